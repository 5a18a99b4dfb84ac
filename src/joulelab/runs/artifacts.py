"""Artefacts on disk: made once inside a run, found again by key, and only whole ones are found."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import joulelab
from joulelab import clock
from joulelab.errors import DependencyMissing, EndedBySignal, JoulelabError
from joulelab.meter.figures import EnergyFigure, Frozen, missing
from joulelab.runs.sharding import PART, Shard
from joulelab.runs.storage import read_json, write_json

# Artefacts carry their bill: what they took, by component and method, and all their ancestors, each once.
#
# The bill holds the ancestors themselves, not only their names, so a student's bill stays whole after the teacher's
# run folder is gone. Weights made elsewhere are ancestors too, with energy `missing`: unknown is shown, not left out.


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


def artifact_key(kind: str, inputs: Mapping[str, Any], parents: Sequence[str], code: str) -> str:
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


@dataclass(frozen=True)
class Artifact:
    folder: Path
    bill: Bill
    reused: bool
    """True where another run made it."""

    @property
    def key(self) -> str:
        return self.bill.key


def read_bill(folder: Path, naming: str = "") -> Bill | None:
    """The bill is written last, so a folder without a readable one is unfinished work.

    One without the word `naming` in it is not looked into: stores grow to thousands of bills.
    """
    try:
        written = (folder / BILL).read_bytes()
        return Bill.model_validate_json(written) if naming.encode() in written else None
    except (OSError, ValidationError):
        return None


def write_bill(folder: Path, bill: Bill) -> None:
    write_json(folder / BILL, bill)


def find_artifacts(store: Path, key: str) -> Iterator[Artifact]:
    """The artefacts with this key made by any run of the store, the newest first."""
    return (found for found in _naming(store, key) if found.key == key)


def find_artifact(store: Path, key: str) -> Artifact | None:
    return next(find_artifacts(store, key), None)


def find_parts(store: Path, key: str, takes: Callable[[Artifact], bool]) -> list[Artifact]:
    """Shares of the artefact with this key that tasks of a split have finished; of a share made twice the newest.

    Where it was split in several ways, the one of which the most is there: shares of different splits overlap.
    """
    splits: dict[tuple[int, int], dict[int, Artifact]] = {}
    for part in _naming(store, key):
        inputs = part.bill.inputs
        if part.bill.artefact.kind.endswith(PART) and inputs.get("whole") == key:
            share = Shard.parse(inputs["share"])
            split = splits.setdefault((share.of, inputs["at_once"]), {})
            if share.number not in split and takes(part):
                split[share.number] = part
    best = max(splits, key=lambda split: len(splits[split]) / split[0], default=None)
    return [] if best is None else [splits[best][number] for number in sorted(splits[best])]


def _naming(store: Path, key: str) -> Iterator[Artifact]:
    """Artefacts whose bill has this key somewhere, the newest first; other runs may set some aside meanwhile."""
    written = {}
    for path in store.glob(f"*/artifacts/*/{BILL}"):
        with suppress(OSError):
            written[path] = path.stat().st_mtime
    for path in sorted(written, key=lambda path: written[path], reverse=True):
        bill = read_bill(path.parent, naming=key)
        if bill is not None:
            yield Artifact(path.parent, bill, reused=True)


def fresh_folder(folder: Path) -> Path:
    """An empty folder for an artefact; what an interrupted attempt left half-made is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


# Artefacts are looked at before they are taken again: a bill says that one was made, not that it is still whole.
#
# A disk loses files, and people tidy up. Beside its bill every artefact has a list of its files: their sizes, and a
# CRC32 of the smallest ones up to `SUMMED_BYTES` together, so that a flipped byte is seen where looking costs little.
# The larger ones are told by their sizes alone: reading a cache of hidden states takes longer than some trainings.
# Files that came later are nobody's harm, and a link counts as what it leads to.
#
# One that does not agree with its list, or that its own reader cannot open, is set aside by renaming its bill, so
# that nobody finds it any more. Its joules stay on the record of the run that made it: they were spent.


