"""Tables of a comparison for terminal, Markdown and page: quality, energy, stages, break-even; and the list of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulelab.meter.figures import (
    EnergyFigure,
    amount_text,
    bound_mark,
    estimate_note,
    labeled_text,
    method_text,
    methods_text,
    uncertainty_note,
)
from joulelab.meter.grids import co2e as co2e_of
from joulelab.report.compare.break_even_report import (
    EqualEnergy,
    RowBreakEven,
    StudentCosts,
    at_equal_energy,
    break_even_rows,
    had_teacher,
    student_costs,
    times_text,
)
from joulelab.report.compare.comparison import ComparedRun, Comparison, QualityDifference, Row
from joulelab.report.compare.evaluation_data import is_known
from joulelab.report.compare.method_rows import last_training, training_energy, training_stage
from joulelab.report.compare.quality import AGREEMENT, Measure, quality_of
from joulelab.report.compare.scopes import ratio_text, shared_energies
from joulelab.report.compare.verdict import Verdict, break_even_grid, teacher_evaluation_note, verdict
from joulelab.report.energy_sums import mean_figure
from joulelab.report.tables.grid import Cell, Column, Grid, make_grid, to_markdown, to_rich
from joulelab.report.tables.inference_pair import serving_grid
from joulelab.report.tables.run_tables import run_grids, run_result
from joulelab.report.wording import NOTHING, all_equal, gram_cell, p_value, rate, ratio_cell
from joulelab.runs.groups import GroupRecord
from joulelab.runs.measure.result import RUN
from joulelab.runs.record import RunRecord
from joulelab.stats import Interval, mean_t
from joulelab.units import duration_text, energy_text


def quality_grid(comparison: Comparison) -> Grid | None:
    """None if no run has a quality value."""
    measure, items = comparison.measure, comparison.about_items
    if measure is None:
        return None
    is_known = f"student.{measure.name}" == AGREEMENT or has_student_quality(comparison)  # in a table anyway
    agreement = not is_known and any(row.agreement for row in comparison.rows)
    rows = [
        (
            row.label,
            row.seeds_text,
            _value(row, measure),
            _by_seed(row, measure),
            *_cells(row, measure, items),
            *([_agreement_cell(row)] * agreement),
        )
        for row in comparison.rows
    ]
    title, unit = ("Loss", "nats/token") if measure.unit == "nats" else (measure.heading, measure.unit)
    heading = f"{title}, {unit}" if unit else title
    by_seed = f"By seed, {unit}" if measure.percent else "By seed"
    difference = f"Difference, {measure.difference_unit}" if measure.difference_unit else "Difference"
    columns = ["Method", "Seeds!", f"{heading}>", f"{by_seed}>", f"{difference}>", *(["p>"] * items), "Significant!"]
    columns += [_STUDENT_METRICS[AGREEMENT][0]] * agreement
    note = _note(comparison, measure, title)
    if agreement:
        note += " Agrees with teacher: share of equal predictions, with Student's 95 % interval over seeds."
    return make_grid("Quality", "|".join(columns), rows, note)


def _note(comparison: Comparison, measure: Measure, title: str) -> str:
    if not comparison.about_items:
        less = " less is better." if measure.lower_is_better else ""
        runs = [run for row in comparison.rows for run in row.runs if run.quality]
        same = is_known(runs) and all(row.same_data for row in comparison.rows)
        tokens = ", on the same held-out tokens" if measure.unit == "nats" and same else ""
        return (
            f"{title}: mean over seeds with its 95 % t interval;{less or ' more is better.'} "
            f"Difference: to {comparison.baseline}, paired by seed where seeds pair{tokens}."
            + _not_comparable_note(comparison)
        )
    trials = sorted({run.result.trials or 0 for row in comparison.rows for run in row.runs if run.quality})
    note = (
        f"{title}: mean over seeds with Wilson's 95 % interval on {' / '.join(map(str, trials))} test items. "
        f"Difference: to {comparison.baseline}, paired by item, with a 95 % interval over items and training seeds."
    )
    differences = [row.difference for row in comparison.rows if row.difference]
    if any(difference.models_only for difference in differences):
        note += " Models only: exact McNemar test of the trained models; one training run does not compare methods."
    having = [row.difference for row in comparison.rows if row.difference and row.quality is not None]
    unpaired = [one.reason for one in having if one.paired is None and one.comparable]
    note += "".join(f" Unpaired: {reason}." for reason in dict.fromkeys(unpaired))
    return note + _not_comparable_note(comparison)


def _not_comparable_note(comparison: Comparison) -> str:
    reasons = dict.fromkeys(row.difference.reason for row in comparison.rows if row.difference and not row.same_data)
    return "".join(f" Not comparable: {reason}." for reason in reasons)


def _agreement_cell(row: Row) -> str:
    if row.role == "teacher":
        return NOTHING
    return _cell(row.runs, AGREEMENT, _STUDENT_METRICS[AGREEMENT][1]) if row.agreement else "not evaluated"


def _value(row: Row, measure: Measure) -> str:
    if row.quality is None:
        return NOTHING
    if same := equal_repeats(row):
        return f"{measure.number(row.quality)} {same}"
    return (
        _with_ends(Interval(row.quality, row.interval.low, row.interval.high), measure)
        if row.interval
        else (measure.number(row.quality))
    )


def equal_repeats(row: Row) -> str:
    """Text for equal repeats; empty for shares, whose interval comes from the test set."""
    found = [run.result for run in row.runs if run.quality]
    return "" if any(result.trials for result in found) else all_equal([result.value for result in found])


def _with_ends(interval: Interval, measure: Measure) -> str:
    """One seed has no interval."""
    text = measure.number(interval.value)
    return f"{text} [{measure.number(interval.low)}, {measure.number(interval.high)}]" if interval.bounded else text


def _by_seed(row: Row, measure: Measure) -> str:
    return ", ".join(measure.number(run.result.value) for run in row.runs if run.quality) or NOTHING


def _cells(row: Row, measure: Measure, items: bool) -> tuple[str, ...]:
    difference, nothing = row.difference, (NOTHING,) * items
    if difference is None:
        return "baseline", *nothing, NOTHING
    if row.quality is None:
        return NOTHING, *nothing, NOTHING
    found = difference.interval
    if found is None:
        mean = sum(difference.by_seed) / len(difference.by_seed) if difference.by_seed else None
        how = "unpaired" if difference.comparable else "not comparable"
        return NOTHING if mean is None else measure.change(mean), *nothing, how
    ends = f" {measure.change_interval(found)}" if found.bounded else ""
    p = (p_value(difference.paired.p_value),) if difference.paired else nothing
    return f"{measure.change(found.value)}{ends}", *p, _significance(difference)


def _significance(difference: QualityDifference) -> str:
    if difference.significant:
        return "yes"
    if difference.models_only:
        return "models only" if difference.paired and difference.paired.significant else "no"
    return "no" if difference.interval and difference.interval.bounded else "one run"


# Result -> column title, and factor (100 for percent)
_STUDENT_METRICS = {
    "student.accuracy": ("Accuracy, %>", 100.0),
    "student.macro_f1": ("Macro F1, %>", 100.0),
    "student.calibration_error": ("Calibration\nerror, %>", 100.0),
    AGREEMENT: ("Agrees with\nteacher, %>", 100.0),
    "student.over_teacher": ("Accuracy over\nteacher's>", 1.0),
}
# Only pipelines with the whole set of metrics have this one.
_DETAILED = "student.macro_f1"


def has_student_quality(comparison: Comparison) -> bool:
    """Runs of other pipelines, and those of earlier versions, have an accuracy only."""
    return any(_DETAILED in run.record.results for row in comparison.rows for run in row.runs)


def student_quality_grid(comparison: Comparison) -> Grid:
    rows = [
        (row.label, *(_cell(row.runs, name, scale) for name, (_, scale) in _STUDENT_METRICS.items()))
        for row in comparison.rows
        if _is_student(row)
    ]
    titles = "|".join(["Method", *(title for title, _ in _STUDENT_METRICS.values())])
    note = "Mean over seeds with Student's 95 % interval; one seed has no interval."
    return make_grid("Students' quality over seeds", titles, rows, note)


def _is_student(row: Row) -> bool:
    return any(_DETAILED in run.record.results for run in row.runs)


def _cell(runs: Sequence[ComparedRun], name: str, scale: float) -> str:
    values = [scale * run.record.results[name].value for run in runs if name in run.record.results]
    if not values:
        return NOTHING
    digits = 1 if scale > 1 else 3
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    if same := all_equal(values):
        return f"{values[0]:.{digits}f} {same}"
    found = mean_t(values)
    return f"{found.value:.{digits}f} ± {found.high - found.value:.{digits}f}"


_LOSS = "student.clm_loss"


def language_grid(comparison: Comparison) -> Grid | None:
    """None unless language models are compared by held-out loss."""
    rows = [row for row in comparison.rows if all(_LOSS in run.record.results for run in row.runs)]
    if not rows or comparison.measure is None or comparison.measure.name != "clm_loss":
        return None
    baseline = comparison.row(comparison.baseline)
    answers = {one.label: one for one in break_even_rows(comparison) if one.each == "student"}
    cells = []
    for row in rows:
        if baseline is None or row is baseline:
            equal: tuple[str, ...] = (NOTHING, NOTHING, NOTHING, "baseline" if baseline else NOTHING)
        elif one := answers.get(row.label):
            equal = (*_cost_cells(one.costs), _answer(one))
        else:
            equal = (*_cost_cells(student_costs(row, baseline, comparison)), "had no teacher")
        cells.append((*_own_cells(row), *equal))
    titles = (
        "Method|Held-out\nloss, nats>|Training\ntokens/s>|Energy\nper token>|Teacher\nshare>|"
        "Equal loss,\nnats>|Student J\nto reach it>|Baseline J\nto reach it>|N* at equal loss"
    )
    beyond = f" beyond that of {baseline.label}'s" if baseline and had_teacher(baseline) else ""
    note = (
        "Equal loss: the final loss of the worse student; the better student is charged only until it reached that "
        "loss. "
        f"N*: students after which the teacher's energy{beyond} breaks even, from student stages alone."
        + teacher_evaluation_note(rows)
    )
    if doubt := estimate_note(row.with_teacher for row in rows):
        note += f" {doubt}"
    return make_grid("Language models at equal held-out loss", titles, cells, note)


def equal_energy_grid(comparison: Comparison) -> Grid | None:
    """None unless language models were evaluated by held-out loss while they were trained."""
    baseline = comparison.row(comparison.baseline)
    if baseline is None:
        return None
    found = {row.label: at_equal_energy(row, baseline, comparison) for row in comparison.methods}
    if not any(found.values()):
        return None
    unknown = ("not trained by then", *(NOTHING,) * 3)
    cells = [(label, *(_equal_energy_cells(one) if one else unknown)) for label, one in found.items()]
    titles = f"Method|Energy of\nboth students>|Held-out\nloss, nats>|{baseline.label},\nnats>|Difference [95 %]!"
    note = (
        "Energy: everything that the cheaper of the two students used, including its SFT phase, its completions and "
        "their scores, but not the teacher's work that students share. The other student's loss is interpolated "
        "between its evaluations. A training of exactly this length would end with a lower loss, because its learning "
        "rate would have decayed to the end: `run --budget ENERGY` trains every method for the same energy."
    )
    if doubt := estimate_note(row.with_teacher for row in comparison.rows):
        note += f" {doubt}"
    return make_grid("Language models at equal energy of the student stages", titles, cells, note)


def _equal_energy_cells(one: EqualEnergy) -> tuple[str, ...]:
    columns = (one.energies_j, one.losses, one.baseline_losses)
    energy, loss, baseline = (sum(values) / len(values) for values in columns)
    change = mean_t([loss - other for loss, other in zip(one.losses, one.baseline_losses, strict=True)])
    interval = f" [{change.low:+.3f}, {change.high:+.3f}]" if change.bounded else ""
    return energy_text(energy), f"{loss:.3f}", f"{baseline:.3f}", f"{change.value:+.3f}{interval}"


def _own_cells(row: Row) -> tuple[str, ...]:
    loss = _mean([run.record.results[_LOSS].value for run in row.runs])
    stages = [stage for run in row.runs if (stage := last_training(run.record, "student"))]
    speed = _mean([stage.tokens_per_s for stage in stages if stage.tokens_per_s])
    each = [figure for stage in stages if (figure := stage.energy_per("token")) is not None]
    return (
        row.label,
        NOTHING if loss is None else f"{loss:.3f}",
        NOTHING if speed is None else f"{speed:,.0f}",
        amount_text(mean_figure(each)) if each else NOTHING,
        row.teacher_share_text,
    )


def _cost_cells(costs: StudentCosts | str | None) -> tuple[str, str, str]:
    if costs is None or isinstance(costs, str):
        return (NOTHING, NOTHING, NOTHING)
    loss = NOTHING if costs.loss is None else f"{costs.loss:.3f}"
    own_j, base_j = (energy_text(sum(side) / len(side)) for side in (costs.own_j, costs.base_j))
    return loss, own_j, f"≤ {base_j}" if costs.base_at_most else base_j


def _answer(one: RowBreakEven) -> str:
    found = one.found
    if found is None:
        return f"unknown: {one.reason}"
    if found.breaks_even:
        return one.answer if found.count else f"{one.answer}: {found.reason}"
    estimate = ""
    if found.saved.value > 0 and found.spent.value > 0:
        estimate = f"; point estimate {times_text(found.spent.value / found.saved.value, 'student')} students"
    return f"{one.answer}: {found.reason}{estimate}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def comparison_view(comparison: Comparison) -> RenderableType:
    """For the terminal: the verdict, notes on estimates, then the tables."""
    found = verdict(comparison)
    lines: list[RenderableType] = [Text(found.headline, style="bold"), *(_bullet(text) for text in found.sentences)]
    lines += [Text(f"! {text}") for text in found.provenance]
    return Group(*lines, Text(""), *(to_rich(grid) for grid in comparison_grids(comparison)))


def _bullet(text: str) -> Table:
    """With a hanging indent."""
    row = Table.grid(padding=(0, 1))
    row.add_row(Text("-"), Text(text))
    return row


def comparison_markdown(comparison: Comparison) -> str:
    found: Verdict = verdict(comparison)
    parts = [f"# {comparison.name}", *(f"> {text}" for text in found.provenance), f"**{found.headline}**"]
    parts.append("\n".join(f"- {text}" for text in found.sentences))
    parts += [to_markdown(grid).strip() for grid in comparison_grids(comparison)]
    return "\n\n".join(part for part in parts if part) + "\n"


def shared_grid(comparison: Comparison, students: int) -> Grid:
    """Energy of one student and its ratio to the baseline, with the teacher shared by a number of students."""
    rows = [
        (label, labeled_text(one.mean, one.mixed), ratio_text(one.ratio))
        for label, one in shared_energies(comparison, students).items()
    ]
    return make_grid(f"Energy per student, teacher shared by {students} students", "Method|Energy>|x>", rows)


def comparison_grids(comparison: Comparison) -> tuple[Grid, ...]:
    quality = quality_grid(comparison)
    grids = [quality] if quality else []
    if has_student_quality(comparison):
        grids.append(student_quality_grid(comparison))
    if comparison.rows:  # otherwise there are only incomplete runs
        grids += [energy_grid(comparison), stage_grid(comparison)]
        if in_use := serving_grid(comparison):
            grids.append(in_use)
    last = (language_grid(comparison), equal_energy_grid(comparison), break_even_grid(comparison))
    grids += [grid for grid in last if grid]
    if comparison.incomplete:
        grids.append(incomplete_grid(comparison))
    return tuple(grids)


def energy_grid(comparison: Comparison) -> Grid:
    """The method is in the caption; rows state their own only if they differ."""
    found = [row.without_teacher for row in comparison.rows]
    differ = len({figure.method for figure in found}) > 1
    has_teacher = any(row.unmetered or row.teacher_share for row in comparison.rows)
    rows = [(row.label, *_energy_cells(row, differ, has_teacher)) for row in comparison.rows]
    titles = "Method|Without\nteacher>|Teacher\nincluded>|Teacher\nshare>|x without\nteacher>|x teacher\nincluded>"
    caption = f"Energy, mean per run ({methods_text(found)})"
    return make_grid(caption, titles if has_teacher else "Method|Energy>|x>", rows, _energy_note(comparison))


def _energy_cells(row: Row, differ: bool, has_teacher: bool) -> tuple[str, ...]:
    method = f"\n{method_text(row.without_teacher, row.mixed_without)}" if differ or row.mixed_without else ""
    without = amount_text(row.without_teacher) + method
    if not has_teacher:
        return without, ratio_cell(row.student_ratio)
    whole = amount_text(row.with_teacher) + (f"\n{method_text(row.with_teacher, True)}" if row.mixed else "")
    if row.role == "teacher":
        return NOTHING, whole, NOTHING, NOTHING, ratio_cell(row.full_ratio)
    return without, whole, row.teacher_share_text, ratio_cell(row.student_ratio), ratio_cell(row.full_ratio)


def _co2e_and_grade_lines(rows: Sequence[Row]) -> list[list[str]]:
    """CO2e and grades, if the records have them."""
    records = [run.record for row in rows for run in row.runs]
    lines = []
    if any(record.totals and record.totals.co2e for record in records):
        lines.append(["gCO2e of the sum", *(co2e_cell(row) for row in rows)])
    if any(record.validity.grade for record in records):
        lines.append(["grade of the run", *(_grades_cell(row) for row in rows)])
    return lines


def co2e_cell(row: Row) -> Cell:
    """CO2e of the energy with the teacher: mean of the runs' low ends to mean of their high ends; each needs a grid."""
    totals = [(run.joules.with_teacher, run.record.totals) for run in row.runs]
    found = [co2e for figure, own in totals if own and (co2e := co2e_of(figure, own.grid, own.pue))]
    if len(found) < len(row.runs):
        return Cell(NOTHING)
    low, high = (
        sum(values) / len(found) for values in zip(*((f.co2e_g_low, f.co2e_g_high) for f in found), strict=True)
    )
    return Cell(gram_cell(low, high, row.with_teacher.is_lower_bound), high)


