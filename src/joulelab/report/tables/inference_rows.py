"""The rows of an inference run, out of its record: latency, joules gross and above idle, and who beats whom.

Net joules are computed here and not while the run ran, because the idle baseline after it comes last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.infer.energy import ItemEnergy
from joulelab.meter.figures import COVERED, amount_text, coverage_text, method_text, relative_text, uncertainty_note
from joulelab.meter.health import CoreUse
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import INCONCLUSIVE, NOTHING, is_uninformative
from joulelab.runs.attempt_data import IdlePower, idle_power
from joulelab.runs.record import CPU_WORK, IdleBaseline, RunRecord
from joulelab.stats import Interval, ratio_paired
from joulelab.units import plural, power_text, three_digits, with_prefix

TRACKER, GENERATION = "inference", "generation"


@dataclass(frozen=True)
class InferenceRow:
    stage: str
    values: Mapping[str, Any]
    energy: ItemEnergy | None
    core_use: CoreUse | None = None
    """CPU use in its windows; None if it was not recorded."""

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows with the same input ran in turns and can be compared round by round."""
        return self.values["batch_size"], self.values["tokens"]

    @property
    def item(self) -> tuple[Any, ...]:
        """The unit of energy: rows of different lengths or parts are not compared on a Pareto front."""
        return self.values["tokens"], self.values.get("part")

    @property
    def latency_s(self) -> float:
        return float(self.values["latency"]["median_s"])

    @property
    def items_per_s(self) -> float:
        """Mean over the windows, like power: power over this rate is the energy of one item."""
        return float(self.values["items_per_call"] * self.values["calls"] / self.values["seconds"])

    @property
    def contended(self) -> bool:
        return self.core_use is not None and self.core_use.contended

    @property
    def name(self) -> str:
        """Norm, mode and dtype."""
        return ", ".join(str(self.values[key]) for key in ("norm", "mode", "dtype") if self.values.get(key))


def inference_rows(record: RunRecord, tracker: str = TRACKER) -> tuple[InferenceRow, ...]:
    """In the order of their first rounds; findings are in the order in which stages reported."""
    stage_order = [stage.name for stage in record.stages]
    cores = {stage.name: stage.core_use for stage in record.stages}
    found = {stage: values[tracker] for stage, values in record.findings.items() if tracker in values}
    in_order = sorted(found, key=lambda stage: stage_order.index(stage) if stage in stage_order else len(stage_order))
    return tuple(
        InferenceRow(stage, found[stage], with_net(found[stage], record), cores.get(stage)) for stage in in_order
    )


def timed_rows(record: RunRecord) -> dict[str, InferenceRow]:
    """Stage -> its row, for forward passes and generation.

    Energy and rate per item are those of the timed windows: the stage also contains the time between windows.
    """
    return {row.stage: row for tracker in (TRACKER, GENERATION) for row in inference_rows(record, tracker)}


def rows_in_use(record: RunRecord) -> list[InferenceRow]:
    """Forward passes, or whole responses of a run that generated text."""
    rows = inference_rows(record) or inference_rows(record, GENERATION)
    return [row for row in rows if row.values.get("part", "infer") == "infer"]


def best_row(record: RunRecord) -> InferenceRow | None:
    """The row with the least energy per item; without energy, the fastest; None if the run has no rows."""
    return min(
        rows_in_use(record),
        key=lambda row: (row.energy.gross_j if row.energy else math.inf, row.latency_s),
        default=None,
    )


def item_answer(record: RunRecord) -> str:
    """`213 mJ ±0.8 % per image, energy counter; median latency 4.2 ms (batch 8, eager, bf16; lowest of 3 rows)`."""
    row = best_row(record)
    if row is None:
        return ""
    rows, item = rows_in_use(record), row.values["item"]
    energy = f"energy per {item} missing"
    if row.energy is not None:
        figure = row.energy.gross()
        energy = f"{energy_cell(row.energy)} per {item}, {method_text(figure)}"
    of = f"; lowest of {len(rows)} rows" if len(rows) > 1 else ""
    return f"{energy}; median latency {with_prefix(row.latency_s, 's')} ({input_text(row)}, {row.name}{of})"


