"""The rows of an inference run, out of its record: latency, joules gross and above idle, and who beats whom.

Net joules are computed here and not while the run ran, because the idle baseline after it comes last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.infer.energy import ItemEnergy
from joulelab.meter.figures import COVERED, amount_text, coverage_text, relative_text, uncertainty_note
from joulelab.meter.health import CoreUse, most_contended
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import INCONCLUSIVE, NOTHING, says_nothing
from joulelab.runs.attempt_data import IdlePower, idle_power
from joulelab.runs.record import CPU_WORK, IdleBaseline, RunRecord
from joulelab.stats import Interval, ratio_paired
from joulelab.units import power_text, three_digits

TRACKER, GENERATION = "inference", "generation"


@dataclass(frozen=True)
class InferenceRow:
    stage: str
    values: Mapping[str, Any]
    energy: ItemEnergy | None
    core_use: CoreUse | None = None
    """Who used the CPU cores in its windows; None where nobody looked."""

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows of one input took turns, and can be compared round by round."""
        return self.values["batch_size"], self.values["tokens"]

    @property
    def item(self) -> tuple[Any, ...]:
        """What joules are told for: a shorter sequence or a prompt alone takes less than a response, and beats none."""
        return self.values["tokens"], self.values.get("part")

    @property
    def latency_s(self) -> float:
        return float(self.values["latency"]["median_s"])

    @property
    def items_per_s(self) -> float:
        """Mean over the windows, as watts and joules are: W over this is the joules of one item."""
        return float(self.values["items_per_call"] * self.values["calls"] / self.values["seconds"])

    @property
    def crowded(self) -> bool:
        return self.core_use is not None and self.core_use.contended

    @property
    def name(self) -> str:
        """How it was run, without how much at once."""
        return ", ".join(str(self.values[key]) for key in ("norm", "mode", "dtype") if self.values.get(key))


def inference_rows(record: RunRecord, tracker: str = TRACKER) -> tuple[InferenceRow, ...]:
    """As they were asked for, which is the order of their first rounds; findings come as each stage first says any."""
    begun = [stage.name for stage in record.stages]
    cores = {stage.name: stage.core_use for stage in record.stages}
    found = {stage: values[tracker] for stage, values in record.findings.items() if tracker in values}
    in_order = sorted(found, key=lambda stage: begun.index(stage) if stage in begun else len(begun))
    return tuple(
        InferenceRow(stage, found[stage], _with_net(found[stage], record), cores.get(stage)) for stage in in_order
    )


def timed_rows(record: RunRecord) -> dict[str, InferenceRow]:
    """Stage -> its row, forward passes and generations alike.

    Energy and rate of an item are those of the timed windows wherever they are shown: the stage around these also has
    the time in which marks are written and rounds begin.
    """
    return {row.stage: row for tracker in (TRACKER, GENERATION) for row in inference_rows(record, tracker)}