def _grades_cell(row: Row) -> str:
    """One letter if all runs have it, else each run's."""
    grades = [run.record.validity.grade or NOTHING for run in row.runs]
    return grades[0] if len(set(grades)) == 1 else ", ".join(grades)


def _energy_note(comparison: Comparison) -> str:
    ratios = [row.full_ratio for row in comparison.rows if row.full_ratio]
    spread = uncertainty_note(row.with_teacher for row in comparison.rows)
    cancels = all(found.same_devices for found in ratios)
    scale = " The scale error cancels in the ratios." if cancels else " Ratios between devices include the scale error."
    stated = f"{spread}{scale} " if spread else ""
    pairing = ", paired by seed" if all(found.paired for found in ratios) else ", paired by seed where seeds pair"
    not_included = not_included_note(comparison.rows)
    return f"{stated}{not_included}x: multiple of {comparison.baseline} [95 % t interval on logarithms]{pairing}."


def not_included_note(rows: Sequence[Row]) -> str:
    """Setup and repeated work, which the table does not contain; the table by stage lists them."""
    texts = []
    for kind, meaning in (("setup", "start-up, imports, compilation, warm-ups"), ("repeated", "after an interruption")):
        found = [figure for row in rows if (figure := getattr(row, kind)) and figure.energy_j is not None]
        if found:
            found.sort(key=lambda figure: figure.energy_j or 0.0)
            ends = dict.fromkeys(f"{bound_mark(end)}{energy_text(end.energy_j)}" for end in (found[0], found[-1]))
            name = "setup" if kind == "setup" else "repeated work"
            texts.append(f"{name} ({meaning}; {' to '.join(ends)} per run)")
    return f"Not included: {' and '.join(texts)}. " if texts else ""