def idle_of(record: RunRecord, cpu_work: bool = False) -> IdlePower | None:
    """The idle power to subtract (`runs.idle.idle_power`).

    `cpu_work`: of processor and memory only, for measured GPUs that the model did not use.
    """
    baselines = record.totals.idle if record.totals else ()
    return idle_power(_of_the_cpu(record, baselines) if cpu_work else baselines)


def _of_the_cpu(record: RunRecord, baselines: Sequence[IdleBaseline]) -> list[IdleBaseline]:
    found = []
    for baseline in baselines:
        stage = record.stage(baseline.stage)
        figure = stage.energy.under_policy(CPU_WORK) if stage else None
        if (
            stage is None
            or figure is None
            or not figure.measured
            or (power_w := figure.mean_power_w(stage.duration_s)) is None
        ):
            continue
        spread_rel = (figure.half_width_j or 0.0) / abs(figure.energy_j) if figure.energy_j else None
        found.append(baseline.model_copy(update={"power_w": power_w, "spread_rel": spread_rel}))
    return found


def with_net(values: Mapping[str, Any], record: RunRecord) -> ItemEnergy | None:
    if values["energy"] is None:
        return None
    found = ItemEnergy.model_validate(values["energy"])
    if found.gain_error_rel is None and record.totals:  # of a record older than this field
        known = record.totals.cpu_estimate if found.estimated else record.totals.figure
        found = found.model_copy(update={"gain_error_rel": known.gain_error_rel})
    without_gpu = bool(found.sources) and not any(source.startswith("gpu:") for source in found.sources)
    idle = None if found.estimated else idle_of(record, without_gpu)
    return found if idle is None else found.above(idle)


@dataclass(frozen=True)
class RowRatio:
    """A row compared with the first of its group, round by round."""

    row: InferenceRow
    base: InferenceRow
    time: Interval
    energy: Interval | None


def row_ratios(rows: Sequence[InferenceRow]) -> list[RowRatio]:
    first: dict[tuple[Any, ...], InferenceRow] = {}
    found = []
    for row in rows:
        base = first.setdefault(row.group, row)
        if base is not row:
            found.append(RowRatio(row, base, _ratio(row, base, _seconds), _energy_ratio(row, base)))
    return found


def _ratio(row: InferenceRow, base: InferenceRow, value: Any) -> Interval:
    pairs = list(zip(row.values["rounds"], base.values["rounds"], strict=False))
    # Paired by round: rows take turns within a round, so that slow drift of clocks and temperature
    # affects both and cancels in their ratio.
    return ratio_paired([value(ours) for ours, _ in pairs], [value(theirs) for _, theirs in pairs])


def _seconds(turn: Mapping[str, Any]) -> float:
    return float(turn["median_s"])


def _joules(turn: Mapping[str, Any]) -> float:
    return float(turn["power_w"] * (turn["end_ns"] - turn["begin_ns"]) / turn["calls"])


def _energy_ratio(row: InferenceRow, base: InferenceRow) -> Interval | None:
    turns = [*row.values["rounds"], *base.values["rounds"]]
    if row.energy is None or base.energy is None or any(not turn.get("power_w") for turn in turns):
        return None
    return _ratio(row, base, _joules)


def why_no_front(rows: Sequence[InferenceRow]) -> str:
    """Empty if a front can be determined."""
    if any(row.contended for row in rows):
        return "CPU contention"
    if any(row.energy is None for row in rows):
        return "energy is missing"
    groups = _took_turns(rows)
    if len(groups) == 1 and len(rows) > 1 and _alike(groups[0]):
        return "no difference between the rows is significant"
    return ""


def _took_turns(rows: Sequence[InferenceRow]) -> list[list[InferenceRow]]:
    found: dict[tuple[Any, ...], list[InferenceRow]] = {}
    for row in rows:
        found.setdefault((row.group, row.item), []).append(row)
    return list(found.values())


