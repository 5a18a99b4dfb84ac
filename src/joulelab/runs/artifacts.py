"""Artifacts: made once inside a run, found again by key, checked for integrity before reuse, each with an energy bill.

A bill (`bill.json`) holds energy by component and method, and all ancestors, each once. The ancestors themselves are
stored, not only their names, so a student's bill stays complete after the teacher's run folder is gone. Weights made
elsewhere are ancestors too, with energy `missing`: unknown energy is shown, not left out.

A bill proves that an artifact was made, not that it is still intact. `contents.json` lists the files of an artifact:
their sizes, and a CRC32 of the smallest ones up to `SUMMED_BYTES` in total, so that a flipped byte is found where the
check is cheap. Larger files are checked by size alone: reading a cache of hidden states takes longer than some
trainings. Additional files are ignored, and a link counts as its target. An artifact that does not match its list, or
that its own reader cannot open, is set aside by renaming its bill, so that no run finds it again. Its energy stays on
the record of the run that made it: it was spent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field, ValidationError, field_validator

import joulelab
from joulelab import clock
from joulelab.errors import DependencyMissing, EndedBySignal, JoulelabError
from joulelab.meter.figures import EnergyFigure, Frozen, missing
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.phases import PART, Shard

BILL = "bill.json"
CARD = "README.md"
"""Model card in a model's folder. It is not part of the content: neither the key nor the content hash depends on it."""
ELSEWHERE = "elsewhere"
UNMETERED = "unmetered-work"
"""Kind of an ancestor that represents unmetered work on an artifact."""
# Packages whose code decides the content of an artifact: a change in them gives a new key, never a stale reuse.
_CODE_PACKAGES = ("data", "zoo", "train", "infer", "evaluate", "distill")


class Ancestor(Frozen):
    key: str
    name: str
    kind: str
    made_by: str
    """Run id, or `elsewhere`."""
    stages: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    activities: tuple[str, ...] = ()
    """Activities of its stages, in the order of `stages`; like `roles`, empty in older bills."""
    energy: dict[str, EnergyFigure]
    """Energy used to make it, by component, including setup and repeated work."""
    work: dict[str, EnergyFigure] = {}
    """`energy` without setup and repeated work: what comparisons count. Empty if that is the same."""
    setup: dict[str, EnergyFigure] = {}
    repeated: dict[str, EnergyFigure] = {}
    parents: tuple[str, ...] = ()
    used_as: str | None = None
    """Its role where it is used (`teacher`, `student`, `data`), for inputs that the user named and, for a teacher, for
    all of its ancestors too; None if the roles of its stages apply, and in bills older than this field."""

    @field_validator("energy")
    @classmethod
    def _possible(cls, energy: dict[str, EnergyFigure]) -> dict[str, EnergyFigure]:
        for component, figure in energy.items():
            if figure.energy_j is not None and not 0 <= figure.energy_j < math.inf:
                raise ValueError(f"{component}: {figure.energy_j} J is not a valid energy")
        return energy


RECORDED_FIELDS = ("roles", "activities", "energy", "work", "setup", "repeated")
"""Fields that the record of its run determines."""


class Bill(Frozen):
    schema_version: int = 1
    artifact: Ancestor = Field(validation_alias=AliasChoices("artifact", "artefact"))
    """Bills of earlier versions call it `artefact`."""
    ancestry: tuple[Ancestor, ...] = ()
    """All ancestors, each once; with the `parents` of each this is the lineage graph."""
    made_at: str
    code_version: str
    inputs: dict[str, Any]
    provisional: bool = False
    """Written while the run was still running; replaced by the final energy when the run is closed."""

    @property
    def key(self) -> str:
        return self.artifact.key