def _sum_title(rows: Sequence[Row]) -> str:
    if any(row.teacher_share for row in rows):
        return "sum, teacher included"
    return "sum, inherited energy included" if any(row.inherited for row in rows) else "sum"


def stage_grid(comparison: Comparison) -> Grid:
    """Stages as rows, methods as columns."""
    rows = comparison.rows
    figures = [stage.figure for row in rows for stage in row.stages if stage.figure.energy_j is not None]
    one_method = len({figure.method for figure in figures}) <= 1
    keys, not_included = _stage_order(rows, counted=True), _stage_order(rows, counted=False)
    lines = [[_stage_title(key), *(_stage_cell(row, key, one_method) for row in rows)] for key in keys]
    lines.append([_sum_title(rows), *(amount_text(row.with_teacher) for row in rows)])
    if not_included:
        lines += [[_stage_title(key), *(_stage_cell(row, key, one_method) for row in rows)] for key in not_included]
        lines.append(["all energy used", *(amount_text(row.whole) for row in rows)])
    if any(row.samples_per_s for row in rows):
        lines.append(["training, samples/s", *(rate(row.samples_per_s, "") for row in rows)])
        lines.append(["training, J/sample", *(_item_cell(row) for row in rows)])
    lines += _co2e_and_grade_lines(rows)
    caption = f"Energy by stage, mean per run ({methods_text(figures)})"
    columns = (Column("Stage"), *(Column(row.label, "right", whole=True) for row in rows))
    return Grid(caption, columns, tuple(tuple(line) for line in lines), _stage_note(rows, [*keys, *not_included]))


