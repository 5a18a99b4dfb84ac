"""What people read in a terminal or paste into a note: the comparison, one run, and the list of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulelab.meter.figure_text import (
    amount_text,
    bound_mark,
    labeled_text,
    method_text,
    methods_text,
    uncertainty_note,
)
from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare_rows import training_energy, training_stage
from joulelab.report.comparison import Comparison, Row
from joulelab.report.grid import Column, Grid, make_grid, to_markdown, to_rich
from joulelab.report.inference_compare import use_grid
from joulelab.report.language_table import language_grid
from joulelab.report.payback_words import payback_grid
from joulelab.report.quality import quality_of
from joulelab.report.quality_table import quality_grid
from joulelab.report.run_tables import run_grids
from joulelab.report.student_quality import has_student_quality, student_quality_grid
from joulelab.report.verdict import Verdict, verdict
from joulelab.report.wording import (
    NOTHING,
    gram_cell,
    rate,
    ratio_cell,
)
from joulelab.runs.groups import GroupRecord
from joulelab.runs.measure_result import RUN
from joulelab.runs.record import RunRecord
from joulelab.units import duration_text, energy_text


def comparison_view(comparison: Comparison) -> RenderableType:
    """For the terminal: how the joules were obtained, the tables, then the verdict."""
    found = verdict(comparison)
    lines: list[RenderableType] = [Text(f"! {text}") for text in found.provenance]
    lines += [to_rich(grid) for grid in comparison_grids(comparison)]
    lines += [Text(found.headline, style="bold"), *(_bullet(text) for text in found.sentences)]
    return Group(*lines)


def _bullet(text: str) -> Table:
    """A hanging indent, so that long sentences stay apart from each other."""
    row = Table.grid(padding=(0, 1))
    row.add_row(Text("-"), Text(text))
    return row


def comparison_markdown(comparison: Comparison) -> str:
    found: Verdict = verdict(comparison)
    parts = [f"# {comparison.name}", *(f"> {text}" for text in found.provenance), f"**{found.headline}**"]
    parts.append("\n".join(f"- {text}" for text in found.sentences))
    parts += [to_markdown(grid).strip() for grid in comparison_grids(comparison)]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_grids(comparison: Comparison) -> tuple[Grid, ...]:
    quality = quality_grid(comparison)
    grids = [quality] if quality else []
    if has_student_quality(comparison):
        grids.append(student_quality_grid(comparison))
    if comparison.rows:  # without any finished run there is only the list of those that are not
        grids += [energy_grid(comparison), stage_grid(comparison)]
        if in_use := use_grid(comparison):
            grids.append(in_use)
    grids += [grid for grid in (language_grid(comparison), payback_grid(comparison)) if grid]
    if comparison.incomplete:
        grids.append(incomplete_grid(comparison))
    return tuple(grids)


def energy_grid(comparison: Comparison) -> Grid:
    """The method stands in the caption; only where rows differ does each say its own."""
    found = [row.without_teacher for row in comparison.rows]
    differ = len({figure.method for figure in found}) > 1
    taught = any(row.unmetered or row.teacher_share for row in comparison.rows)
    rows = [(row.label, *_energy_cells(row, differ, taught)) for row in comparison.rows]
    titles = "Method|Without\nteacher>|Teacher\nincluded>|Teacher\nshare>|x without\nteacher>|x teacher\nincluded>"
    caption = f"Energy, mean per run ({methods_text(found)})"
    return make_grid(caption, titles if taught else "Method|Energy>|x>", rows, _energy_note(comparison))


def _energy_cells(row: Row, differ: bool, taught: bool) -> tuple[str, ...]:
    said = f"\n{method_text(row.without_teacher, row.mixed_without)}" if differ or row.mixed_without else ""
    without = amount_text(row.without_teacher) + said
    if not taught:
        return without, ratio_cell(row.student_ratio)
    whole = amount_text(row.with_teacher) + (f"\n{method_text(row.with_teacher, True)}" if row.mixed else "")
    if row.role == "teacher":
        return NOTHING, whole, NOTHING, NOTHING, ratio_cell(row.full_ratio)
    return without, whole, row.teacher_share_text, ratio_cell(row.student_ratio), ratio_cell(row.full_ratio)


def _trust_lines(rows: Sequence[Row]) -> list[list[str]]:
    """CO2e where a grid was named, and grades where the records have them."""
    records = [run.record for row in rows for run in row.runs]
    lines = []
    if any(record.totals and record.totals.co2e for record in records):
        lines.append(["own stages, gCO2e", *(_co2e_cell(row) for row in rows)])
    if any(record.validity.grade for record in records):
        lines.append(["grade of the run", *(_grades_cell(row) for row in rows)])
    return lines


def _co2e_cell(row: Row) -> str:
    """Mean of the runs' low ends to mean of their high ends; only where every run of the row has one."""
    found = [run.record.totals.co2e for run in row.runs if run.record.totals and run.record.totals.co2e]
    if not found or len(found) < len(row.runs):
        return NOTHING
    low, high = (
        sum(values) / len(found) for values in zip(*((f.co2e_g_low, f.co2e_g_high) for f in found), strict=True)
    )
    return gram_cell(low, high, any(run.joules.own.is_lower_bound for run in row.runs))


