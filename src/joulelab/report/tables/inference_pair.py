"""Inference of a student and its teacher compared, and the number of items after which distillation breaks even (T*).

T* = energy of making the student, its teacher excluded, over the energy it saves per item. Only rows with the same
batch size, sequence length, mode, dtype and device are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.errors import ConfigError
from joulelab.meter.figures import estimate_note, total
from joulelab.report.compare.comparison import Comparison, run_name
from joulelab.report.compare.differences import CPU_CONTENTION
from joulelab.report.energy_sums import NOT_METERED, mixes_methods, parts_of, why_incomplete
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.tables.inference_rows import (
    InferenceRow,
    Named,
    contention_notes,
    energy_cell,
    energy_notes,
    inference_rows,
    input_text,
    rows_in_use,
    where_text,
)
from joulelab.report.tables.inference_tables import GenerationRow, generation_rows, prompt_notes, rows_data
from joulelab.report.tables.serving_tables import loads_grid, loads_headline, serving_data, serving_rows
from joulelab.report.wording import NOTHING
from joulelab.runs.artifacts import ELSEWHERE
from joulelab.runs.record import RunRecord
from joulelab.stats import BreakEven, Estimate, break_even
from joulelab.units import count_text, energy_text, size_text, three_digits, with_prefix

_LISTED = 4


def rows_run_alike(student: RunRecord, teacher: RunRecord) -> list[tuple[InferenceRow, InferenceRow]]:
    ours, theirs = rows_in_use(student), rows_in_use(teacher)
    _require_one_kind(student, ours, teacher, theirs)
    alike = [(row, other) for row in ours for other in _partners(row, theirs)]
    if not alike:
        raise ConfigError(
            "the two runs have no row in common (batch, tokens, mode, dtype, device): "
            f"{student.run_id} has {_listed(ours)}; {teacher.run_id} has {_listed(theirs)}",
            "run both with the same --batch-size, --seq-length, --mode, --dtype and --device",
        )
    return alike


def _partners(row: InferenceRow, others: Sequence[InferenceRow]) -> list[InferenceRow]:
    """Rows with the same settings and norm; if none has that norm, with any."""
    alike = [other for other in others if _key(other) == _key(row)]
    return [other for other in alike if other.values["norm"] == row.values["norm"]] or alike


def _require_one_kind(
    student: RunRecord, ours: Sequence[InferenceRow], teacher: RunRecord, theirs: Sequence[InferenceRow]
) -> None:
    for record, rows in ((student, ours), (teacher, theirs)):
        if not rows:
            raise ConfigError(f"{record.run_id} has no finished inference rows", "pass runs of `joulelab infer`")
    kinds = [_kind(rows[0]) for rows in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"{student.run_id} has {kinds[0]}, {teacher.run_id} has {kinds[1]}: they cannot be compared",
            "run both models the same way, with --generate or without",
        )


def _kind(row: InferenceRow) -> str:
    if "part" in row.values:
        return "generated responses (--generate)"
    return f"forward passes over one {row.values['item']} or several"


def _listed(rows: Sequence[InferenceRow]) -> str:
    texts = [
        f"batch {row.values['batch_size']}{length_text(row.values)}, {row.name} on {row.values['device']}"
        for row in rows
    ]
    return ", ".join(texts[:_LISTED]) + (f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else "")


def length_text(values: Mapping[str, Any]) -> str:
    if "new_tokens" in values:
        return f", {values['prompt_tokens']:g} + {values['new_tokens']} tokens"
    return f", {values['tokens']} tokens" if values["tokens"] else ""


def _key(row: InferenceRow) -> tuple[Any, ...]:
    names = ("batch_size", "tokens", "mode", "dtype", "device", "prompt_tokens", "new_tokens")
    return tuple(row.values.get(name) for name in names)


def maker_remark(student: RunRecord, made_by: RunRecord) -> str:
    """Empty if the student's lineage contains that run, a remark if it has no lineage; otherwise an error."""
    inner = {key for one in student.inherited for key in one.parents}
    last = [one for one in student.inherited if one.key not in inner]
    makers = list(dict.fromkeys(one.made_by for one in last if one.made_by != ELSEWHERE))
    if made_by.run_id in makers:
        return ""
    if makers:
        raise ConfigError(
            f"{made_by.run_id} did not make the student of {student.run_id}, which comes from {', '.join(makers)}",
            "omit --distilled-by: the student's lineage has the energy of making it",
        )
    return f" (not verified that it made this student: {student.run_id} has no lineage)"