def _alike(rows: Sequence[InferenceRow]) -> bool:
    """Whether none differs significantly from the first, in time or energy; False for records without rounds."""
    if not all(row.values.get("rounds") for row in rows):
        return False
    found = [one for ratio in row_ratios(rows) for one in (ratio.time, ratio.energy) if one]
    return not any(one.excludes(1.0) for one in found)


def pareto(rows: Sequence[InferenceRow]) -> tuple[InferenceRow, ...]:
    """Rows that no other with the same item beats in latency and energy per item at once, fastest first.

    Rows of one input without significant differences are on it together. Empty if `why_no_front` has a reason.
    """
    if why_no_front(rows):
        return ()
    known = [(row, row.energy.gross_j) for row in rows if row.energy is not None]
    front: list[InferenceRow] = []
    least_j: dict[tuple[Any, ...], float] = {}
    # In order of latency a row is on the front if it uses less energy than every faster one.
    for row, gross_j in sorted(known, key=lambda one: (one[0].latency_s, one[1])):
        if gross_j < least_j.get(row.item, math.inf):
            least_j[row.item] = gross_j
            front.append(row)
    alike = [group for group in _took_turns(rows) if len(group) > 1 and _alike(group)]
    front += [row for group in alike if any(row in front for row in group) for row in group if row not in front]
    return tuple(sorted(front, key=lambda row: row.latency_s))


def energy_cell(energy: ItemEnergy | None, items: float = 1.0, net: bool = False) -> str:
    """Energy of one item: `213 mJ ±0.8 %`; with the coverage if readings are missing."""
    if energy is None:
        return NOTHING if net else "missing"
    figure = energy.net(items) if net else energy.gross(items)
    covered = f" ({coverage_text(energy.coverage)})" if figure and energy.coverage < COVERED else ""
    return amount_text(figure) + covered


def where_text(values: Mapping[str, Any]) -> str:
    threads = values["threads"]
    return "GPU" if values["device"] == "cuda" else f"CPU, {threads} thread{'s' if threads != 1 else ''}"


Named = Sequence[tuple[str, InferenceRow]]
"""Rows with names that distinguish them in their table."""


def contention_notes(rows: Named) -> list[str]:
    """Contention delays calls on the CPU, and kernel launches of calls on a GPU."""
    contended = [(name, row) for name, row in rows if row.contended]
    if not contended:
        return []
    names = list(dict.fromkeys(name for name, _ in contended))
    which = "all rows" if len(contended) == len(rows) else "; ".join(names)
    return [f"CPU contention ({which}): latencies are upper bounds; rerun on an idle machine."]


def ended_notes(rows: Named) -> list[str]:
    """Why measuring ended: rows by reason, each with its interval."""
    by_reason: dict[str, list[str]] = {}
    for name, row in rows:
        if reason := row.values.get("stopped"):  # older records of generation have none
            # estimates print their total uncertainty, which does not depend on the run time
            tight = f" (±{relative_text(row.energy.relative)})" if row.energy and not row.energy.estimated else ""
            by_reason.setdefault(reason, []).append(f"{name}{tight}")
    return [f"Ended by: {reason}: {'; '.join(names)}." for reason, names in by_reason.items()]


def energy_notes(rows: Sequence[InferenceRow]) -> list[str]:
    """Method, idle power and uncertainty of a table's energies; empty if there are none."""
    return energy_notes_of([row.energy for row in rows if row.energy is not None])