CONTENTS = "contents.json"
SET_ASIDE = "bill.damaged.json"
"""What the bill of a damaged artefact is called from then on."""
SUMMED_BYTES = 128 * 2**20
"""A twentieth of a second on one core, and the models of the demo are within it."""
Opens = Callable[[Path], object]
"""Reads an artefact's folder, and fails where the content has come to harm that the list does not show."""
_BLOCK_BYTES = 1 << 20
_NO_DAMAGE = (EndedBySignal, DependencyMissing, MemoryError)
"""What may befall a reader of sound files."""
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What this machine has none left of; the files may be sound, and hours of work lie in them."""


def list_contents(folder: Path) -> None:
    """Of what was just made. The bill comes later and changes when the run ends: it is not on the list."""
    _refuse_to_replace(folder / CONTENTS)
    files = [path for path in folder.rglob("*") if path.is_file() and path not in (folder / BILL, folder / CONTENTS)]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}
    sums, left = {}, SUMMED_BYTES
    for name in sorted(sizes, key=lambda name: sizes[name]):
        left -= sizes[name]
        if left < 0:
            break
        sums[name] = crc32(folder / name)
    write_json(folder / CONTENTS, {"bytes": sizes, "crc32": sums})


def find_damage(folder: Path, opens: Opens | None = None) -> str | None:
    """What is wrong with the artefact in words, or nothing. One of an older version without a list is not compared."""
    try:
        listed = listed_contents(folder)
        sums = listed.get("crc32", {})
        for name, written in listed.get("bytes", {}).items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != written:
                return f"{name} has {path.stat().st_size:,} bytes, and {written:,} were written"
            if name in sums and crc32(path) != sums[name]:
                return f"{name} does not hold the bytes that were written"
        if opens is not None:
            opens(folder)
    except _NO_DAMAGE:
        raise
    except Exception as error:  # readers of torch, numpy and zlib have each their own for bytes that make no sense
        if isinstance(error, OSError) and error.errno in _SHORT_OF:
            raise
        return words_for(error)
    return None


def set_aside(folder: Path) -> None:
    with suppress(OSError):  # another run was quicker, or may not write here; whoever looks sees the harm again
        (folder / BILL).replace(folder / SET_ASIDE)


def words_for(error: Exception) -> str:
    """A key that a file lacks is told by Python as the bare key, and some errors tell nothing but their name."""
    if isinstance(error, KeyError) and error.args:
        return f"it does not say {error.args[0]}"
    return str(error) or type(error).__name__


def listed_contents(folder: Path) -> dict[str, Any]:
    """`bytes` and `crc32` by file name; empty for an artifact of an old version, which has no list."""
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
    """A list that came along with a copy of another artefact is ours; a file of the maker's would be lost."""
    try:
        is_ours = "bytes" in _read(path) or not path.exists()
    except (JoulelabError, ValueError):
        is_ours = False
    if not is_ours:
        raise JoulelabError(f"{path} has the name of the list of the artefact's files", "give it another name")


# What is noted of an artefact while it is made, and the bill that comes of it.


@dataclass
class BillBuilder:
    stages: list[str] = field(default_factory=list)
    unmetered: dict[str, str] = field(default_factory=dict)
    """Work that no meter of ours saw, and why."""
    joined: list[Bill] = field(default_factory=list)
    """Of the shares that others made."""

    def bill(self, artefact: Ancestor, parents: Sequence[Bill], code: str, inputs: dict[str, Any]) -> Bill:
        # not in the key: where a server stood, or how work was split, does not change what came out
        unseen = [unmetered(work, artefact.key, reason) for work, reason in self.unmetered.items()]
        parents = [*parents, *self.joined, *unseen]
        known = {"stages": tuple(self.stages), "parents": tuple(parent.key for parent in parents)}
        return Bill(
            artefact=artefact.model_copy(update=known),
            ancestry=ancestry_of(parents),
            made_at=clock.iso(clock.now().wall_s),
            code_version=code,
            inputs=inputs,
            provisional=True,
        )


def spent_between(before: Mapping[str, EnergyFigure], after: Mapping[str, EnergyFigure]) -> dict[str, EnergyFigure]:
    """For a first bill, from the trace so far; the closing of the run replaces it with the stages' own figures."""
    spent = {}
    for component, figure in after.items():
        start = before[component]
        left = figure if figure.energy_j is None or start.energy_j is None else figure.minus(start)
        spent[component] = left.model_copy(update={"energy_j": left.energy_j and max(0.0, left.energy_j)})
    return spent