def idle_of(record: RunRecord, cpu_work: bool = False) -> IdlePower | None:
    """The idle power to subtract (`runs.idle.idle_power`).

    `cpu_work`: of the processor and its memory alone, where GPUs were measured that the model did not use.
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


def _with_net(values: Mapping[str, Any], record: RunRecord) -> ItemEnergy | None:
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
    """A row against the first of its group, from rounds that took turns."""

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
    """Empty where a front can be told."""
    if any(row.crowded for row in rows):
        return "others used the CPU cores meanwhile"
    if any(row.energy is None for row in rows):
        return "joules are missing"
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
    """None can be told from the first of them, in time or in joules; a record without rounds does not say."""
    if not all(row.values.get("rounds") for row in rows):
        return False
    found = [one for ratio in row_ratios(rows) for one in (ratio.time, ratio.energy) if one]
    return not any(one.excludes(1.0) for one in found)


def pareto(rows: Sequence[InferenceRow]) -> tuple[InferenceRow, ...]:
    """Rows that no other with the same item beats in latency and joules per item at once, quickest first.

    Rows of one input that cannot be told apart are on it together. None where `why_no_front` has a reason.
    """
    if why_no_front(rows):
        return ()
    told = [(row, row.energy.gross_j) for row in rows if row.energy is not None]
    front: list[InferenceRow] = []
    least_j: dict[tuple[Any, ...], float] = {}
    for row, gross_j in sorted(told, key=lambda one: (one[0].latency_s, one[1])):
        if gross_j < least_j.get(row.item, math.inf):
            least_j[row.item] = gross_j
            front.append(row)
    alike = [group for group in _took_turns(rows) if len(group) > 1 and _alike(group)]
    front += [row for group in alike if any(row in front for row in group) for row in group if row not in front]
    return tuple(sorted(front, key=lambda row: row.latency_s))


# How the figures of an inference read in tables.


def energy_cell(energy: ItemEnergy | None, items: float = 1.0, net: bool = False) -> str:
    """Energy of one item: `213 mJ ±0.8 %`; with the coverage where readings are missing, which the interval covers."""
    if energy is None:
        return NOTHING if net else "missing"
    figure = energy.net(items) if net else energy.gross(items)
    covered = f" ({coverage_text(energy.coverage)})" if figure and energy.coverage < COVERED else ""
    return amount_text(figure) + covered


def where_text(values: Mapping[str, Any]) -> str:
    threads = values["threads"]
    return "GPU" if values["device"] == "cuda" else f"CPU, {threads} thread{'s' if threads != 1 else ''}"


# What stands below tables of inference: who else used the cores, why a row ended, why there are no joules.


Named = Sequence[tuple[str, InferenceRow]]
"""Rows under the names that tell them apart in their table."""


def crowd_notes(rows: Named) -> list[str]:
    """A call waits its turn where others use the cores, on a GPU while its kernels are launched."""
    crowded = [(name, row) for name, row in rows if row.crowded]
    worst = most_contended([row.core_use for _, row in crowded])
    if worst is None:
        return []
    names = list(dict.fromkeys(name for name, _ in crowded))
    whose = "all rows" if len(crowded) == len(rows) else "; ".join(names)
    most = "in the worst of them " if len(crowded) > 1 else ""
    return [f"Crowded ({whose}): {most}{worst.text} meanwhile, so latencies are upper bounds. Run it on quiet cores."]


def ended_notes(rows: Named) -> list[str]:
    """Rows that ended for the same reason together, each with the interval that stands in its line of the table."""
    by_reason: dict[str, list[str]] = {}
    for name, row in rows:
        if reason := row.values.get("stopped"):  # older records of generations have none
            # of an estimate only the total uncertainty is printed, and no run time makes that smaller
            tight = f" (±{relative_text(row.energy.relative)})" if row.energy and not row.energy.estimated else ""
            by_reason.setdefault(reason, []).append(f"{name}{tight}")
    return [f"Ended by: {reason}: {'; '.join(names)}." for reason, names in by_reason.items()]


def energy_notes(rows: Sequence[InferenceRow]) -> list[str]:
    """How the joules of a table came about; nothing where there are none."""
    told = [row.energy for row in rows if row.energy is not None]
    if not told:
        return []
    measured = [energy for energy in told if not energy.estimated]
    notes = []
    if len(measured) < len(told):
        where = f"In {len(told) - len(measured)} of {len(told)} rows: " if measured else ""
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
        f"Net: less the idle power of {powers} W, of before and after by their length; half their difference is in the "
        f"interval. {uncertainty_note(energy.gross() for energy in measured)} The gain error cancels in ratios on one "
        "card.",
    ]


def memory_notes(rows: Sequence[InferenceRow]) -> list[str]:
    on_gpu = rows[0].values["device"] == "cuda"
    return [] if on_gpu else ["Memory: the most the whole process ever held."]


def missing_notes(rows: Sequence[InferenceRow], record: RunRecord) -> list[str]:
    """The reason in full only where the run's own line about energy does not give it already."""
    reasons = list(dict.fromkeys(row.values["why_no_energy"] for row in rows if row.energy is None))
    if not reasons:
        return []
    told = record.totals.figure.reason if record.totals and record.totals.figure.energy_j is None else None
    if told and all(told in reason or reason in told for reason in reasons):
        return ["Not measured: joules and watts; the run's line `energy` says why."]
    return [f"Not measured: joules and watts. {'; '.join(reasons)}."]


def unused_gpu_notes(rows: Sequence[InferenceRow], record: RunRecord) -> list[str]:
    """The power of GPUs that were measured while the model ran on the CPU; the energy of an item leaves it out."""
    stages = [record.stage(row.stage) for row in rows]
    powers = [stage.unused_gpu_w for stage in stages if stage and stage.unused_gpu_w is not None]
    if not powers:
        return []
    text = " to ".join(dict.fromkeys(power_text(power_w) for power_w in (min(powers), max(powers))))
    return [f"GPU: {text}, not used by this model and not included; energy is that of the CPU."]


# Rows that took turns, each against the first of its input: ratios of time and joules, and what they say in words.


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
            _verdict(one.time, "time", "slower", "quicker"),
        )
        for one in ratios
    ]
    note = (
        "Rows of one input took turns. Each round gives one ratio, of its two medians or of its joules per item; here "
        "is the geometric mean of these, with Student's 95 % interval. It is not the ratio of the medians over all "
        "rounds, which stand above. Below 1 the row takes less than the one it is compared with."
    )
    ratio = "ratio\nmean of rounds!"
    titles = ("Input!|" if several else "") + f"Row|Against|Time {ratio}|Energy {ratio}|In words"
    return make_grid("Against the first row, in turns", titles, cells, note)


def input_text(row: InferenceRow) -> str:
    tokens = row.values["tokens"]
    return f"batch {row.values['batch_size']}" + (f", {tokens} tokens" if tokens else "")


def _way(row: InferenceRow, rows: Sequence[InferenceRow]) -> str:
    """In what its way differs from that of the others."""
    keys = [key for key in ("norm", "mode", "dtype") if len({one.values[key] for one in rows}) > 1]
    return ", ".join(str(row.values[key]) for key in keys)


def _interval(found: Interval) -> str:
    if says_nothing(found):
        return f"{found.value:.3f}" + (f", {INCONCLUSIVE}" if found.bounded else "")
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _verdict(found: Interval, of: str, above: str, below: str) -> str:
    if not found.bounded:
        return "one round tells no spread"
    if not found.excludes(1.0):
        return f"no significant difference in {of}"
    change = 100 * abs(found.value - 1)
    return f"{change:.1f} % {above if found.value > 1 else below}"
