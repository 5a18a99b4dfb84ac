"""Every figure of a record computed again from its trace, marks and predictions, and compared with what it states.

A record of this method version must equal its recomputation in every field, to nine digits: energy, durations, counts,
rates, grades and results. The files next to it (summary, stage files, bills) must state the same.

Later versions compute energy by better rules, so a record of an older version may differ honestly. It is checked in two
ways. What no method changes must hold exactly (`_by_rules_of_first_release`): segments, durations, counts and results
follow from the marks, rates and sums from the figures that the record states, and its files agree with it. Energy that
the newer method computes differently is shown as `newer method: X to Y`; over a sound trace it must still be near.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from pydantic import ValidationError

from joulelab.errors import JoulelabError
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.series import load_trace
from joulelab.meter.trace import read_header
from joulelab.runs.artifacts import read_bill
from joulelab.runs.assemble import OVERHEAD, assemble, stage_energy
from joulelab.runs.bills import Ancestor, Bill
from joulelab.runs.environment import REDACTED, digests
from joulelab.runs.events import AttemptEvents, read_events
from joulelab.runs.json_file import read_json
from joulelab.runs.measure_result import conclude, repetitions, summarise
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import METHOD_VERSION, EnergyByComponent, Result, RunRecord, StageRecord, Validity
from joulelab.runs.soundness import crc32, listed_contents
from joulelab.runs.store import read_record
from joulelab.runs.summary import flat_summary
from joulelab.runs.yaml_text import read_mapping

Verdict = Literal[
    "matches", "newer method", "differs", "cannot be recomputed", "not in the archive", "redacted", "no evidence"
]
TOLERANCE_REL = 1e-9
NEAR_REL = 0.02
"""Two methods over one sound trace agree within three times their intervals and this."""
SHORT_S = 1.0
"""In windows below, ten refreshes of a 100 ms sensor, the first release shared energy by time and could be far off."""
SUMMARY = RunPaths(Path()).summary.name
# What the recomputation takes over from the record; `_claims` checks those for which there is evidence.
_TAKEN_OVER = {"schema_version", "method_version", "run_id", "name", "label", "status", "group", "created_at", "spec"}
_TAKEN_OVER |= {"error", "process", "lineage"}
_TRACE_CHECKS = ("coverage", "agreement", "sensors", "attempts")
_UNREADABLE = (JoulelabError, OSError, ValueError, LookupError, TypeError, AttributeError, BadZipFile)
Leaf = float | str | bool | None
Leaves = dict[str, Leaf]


@dataclass(frozen=True)
class FigureCheck:
    run_id: str
    figure: str
    """Where it is: a path into the record, or file and path."""
    recorded: Leaf
    recomputed: Leaf
    verdict: Verdict
    reason: str = ""

    @property
    def good(self) -> bool:
        return self.verdict not in ("differs", "cannot be recomputed")

    @property
    def subject(self) -> str:
        """What kind of figure it is, for a table of all checks."""
        path, last = self.figure, self.figure.rpartition(".")[2]
        if ".errors." in path:
            return "energy and intervals"
        for start, subject in _SUBJECTS_BY_START.items():
            if path.startswith(start):
                return subject
        for end, subject in _SUBJECTS_BY_END.items():
            if last.endswith(end):
                return subject
        return "methods, states and other fields"


_SUBJECTS_BY_START = {
    "results": "results",
    "findings": "results",
    "inherited": "inherited energy",
    "environment": "environment",
    "settings": "settings and status",
    "status": "settings and status",
    "files": "files of artifacts",
}
_SUBJECTS_BY_END = {
    "j_per_sample": "rates and J per item",
    "j_per_token": "rates and J per item",
    "per_s": "rates and J per item",
    "_j": "energy and intervals",
    "joules": "energy and intervals",
    "_w": "power",
    "tokens": "counts",
    "samples": "counts",
    "count": "counts",
    "grade": "grades and their checks",
    "ok": "grades and their checks",
    "text": "grades and their checks",
    "_s": "times",
    "_ns": "times",
    "_at": "times",
}


def verify_runs(folders: list[Path]) -> list[FigureCheck]:
    """Every figure of every run; inherited ones against the run that made them, where it is here too."""
    checks: list[FigureCheck] = []
    records = {folder: read_record(RunPaths(folder)) for folder in folders}
    for folder, record in records.items():
        checks += _Run(RunPaths(folder), record).checks()
    by_id = {record.run_id: record for record in records.values()}
    for folder, record in records.items():
        checks += _inherited(RunPaths(folder), record, by_id)
    return checks


class _Run:
    """One run under verification: what it states, and what follows from its evidence."""

    def __init__(self, paths: RunPaths, record: RunRecord) -> None:
        self.paths = paths
        self.record = record
        self.older = record.method_version < METHOD_VERSION
        ranked = [(number, host, *files[0]) for (host, number), files in paths.event_files().items()]
        read = [(number, host, rank, read_events(path)) for number, host, rank, path in sorted(ranked)]
        self.events = {(host, number): events for number, host, _, events in read}
        self.leading = [events for _, _, rank, events in read if rank == 0]
        """The first rank's marks, attempt by attempt: it states environment, results and end."""

    def checks(self) -> Iterator[FigureCheck]:
        found = self._recompute()
        yield from self._guarded("settings", self._claims())
        yield from self._guarded("environment", self._environment())
        yield from self._guarded("files", self._artifact_files())
        if isinstance(found, str):
            for name, value in _leaves(_dump(self.record)).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield FigureCheck(self.record.run_id, name, value, None, "cannot be recomputed", found)
            return
        yield from self._against(found)
        if self.record.method_version == 1:
            yield from self._by_rules_of_first_release()
        yield from self._guarded("files", self._files(self.record if self.older else found))

    def _guarded(self, place: str, checks: Iterator[FigureCheck]) -> Iterator[FigureCheck]:
        """Files of strangers may hold anything; what cannot be read is not verified."""
        try:
            yield from checks
        except _UNREADABLE as error:
            yield FigureCheck(self.record.run_id, place, None, None, "cannot be recomputed", _words(error))

    def _recompute(self) -> RunRecord | str:
        """The record from trace and marks, or why there can be none."""
        record, paths = self.record, self.paths
        if record.method_version > METHOD_VERSION:
            return f"written by method version {record.method_version}; this joulelab knows {METHOD_VERSION}"
        there = {(host, attempt) for host, attempt, _ in paths.traces()}
        gone = [f"{row.host}.{row.number}" for row in record.attempts if (row.host, row.number) not in there]
        if gone:
            return f"the trace {', '.join(gone)} is missing"
        inherited = {ancestor.key: ancestor for ancestor in record.inherited}
        try:
            # inherited energy is compared with its makers apart; here it stands for what results are computed from
            found = assemble(paths, record.status, record.error, lambda one: inherited.get(one.key, one))
            return conclude(found, paths) if _measures_a_program(record) else found
        except _UNREADABLE as error:
            return _words(error)

    def _check(self, figure: str, recorded: Leaf, expected: Leaf, reason: str = "") -> FigureCheck:
        verdict: Verdict = "matches" if _same(recorded, expected) else "differs"
        return FigureCheck(self.record.run_id, figure, recorded, expected, verdict, reason)

    def _against(self, found: RunRecord) -> Iterator[FigureCheck]:
        """The record against its recomputation, field by field."""
        recorded, recomputed = _leaves(_dump(self.record)), _leaves(_dump(found))
        unsound = self._unsound(found) if self.older else {}
        for name in dict.fromkeys((*recorded, *recomputed)):
            one, other = recorded.get(name), recomputed.get(name)
            if one is None and (other is None or self.older or self.record.totals is None):
                continue  # a field of later versions; or a run whose end could not be written, which states nothing
            check = self._check(name, one, other)
            if check.verdict == "matches" or not self.older or self._from_marks_alone(name):
                yield check
            else:
                yield self._newer_method(check, recorded, recomputed, unsound)
        noted = {note.text for note in self.record.validity.notes}
        for note in () if self.older else found.validity.notes:
            if note.text not in noted and not _measures_a_program(self.record):
                yield FigureCheck(self.record.run_id, "validity.notes", None, note.text, "differs", "it was left out")

    def _from_marks_alone(self, name: str) -> bool:
        """Results and findings that the program stated while it ran: no method of computing energy changes them."""
        if name.startswith("findings."):
            return True
        stated = {result for events in self.events.values() for result in events.results}
        return name.startswith("results.") and name.removeprefix("results.").rpartition(".")[0] in stated

    def _newer_method(
        self, check: FigureCheck, recorded: Leaves, recomputed: Leaves, unsound: Mapping[str, str]
    ) -> FigureCheck:
        """A difference in a record of an older version: expected, but over a sound trace not by much."""
        row = FigureCheck(check.run_id, check.figure, check.recorded, check.recomputed, "newer method")
        one, other = check.recorded, check.recomputed
        if not check.figure.endswith(".energy_j") or not isinstance(one, float) or not isinstance(other, float):
            return row
        widths = [leaves.get(_width_of(check.figure)) for leaves in (recorded, recomputed)]
        allowed_j = 3 * sum(width for width in widths if isinstance(width, float)) + NEAR_REL * max(
            abs(one), abs(other)
        )
        if abs(one - other) <= allowed_j:
            return row
        excuse = next((why for place, why in unsound.items() if check.figure.startswith(place)), "")
        if excuse:
            return FigureCheck(row.run_id, row.figure, one, other, "newer method", f"far apart: {excuse}")
        return FigureCheck(
            row.run_id, row.figure, one, other, "differs", "far outside both intervals, over a trace without faults"
        )

    def _unsound(self, found: RunRecord) -> dict[str, str]:
        """Beginning of a path -> why an older method may have been far off there.

        The record may say so itself: it then has the grade of a figure that must not be quoted.
        """
        gaps = [gap.reason for _, _, path in self.paths.traces() for gap in load_trace(path).gaps]
        faults = _faults(found.validity) or _faults(self.record.validity) or "; ".join(dict.fromkeys(gaps))
        reasons = {"": faults} if faults else {}
        short = set()
        for stage in found.stages:
            shortest_s = min((segment.duration_s for segment in stage.segments), default=0.0)
            if shortest_s < SHORT_S:
                short.add(stage.name)
                reasons[f"stages.{stage.name}."] = "the window is short"
            elif why := _faults(stage.validity):
                reasons[f"stages.{stage.name}."] = why
        for ancestor in self.record.lineage:
            if short & set(ancestor.stages):
                reasons[f"lineage.{ancestor.name}."] = "the window is short"
        return reasons

    def _by_rules_of_first_release(self) -> Iterator[FigureCheck]:
        """What followed exactly from marks and stated figures, however energy was computed."""
        record, check = self.record, self._check
        for stage in record.stages:
            yield from self._stage_by_rules_of_first_release(stage)
        if record.totals is not None:
            for name in EnergyByComponent.model_fields:
                stages = [getattr(stage.energy, name) for stage in record.stages if not stage.outside_totals]
                for of, parts in (
                    ("stages", stages),
                    ("attempts", [getattr(attempt.energy, name) for attempt in record.attempts]),
                ):
                    sum_j, stated_j = _sum_j(parts), getattr(record.totals, name).energy_j
                    yield check(f"totals.{name}.energy_j", stated_j, sum_j, f"the sum over its {of}")
            best = record.totals.components.best(record.policy)
            yield check("totals.best.energy_j", record.totals.best.energy_j, best.energy_j, "by its components")
            measured = record.totals.components.under_policy(record.policy)
            yield check("totals.energy_j", record.totals.energy_j, measured.energy_j, "by its components")
        for attempt in record.attempts:
            for name in EnergyByComponent.model_fields:
                devices = [device.figure for device in attempt.devices if device.component == name]
                if devices:
                    stated_j = getattr(attempt.energy, name).energy_j
                    place = f"attempts.{attempt.number} on {attempt.host}.energy.{name}.energy_j"
                    yield check(place, stated_j, _sum_j(devices), "the sum over its devices")
        yield check("validity.grade", record.validity.grade, _worst(record.validity), "the worst of its checks")
        by_name = {stage.name: stage for stage in record.stages}
        for ancestor in record.lineage:
            if ancestor.key in record.made:
                energy = stage_energy([by_name[name] for name in ancestor.stages if name in by_name])
                for name, figure in energy.items():
                    stated_j = ancestor.energy[name].energy_j if name in ancestor.energy else None
                    place = f"lineage.{ancestor.name}.energy.{name}.energy_j"
                    yield check(place, stated_j, figure.energy_j, "the sum over its stages")
        summary = summarise(repetitions(record)) if _measures_a_program(record) else None
        if summary is not None and "program.run.mean_j" in record.results:
            stated_j = record.results["program.run.mean_j"].value
            yield check("results.program.run.mean_j.value", stated_j, summary.mean_j, "the mean of its repeats")

    def _stage_by_rules_of_first_release(self, stage: StageRecord) -> Iterator[FigureCheck]:
        place = f"stages.{stage.name}"
        policy, best_j = self.record.policy, stage.best.energy_j

        def check(field: str, recorded: Leaf, expected: Leaf, reason: str) -> FigureCheck:
            return self._check(f"{place}.{field}", recorded, expected, reason)

        yield check("best.energy_j", best_j, stage.energy.best(policy).energy_j, "by its components")
        yield check("energy_j", stage.energy_j, stage.energy.under_policy(policy).energy_j, "by its components")
        yield check("mean_power_w", stage.mean_power_w, _ratio(best_j, stage.duration_s), "energy over duration")
        yield check("j_per_token", stage.j_per_token, _ratio(best_j, stage.tokens), "energy over tokens")
        yield check("j_per_sample", stage.j_per_sample, _ratio(best_j, stage.samples), "energy over samples")
        rate = _ratio(stage.tokens, stage.duration_s)
        yield check("tokens_per_s", stage.tokens_per_s, rate, "tokens over duration")
        rate = _ratio(stage.samples, stage.duration_s)
        yield check("samples_per_s", stage.samples_per_s, rate, "samples over duration")
        yield check("validity.grade", stage.validity.grade, _worst(stage.validity), "the worst of its checks")
        by_attempt: dict[int, dict[str, int]] = {}
        for segment in stage.segments:
            hosts = by_attempt.setdefault(segment.attempt, {})
            hosts[segment.host] = hosts.get(segment.host, 0) + segment.end_ns - segment.start_ns
        whole_s = sum(max(hosts.values()) for hosts in by_attempt.values()) / 1e9
        yield check("duration_s", stage.duration_s, whole_s, "the sum over its segments")
        if stage.name == OVERHEAD:
            return
        for count in ("tokens", "samples"):
            marked = [events.counts.get(stage.name, {}).get(count) for events in self.events.values()]
            most = max((number for number in marked if number is not None), default=None)
            yield check(count, getattr(stage, count), most, "by its marks")
        for number, segment in enumerate(stage.segments):
            events = self.events.get((segment.host, segment.attempt), AttemptEvents())
            known = (segment.start_ns, segment.end_ns) in events.windows.get(stage.name, ())
            opened = events.open_stages.get(stage.name) == segment.start_ns
            marked_ns = segment.end_ns if known or opened else None
            yield check(f"segments.{number}.end_ns", segment.end_ns, marked_ns, "by its marks")

    def _files(self, record: RunRecord) -> Iterator[FigureCheck]:
        """Summary, stage files and bills state what the record does."""
        if self.paths.summary.exists() and record.totals is not None:
            expected = flat_summary(record)
            for name, value in read_json(self.paths.summary).items():
                if name in expected:
                    yield self._check(f"{SUMMARY}.{name}", value, expected[name])
        stages = {stage.name: stage for stage in record.stages}
        for path in sorted(self.paths.stages.glob("*.json")):
            try:
                stage = StageRecord.model_validate(read_json(path))
                stated, expected = stage.model_dump(mode="json"), stages[stage.name].model_dump(mode="json")
            except (ValidationError, KeyError) as error:
                yield self._check(f"stages/{path.name}", type(error).__name__, "a stage of the record")
                continue
            yield from self._pairs(f"stages/{path.name}", _leaves(stated), _leaves(expected))
        made = {ancestor.key: ancestor for ancestor in record.lineage if ancestor.key in record.made}
        for bill in self._own_bills():
            if bill.key in made and not bill.provisional:
                place = f"bill of {bill.artefact.name}"
                yield from self._pairs(place, _energies(bill.artefact), _energies(made[bill.key]))

    def _own_bills(self) -> Iterator[Bill]:
        for folder in sorted(self.paths.artifacts.glob("*")):
            bill = read_bill(folder)
            if bill is not None and bill.artefact.made_by == self.paths.run_id:
                yield bill

    def _pairs(self, place: str, recorded: Leaves, expected: Leaves) -> Iterator[FigureCheck]:
        for name in dict.fromkeys((*recorded, *expected)):
            if recorded.get(name) is not None or expected.get(name) is not None:
                yield self._check(f"{place}.{name}", recorded.get(name), expected.get(name))

    def _claims(self) -> Iterator[FigureCheck]:
        """Identity, settings and end, which the recomputation takes over from the record."""
        record = self.record
        yield self._check("settings.run_id", record.run_id, self.paths.run_id, "the name of its folder")
        named = record.spec.get("name", record.name)
        yield self._check("settings.name", record.name, named, "its settings")
        yield self._check("settings.label", record.label, record.spec.get("label") or named, "its settings")
        if self.paths.config.exists():
            stated, written = _leaves(record.spec), _leaves(read_mapping(self.paths.config))
            for name in dict.fromkeys((*stated, *written)):
                check = self._check(f"settings.{name}", stated.get(name), written.get(name), self.paths.config.name)
                yield _or_redacted(check)
        if record.status == "done" and self.leading:
            yield self._check("status", record.status, self.leading[-1].end_status, "by its marks")
        begun = max((events.method_version for events in self.events.values()), default=1)
        if record.method_version < begun:
            yield self._check("settings.method_version", record.method_version, begun, "by its marks")

    def _environment(self) -> Iterator[FigureCheck]:
        if not self.paths.environment.exists():
            return
        facts = read_json(self.paths.environment)
        begun = [events.environment for events in self.leading if events.begin_ns]
        if begun and begun[-1]:
            now = digests(facts)
            for key in dict.fromkeys((*begun[-1], *now)):
                check = self._check(f"environment.{key}", now.get(key), begun[-1].get(key), "digest in its marks")
                yield _or_redacted(check, json.dumps(facts.get(key)))
        elif not self.older and begun:
            yield self._check("environment", "a snapshot", None, "its marks hold no digest of it")
        else:
            reason = "no digest was recorded; only what the trace states too is compared"
            yield FigureCheck(self.record.run_id, "environment", None, None, "no evidence", reason)
        if not self.record.spec.get("energy", {}).get("replay_trace"):
            yield from self._environment_in_trace(facts)

    def _environment_in_trace(self, facts: dict[str, Any]) -> Iterator[FigureCheck]:
        """Host, version and devices, which the recorder wrote down by itself."""
        traces = self.paths.traces()
        if not traces:
            return
        lead = next((row.host for row in reversed(self.record.attempts) if row.number == traces[-1][1]), None)
        header: dict[str, Any] = next(
            (read_header(path) for host, number, path in traces if (host, number) == (lead, traces[-1][1])), {}
        )
        for key in ("host", "joulelab"):
            if key in header and key in facts:
                yield self._check(f"environment.{key}", facts[key], header[key], "the trace's first line")
        cards = {card.get("uuid"): card for card in facts.get("gpus", ())}
        for device in header.get("devices", ()):
            card = cards.get(str(device["device"]).removeprefix("gpu:"))
            if card is not None:
                place = f"environment.gpus.{card['uuid']}"
                yield self._check(f"{place}.name", card.get("name"), device["name"], "the trace's first line")
                driver = device.get("facts", {}).get("driver", card.get("driver"))
                yield self._check(f"{place}.driver", card.get("driver"), driver, "the trace's first line")
            elif device["component"] == "cpu_estimate":
                model = facts.get("cpu", {}).get("model")
                yield self._check("environment.cpu.model", model, device["name"], "the trace's first line")

    def _artifact_files(self) -> Iterator[FigureCheck]:
        """Predictions and scores are the files that their run listed, and the results follow from them."""
        for bill in self._own_bills():
            folder = self.paths.artifacts / bill.artefact.name
            listed = listed_contents(folder)
            for name, size in listed.get("bytes", {}).items():
                if (folder / name).is_file():
                    place = f"files.{bill.artefact.name}/{name}"
                    yield self._check(f"{place}.bytes", (folder / name).stat().st_size, size, "its list of contents")
                    if name in listed.get("crc32", {}):
                        yield self._check(f"{place}.crc32", crc32(folder / name), listed["crc32"][name], "its list")
            for name, result in _results_in(folder, bill.artefact.name).items():
                stated = self.record.results.get(name)
                if stated is not None:
                    for field in ("value", "trials", "successes"):
                        recorded, expected = getattr(stated, field), getattr(result, field)
                        yield self._check(f"results.{name}.{field}", recorded, expected, f"from {bill.artefact.name}")


