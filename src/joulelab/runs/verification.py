"""`unpack --verify`: recomputes every figure of a record from its trace, marks and predictions, and compares them.

A record must equal its recomputation by the rules of its own method version in every field, to nine digits: energy,
intervals, durations, counts, rates, grades and results. The files next to it (summary, stage files, bills) must state
the same. Records of the first release are recomputed by its rules (`first_release.py`); the result of current rules is
shown as `newer method: X to Y`. Each figure has one verdict.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from pydantic import ValidationError

from joulelab.errors import JoulelabError
from joulelab.meter.trace import read_header
from joulelab.redaction import REDACTED
from joulelab.runs import first_release
from joulelab.runs.artifacts import Ancestor, Bill, crc32, listed_contents, read_bill
from joulelab.runs.assemble import assemble
from joulelab.runs.attempt_data import read_events
from joulelab.runs.environment import digests
from joulelab.runs.measure.result import conclude, with_former_results
from joulelab.runs.paths import RunPaths, read_json
from joulelab.runs.record import METHOD_VERSION, Result, RunRecord, StageRecord, flat_summary
from joulelab.runs.spec import read_mapping
from joulelab.runs.store import read_record

Verdict = Literal[
    "matches", "newer method", "differs", "cannot be recomputed", "not in the archive", "redacted", "no evidence"
]
TOLERANCE_REL = 1e-9
SUMMARY = RunPaths(Path()).summary.name
# Earlier versions wrote null where the energy was estimated; `shown_energy_j` has the same figure.
_ONCE_NULL_IF_ESTIMATED = ("total_energy_j", "total_energy_kwh")
# Fields that the recomputation takes from the record; `_claims` checks those for which there is evidence.
_TAKEN_OVER = {"schema_version", "method_version", "run_id", "name", "label", "status", "group", "created_at", "spec"}
_TAKEN_OVER |= {"error", "process", "store", "lineage"}
_UNREADABLE = (JoulelabError, OSError, ValueError, LookupError, TypeError, AttributeError, BadZipFile)
# Texts may be reworded from one version to the next; the numbers in them must be the same.
_WORDING = ("text", "reason", "fix")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
Leaf = float | str | bool | None
Leaves = dict[str, Leaf]


@dataclass(frozen=True)
class FigureCheck:
    run_id: str
    figure: str
    """Path into the record, or file and path."""
    recorded: Leaf
    recomputed: Leaf
    verdict: Verdict
    reason: str = ""

    @property
    def good(self) -> bool:
        return self.verdict not in ("differs", "cannot be recomputed")

    @property
    def subject(self) -> str:
        """Category of the figure, for a summary table."""
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
    """One verdict per figure of every run; inherited figures are compared with the run that made them, if present."""
    checks: list[FigureCheck] = []
    records: dict[Path, RunRecord] = {}
    for folder in folders:
        try:
            records[folder] = read_record(RunPaths(folder))
        except _UNREADABLE as error:
            checks.append(FigureCheck(folder.name, "run.json", None, None, "cannot be recomputed", _error_text(error)))
    for folder, record in records.items():
        checks += _Run(RunPaths(folder), record).checks()
    by_id = {record.run_id: record for record in records.values()}
    for folder, record in records.items():
        checks += _inherited(RunPaths(folder), record, by_id)
    return _one_per_figure(checks)


def _one_per_figure(checks: list[FigureCheck]) -> list[FigureCheck]:
    """A figure may have several kinds of evidence (marks, predictions): the first contradiction counts."""
    first: dict[tuple[str, str], FigureCheck] = {}
    for check in checks:
        known = first.setdefault((check.run_id, check.figure), check)
        if known.good and (not check.good or known.verdict == "matches"):
            first[check.run_id, check.figure] = check
    return list(first.values())


class _Run:
    """One run under verification: its statements, and what follows from its evidence."""

    def __init__(self, paths: RunPaths, record: RunRecord) -> None:
        self.paths = paths
        self.record = record
        self.older = record.method_version < METHOD_VERSION
        ranked = [(number, host, *files[0]) for (host, number), files in paths.event_files().items()]
        read = [(number, host, rank, read_events(path)) for number, host, rank, path in sorted(ranked)]
        self.events = {(host, number): events for number, host, _, events in read}
        self.leading = [events for _, _, rank, events in read if rank == 0]
        """Marks of rank 0 by attempt: it states environment, results and status."""

    def checks(self) -> Iterator[FigureCheck]:
        recomputed = self._recompute()
        yield from self._guarded("settings", self._claims())
        yield from self._guarded("environment", self._environment())
        yield from self._guarded("files", self._artifact_files())
        if isinstance(recomputed, str):
            for name, value in _leaves(_dump(self.record)).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield FigureCheck(self.record.run_id, name, value, None, "cannot be recomputed", recomputed)
            return
        expected, today = recomputed
        yield from self._against(expected, today)
        yield from self._guarded("files", self._files(expected))

    def _guarded(self, place: str, checks: Iterator[FigureCheck]) -> Iterator[FigureCheck]:
        """Files of others may contain anything; what cannot be read is not verified."""
        try:
            yield from checks
        except _UNREADABLE as error:
            yield FigureCheck(self.record.run_id, place, None, None, "cannot be recomputed", _error_text(error))

    def _recompute(self) -> tuple[RunRecord, RunRecord] | str:
        """The record from trace and marks, by the rules of its version and by current rules; or the reason why not."""
        record, paths = self.record, self.paths
        if record.method_version > METHOD_VERSION:
            return f"written by method version {record.method_version}; this joulelab supports {METHOD_VERSION}"
        present = {(host, attempt) for host, attempt, _ in paths.traces()}
        absent = [f"{row.host}.{row.number}" for row in record.attempts if (row.host, row.number) not in present]
        if absent:
            return f"trace {', '.join(absent)} is missing"
        inherited = {ancestor.key: ancestor for ancestor in record.inherited}

        def stated_energy(ancestor: Ancestor) -> Ancestor:
            """Inherited energy is verified separately; results are computed from what the record states."""
            return inherited.get(ancestor.key, ancestor)

        try:
            today = assemble(paths, record.status, record.error, stated_energy)
            today = conclude(today, paths) if record.spec.get("pipeline") == "measure" else today
            expected = first_release.recompute(paths, record, stated_energy) if self.older else today
            return with_former_results(expected, record), with_former_results(today, record)
        except _UNREADABLE as error:
            return _error_text(error)

    def _check(self, figure: str, recorded: Leaf, expected: Leaf, reason: str = "") -> FigureCheck:
        if figure.rpartition(".")[2] in _WORDING:
            same = _numbers_in(recorded) == _numbers_in(expected)
        else:
            same = _same(recorded, expected)
        verdict: Verdict = "matches" if same else "differs"
        return FigureCheck(self.record.run_id, figure, recorded, expected, verdict, reason)

    def _against(self, expected: RunRecord, today: RunRecord) -> Iterator[FigureCheck]:
        """The record compared with its recomputation, field by field."""
        stated, right, newer = (_leaves(_dump(record)) for record in (self.record, expected, today))
        written = _leaves(read_json(self.paths.record))
        for name in dict.fromkeys((*stated, *right)):
            value = stated.get(name)
            later_field = self.older and name not in written
            if value is None and (right.get(name) is None or later_field or self.record.totals is None):
                continue  # also a run whose end could not be written, which states nothing
            if not self.older:
                yield self._check(name, value, right.get(name))
            elif not _same(value, right.get(name)) and name.rpartition(".")[2] not in _WORDING:
                yield self._check(name, value, right.get(name), "by the rules of the first release")
            elif _same(value, newer.get(name)):
                yield self._check(name, value, newer.get(name))
            else:
                yield FigureCheck(self.record.run_id, name, value, newer.get(name), "newer method")
        noted = Counter((note.level, _numbers_in(note.text)) for note in self.record.validity.notes)
        noted.subtract((note.level, _numbers_in(note.text)) for note in expected.validity.notes)
        # A later version may split a recorded note into two.
        longer = [Counter(numbers) for (_, numbers), count in noted.items() if count > 0]
        for number, note in enumerate(() if self.older else expected.validity.notes):
            numbers = Counter(_numbers_in(note.text))
            if numbers and any(numbers <= recorded for recorded in longer):
                continue
            if noted[note.level, _numbers_in(note.text)] < 0 and self.record.spec.get("pipeline") != "measure":
                place = f"validity.notes.{number}"
                yield FigureCheck(self.record.run_id, place, None, note.text, "differs", "the note is missing")

    def _files(self, record: RunRecord) -> Iterator[FigureCheck]:
        """Summary, stage files and bills must agree with the record."""
        if self.paths.summary.exists() and record.totals is not None:
            expected = flat_summary(record)
            for name, value in read_json(self.paths.summary).items():
                if name in _ONCE_NULL_IF_ESTIMATED and value is None:
                    continue
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
                place = f"bill of {bill.artifact.name}"
                yield from self._pairs(place, _energies(bill.artifact), _energies(made[bill.key]))

    def _own_bills(self) -> Iterator[Bill]:
        for folder in sorted(self.paths.artifacts.glob("*")):
            bill = read_bill(folder)
            if bill is not None and bill.artifact.made_by == self.paths.run_id:
                yield bill

    def _pairs(self, place: str, recorded: Leaves, expected: Leaves) -> Iterator[FigureCheck]:
        for name in dict.fromkeys((*recorded, *expected)):
            if self.older and name.rpartition(".")[2] in _WORDING:
                continue
            if recorded.get(name) is not None or expected.get(name) is not None:
                yield self._check(f"{place}.{name}", recorded.get(name), expected.get(name))

    def _claims(self) -> Iterator[FigureCheck]:
        """Identity, settings and status, which the recomputation takes from the record."""
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
        version = max((events.method_version for events in self.events.values()), default=1)
        if record.method_version < version:
            yield self._check("settings.method_version", record.method_version, version, "by its marks")

    def _environment(self) -> Iterator[FigureCheck]:
        if not self.paths.environment.exists():
            return
        facts = read_json(self.paths.environment)
        in_trace = list(self._guarded("environment", self._environment_in_trace(facts)))
        recorded = [events.environment for events in self.leading if events.begin_ns]
        if recorded and recorded[-1]:
            now = digests(facts)
            in_trace = [check for check in in_trace if check.figure != "environment"]  # the digests are per entry
            shown = {check.figure.split(".")[1] for check in in_trace if not check.good}
            for key in dict.fromkeys((*recorded[-1], *now)):
                check = self._check(f"environment.{key}", now.get(key), recorded[-1].get(key), "digest in its marks")
                text = json.dumps(facts.get(key))
                if check.good:
                    yield check
                elif key not in shown:  # a digest shows that the entry differs, but not what it was
                    yield _or_redacted(replace(check, recorded=text, recomputed=f"digest {check.recomputed}"))
        elif not self.older and recorded:
            yield self._check("environment", "a snapshot", None, "its marks have no digest of it")
        else:
            reason = "no digest was recorded; only entries that the trace also has are compared"
            yield FigureCheck(self.record.run_id, "environment", None, None, "no evidence", reason)
        yield from in_trace

    def _environment_in_trace(self, facts: dict[str, Any]) -> Iterator[FigureCheck]:
        """Host, version and devices, which the recorder wrote independently."""
        traces = self.paths.traces()
        if not traces or self.record.spec.get("energy", {}).get("replay_trace"):
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
        """Predictions and scores must match the list of files, and results must follow from them."""
        for bill in self._own_bills():
            folder = self.paths.artifacts / bill.artifact.name
            listed = listed_contents(folder)
            for name, size in listed.get("bytes", {}).items():
                if (folder / name).is_file():
                    place = f"files.{bill.artifact.name}/{name}"
                    yield self._check(f"{place}.bytes", (folder / name).stat().st_size, size, "its list of contents")
                    if name in listed.get("crc32", {}):
                        yield self._check(f"{place}.crc32", crc32(folder / name), listed["crc32"][name], "its list")
            for name, result in _results_in(folder, bill.artifact.name).items():
                stated = self.record.results.get(name)
                if stated is not None:
                    for field in ("value", "trials", "successes"):
                        recorded, expected = getattr(stated, field), getattr(result, field)
                        yield self._check(f"results.{name}.{field}", recorded, expected, f"from {bill.artifact.name}")


def _results_in(folder: Path, name: str) -> dict[str, Result]:
    """Results that follow from the predictions or scores in an artifact's folder, by their names in the record."""
    found: dict[str, Result] = {}
    subject = name.rpartition("-")[0]
    if (folder / "predictions.npz").is_file() and name.endswith("-predictions"):
        with np.load(folder / "predictions.npz", allow_pickle=False) as arrays:
            correct = arrays["labels"] == arrays["predicted"]
            found[f"{subject}.accuracy"] = _proportion(int(correct.sum()), len(correct))
    if (folder / "answers.json").is_file():
        answers = read_json(folder / "answers.json").get("right", [])
        if answers:
            found[f"{subject}.exact_answers"] = _proportion(sum(map(bool, answers)), len(answers))
    if (folder / "scores.json").is_file():
        scores = read_json(folder / "scores.json")
        found |= {f"{subject}.{score}": Result.model_validate(value) for score, value in scores.items()}
    return found


