"""Parts of a run that separate jobs do: phases one after the other, shards of one phase in parallel.

Phases: data on a CPU node, the teacher on a GPU, the students elsewhere. All phases are attempts of the same run, so
its record has the whole energy bill. A pipeline asks `RunContext.includes` before it begins a phase and returns if the
attempt ends before it; the next attempt finds the artifacts of the earlier phases. A pipeline that does not ask runs
all of its phases in one attempt.

Shards: work consists of units (a batch of rows, a batch of prompts) that do not depend on the number of shards and are
named by their content. Every task sees the same list, sorts it by name and takes every n-th unit, so that shards are
disjoint, complete and of equal size without a server. A shard's output is stored as a partial artifact with its own
bill, and a later run joins the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from joulelab.errors import ConfigError

Phase = Literal["data", "teacher", "train"]
"""The last phase of a run (setting `until`) or of an attempt (option `--until`), as a user chooses it."""
PHASES: tuple[Phase, ...] = ("data", "teacher", "train")
RENAMED_PHASES = {"student": "train"}
_ORDER = (*PHASES, "evaluate")


def comes_after(phase: Phase | Literal["evaluate"], last: Phase) -> bool:
    return _ORDER.index(phase) > _ORDER.index(last)


PART = "-part"
"""Suffix of the kind of an artifact that is a shard of another one."""


@dataclass(frozen=True)
class Shard:
    """One of `of` equal parts of the work, counted from 0."""

    number: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/8` is the third of eight."""
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
            raise ConfigError(f"invalid shard '{text}'", "expected NUMBER/COUNT, counted from 0: 0/4 to 3/4")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def name(self) -> str:
        """For file and run names."""
        return f"{self.number}-of-{self.of}"

    def among(self, rank: int, world: int) -> Shard:
        """The part of this shard that one of `world` ranks does."""
        # Every (of x world)-th unit starting at number + of x rank: the ranks' parts are disjoint,
        # and together they are exactly the units of this shard.
        return Shard(self.number + self.of * rank, self.of * world)

    def units(self, names: Sequence[str]) -> list[int]:
        """Indices of the units of this shard, in ascending order; units with equal names are distributed, too."""
        # Names are content hashes, so sorting by them is a fixed random order: shards are balanced
        # even where units are sorted by length.
        by_name = sorted(range(len(names)), key=lambda index: (names[index], index))
        return sorted(by_name[self.number :: self.of])


ALL = Shard()
