"""Which rows of a student's and a teacher's inference can be set side by side, and who made the student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from joulelab.errors import ConfigError
from joulelab.report.inference_rows import GENERATION, InferenceRow, inference_rows
from joulelab.runs.bills import ELSEWHERE
from joulelab.runs.record import RunRecord

_LISTED = 4


def rows_run_alike(student: RunRecord, teacher: RunRecord) -> list[tuple[InferenceRow, InferenceRow]]:
    ours, theirs = rows_in_use(student), rows_in_use(teacher)
    _require_one_kind(student, ours, teacher, theirs)
    alike = [(row, other) for row in ours for other in _partners(row, theirs)]
    if not alike:
        raise ConfigError(
            "the two runs have no row that was run alike (batch, tokens, mode, numbers, device): "
            f"{student.run_id} has {_listed(ours)}; {teacher.run_id} has {_listed(theirs)}",
            "run both with the same --batch-size, --seq-length, --mode, --dtype and --device",
        )
    return alike


def _partners(row: InferenceRow, others: Sequence[InferenceRow]) -> list[InferenceRow]:
    """Run alike and of the same norm; where none has that norm, of any."""
    alike = [other for other in others if _key(other) == _key(row)]
    return [other for other in alike if other.values["norm"] == row.values["norm"]] or alike


def rows_in_use(record: RunRecord) -> list[InferenceRow]:
    """Forward passes, or whole responses of a run that generated text."""
    rows = inference_rows(record) or inference_rows(record, GENERATION)
    return [row for row in rows if row.values.get("part", "infer") == "infer"]


def _require_one_kind(
    student: RunRecord, ours: Sequence[InferenceRow], teacher: RunRecord, theirs: Sequence[InferenceRow]
) -> None:
    for record, rows in ((student, ours), (teacher, theirs)):
        if not rows:
            raise ConfigError(f"{record.run_id} has no finished rows of inference", "name runs of `joulelab infer`")
    kinds = [_kind(rows[0]) for rows in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"{student.run_id} is about {kinds[0]}, {teacher.run_id} about {kinds[1]}: they cannot be set side by side",
            "run both models the same way, with --generate or without",
        )


def _kind(row: InferenceRow) -> str:
    if "part" in row.values:
        return "responses that were generated (--generate)"
    return f"forward passes over one {row.values['item']} or several"


def _listed(rows: Sequence[InferenceRow]) -> str:
    told = [
        f"batch {row.values['batch_size']}{length_text(row.values)}, {row.name} on {row.values['device']}"
        for row in rows
    ]
    return ", ".join(told[:_LISTED]) + (f" and {len(told) - _LISTED} more" if len(told) > _LISTED else "")


def length_text(values: Mapping[str, Any]) -> str:
    if "new_tokens" in values:
        return f", {values['prompt_tokens']} + {values['new_tokens']} tokens"
    return f", {values['tokens']} tokens" if values["tokens"] else ""


def _key(row: InferenceRow) -> tuple[Any, ...]:
    names = ("batch_size", "tokens", "mode", "dtype", "device", "prompt_tokens", "new_tokens")
    return tuple(row.values.get(name) for name in names)


def doubt_about_maker(student: RunRecord, made_by: RunRecord) -> str:
    """Nothing where the student's lineage names that run; words where it names none; otherwise it is refused."""
    inner = {key for one in student.inherited for key in one.parents}
    last = [one for one in student.inherited if one.key not in inner]
    makers = list(dict.fromkeys(one.made_by for one in last if one.made_by != ELSEWHERE))
    if made_by.run_id in makers:
        return ""
    if makers:
        raise ConfigError(
            f"{made_by.run_id} did not make the student of {student.run_id}, which comes from {', '.join(makers)}",
            "leave --distilled-by out: the student's lineage knows what making it took",
        )
    return f" (nothing here says that it made this student: {student.run_id} has no lineage)"