def _results_in(folder: Path, name: str) -> dict[str, Result]:
    """Results that follow from the predictions or scores in an artifact's folder, by the name the record has."""
    found: dict[str, Result] = {}
    who = name.rpartition("-")[0]
    if (folder / "predictions.npz").is_file() and name.endswith("-predictions"):
        with np.load(folder / "predictions.npz", allow_pickle=False) as arrays:
            right = arrays["labels"] == arrays["predicted"]
            found[f"{who}.accuracy"] = _proportion(int(right.sum()), len(right))
    if (folder / "answers.json").is_file():
        answers = read_json(folder / "answers.json").get("right", [])
        if answers:
            found[f"{who}.exact_answers"] = _proportion(sum(map(bool, answers)), len(answers))
    if (folder / "scores.json").is_file():
        scores = read_json(folder / "scores.json")
        found |= {f"{who}.{score}": Result.model_validate(value) for score, value in scores.items()}
    return found


def _proportion(successes: int, trials: int) -> Result:
    return Result(value=successes / trials, trials=trials, successes=successes)


def _inherited(paths: RunPaths, record: RunRecord, by_id: Mapping[str, RunRecord]) -> Iterator[FigureCheck]:
    """What others made and this run used: its energy is what their runs state, or what their bill stated back then."""
    billed: dict[str, Ancestor] = {}
    for files in paths.event_files().values():
        for bill in read_events(files[0][1]).bills.values():
            billed |= {ancestor.key: ancestor for ancestor in (*bill.ancestry, bill.artefact)}
    for ancestor in record.inherited:
        maker = by_id.get(ancestor.made_by)
        made = {other.key: other for other in maker.lineage} if maker else {}
        stated = _energies(made[ancestor.key]) if ancestor.key in made else None
        then = _energies(billed[ancestor.key]) if ancestor.key in billed else {}
        for name, recorded in _energies(ancestor).items():
            if recorded is None or not name.endswith("energy_j"):
                continue
            place, reason = f"inherited {ancestor.name}.{name}", f"made by {ancestor.made_by}"
            if stated is None:
                yield FigureCheck(record.run_id, place, recorded, None, "not in the archive", reason)
            elif not _same(recorded, stated.get(name)) and _same(recorded, then.get(name)):
                settled_later = f"{reason}; its bill was provisional when it was used"
                yield FigureCheck(record.run_id, place, recorded, stated.get(name), "newer method", settled_later)
            else:
                verdict: Verdict = "matches" if _same(recorded, stated.get(name)) else "differs"
                yield FigureCheck(record.run_id, place, recorded, stated.get(name), verdict, reason)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _or_redacted(check: FigureCheck, text: str = "") -> FigureCheck:
    """`pack` replaces what looks like a secret, so a text with its mark cannot agree any more."""
    if check.verdict == "differs" and REDACTED in f"{check.recorded} {check.recomputed} {text}":
        return FigureCheck(check.run_id, check.figure, check.recorded, check.recomputed, "redacted", check.reason)
    return check