def artifact_key(kind: str, inputs: Mapping[str, Any], parents: Sequence[str], code: str) -> str:
    # Sorted keys and sorted parents: the key must not depend on the order in which a recipe lists
    # its inputs. 24 hex digits are 96 bits; a collision among a million artifacts has the
    # probability 6e-18.
    text = json.dumps({"kind": kind, "inputs": inputs, "parents": sorted(parents), "code": code}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def code_version() -> str:
    """Package version and a hash of the code that makes artifacts, as this process runs it."""
    root = Path(joulelab.__file__).parent
    digest = hashlib.sha256()
    for package in _CODE_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{joulelab.__version__}+{digest.hexdigest()[:12]}"


def external(
    name: str,
    kind: str,
    identity: str,
    commit: str | None = None,
    reason: str = "made elsewhere; its energy was not measured here",
) -> Bill:
    """The bill of something made elsewhere, or changed after a run made it: its energy is unknown and recorded as
    missing for this reason. `commit`: on the hub."""
    unknown = {"all": missing(reason)}
    artifact = Ancestor(key=f"external:{identity}", name=name, kind=kind, made_by=ELSEWHERE, energy=unknown)
    inputs = {"name": name} if commit is None else {"name": name, "commit": commit}
    return Bill(artifact=artifact, made_at=clock.iso(clock.now().wall_s), code_version="", inputs=inputs)


def unmetered(name: str, key: str, reason: str) -> Bill:
    """The bill of work on the artifact `key` that was done on a machine which its run did not measure.

    Weights made elsewhere were not caused by the run that uses them; this work was, so every sum without it is a lower
    bound.
    """
    unknown = missing(reason).model_copy(update={"lower_bound": True})
    artifact = Ancestor(
        key=f"unmetered:{key}:{name}", name=name, kind=UNMETERED, made_by=ELSEWHERE, energy={"all": unknown}
    )
    return Bill(artifact=artifact, made_at=clock.iso(clock.now().wall_s), code_version="", inputs={"name": name})


def with_shards(bill: Bill) -> tuple[Ancestor, ...]:
    """The artifact and the shards that it was joined from: together they are the work of making it."""
    own = bill.artifact
    return (own, *(part for part in bill.ancestry if part.kind == own.kind + PART and part.key in own.parents))


def ancestry_of(parents: Iterable[Bill]) -> tuple[Ancestor, ...]:
    """The parents and all their ancestors; one that is reached by two paths counts once, in one role (`_main_use`)."""
    by_key: dict[str, Ancestor] = {}
    for bill in parents:
        for ancestor in (*bill.ancestry, bill.artifact):
            known = by_key.setdefault(ancestor.key, ancestor)
            by_key[ancestor.key] = known.model_copy(update={"used_as": _main_use(known.used_as, ancestor.used_as)})
    return tuple(by_key.values())


def with_use(bill: Bill, role: str | None) -> Bill:
    """The bill of an input that is used in this role.

    A teacher counts as teacher with its whole bill: N students share all that led to it, a student's training included.
    For a student's initial weights and for data only the artifact itself takes the role; the work of their own teachers
    stays teacher's work. None keeps the roles in which everything was made.
    """
    if role is None:
        return bill
    artifact = bill.artifact.model_copy(update={"used_as": role})
    ancestry = bill.ancestry
    if role == "teacher":
        ancestry = tuple(ancestor.model_copy(update={"used_as": role}) for ancestor in ancestry)
    return bill.model_copy(update={"artifact": artifact, "ancestry": ancestry})


def _main_use(*uses: str | None) -> str | None:
    """The role of an artifact that one run uses in several roles.

    Any other use takes precedence over `teacher`: the student needs the artifact with and without a teacher, so its
    energy belongs to the sum without teacher, and N students do not share it. A declared use takes precedence over the
    roles of its stages.
    """
    return next((role for role in ("student", "data", None) if role in uses), "teacher")


@dataclass(frozen=True)
class Artifact:
    folder: Path
    bill: Bill
    reused: bool
    """Whether another run made it."""

    @property
    def key(self) -> str:
        return self.bill.key


def read_bill(folder: Path, containing: str = "") -> Bill | None:
    """The bill of a folder; None if there is none. It is written last, so a folder without a bill is unfinished.

    A bill without the text `containing` is not parsed: stores grow to thousands of bills.
    """
    try:
        text = (folder / BILL).read_bytes()
        return Bill.model_validate_json(text) if containing.encode() in text else None
    except (OSError, ValidationError):
        return None


def write_bill(folder: Path, bill: Bill) -> None:
    write_json(folder / BILL, bill)


def find_artifacts(store: Path, key: str) -> Iterator[Artifact]:
    """Artifacts with this key from any run of the store, newest first."""
    return (artifact for artifact in _bills_containing(store, key) if artifact.key == key)


def find_artifact(store: Path, key: str) -> Artifact | None:
    return next(find_artifacts(store, key), None)


def find_shards(store: Path, key: str, accept: Callable[[Artifact], bool]) -> list[Artifact]:
    """Finished shards of the artifact with this key; of a shard that was made twice, the newest.

    Shards of different splits overlap. If there are several splits, the one with the largest finished part is used.
    """
    splits: dict[tuple[int, int], dict[int, Artifact]] = {}
    for part in _bills_containing(store, key):
        inputs = part.bill.inputs
        if part.bill.artifact.kind.endswith(PART) and inputs.get("whole") == key:
            shard = Shard.parse(inputs["share"])
            split = splits.setdefault((shard.of, inputs["at_once"]), {})
            if shard.number not in split and accept(part):
                split[shard.number] = part
    best = max(splits, key=lambda split: len(splits[split]) / split[0], default=None)
    return [] if best is None else [splits[best][number] for number in sorted(splits[best])]


def _bills_containing(store: Path, key: str) -> Iterator[Artifact]:
    """Artifacts whose bill contains this key anywhere, newest first; other runs may set some aside meanwhile."""
    modified = {}
    for path in store.glob(f"*/artifacts/*/{BILL}"):
        with suppress(OSError):
            modified[path] = path.stat().st_mtime
    for path in sorted(modified, key=lambda path: modified[path], reverse=True):
        bill = read_bill(path.parent, containing=key)
        if bill is not None:
            yield Artifact(path.parent, bill, reused=True)


def fresh_folder(folder: Path) -> Path:
    """Create an empty folder for an artifact; removes what an interrupted attempt left."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


CONTENTS = "contents.json"
SET_ASIDE = "bill.damaged.json"
"""New name of the bill of a corrupted artifact."""
SUMMED_BYTES = 128 * 2**20
"""Files up to this total size get a checksum, which takes 50 ms on one core. Models of the demo are below it."""
Opens = Callable[[Path], object]
"""Reads an artifact's folder, and raises if its content is corrupted in a way that the list does not show."""
_BLOCK_BYTES = 1 << 20
_UNRELATED_ERRORS = (EndedBySignal, DependencyMissing, MemoryError)
"""Errors of a reader that do not indicate a corrupted file."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A resource of the machine is exhausted. The files may be intact and hold hours of work, so they are kept."""


def list_contents(folder: Path) -> None:
    """Write the list of files. The bill is not on it: it is written later and changes when the run ends."""
    _refuse_to_replace(folder / CONTENTS)
    ours = (folder / BILL, folder / CONTENTS, folder / CARD)
    files = [path for path in folder.rglob("*") if path.is_file() and path not in ours]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}
    sums, remaining = {}, SUMMED_BYTES
    # Smallest first: configurations, indices and labels, where one flipped byte changes the meaning
    # of everything else, fit into the budget before a single large weight file uses it up.
    for name in sorted(sizes, key=lambda name: sizes[name]):
        remaining -= sizes[name]
        if remaining < 0:
            break
        sums[name] = crc32(folder / name)
    write_json(folder / CONTENTS, {"bytes": sizes, "crc32": sums})