@dataclass(frozen=True)
class Pair:
    student: InferenceRow
    teacher: InferenceRow
    item: str
    over: int
    """Items per unit of the rows: the tokens of a response, else 1."""
    found: BreakEven | None
    reason: str = ""
    """Why there is no answer; otherwise the source of the energy spent once."""

    @property
    def answer(self) -> str:
        if self.found is None:
            return f"unknown: {self.reason}"
        if not self.found.breaks_even:
            return f"does not break even: {self.found.reason}"
        return "immediately" if not self.found.count else f"after {count_text(self.found.count)} {self.item}s"


def pairs(student: RunRecord, teacher: RunRecord, made_by: RunRecord | None) -> list[Pair]:
    alike = rows_run_alike(student, teacher)
    spent = _spent_once(student, made_by)
    return [_pair(row, other, spent) for row, other in alike]


@dataclass(frozen=True)
class _Spent:
    joules: Estimate | None
    source: str
    """Which stages or run the energy is of, or why there is none."""
    estimated: bool = False


def _spent_once(student: RunRecord, made_by: RunRecord | None) -> _Spent:
    """Energy of making the student, its teacher excluded: from the given run, or from the student's lineage."""
    doubt = ""
    if made_by is not None:
        doubt = maker_remark(student, made_by)
        parts = list(parts_of(made_by))
    else:
        parts = [part for part in parts_of(student) if part.inherited]
    figures = [part.figure for part in parts if not part.makes_the_teacher]
    known = [figure for figure in figures if figure.energy_j is not None]
    if any(figure.lower_bound and figure.energy_j is None for figure in figures):
        return _Spent(None, NOT_METERED)
    if incomplete := why_incomplete(known):
        return _Spent(None, incomplete)
    if not known:
        source = "that run" if made_by is not None else "the student's lineage"
        return _Spent(None, f"{source} has no energy of a distillation (pass its run with --distilled-by)")
    if mixes_methods(known):
        return _Spent(None, "the distillation is partly measured and partly estimated")
    if any(figure.cpu_contention for figure in known):
        return _Spent(None, "CPU contention while the student was made")
    whose = "the stages that made the student, from its lineage"
    if made_by is not None:
        whose = (
            f"all of {made_by.run_id} and of what it reused, except the teacher's training; evaluation and overhead "
            f"are included{doubt}"
        )
    spent = total(known)
    joules = Estimate.of_half_width(spent.energy_j or 0.0, spent.half_width_j or 0.0)
    return _Spent(joules, whose, estimated=not known[0].measured)


def _pair(student: InferenceRow, teacher: InferenceRow, spent: _Spent) -> Pair:
    tokens = int(student.values.get("new_tokens", 0))
    item, over = ("token", tokens) if tokens else (str(student.values["item"]), 1)

    def answer(found: BreakEven | None, reason: str = "") -> Pair:
        return Pair(student, teacher, item, over, found, reason)

    ours, theirs = student.energy, teacher.energy
    if ours is None or theirs is None:
        return answer(None, str((student if ours is None else teacher).values["why_no_energy"]))
    if ours.estimated != theirs.estimated:
        return answer(None, "one side is measured and the other estimated")
    if ours.estimated and (student.contended or teacher.contended):
        return answer(None, CPU_CONTENTION)
    if spent.joules is None:
        return answer(None, spent.source)
    if spent.estimated != ours.estimated:
        return answer(None, "either the distillation or the inference energy is measured, and the other is estimated")
    each = [Estimate.of_half_width(one.gross_j / over, one.gross_half_width_j / over) for one in (theirs, ours)]
    article = "an" if item[0] in "aeiou" else "a"
    return answer(break_even(spent.joules, each[0] - each[1], f"{article} {item}"), spent.source)


def pair_grid(student: RunRecord, teacher: RunRecord, found: Sequence[Pair]) -> Grid:
    rows = []
    for one in found:
        how = f"{input_text(one.student)}, {one.student.name}"
        other = one.teacher.name if one.teacher.name != one.student.name else ""
        rows.append((how, f"student: {student.label}", *_cells(one.student, one.over)))
        rows.append((other, f"teacher: {teacher.label}", *_cells(one.teacher, one.over)))
        rows.append(("", "T*", NOTHING, NOTHING, _saved(one), _spent(one), _answer_text(one)))
    named = [(who, row) for one in found for who, row in (("student", one.student), ("teacher", one.teacher))]
    note = "".join(f"{text} " for text in contention_notes(named)) + (
        f"{_unit_note(found[0])} T*: energy of making the student, its teacher excluded, divided by the energy it "
        "saves per item; Fieller's 95 % interval. This table does not compare quality: T* is meaningful only if the "
        "student is good enough."
    )
    note += "".join(f" Spent once: {source}." for source in dict.fromkeys(one.reason for one in found if one.found))
    energies = [row.energy for one in found for row in (one.student, one.teacher) if row.energy]
    if doubt := estimate_note(energy.gross() for energy in energies):
        note += f" {doubt}"
    of = found[0].item if found[0].over > 1 else "call"
    titles = f"Configuration!|Model!|Median ms\nper {of}>|Mean W>|Energy\nper {found[0].item}>|Spent once>|Breaks even"
    return make_grid("Student and teacher at inference", titles, rows, note)


