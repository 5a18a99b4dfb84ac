"""Artefacts carry their bill: what they took, by component and method, and all their ancestors, each once.

The bill holds the ancestors themselves, not only their names, so a student's bill stays whole after the teacher's run
folder is gone. Weights made elsewhere are ancestors too, with energy `missing`: unknown is shown, not left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import joulelab
from joulelab import clock
from joulelab.meter.figures import EnergyFigure, Frozen, missing
from joulelab.runs.shares import PART

BILL = "bill.json"
ELSEWHERE = "elsewhere"
UNMETERED = "unmetered-work"
"""The kind of an ancestor that is work done for an artefact where no meter of its run saw it."""
# The rooms whose code decides what an artefact contains. A change there makes a new artefact, never a stale reuse.
_MAKING_ROOMS = ("data", "zoo", "train", "infer", "evaluate", "distill")


class Ancestor(Frozen):
    key: str
    name: str
    kind: str
    made_by: str
    """Run id, or `elsewhere`."""
    stages: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    activities: tuple[str, ...] = ()
    """Of its stages, in their order; empty in bills older than roles."""
    energy: dict[str, EnergyFigure]
    """All that making it used, by component; setup and repeated work included."""
    work: dict[str, EnergyFigure] = {}
    """`energy` without setup and repeated work: what comparisons count. Empty where that is the same."""
    setup: dict[str, EnergyFigure] = {}
    repeated: dict[str, EnergyFigure] = {}
    parents: tuple[str, ...] = ()
    used_as: str | None = None
    """Role it has where it is used (`teacher`, `student`, `data`), for inputs that a user named and, of a teacher, for
    all of its ancestors too; None where the roles of its stages apply, and in bills older than this field."""


PRICE_FIELDS = ("roles", "activities", "energy", "work", "setup", "repeated")
"""What the record of its run states about an artifact."""


class Bill(Frozen):
    schema_version: int = 1
    artefact: Ancestor
    ancestry: tuple[Ancestor, ...] = ()
    """All ancestors, each once; with `parents` of each this is the lineage graph."""
    made_at: str
    code_version: str
    inputs: dict[str, Any]
    provisional: bool = False
    """Written while the run was still going; the closing of the run replaces it with the final joules."""

    @property
    def key(self) -> str:
        return self.artefact.key


def artefact_key(kind: str, inputs: Mapping[str, Any], parents: Sequence[str], code: str) -> str:
    text = json.dumps({"kind": kind, "inputs": inputs, "parents": sorted(parents), "code": code}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def code_version() -> str:
    """Package version and a hash of the rooms that make artefacts; what this process runs, whoever edits it since."""
    root = Path(joulelab.__file__).parent
    digest = hashlib.sha256()
    for room in _MAKING_ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{joulelab.__version__}+{digest.hexdigest()[:12]}"


def external(name: str, kind: str, identity: str) -> Bill:
    """The bill of something that came from elsewhere: its joules are unknown, and that is said."""
    reason = missing("made elsewhere; what it took was not measured here")
    artefact = Ancestor(key=f"external:{identity}", name=name, kind=kind, made_by=ELSEWHERE, energy={"all": reason})
    return Bill(artefact=artefact, made_at=clock.iso(clock.now().wall_s), code_version="", inputs={"name": name})


def unmetered(name: str, key: str, reason: str) -> Bill:
    """The bill of work that was done for the artefact `key` on a machine that its run did not meter.

    Unlike weights made elsewhere, which whoever uses them did not cause, this work belongs to the artefact: every sum
    it is missing from is a lower bound.
    """
    unknown = missing(reason).model_copy(update={"lower_bound": True})
    artefact = Ancestor(
        key=f"unmetered:{key}:{name}", name=name, kind=UNMETERED, made_by=ELSEWHERE, energy={"all": unknown}
    )
    return Bill(artefact=artefact, made_at=clock.iso(clock.now().wall_s), code_version="", inputs={"name": name})


def with_parts(bill: Bill) -> tuple[Ancestor, ...]:
    """The artefact, and the shares of it that others made and it was joined from: together what making it took."""
    own = bill.artefact
    return (own, *(one for one in bill.ancestry if one.kind == own.kind + PART and one.key in own.parents))


def ancestry_of(parents: Iterable[Bill]) -> tuple[Ancestor, ...]:
    """The parents and all of theirs; an ancestor reached by two ways counts once, in one role (`_main_use`)."""
    by_key: dict[str, Ancestor] = {}
    for bill in parents:
        for ancestor in (*bill.ancestry, bill.artefact):
            known = by_key.setdefault(ancestor.key, ancestor)
            by_key[ancestor.key] = known.model_copy(update={"used_as": _main_use(known.used_as, ancestor.used_as)})
    return tuple(by_key.values())


def with_use(bill: Bill, role: str | None) -> Bill:
    """The bill of an input that is used in this role.

    A teacher counts as teacher with its whole bill: N students share all that led to it, a student's training included.
    Of a student's first weights and of data only the artifact itself takes the role; what their own teachers did stays
    teacher's work. None keeps the roles in which everything was made.
    """
    if role is None:
        return bill
    artefact = bill.artefact.model_copy(update={"used_as": role})
    ancestry = bill.ancestry
    if role == "teacher":
        ancestry = tuple(ancestor.model_copy(update={"used_as": role}) for ancestor in ancestry)
    return bill.model_copy(update={"artefact": artefact, "ancestry": ancestry})


def _main_use(*uses: str | None) -> str | None:
    """The role of an artifact that one run uses in several.

    Any other use wins over `teacher`: the student needs the artifact with and without a teacher, so its energy belongs
    to the sum without teacher, and N students do not share it. A declared use wins over the roles of its stages.
    """
    return next((role for role in ("student", "data", None) if role in uses), "teacher")