def _grades_cell(row: Row) -> str:
    """One letter where all runs share it, else each run's."""
    grades = [run.record.validity.grade or NOTHING for run in row.runs]
    return grades[0] if len(set(grades)) == 1 else ", ".join(grades)


def _energy_note(comparison: Comparison) -> str:
    ratios = [row.full_ratio for row in comparison.rows if row.full_ratio]
    spread = uncertainty_note(row.with_teacher for row in comparison.rows)
    cancels = all(found.same_devices for found in ratios)
    scale = " The scale error cancels in the ratios." if cancels else " Ratios between devices include the scale error."
    stated = f"{spread}{scale} " if spread else ""
    pairing = ", paired by seed" if all(found.paired for found in ratios) else ", paired by seed where seeds pair"
    apart = _apart_note(comparison.rows)
    return f"{stated}{apart}x: multiple of {comparison.baseline} [95 % t interval on logarithms]{pairing}."


def _apart_note(rows: Sequence[Row]) -> str:
    """What is in no figure of the table, with its size; the table by stage has it line by line."""
    texts = []
    for kind, meaning in (("setup", "start-up, imports, compilation, warm-ups"), ("repeated", "after an interruption")):
        found = [figure for row in rows if (figure := getattr(row, kind)) and figure.energy_j is not None]
        if found:
            found.sort(key=lambda figure: figure.energy_j or 0.0)
            ends = dict.fromkeys(f"{bound_mark(end)}{energy_text(end.energy_j)}" for end in (found[0], found[-1]))
            name = "setup" if kind == "setup" else "repeated work"
            texts.append(f"{name} ({meaning}; {' to '.join(ends)} a run)")
    return f"Not included: {' and '.join(texts)}. " if texts else ""


def _sum_title(rows: Sequence[Row]) -> str:
    if any(row.teacher_share for row in rows):
        return "sum, teacher included"
    return "sum, inherited energy included" if any(row.inherited for row in rows) else "sum"


def stage_grid(comparison: Comparison) -> Grid:
    """Stages downwards, methods across: where each method's joules went."""
    rows = comparison.rows
    figures = [stage.figure for row in rows for stage in row.stages if stage.figure.energy_j is not None]
    one_method = len({figure.method for figure in figures}) <= 1
    keys, apart = _stage_order(rows, counted=True), _stage_order(rows, counted=False)
    lines = [[_stage_title(key), *(_stage_cell(row, key, one_method) for row in rows)] for key in keys]
    lines.append([_sum_title(rows), *(amount_text(row.with_teacher) for row in rows)])
    if apart:
        lines += [[_stage_title(key), *(_stage_cell(row, key, one_method) for row in rows)] for key in apart]
        lines.append(["all energy used", *(amount_text(row.whole) for row in rows)])
    if any(row.samples_per_s for row in rows):
        lines.append(["training, samples/s", *(rate(row.samples_per_s, "") for row in rows)])
        lines.append(["training, J/sample", *(_item_cell(row) for row in rows)])
    lines += _trust_lines(rows)
    caption = f"Joules by stage, mean per run ({methods_text(figures)})"
    columns = (Column("Stage"), *(Column(row.label, "right", whole=True) for row in rows))
    return Grid(caption, columns, tuple(tuple(line) for line in lines), _stage_note(rows, [*keys, *apart]))


