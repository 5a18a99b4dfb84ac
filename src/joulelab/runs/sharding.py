"""Work that several tasks do without knowing of each other: each takes its share, and whoever comes later joins them.

Work is cut into units (a batch of rows, a batch of prompts), the same ones however it is split, and a unit is named by
its content. All tasks see the same list, sort it by name and deal it out like cards: shares are disjoint, complete and
of equal size, and there is no server to ask. What a task made lies in the store as a part of the whole, with its bill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.errors import ConfigError

PART = "-part"
"""Behind the kind of an artefact: a share of one."""


@dataclass(frozen=True)
class Shard:
    """Which part of the work is ours: of `of` equal parts, counted from 0, the one with this number."""

    number: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/8`: the third of eight."""
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
            raise ConfigError(f"'{text}' is no share of the work", "write number/of, counted from 0: 0/4 to 3/4")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def name(self) -> str:
        """For files and runs."""
        return f"{self.number}-of-{self.of}"

    def among(self, rank: int, world: int) -> Shard:
        """The share of one of the processes that do this share together."""
        return Shard(self.number + self.of * rank, self.of * world)

    def units(self, names: Sequence[str]) -> list[int]:
        """Places of our units, in their order; of units with the same name each has its turn."""
        dealt = sorted(range(len(names)), key=lambda place: (names[place], place))
        return sorted(dealt[self.number :: self.of])


ALL = Shard()