def _unit_note(pair: Pair) -> str:
    if pair.over == 1:
        return f"Energy per {pair.item}, gross."
    return f"Time and gross energy per token: those of a whole response, prompt included, over its {pair.over} tokens."


def _cells(row: InferenceRow, over: int) -> tuple[str, str, str, str, str]:
    energy, latency = row.energy, f"{1000 * row.latency_s / over:.4g}"
    if energy is None:
        return latency, "missing", "missing", NOTHING, NOTHING
    return latency, three_digits(energy.power_w), energy_cell(energy, over), NOTHING, NOTHING


def _saved(one: Pair) -> str:
    return NOTHING if one.found is None else f"saves {energy_text(one.found.saved.value)}"


def _spent(one: Pair) -> str:
    return NOTHING if one.found is None else energy_text(one.found.spent.value)


def _answer_text(one: Pair) -> str:
    if one.found is None or math.isinf(one.found.low) or not one.found.breaks_even:
        return one.answer
    high = "no upper bound" if math.isinf(one.found.high) else count_text(one.found.high)
    return f"{one.answer} [{count_text(one.found.low)} to {high}]"


def pair_data(found: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {
            "stage": one.student.stage,
            "item": one.item,
            "student": None if one.student.energy is None else one.student.energy.model_dump(),
            "teacher": None if one.teacher.energy is None else one.teacher.energy.model_dump(),
            "items_per_row": one.over,
            "student_median_s_per_call": one.student.latency_s,
            "teacher_median_s_per_call": one.teacher.latency_s,
            "spent_j": None if one.found is None else one.found.spent.value,
            "saved_j_per_item": None if one.found is None else one.found.saved.value,
            "breaks_even_after": None if one.found is None else one.found.count,
            "low": None if one.found is None or math.isinf(one.found.low) else one.found.low,
            "high": None if one.found is None or math.isinf(one.found.high) else one.found.high,
            "answer": one.answer,
        }
        for one in found
    ]


# Several inference runs in one table: energy per item and latency first. The energy of whole inference runs depends on
# how long they ran and is not compared.
_MOST_ROWS = 40


def _least_energy(row: InferenceRow) -> float:
    return row.energy.gross_j if row.energy else math.inf


SORTED_BY: Mapping[str, Callable[[InferenceRow], float]] = {
    "energy": _least_energy,
    "latency": lambda row: row.latency_s,
}


def serving_grid(comparison: Comparison) -> Grid | None:
    """One line per row of every inference run; None if there is none."""
    runs = [run for row in comparison.rows for run in row.runs]
    named: Named = [(run_name(run, runs), row) for run in runs for row in rows_in_use(run.record)]
    return _serving_grid("Serving cost", "Run", named) if named else None


def _serving_grid(caption: str, who: str, named: Named, notes: Sequence[str] = ()) -> Grid:
    shown = named[:_MOST_ROWS]
    found = [*contention_notes(shown), *notes, "Latency: median of a call. Others: means over all calls."]
    found += energy_notes([row for _, row in shown])
    if len(named) > len(shown):
        found.append(f"{len(named) - len(shown)} more rows: `joulelab show RUN`.")
    titles = (
        f"{who}!|Energy per item\ngross>|Latency\nms>|Configuration!|Energy per\nitem, net>|Items\nper s>|Mean\nW>|"
        "Memory>"
    )
    return make_grid(caption, titles, [_compared_cells(name, row) for name, row in shown], " ".join(found))


def _compared_cells(name: str, row: InferenceRow) -> tuple[str, ...]:
    energy, per_s, latency = row.energy, row.items_per_s, f"{1000 * row.latency_s:.4g}"
    how = f"batch {row.values['batch_size']}{length_text(row.values)}, {row.name}"
    rate = three_digits(per_s) if per_s < 1000 else count_text(per_s)
    memory = size_text(row.values["memory_bytes"])
    if energy is None:
        return (name, "missing", latency, how, NOTHING, rate, "missing", memory)
    gross = f"{energy_cell(energy)} / {row.values['item']}"
    return (name, gross, latency, how, energy_cell(energy, net=True), rate, three_digits(energy.power_w), memory)