def _item_cell(row: Row) -> str:
    """With its method if that differs from the stage's: CPU energy if the GPU was measured but not used."""
    each = training_energy(row.runs, "sample")
    stages = [training_stage(run.record) for run in row.runs]
    return labeled_text(each) if each and any(stage and stage.item_energy for stage in stages) else amount_text(each)


def _stage_note(rows: Sequence[Row], keys: Sequence[tuple[str, bool]]) -> str:
    """What the lines are means of, and what inherited lines are."""
    notes = []
    if any(run.repeat is not None for row in rows for run in row.runs):
        notes.append(f"{RUN}: mean over all runs of the program. Setup and all energy used: of the whole measurement.")
    elif any(len(row.runs) > 1 for row in rows):
        notes.append("Each line is the mean over all runs of a method, own or inherited, so that the lines add up.")
    if any(inherited for _, inherited in keys):
        notes.append("(inherited): energy of other runs, counted once per method.")
    return " ".join(notes)


def _stage_order(rows: Sequence[Row], counted: bool) -> list[tuple[str, bool]]:
    """Inherited work first, each in the order of the runs; `counted`: in ratios (listed above the sum) or not."""
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
        (run.label, labeled_text(run.own), str(run.seed), run.why, run.run_id or NOTHING)
        for run in comparison.incomplete
    ]
    titles = "Method|Energy used|Seed>|Why|Run!"
    return make_grid("Incomplete runs (not compared)", titles, rows)