def energy_notes_of(known: Sequence[ItemEnergy]) -> list[str]:
    if not known:
        return []
    measured = [energy for energy in known if not energy.estimated]
    notes = []
    if len(measured) < len(known):
        where = f"In {len(known) - len(measured)} of {len(known)} rows: " if measured else ""
        notes = [f"{where}Energy is estimated from CPU time, not measured; ±: total uncertainty; no net energy."]
    if not measured:
        return notes
    idle_w = [energy.idle_power_w for energy in measured if energy.idle_power_w is not None]
    if not idle_w:
        spread = uncertainty_note(energy.gross() for energy in measured)
        return [*notes, *([spread] if spread else []), "No idle baseline was measured, so there is no net energy."]
    powers = " to ".join(dict.fromkeys(three_digits(power_w) for power_w in (min(idle_w), max(idle_w))))
    return [
        *notes,
        f"Net: minus the idle power of {powers} W (before and after, weighted by length; half their difference is part "
        f"of the interval). {uncertainty_note(energy.gross() for energy in measured)} The gain error cancels in ratios "
        "on one card.",
    ]


def memory_notes(rows: Sequence[InferenceRow]) -> list[str]:
    on_gpu = rows[0].values["device"] == "cuda"
    return [] if on_gpu else ["Memory: peak of the whole process."]


def missing_notes(rows: Sequence[InferenceRow], record: RunRecord) -> list[str]:
    """The full reason only if the run's line `energy` does not state it."""
    reasons = list(dict.fromkeys(row.values["why_no_energy"] for row in rows if row.energy is None))
    if not reasons:
        return []
    stated = record.totals.figure.reason if record.totals and record.totals.figure.energy_j is None else None
    if stated and all(stated in reason or reason in stated for reason in reasons):
        return ["Energy and power were not measured: see the run's line `energy`."]
    return [f"Energy and power were not measured: {'; '.join(reasons)}."]


def unused_gpu_notes(rows: Sequence[InferenceRow], record: RunRecord) -> list[str]:
    """Power of measured GPUs while the model ran on the CPU; not part of the energy per item."""
    stages = [record.stage(row.stage) for row in rows]
    powers = [stage.unused_gpu_w for stage in stages if stage and stage.unused_gpu_w is not None]
    if not powers:
        return []
    text = " to ".join(dict.fromkeys(power_text(power_w) for power_w in (min(powers), max(powers))))
    return [f"GPU: {text}, not used by this model and not included; energy is that of the CPU."]


def ratio_grid(ratios: Sequence[RowRatio]) -> Grid:
    several = len({one.row.group for one in ratios}) > 1
    rows = [row for one in ratios for row in (one.row, one.base)]
    cells = [
        (
            *([input_text(one.row)] if several else []),
            _way(one.row, rows),
            _way(one.base, rows),
            _interval(one.time),
            _interval(one.energy) if one.energy else "not measured",
            _verdict(one.time, "time", "slower", "faster"),
        )
        for one in ratios
    ]
    note = (
        "Rows with the same input ran in turns. Each round gives one ratio of median times and one of energies per "
        "item; the table shows their geometric means over rounds with Student's 95 % interval. These means differ from "
        "the ratio of the medians in the table above. Below 1, the row uses less than the row it is compared with."
    )
    ratio = "ratio\nmean of rounds!"
    titles = ("Input!|" if several else "") + f"Row|Against|Time {ratio}|Energy {ratio}|Result"
    return make_grid("Ratio to the first row, measured in turns", titles, cells, note)


def input_text(row: InferenceRow) -> str:
    tokens = row.values["tokens"]
    return f"batch {row.values['batch_size']}" + (f", {plural(tokens, 'token')}" if tokens else "")


def _way(row: InferenceRow, rows: Sequence[InferenceRow]) -> str:
    """The settings in which it differs from the other rows."""
    keys = [key for key in ("norm", "mode", "dtype") if len({one.values[key] for one in rows}) > 1]
    return ", ".join(str(row.values[key]) for key in keys)


def _interval(found: Interval) -> str:
    if is_uninformative(found):
        return f"{found.value:.3f}" + (f", {INCONCLUSIVE}" if found.bounded else "")
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _verdict(found: Interval, of: str, above: str, below: str) -> str:
    if not found.bounded:
        return "a single round has no spread"
    if not found.excludes(1.0):
        return f"no significant difference in {of}"
    change = 100 * abs(found.value - 1)
    return f"{change:.1f} % {above if found.value > 1 else below}"