def _item_cell(row: Row) -> str:
    """Its method where it is not that of the stage: the CPU's energy where the GPU was measured and not used."""
    each = training_energy(row.runs, "sample")
    stages = [training_stage(run.record) for run in row.runs]
    return labeled_text(each) if each and any(stage and stage.item_energy for stage in stages) else amount_text(each)


def _stage_note(rows: Sequence[Row], keys: Sequence[tuple[str, bool]]) -> str:
    """Whose joules a line means, where that could be taken in two ways."""
    notes = []
    if any(run.repeat is not None for row in rows for run in row.runs):
        notes.append(f"{RUN}: mean over all runs of the program. Setup and all energy used: of the whole measurement.")
    elif any(len(row.runs) > 1 for row in rows):
        notes.append("Each line is the mean over all runs of a method, whoever paid, so that the lines add up.")
    if any(inherited for _, inherited in keys):
        notes.append("(inherited): other runs paid for it; counted once in each bill.")
    return " ".join(notes)


def _stage_order(rows: Sequence[Row], counted: bool) -> list[tuple[str, bool]]:
    """Inherited work above own work; within each, as the runs went. What no ratio counts comes after the sum."""
    stages = [stage for row in rows for stage in row.stages if row.counts(stage) is counted]
    keys = list(dict.fromkeys((stage.name, stage.inherited) for stage in stages))
    return sorted(keys, key=lambda key: not key[1])


def _stage_title(key: tuple[str, bool]) -> str:
    return f"{key[0]} (inherited)" if key[1] else key[0]


def _stage_cell(row: Row, key: tuple[str, bool], one_method: bool) -> str:
    stage = next((stage for stage in row.stages if (stage.name, stage.inherited) == key), None)
    if stage is None:
        return NOTHING
    return amount_text(stage.figure) if one_method else labeled_text(stage.figure)


def incomplete_grid(comparison: Comparison) -> Grid:
    rows = [
        (run.label, str(run.seed), run.run_id or NOTHING, run.why, labeled_text(run.own))
        for run in comparison.incomplete
    ]
    titles = "Method|Seed>|Run!|Why|Joules taken"
    return make_grid("Incomplete runs: not compared, their joules were spent", titles, rows)


def run_view(record: RunRecord) -> RenderableType:
    return Group(*(to_rich(grid) for grid in run_grids(record)))


def runs_table(records: Iterable[RunRecord]) -> RenderableType:
    return to_rich(runs_grid(records))


def runs_grid(records: Iterable[RunRecord]) -> Grid:
    listed = list(records)
    rows = [
        (record.run_id, record.label, record.status, _quality_cell(record), *_total_cells(record)) for record in listed
    ]
    note = "Own energy: what the run took itself; `joulelab bill RUN` adds its teacher's and all else that it reused."
    graded = any(record.validity.grade for record in listed)
    note += " A, B or C after the method is the grade of the measurement." if graded else ""
    return make_grid("Runs", "Run!|Label|Status!|Quality>|Own energy|Time>", rows, note)


def groups_table(groups: Iterable[GroupRecord]) -> RenderableType:
    rows = [
        (
            group.group_id,
            f"{sum(member.run_id is not None for member in group.members)}/{len(group.members)}",
            group.about,
        )
        for group in groups
    ]
    return to_rich(make_grid("Groups", "Group!|Runs started>|About", rows))


def _quality_cell(record: RunRecord) -> str:
    found = quality_of(record)
    return NOTHING if found is None else found.text(with_interval=False)


def _total_cells(record: RunRecord) -> tuple[str, str]:
    if record.totals is None:
        return NOTHING, NOTHING
    figure: EnergyFigure = record.totals.best
    energy = labeled_text(figure)
    if record.validity.grade and figure.energy_j is not None:
        energy += f", {record.validity.grade}"
    if repeats := getattr(record, "repeats", None):
        energy += f", mean of {repeats}"
    return energy, duration_text(record.totals.duration_s)
