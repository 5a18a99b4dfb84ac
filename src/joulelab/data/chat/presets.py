"""The published datasets by short name, as settings; without torch, so that a login node can check them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from joulelab import lookup
from joulelab.errors import ConfigError


@dataclass(frozen=True)
class ChatDataSettings:
    source: str
    """sample:reviews, a file or folder of JSON lines, JSON or Parquet, or a hub id."""
    subset: str = "all"
    """The configuration of a hub dataset; short, long or all of sample:reviews."""
    split: Literal["train", "validation", "test"] | None = "train"
    """Our own, by the hash of each question; None is everything."""
    form: Literal["text", "chat"] = "text"
    """Of sample:reviews: plain texts, or questions with answers."""
    limit: int | None = None
    """At most so many rows, taken by hash."""
    strip_think_blocks: bool = False
    """Take the thoughts out of answers."""
    code_only: bool = False
    """Keep the last block of code of an answer."""
    only_correct: bool = True
    """Where a set has verdicts on its answers, teach only the right ones."""
    last_answer_only: bool = False
    """Train on the last answer of a conversation alone, for chat templates that rewrite earlier turns."""
    max_tokens: int | None = None
    """Cut documents there."""


PRESETS: dict[str, ChatDataSettings] = {
    "tulu-3": ChatDataSettings("allenai/tulu-3-sft-mixture"),
    "codeforces-cots": ChatDataSettings(
        "open-r1/codeforces-cots", "solutions_py_decontaminated", strip_think_blocks=True, code_only=True
    ),
    "openr1-math": ChatDataSettings("open-r1/OpenR1-Math-220k", "default"),
    "reviews": ChatDataSettings("sample:reviews", "short"),
    "reviews-chat": ChatDataSettings("sample:reviews", "short", form="chat"),
}


def preset(name: str, **changes: Any) -> ChatDataSettings:
    """`preset("tulu-3", source="tulu.parquet", limit=1000)`: what is not named stays as published.

    A local file holds one configuration, so naming one as the source sets the subset aside.
    """
    if name not in PRESETS:
        raise lookup.unknown("dataset", name, PRESETS)
    known = ChatDataSettings.__dataclass_fields__
    for key in changes:
        if key not in known:
            guess = lookup.nearest(key, known)
            raise ConfigError(
                f"the data have no setting '{key}'" + (f"; did you mean '{guess}'?" if guess else ""),
                f"the settings are {', '.join(known)}",
            )
    if "source" in changes and "subset" not in changes:
        changes["subset"] = "all"
    return replace(PRESETS[name], **changes)