def run_view(record: RunRecord) -> RenderableType:
    """For the terminal: the result line, then all tables."""
    return Group(Text(run_result(record), style="bold"), *(to_rich(grid) for grid in run_grids(record)))


def runs_grid(records: Iterable[RunRecord], brief: bool = False) -> Grid:
    """`brief`: for a screen; the status only of runs that are not done, and no note."""
    listed = list(records)
    if brief:
        # a method that all runs share is in the title, which leaves more room for the rows
        figures = [record.totals.best for record in listed if record.totals is not None]
        methods = {method_text(figure) for figure in figures if figure.energy_j is not None}
        shared = f",\n{methods.pop()}" if len(methods) == 1 else ""
        short = [
            (record.run_id, *_total_cells(record, shared), _quality_cell(record), _label_cell(record))
            for record in listed
        ]
        return make_grid("", f"Run!|Own energy{shared}!|Time>|Quality>|Label", short)
    rows = [
        (record.run_id, record.label, record.status, _quality_cell(record), *_total_cells(record)) for record in listed
    ]
    note = "Own energy: the run's own stages; `joulelab bill RUN` adds the teacher and everything else it reused."
    graded = any(record.validity.grade for record in listed)
    note += " A, B or C after the method is the grade of the measurement." if graded else ""
    return make_grid("Runs", "Run!|Label|Status!|Quality>|Own energy|Time>", rows, note)


def _label_cell(record: RunRecord) -> str:
    return record.label if record.status == "done" else f"{record.label} ({record.status})"


def groups_grid(groups: Iterable[GroupRecord]) -> Grid:
    rows = [
        (
            group.group_id,
            f"{sum(member.run_id is not None for member in group.members)}/{len(group.members)}",
            group.about,
        )
        for group in groups
    ]
    return make_grid("Groups", "Group!|Runs started>|About", rows)


def _quality_cell(record: RunRecord) -> str:
    found = quality_of(record)
    return NOTHING if found is None else found.text(with_interval=False)


def _total_cells(record: RunRecord, method_in_title: str = "") -> tuple[str, str]:
    if record.totals is None:
        return NOTHING, NOTHING
    figure: EnergyFigure = record.totals.best
    energy = amount_text(figure) if method_in_title else labeled_text(figure)
    if record.validity.grade and figure.energy_j is not None:
        energy += f", {record.validity.grade}"
    if repeats := getattr(record, "repeats", None):
        energy += f", mean of {repeats}"
    return energy, duration_text(record.totals.duration_s)
