"""Tables of one run: summary, stages, hosts and processes, results, inherited energy, validity checks and notes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from joulelab.meter.figures import (
    EnergyFigure,
    amount_text,
    bound_mark,
    figure_text,
    labeled_text,
    method_text,
    total,
    uncertainty_note,
)
from joulelab.meter.grids import cost_text
from joulelab.report.compare.quality import quality_of, share_interval
from joulelab.report.energy_sums import ancestor_figure, brief_missing_text, run_energy
from joulelab.report.tables.grid import Grid, make_grid, without_column, without_empty_columns
from joulelab.report.tables.inference_rows import InferenceRow, item_answer, timed_rows
from joulelab.report.tables.inference_tables import inference_grids
from joulelab.report.tables.serving_tables import measures_only_the_client, serving_answer
from joulelab.report.tables.training_table import results_in_training_table, training_grids
from joulelab.report.wording import NOTHING, gram_cell, grams, moment, rate, share
from joulelab.runs.measure.result import answer_text, repeats_text
from joulelab.runs.record import Attempt, IdleBaseline, RankPace, RunRecord, StageRecord, Totals, program_energy
from joulelab.runs.validity import interruption_text
from joulelab.units import duration_text, energy_text, power_text, with_prefix

# Ranks wait for each other at every step, so all steps take equally long. A straggler shows in its own work (input and
# forward passes, which wait for no other rank) compared with the others', and in a GPU that draws less while it waits.
# Own work above the median of its stage by more than this share marks a straggler.
STRAGGLES_REL = 0.2
# Rows of a table of ranks or devices; of more ranks, the slowest are listed.
MOST_ROWS = 64
_UNCLOSED = "the process ended without closing the run"


def node_grids(record: RunRecord) -> tuple[Grid, ...]:
    """Empty if the run had one process on one host."""
    several = len({attempt.host for attempt in record.attempts}) > 1
    paced = any(attempt.ranks for attempt in record.attempts)
    if not several and not paced:
        return ()
    grids = [hosts_grid(record), devices_grid(record)] if several else [devices_grid(record)]
    return (*grids, *([ranks_grid(record)] if paced else []))


def hosts_grid(record: RunRecord) -> Grid:
    rows = []
    for attempt in record.attempts:
        figure = attempt.energy.best(record.policy)
        offset = f"{1000 * attempt.clock_offset_s:+.0f} ms" if attempt.clock_offset_s else NOTHING
        cells = (amount_text(figure), method_text(figure), duration_text(attempt.billed_s))
        rows.append((attempt.host, *cells, _mean_power(figure, attempt), str(attempt.number), offset))
    whole = total([attempt.energy.best(record.policy) for attempt in record.attempts])
    note = f"Sum: {amount_text(whole)}, the run's total. Clock: offset from the host of rank 0.{_cut_note(rows)}"
    return make_grid("By host", "Host!|Energy>|Method|Time>|Mean W>|Attempt>|Clock>", rows[:MOST_ROWS], note)


def devices_grid(record: RunRecord) -> Grid:
    rows = []
    for attempt in record.attempts:
        for device in attempt.devices:
            cells = (device.device, amount_text(device.figure), _mean_power(device.figure, attempt), device.name)
            rows.append((*cells, attempt.host, str(attempt.number)))
    titles = "Device|Energy>|Mean W>|Name|Host!|Attempt>"
    return make_grid("By device", titles, rows[:MOST_ROWS], _cut_note(rows).strip())


def _cut_note(rows: Sequence[object]) -> str:
    return f" The first {MOST_ROWS} of {len(rows)} are shown." if len(rows) > MOST_ROWS else ""


def _mean_power(figure: EnergyFigure, attempt: Attempt) -> str:
    """Idle baselines are in neither energy nor time."""
    return power_text(figure.mean_power_w(attempt.billed_s))


def ranks_grid(record: RunRecord) -> Grid:
    found = [(attempt, pace) for attempt in record.attempts for pace in attempt.ranks]
    slow = [(attempt, pace) for attempt, pace in found if straggles(pace, _own_work_in_stage(found, attempt, pace))]
    shown = found if len(found) <= MOST_ROWS else sorted(found, key=lambda row: row[1].own_s, reverse=True)[:MOST_ROWS]
    rows = [_rank_cells(attempt, pace, (attempt, pace) in slow) for attempt, pace in shown]
    who = ", ".join(dict.fromkeys(f"rank {pace.rank} on {attempt.host}" for attempt, pace in slow))
    note = f"Stragglers: {who}." if who else "No stragglers."
    if len(shown) < len(found):
        note += f" The slowest {len(shown)} of {len(found)} are shown."
    titles = "Rank>|Host!|Attempt>|Stage|Steps>|Step>|Own work\nper step>|Straggler!"
    return make_grid("By process", titles, rows, note)


def _own_work_in_stage(found: Sequence[tuple[Attempt, RankPace]], attempt: Attempt, pace: RankPace) -> list[float]:
    return [p.own_s for a, p in found if (a.number, p.stage) == (attempt.number, pace.stage)]


def straggles(pace: RankPace, own_s: Sequence[float]) -> bool:
    """Whether its own work takes clearly longer than the median, so that the others wait for it."""
    middle = statistics.median_low(sorted(own_s))
    return len(own_s) > 1 and middle > 0 and pace.own_s > (1 + STRAGGLES_REL) * middle


def _rank_cells(attempt: Attempt, pace: RankPace, slow: bool) -> tuple[str, ...]:
    times = (with_prefix(pace.step_s, "s"), with_prefix(pace.own_s, "s"))
    return (
        str(pace.rank),
        attempt.host,
        str(attempt.number),
        pace.stage,
        str(pace.steps),
        *times,
        "yes" if slow else "no",
    )


def run_result(record: RunRecord, title: str = "", member: bool = False) -> str:
    """The answer in one line: energy with uncertainty and method, kWh, mean power, time, quality, CO2e, grade; of an
    inference run, energy per item and latency come first.

    `title` replaces the label. `member`: one of the lines of a group, without what follows from energy and time.
    """
    program, quality = program_energy(record), quality_of(record)
    status = "" if record.status == "done" else f"{record.status}; "
    if record.totals is None:
        return f"{title or record.label}: {status}energy missing: nothing was recorded"
    missing = f"energy missing; {duration_text(record.best_duration_s)}"
    parts = [missing if record.best_energy.energy_j is None else answer_text(record) + _unused_gpu(record)]
    if member and record.best_energy.energy_j is not None:
        parts = [figure_text(record.best_energy) + _unused_gpu(record), duration_text(record.best_duration_s)]
    if per_item := item_answer(record) or serving_answer(record):
        # the energy of the whole run depends on how long it measured
        whole = "client, whole run" if measures_only_the_client(record) else "whole run"
        parts = [per_item] if member else [per_item, f"{whole}: {parts[0]}"]
    if program is not None and program.count > 1:
        parts.append(repeats_text(program))
    if quality is not None:
        parts.append(f"{quality.measure.title} {quality.text()}")
    if record.validity.grade:
        parts.append(f"grade {record.validity.grade}")
    return f"{title or record.label}: {status}{'; '.join(parts)}"


def summary_grids(record: RunRecord) -> list[Grid]:
    """What a screen shows of a run: its work in numbers, then its stages; notes are in the full tables."""
    work = [*training_grids(record), *inference_grids(record)][:1]
    # a small screen cuts the last rows: idle baselines and overhead
    by_weight = sorted(record.stages, key=lambda stage: not stage.is_method_work)
    stages = without_empty_columns(stages_grid(record.model_copy(update={"stages": tuple(by_weight)})))
    methods = {method_text(stage.best) for stage in record.stages}
    if len(methods) == 1:  # stated once in the caption; a column of equal words would take space from the numbers
        stages = replace(without_column(stages, "Method"), caption=f"Stages (energy: {methods.pop()})")
    return [replace(grid, note="") for grid in (*work, stages) if grid.rows]


def run_remarks(record: RunRecord) -> list[str]:
    """Warnings about the run, and how it failed."""
    error = [f"error: {record.error.message}"] if record.error else []
    warnings = [note.text for note in record.validity.notes if note.level == "warning"]
    if _unclosed(record):
        causes = "killed, out of memory, or the machine stopped"
        error = [f"error: {_UNCLOSED} ({causes}); its energy ends with the last reading"]
        last = max((attempt.number for attempt in record.attempts), default=0)
        warnings = [text for text in warnings if text != interruption_text(last)]  # the error says the same
    return error + [f"warning: {text}" for text in warnings]


def run_grids(record: RunRecord) -> tuple[Grid, ...]:
    above_idle = above_idle_grid(record)
    work = [*training_grids(record), *inference_grids(record)]
    grids = [header_grid(record), *work, stages_grid(record), *([above_idle] if above_idle else [])]
    grids += node_grids(record)
    if set(record.results) - results_in_training_table(record):
        grids.append(results_grid(record))
    if record.inherited:
        grids.append(inherited_grid(record))
    if record.validity.checks:
        grids.append(checks_grid(record))
    if record.validity.notes:
        grids.append(notes_grid(record))
    if record.error:
        grids.append(error_grid(record))
    return tuple(grids)


def header_grid(record: RunRecord) -> Grid:
    rows = [
        ("label", record.label),
        ("status", _status_text(record)),
        ("started", moment(record.created_at)),
        ("attempts", _attempts_text(record)),
    ]
    if record.totals:
        if program := program_energy(record):
            rows.append(("energy", answer_text(record)))
            if program.count > 1:
                rows.append(("repeats", repeats_text(program)))
        rows += [*_total_rows(record, whole_run=program is not None), *_trust_rows(record)]
    else:
        rows.append(("energy", "missing: nothing was recorded"))
    return make_grid(f"Run {record.run_id}", "What!|Value", rows)


def _status_text(record: RunRecord) -> str:
    return f"{record.status}: {_UNCLOSED}" if _unclosed(record) else record.status


def _unclosed(record: RunRecord) -> bool:
    return record.status == "truncated" and record.error is None


def _attempts_text(record: RunRecord) -> str:
    running = max((attempt.number for attempt in record.attempts), default=0) if record.status == "running" else 0
    interrupted = len({attempt.number for attempt in record.attempts if not attempt.closed} - {running})
    hosts = ", ".join(dict.fromkeys(attempt.host for attempt in record.attempts))
    number = len({attempt.number for attempt in record.attempts})
    return f"{number}{f' ({interrupted} interrupted)' if interrupted else ''}{f' on {hosts}' if hosts else ''}"


def _trust_rows(record: RunRecord) -> list[tuple[str, str]]:
    rows = []
    if record.validity.grade:
        reasons = "; ".join(record.validity.reasons)
        rows.append(("validity grade", record.validity.grade + (f": {reasons}" if reasons else "")))
    elif record.status == "running":
        rows.append(("validity grade", "not graded yet: the run is running"))
    if record.machine_profile:
        rows.append(("machine profile", record.machine_profile))
    return rows


def _unused_gpu(record: RunRecord) -> str:
    """Remark on measured energy of GPUs that the models did not use."""
    unused = any(stage.unused_gpu_w is not None for stage in record.stages)
    if not unused or record.totals is None or record.totals.gpu.energy_j is None:
        return ""
    whole = record.totals.gpu.energy_j == record.totals.figure.energy_j
    part = "all of it" if whole else f"{amount_text(record.totals.gpu)} of it"
    return f"; {part} is the GPU, which the models did not use"


def _total_rows(record: RunRecord, whole_run: bool) -> list[tuple[str, str]]:
    """`whole_run`: the energy of the measured program is in a separate row, and these rows include more than that."""
    totals = record.totals
    assert totals is not None
    energy = brief_missing_text(record, totals.figure) or figure_text(totals.figure) + _unused_gpu(record)
    if whole_run:
        energy = energy if totals.best.energy_j is None else figure_text(totals.best)
        added = "with warm-ups and start-up" if any(s.activity == "warmup" for s in record.stages) else "with start-up"
        rows = [("whole run", f"{energy}; {duration_text(totals.duration_s)}, {added}")]
    else:
        rows = [("time", duration_text(totals.duration_s)), (f"energy ({totals.policy})", energy)]
    if totals.cpu_estimate.energy_j is not None and not (whole_run and totals.best == totals.cpu_estimate):
        rows.append(("CPU estimate", figure_text(totals.cpu_estimate)))
    if totals.codecarbon.energy_j is not None and totals.policy != "codecarbon":
        rows.append(("CodeCarbon", f"{labeled_text(totals.codecarbon)}: {totals.codecarbon.reason}"))
    rows += _tracked_by_codecarbon(record)
    if totals.idle_power_w is not None:
        rows.append(("idle power", "; ".join(map(idle_text, totals.idle)) or power_text(totals.idle_power_w)))
    if totals.above_idle_j is not None:
        above_idle = figure_text(totals.above_idle) if totals.above_idle else energy_text(totals.above_idle_j)
        rows.append(("above idle", above_idle))
    if totals.cost is not None and not whole_run:
        rows.append(("cost", cost_text(totals.cost, totals.best.is_lower_bound)))
    return rows + _co2e_rows(totals, factor_only=whole_run)


def _tracked_by_codecarbon(record: RunRecord) -> list[tuple[str, str]]:
    """What the training tracker `codecarbon` found for a whole training, next to our figure of the same stage."""
    rows = []
    for stage in record.stages:
        total = record.findings.get(stage.name, {}).get("codecarbon", {}).get("total")
        if total is not None:
            emitted = total.get("emissions_kg")
            co2e = "" if emitted is None else f", {1000 * emitted:.3g} g CO2e"
            found = f"{energy_text(total['energy_j'])}, estimated by CodeCarbon{co2e}; ours: {labeled_text(stage.best)}"
            rows.append((f"CodeCarbon, {stage.name}", found))
    return rows


def idle_text(idle: IdleBaseline) -> str:
    """`82.1 W before (345 MHz, steady over 10.0 s)`"""
    state = [f"{idle.sm_clock_MHz:.0f} MHz"] if idle.sm_clock_MHz is not None else []
    state.append(f"{'steady' if idle.stable else 'not steady'} over {duration_text(idle.duration_s)}")
    when = "before" if idle.before_load else "after"
    return f"{power_text(idle.power_w)} {when} ({', '.join(state)})"


def _co2e_rows(totals: Totals, factor_only: bool) -> list[tuple[str, str]]:
    if totals.grid is None:
        return []
    found, grid = totals.co2e, totals.grid
    if found is None:
        return [("CO2e", "missing: there is no energy to convert")]
    factor = (
        f"{grid.low_g_per_kwh:g} to {grid.high_g_per_kwh:g} g/kWh"
        if grid.low_g_per_kwh < grid.high_g_per_kwh
        else (f"{grid.low_g_per_kwh:g} g/kWh")
    )
    if factor_only:
        return [("grid", f"{grid.name}, {grid.year}: {factor}"), ("grid source", grid.source)]
    bound = totals.best.is_lower_bound
    rows = [("CO2e", f"{grams(found.co2e_g_low, found.co2e_g_high, bound)} (grid {grid.name}, {grid.year}: {factor})")]
    if found.with_pue_co2e_g_low is not None and found.with_pue_co2e_g_high is not None:
        text = f"{grams(found.with_pue_co2e_g_low, found.with_pue_co2e_g_high, bound)} with PUE {totals.pue:g}"
        rows.append(("CO2e with PUE", text))
    return [*rows, ("grid source", grid.source)]


def stages_grid(record: RunRecord) -> Grid:
    graded = any(stage.validity.grade for stage in record.stages)
    item: Literal["sample", "token"]
    item = "token" if any(stage.tokens_per_s for stage in record.stages if stage.activity == "train") else "sample"
    titles = f"Stage!|Energy>|Time>|Method|Mean\nW>|Peak\nW>|{item}s\nper s>|J per\n{item}>|Status!"
    timed = timed_rows(record) if item == "sample" else {}
    rows = [
        (*_stage_cells(stage, item, timed.get(stage.name)), *[stage.validity.grade or NOTHING] * graded)
        for stage in record.stages
    ]
    idle = any(stage.outside_totals for stage in record.stages)
    notes = [uncertainty_note((stage.best for stage in record.stages), with_gain=False)]
    unused = [stage for stage in record.stages if stage.unused_gpu_w is not None]
    notes += [f"Energy includes the GPU, J per {item} does not: the models ran on the CPU."] if unused else []
    notes += ["Idle baselines are not part of the totals."] if idle else []
    notes += ["Inference: rate and J per sample are those of its timed windows, as above."] if timed else []
    return make_grid("Stages", titles + "|Grade!" * graded, rows, " ".join(note for note in notes if note))


def _above_idle_text(stage: StageRecord) -> str:
    return amount_text(stage.above_idle) if stage.above_idle else energy_text(stage.above_idle_j)


def above_idle_grid(record: RunRecord) -> Grid | None:
    """Energy above idle and CO2e by stage, as far as the run has them."""
    stages = [stage for stage in record.stages if not stage.outside_totals]
    captions: list[str] = []
    columns: list[tuple[str, list[str]]] = []
    if any(stage.above_idle_j is not None for stage in stages):
        captions.append("Above idle")
        columns.append(("Gross>", [amount_text(stage.best) for stage in stages]))
        columns.append(("Above idle>", [_above_idle_text(stage) for stage in stages]))
    if any(stage.co2e for stage in stages):
        captions.append("CO2e")
        columns.append(("gCO2e>", [_grams(stage) for stage in stages]))
    if any(stage.co2e and stage.co2e.with_pue_co2e_g_low is not None for stage in stages):
        columns.append(("gCO2e\nwith PUE>", [_grams(stage, pue=True) for stage in stages]))
    if not columns:
        return None
    titles = "|".join(["Stage!", *(title for title, _ in columns)])
    rows = list(zip([stage.name for stage in stages], *(cells for _, cells in columns), strict=True))
    return make_grid(f"{' and '.join(captions)} by stage", titles, rows)


def _grams(stage: StageRecord, pue: bool = False) -> str:
    found, bound = stage.co2e, stage.best.is_lower_bound
    if found is None or (pue and found.with_pue_co2e_g_low is None):
        return NOTHING
    if pue:
        return gram_cell(found.with_pue_co2e_g_low or 0.0, found.with_pue_co2e_g_high or 0.0, bound)
    return gram_cell(found.co2e_g_low, found.co2e_g_high, bound)


def _stage_cells(stage: StageRecord, item: Literal["sample", "token"], timed: InferenceRow | None) -> tuple[str, ...]:
    best = stage.best
    per_s = stage.tokens_per_s if item == "token" else stage.samples_per_s
    return (
        stage.name,
        amount_text(best),
        duration_text(stage.duration_s),
        method_text(best),
        rate(stage.mean_power_w, ""),
        rate(stage.peak_power_w, ""),
        rate(timed.items_per_s if timed else per_s, ""),
        _item_cell(stage, item, timed),
        stage.status,
    )


def _item_cell(stage: StageRecord, item: Literal["sample", "token"], timed: InferenceRow | None) -> str:
    """Uncertainty and method are those of the row, unless the row contains a GPU that the work did not use."""
    in_windows = timed.energy.gross() if timed and timed.energy else None
    each = in_windows if timed else stage.energy_per(item)
    if stage.item_energy is None:
        return NOTHING if each is None or each.energy_j is None else bound_mark(each) + rate(each.energy_j, "J")
    return NOTHING if each is None else f"{labeled_text(each)} (CPU)"


def results_grid(record: RunRecord) -> Grid:
    rows = []
    for name, result in record.results.items():
        if name in results_in_training_table(record):
            continue
        proportion = result.trials is not None and result.successes is not None
        text = share(result.value, share_interval(result.value, result.trials)) if proportion else f"{result.value:.4g}"
        of = f"{result.successes} of {result.trials}" if proportion else NOTHING
        rows.append((name, text, of))
    return make_grid("Results", "Result|Value [95 %]>|Count>", rows)


def inherited_grid(record: RunRecord) -> Grid:
    rows = []
    for ancestor in record.inherited:
        figure = ancestor_figure(ancestor, record.policy)
        stages = ", ".join(ancestor.stages) or NOTHING
        rows.append((ancestor.name, amount_text(figure), method_text(figure), stages, ancestor.made_by))
    found = run_energy(record)
    note = f"Own and inherited energy: {labeled_text(found.whole, found.mixed_whole)}."
    if found.unknown:
        note += f" Not included (energy unknown): {', '.join(found.unknown)}."
    return make_grid("Inherited energy (from other runs)", "Artifact!|Energy>|Method|Stages|Made by", rows, note)


def notes_grid(record: RunRecord) -> Grid:
    rows = [(note.level, note.text) for note in record.validity.notes]
    return make_grid("Validity notes", "Level|Note", rows)


def checks_grid(record: RunRecord) -> Grid:
    rows = [(check.name, check.grade, check.text) for check in record.validity.checks]
    note = "The grade of a measurement is the worst of its checks: A sound, B usable with care, C not to be quoted."
    return make_grid(f"Why grade {record.validity.grade}", "Check!|Grade!|Finding", rows, note)


def error_grid(record: RunRecord) -> Grid:
    error = record.error
    rows = [] if error is None else [(error.kind, error.message, error.hint or NOTHING)]
    return make_grid("Error", "Kind|Message|Hint", rows)