def _measures_a_program(record: RunRecord) -> bool:
    return record.spec.get("pipeline") == "measure"


def _faults(validity: Validity) -> str:
    """Why the trace behind a figure is not sound; empty where it is."""
    return "; ".join(check.text for check in validity.checks if check.name in _TRACE_CHECKS and not check.ok)


def _worst(validity: Validity) -> str | None:
    return max((check.grade for check in validity.checks), default=None)


def _sum_j(figures: list[EnergyFigure]) -> float | None:
    known = [figure.energy_j for figure in figures if figure.energy_j is not None]
    return math.fsum(known) if known else None


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _width_of(path: str) -> str:
    return path.removesuffix(".energy_j") + ".half_width_j"


def _energies(ancestor: Ancestor) -> Leaves:
    return _leaves({name: figure.model_dump(mode="json") for name, figure in ancestor.energy.items()})


def _dump(record: RunRecord) -> dict[str, Any]:
    """All that was computed, the artifacts that it made included; notes are compared by their texts."""
    dumped = record.model_dump(mode="json", exclude=_TAKEN_OVER)
    dumped["validity"].pop("notes")
    own = [ancestor.model_dump(mode="json") for ancestor in record.lineage if ancestor.key in record.made]
    return {**dumped, "lineage": own}


def _leaves(value: Any, path: str = "") -> Leaves:
    """Every number, text and truth value by its path; elements of lists go by their names where they have one."""
    if isinstance(value, dict):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        items, taken = [], set()
        for number, inner in enumerate(value):
            label = _label(inner, number)
            items.append((label if label not in taken else f"{label} {number}", inner))
            taken.add(label)
    else:
        return {path: value}
    found: Leaves = {}
    for key, inner in items:
        found |= _leaves(inner, f"{path}.{key}" if path else key)
    return found


def _label(element: Any, number: int) -> str:
    if not isinstance(element, dict):
        return str(number)
    if "number" in element and "host" in element:
        return f"{element['number']} on {element['host']}"
    return str(element.get("device") or element.get("name") or number)


def _same(one: Leaf, other: Leaf) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if numbers and not isinstance(one, bool) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=TOLERANCE_REL, abs_tol=1e-9)  # type: ignore[arg-type]
    return one == other or (one != one and other != other)  # a loss may be NaN