def _proportion(successes: int, trials: int) -> Result:
    return Result(value=successes / trials, trials=trials, successes=successes)


def _inherited(paths: RunPaths, record: RunRecord, by_id: Mapping[str, RunRecord]) -> Iterator[FigureCheck]:
    """Energy of reused artifacts must be what their runs state, or what their bill stated when they were used."""
    billed: dict[str, Ancestor] = {}
    for files in paths.event_files().values():
        for bill in read_events(files[0][1]).bills.values():
            billed |= {ancestor.key: ancestor for ancestor in (*bill.ancestry, bill.artifact)}
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
                later = f"{reason}; its bill was provisional when it was used"
                yield FigureCheck(record.run_id, place, recorded, stated.get(name), "newer method", later)
            else:
                verdict: Verdict = "matches" if _same(recorded, stated.get(name)) else "differs"
                yield FigureCheck(record.run_id, place, recorded, stated.get(name), verdict, reason)


def _numbers_in(text: Leaf) -> tuple[str, ...] | None:
    return None if text is None else tuple(_NUMBER.findall(str(text)))


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _or_redacted(check: FigureCheck) -> FigureCheck:
    """`pack` redacts what looks like a secret, so such a text cannot match."""
    if check.verdict == "differs" and REDACTED in f"{check.recorded} {check.recomputed}":
        return replace(check, verdict="redacted")
    return check


def _energies(ancestor: Ancestor) -> Leaves:
    return _leaves({name: figure.model_dump(mode="json") for name, figure in ancestor.energy.items()})


def _dump(record: RunRecord) -> dict[str, Any]:
    """All computed fields, including artifacts that the run made; notes are compared by their texts."""
    dumped = record.model_dump(mode="json", exclude=_TAKEN_OVER)
    dumped["validity"].pop("notes")
    own = [ancestor.model_dump(mode="json") for ancestor in record.lineage if ancestor.key in record.made]
    return {**dumped, "lineage": own}


def _leaves(value: Any, path: str = "") -> Leaves:
    """Every number, string and boolean by its path; list elements are named by their names if they have one."""
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
