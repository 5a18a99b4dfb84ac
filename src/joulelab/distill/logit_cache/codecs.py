"""What is kept of a teacher's distribution at a position, by name, and how many bytes that takes.

    rsN             N draws from the distribution at the temperature kept: ids and how often they came. The gradient of
                    the forward KL is right on average, whatever the student says.
    hybridK         the K likeliest as they are, and 16 draws from the rest. Right on average too, and closer each time.
    topkK-TAIL      the K likeliest alone. The rest of the probability goes by TAIL: `renorm` gives it to those K,
                    `ghost` makes it one more word, `gold` gives it to the token of the text. Biased, all three.
    hidden          the teacher's last hidden state: exact, for any temperature and divergence, and large.

Importable without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from joulelab.errors import ConfigError

NARROW_IDS = 2**18
"""With fewer words than this a drawn id and its count share 24 bits: 18 and 6."""
WIDE_IDS = 2**26
"""With fewer words than this they share 32: 26 and 6."""
MOST_DRAWS = 63
"""What 6 bits can count."""
HYBRID_DRAWS = 16
Tail = Literal["renorm", "ghost", "gold"]
_NAME = re.compile(r"rs(?P<draws>\d+)|hybrid(?P<hybrid>\d+)|topk(?P<top>\d+)-(?P<tail>renorm|ghost|gold)|hidden")


@dataclass(frozen=True)
class Codec:
    name: str
    draws: int = 0
    """Draws with their counts."""
    top: int = 0
    """Of the likeliest words, ids and probabilities."""
    tail: Tail | None = None

    @property
    def is_exact(self) -> bool:
        return self.name == "hidden"

    def fixed_bytes(self, features: int = 0, number_bytes: int = 2) -> int:
        """Per position, drawn words apart: how many those are, entropy, what the likeliest leave, and the likeliest."""
        if self.is_exact:
            return features * number_bytes
        return (3 if self.draws else 0) + (4 + 6 * self.top if self.top else 0)


def codec_named(name: str) -> Codec:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"there is no codec '{name}' for a teacher's distributions",
            "use rs50, hybrid32, topk50-renorm, topk50-ghost, topk50-gold or hidden",
        )
    draws, hybrid, top = (int(found[group] or 0) for group in ("draws", "hybrid", "top"))
    if found["draws"] and not 1 <= draws <= MOST_DRAWS:
        raise ConfigError(f"{name}: {draws} draws; expected 1 to {MOST_DRAWS}, which 6 bits can count", "use rs50")
    if (found["hybrid"] or found["top"]) and hybrid + top < 1:
        raise ConfigError(f"{name} keeps no word at all", "use hybrid32 or topk50-ghost")
    if hybrid:
        return Codec(name, draws=HYBRID_DRAWS, top=hybrid)
    return Codec(name, draws=draws, top=top, tail=found["tail"])  # type: ignore[arg-type]


def record_bytes(vocabulary: int) -> int:
    """Of one drawn word with its count."""
    if not 1 <= vocabulary <= WIDE_IDS:
        raise ConfigError(f"a vocabulary of {vocabulary} words; expected 1 to {WIDE_IDS}", "check the teacher")
    return 3 if vocabulary <= NARROW_IDS else 4