def find_damage(folder: Path, opens: Opens | None = None) -> str | None:
    """A description of what is corrupted, or None. An artifact of an older version has no list to compare with."""
    try:
        listed = listed_contents(folder)
        sums = listed.get("crc32", {})
        for name, expected in listed.get("bytes", {}).items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != expected:
                return f"{name} has {path.stat().st_size:,} bytes instead of {expected:,}"
            if name in sums and crc32(path) != sums[name]:
                return f"the checksum of {name} does not match"
        if opens is not None:
            opens(folder)
    except _UNRELATED_ERRORS:
        raise
    except Exception as error:  # torch, numpy and zlib each raise their own types on corrupted bytes
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            raise
        return error_text(error)
    return None


def set_aside(folder: Path) -> None:
    with suppress(OSError):  # another run was faster, or the folder is read-only; later readers detect it again
        # Renamed and not deleted: the files may still be useful to a person, and one rename is
        # atomic where removing a folder is not.
        (folder / BILL).replace(folder / SET_ASIDE)


def error_text(error: Exception) -> str:
    """The message of an error; str() of a KeyError is only the key, and some errors have no message."""
    if isinstance(error, KeyError) and error.args:
        return f"missing key {error.args[0]}"
    return str(error) or type(error).__name__


def listed_contents(folder: Path) -> dict[str, Any]:
    """`bytes` and `crc32` by file name; empty for an artifact of an older version, which has no list."""
    return _read(folder / CONTENTS)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _refuse_to_replace(path: Path) -> None:
    """A list copied along with another artifact may be replaced; a file of the same name made by the work may not."""
    try:
        is_ours = "bytes" in _read(path) or not path.exists()
    except (JoulelabError, ValueError):
        is_ours = False
    if not is_ours:
        raise JoulelabError(f"{path}: this name is reserved for the list of the artifact's files", "rename the file")


@dataclass
class BillBuilder:
    """What is recorded about an artifact while it is made, for its bill."""

    stages: list[str] = field(default_factory=list)
    unmetered: dict[str, str] = field(default_factory=dict)
    """Work that the run did not measure -> reason."""
    joined: list[Bill] = field(default_factory=list)
    """Bills of shards made by other runs."""

    def bill(self, artifact: Ancestor, parents: Sequence[Bill], code: str, inputs: dict[str, Any]) -> Bill:
        # not in the key: where a server ran, or how work was split, does not change the result
        unknown = [unmetered(work, artifact.key, reason) for work, reason in self.unmetered.items()]
        parents = [*parents, *self.joined, *unknown]
        known = {"stages": tuple(self.stages), "parents": tuple(parent.key for parent in parents)}
        return Bill(
            artifact=artifact.model_copy(update=known),
            ancestry=ancestry_of(parents),
            made_at=clock.iso(clock.now().wall_s),
            code_version=code,
            inputs=inputs,
            provisional=True,
        )


def spent_between(before: Mapping[str, EnergyFigure], after: Mapping[str, EnergyFigure]) -> dict[str, EnergyFigure]:
    """For a provisional bill, from the trace so far; replaced by the figures of the stages when the run is closed."""
    spent = {}
    for component, figure in after.items():
        start = before[component]
        difference = figure if figure.energy_j is None or start.energy_j is None else figure.minus(start)
        energy_j = difference.energy_j and max(0.0, difference.energy_j)
        spent[component] = difference.model_copy(update={"energy_j": energy_j})
    return spent