def models_grids(records: Sequence[RunRecord], sort: str = "") -> list[Grid]:
    """For `joulelab infer A B C`: rows of all models in the order of the records, or sorted; then failed ones."""
    grids = []
    named = _sorted([(record.label, row) for record in records for row in inference_rows(record)], sort)
    reasons = list(dict.fromkeys(row.values["why_no_energy"] for _, row in named if row.energy is None))
    missing = [f"Energy was not measured: {'; '.join(reasons)}."] if reasons else []
    if named:
        grids.append(_serving_grid(f"Inference of models: {where_text(named[0][1].values)}", "Model", named, missing))
    generated = [(record.label, row) for record in records for row in generation_rows(record)]
    if generated:
        key = SORTED_BY.get(sort)
        generated = sorted(generated, key=lambda one: key(one[1].whole)) if key else generated
        grids.append(_responses_grid(generated))
    if (loads := loads_grid(records)) is not None:
        grids.append(loads)
    failed = [(record.label, _failure(record), record.run_id) for record in records if record.status != "done"]
    return [*grids, make_grid("Not measured", "Model!|Reason|Run!", failed)] if failed else grids


def models_headline(records: Sequence[RunRecord]) -> str:
    """The model with the least energy per item, and the fastest, among rows with the same item."""
    named = [(record.label, row) for record in records for row in rows_in_use(record)]
    if not named and any(map(serving_rows, records)):
        return loads_headline(records)
    if not named:
        return "No model was measured."
    if len({(row.values["item"], row.values["tokens"], row.values.get("new_tokens")) for _, row in named}) > 1:
        return "The models have different inputs; their energy per item cannot be compared."
    fastest = min(named, key=lambda one: one[1].latency_s)
    words = f"Lowest latency: {_named_row(fastest)}, {with_prefix(fastest[1].latency_s, 's')}."
    known = [one for one in named if one[1].energy is not None]
    if not known:
        return f"Energy was not measured. {words}"
    least = min(known, key=lambda one: _least_energy(one[1]))
    item = least[1].values["item"]
    return f"Lowest energy per {item}: {_named_row(least)}, {energy_cell(least[1].energy)}. {words}"


def models_sentences(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """The headline, and what makes the latencies doubtful."""
    named = [(record.label, row) for record in records for row in rows_in_use(record)]
    return models_headline(records), *contention_notes(named)


def _named_row(one: tuple[str, InferenceRow]) -> str:
    return f"{one[0]} (batch {one[1].values['batch_size']}, {one[1].name})"


def _sorted(named: Named, sort: str) -> Named:
    key = SORTED_BY.get(sort)
    return sorted(named, key=lambda one: key(one[1])) if key else named


def _failure(record: RunRecord) -> str:
    return f"{record.status}: {record.error.message}" if record.error else record.status


def _responses_grid(named: Sequence[tuple[str, GenerationRow]]) -> Grid:
    values = named[0][1].whole.values
    cells = [
        (
            name,
            energy_cell(row.whole.energy, row.whole.values["new_tokens"]),
            f"{1000 * row.prefill.latency_s:.4g}",
            f"{1000 * row.token_s:.4g}",
            f"batch {row.batch}{length_text(row.whole.values)}, {row.whole.name}",
            energy_cell(row.whole.energy),
            f"{row.whole.latency_s:.4g}",
            count_text(row.whole.items_per_s * row.whole.values["new_tokens"]),
            size_text(row.whole.values["memory_bytes"]),
        )
        for name, row in named
    ]
    titles = (
        "Model!|Energy per\noutput token>|First token\nms>|Next tokens\nms each>|Configuration!|Energy per\nresponse>|"
        "Response\ns>|Output\ntokens/s>|Memory>"
    )
    rows = [(f"{name}, {part}", found) for name, row in named for part, found in row.named_parts]
    notes = [*contention_notes(rows), *prompt_notes([row.whole for _, row in named])]
    reasons = list(dict.fromkeys(row.values["why_no_energy"] for _, row in rows if row.energy is None))
    notes += [f"Energy was not measured: {'; '.join(reasons)}."] if reasons else []
    notes.append(
        "Energy per output token: gross energy of a response, prompt included, over its tokens. Times are medians."
    )
    notes += energy_notes([row.whole for _, row in named])
    return make_grid(f"Generation by models: {where_text(values)}", titles, cells, " ".join(notes))


def models_data(records: Sequence[RunRecord], sort: str = "") -> list[dict[str, Any]]:
    """One entry per model, ordered like the table by the best of its rows."""
    key = SORTED_BY.get(sort)
    ordered = (
        sorted(records, key=lambda record: min(map(key, rows_in_use(record)), default=math.inf)) if key else records
    )
    return [
        {
            "model": record.label,
            "run_id": record.run_id,
            "status": record.status,
            "error": record.error.message if record.error else None,
            "rows": (rows_data(record) or serving_data(record)) if record.status == "done" else [],
        }
        for record in ordered
    ]
