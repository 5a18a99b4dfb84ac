"""Whether a model was trained from nothing or from weights that came from elsewhere; its teacher's are not its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from joulelab.report.bill_model import EnergyBill
from joulelab.report.joules import is_teacher, is_teachers
from joulelab.runs.bills import ELSEWHERE, Ancestor
from joulelab.runs.record import RunRecord

# Settings of a student by which it takes over a teacher's weights without naming them.
_TAKES_OVER = ("layers", "layers_of", "teacher_embeddings")


def training_type(bill: EnergyBill) -> Literal["fine-tuning", "pre-training"]:
    """The Hub knows two words; weights from elsewhere that the model itself began with make it the first."""
    return "fine-tuning" if _began_with_weights(bill) else "pre-training"


def _began_with_weights(bill: EnergyBill) -> bool:
    """Up the lineage, past data and earlier students, and not through what a teacher made."""
    of_teacher = any(line.shared for line in bill.own) if bill.kind != "run" else _is_teacher(bill.record)
    lines = {line.key: line for line in bill.inherited}
    found = {one.key: one for one in bill.record.lineage} if bill.record else {}
    waiting, seen = list(_first(bill, found)), set[str]()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        one = lines.get(key) or found.get(key)
        if one is None:
            continue
        weights = one.made_by == ELSEWHERE and one.kind in ("model", "weights")
        if weights and (of_teacher or not _only_teaches(one.name, bill.record.spec if bill.record else {})):
            return True
        shared = lines[key].shared if key in lines else is_teachers(found[key])
        if of_teacher or not shared:
            waiting += one.parents
    return False


def _first(bill: EnergyBill, lineage: Mapping[str, Ancestor]) -> tuple[str, ...]:
    """What the model was made from; of a run, what it made, and where it kept nothing what it used."""
    made = tuple(key for key in bill.record.made if key in lineage) if bill.record and bill.kind == "run" else ()
    return made or bill.roots


def _is_teacher(record: RunRecord | None) -> bool:
    return record is not None and is_teacher(record)


def _only_teaches(name: str, spec: Mapping[str, Any]) -> bool:
    """A teacher that answers while the student trains is used like a start, and only the settings tell them apart."""
    teacher, student = (json.dumps(spec.get(who)) for who in ("teacher", "student"))
    own = spec.get("student")
    takes_over = isinstance(own, dict) and any(own.get(setting) for setting in _TAKES_OVER)
    return name in teacher and name not in student and not takes_over
