"""What is stored of a teacher's distribution at a position, by name; and the manifest of a cache.

    rsN             N samples from the distribution at the stored temperature: ids and counts. The gradient of the
                    forward KL is unbiased for any student (random sampling KD, Anshumann et al., 2025).
    hybridK         the K most likely tokens with their probabilities, and 16 samples from the rest. Unbiased too, with
                    a smaller variance.
    topkK-TAIL      the K most likely tokens only. TAIL says where the remaining probability goes: `renorm` to those K,
                    `ghost` to one additional class, `gold` to the token of the text. All three are biased.
    hidden          the teacher's last hidden state: exact, for any temperature and divergence, and large.

Importable without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.paths import read_json, write_json

NARROW_IDS = 2**18
"""Up to this vocabulary a sampled id and its count share 24 bits: 18 and 6."""
WIDE_IDS = 2**26
"""Up to this vocabulary they share 32 bits: 26 and 6."""
MAX_DRAWS = 63
"""The largest count that fits into 6 bits."""
HYBRID_DRAWS = 16
MANIFEST = "manifest.json"
Tail = Literal["renorm", "ghost", "gold"]
Divergence = Literal["forward", "reverse", "jsd"]
_NAME = re.compile(r"rs(?P<draws>\d+)|hybrid(?P<hybrid>\d+)|topk(?P<top>\d+)-(?P<tail>renorm|ghost|gold)|hidden")


@dataclass(frozen=True)
class Codec:
    name: str
    draws: int = 0
    """Number of samples."""
    top: int = 0
    """Number of most likely tokens, stored with their probabilities."""
    tail: Tail | None = None

    @property
    def is_exact(self) -> bool:
        return self.name == "hidden"

    def fixed_bytes(self, features: int = 0, number_bytes: int = 2) -> int:
        """Bytes per position, without the sampled tokens: their number and the entropy (3), the probability outside the
        top K (4), and 6 for each of the top K."""
        if self.is_exact:
            return features * number_bytes
        return (3 if self.draws else 0) + (4 + 6 * self.top if self.top else 0)


def get_codec(name: str) -> Codec:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"unknown codec '{name}' for a teacher's distributions",
            "use rs50, hybrid32, topk50-renorm, topk50-ghost, topk50-gold or hidden",
        )
    draws, hybrid, top = (int(match[group] or 0) for group in ("draws", "hybrid", "top"))
    if match["draws"] and not 1 <= draws <= MAX_DRAWS:
        raise ConfigError(f"{name}: {draws} samples; expected 1 to {MAX_DRAWS}, the range of 6 bits", "use rs50")
    if (match["hybrid"] or match["top"]) and hybrid + top < 1:
        raise ConfigError(f"{name} stores no token; expected at least 1", "use hybrid32 or topk50-ghost")
    if hybrid:
        return Codec(name, draws=HYBRID_DRAWS, top=hybrid)
    return Codec(name, draws=draws, top=top, tail=match["tail"])  # type: ignore[arg-type]


def record_bytes(vocabulary: int) -> int:
    """Bytes of one sampled token with its count."""
    if not 1 <= vocabulary <= WIDE_IDS:
        raise ConfigError(f"a vocabulary of {vocabulary} tokens; expected 1 to {WIDE_IDS}", "check the teacher")
    # Six bits hold the count (at most 63 draws), the rest the id: 18 bits in three bytes, 26 in four.
    return 3 if vocabulary <= NARROW_IDS else 4


class Layout(NamedTuple):
    """Format of the entries of a cache."""

    fixed_bytes: int
    record_bytes: int
    compressed: bool


class CacheManifest(BaseModel):
    """Which teacher's distributions a cache holds, over which vocabulary, at which temperature, in which codec."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["joulelab-logits-1"] = "joulelab-logits-1"
    codec: str
    """Name for `get_codec`."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Temperature of the stored distributions; not used with hidden states."""
    vocabulary: int = Field(ge=1)
    """Ids below this are tokens of both teacher and student. A teacher's head may have more rows, which pad it to a
    round size (Qwen: 151,936 in one size and 152,064 in another); their logits mean nothing."""
    teacher: str
    """Name of the teacher as the user wrote it."""
    teacher_sha256: str
    """Hash of its weight files, or its hub id if there are no local files."""
    tokenizer_sha256: str
    """The ids are valid for this tokenizer only."""
    seed: int = Field(0, ge=0)
    """Seed of the samples."""
    features: int | None = Field(None, ge=1)
    """Width of the hidden states, if these are stored."""
    numbers: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the hidden states: the one the teacher computed in."""

    @model_validator(mode="after")
    def _complete(self) -> CacheManifest:
        exact = self.codec_spec.is_exact
        if exact != (self.features is not None) or exact != (self.numbers is not None):
            raise ValueError("features and numbers are required for the codec hidden and not allowed for others")
        record_bytes(self.vocabulary)
        return self

    @property
    def codec_spec(self) -> Codec:
        return get_codec(self.codec)

    @property
    def layout(self) -> Layout:
        number_bytes = 4 if self.numbers == "float32" else 2
        return Layout(
            fixed_bytes=self.codec_spec.fixed_bytes(self.features or 0, number_bytes),
            record_bytes=record_bytes(self.vocabulary),
            compressed=not self.codec_spec.is_exact,
        )

    def require(
        self, *, temperature: float, divergence: Divergence = "forward", tokenizer_sha256: str | None = None
    ) -> None:
        """Raise if a student cannot be trained from this cache with these settings."""
        require_usable(self.codec, self.temperature, temperature, divergence)
        if tokenizer_sha256 is not None and tokenizer_sha256 != self.tokenizer_sha256:
            raise ConfigError(
                f"the cache of {self.teacher} was made with tokenizer {self.tokenizer_sha256[:12]}, "
                f"but the student has {tokenizer_sha256[:12]}: the same id is a different token",
                "use the teacher's tokenizer for the student, and tokenize the data with it",
            )


def require_usable(codec: str, cached_temperature: float, temperature: float, divergence: Divergence) -> None:
    """Raise if the codec does not determine this divergence at this temperature."""
    if get_codec(codec).is_exact:
        return
    if divergence != "forward":
        raise ConfigError(
            f"divergence {divergence} needs the teacher's full distribution, but {codec} stores only part of it, from "
            "which only the gradient of the forward KL can be estimated",
            "use codec hidden, a live teacher, or divergence forward",
        )
    if temperature != cached_temperature:
        raise ConfigError(
            f"the cache has distributions at temperature {cached_temperature:g}, but {temperature:g} was requested: "
            "they do not determine the distribution at another temperature",
            f"set temperature {cached_temperature:g}, build a cache at {temperature:g}, or use codec hidden",
        )


def write_manifest(folder: Path, manifest: CacheManifest) -> None:
    """Written by the first writer; later writers must have an equal one, or one cache would mix two teachers."""
    if not (folder / MANIFEST).exists():
        write_json(folder / MANIFEST, manifest)
        return
    existing = read_manifest(folder)
    differing = [name for name in CacheManifest.model_fields if getattr(existing, name) != getattr(manifest, name)]
    if differing:
        differences = ", ".join(
            f"{name} is {getattr(existing, name)!r}, not {getattr(manifest, name)!r}" for name in differing
        )
        raise ConfigError(
            f"{folder} holds a different cache: {differences}", "write to another folder, or remove this one"
        )


def read_manifest(folder: Path) -> CacheManifest:
    if not (folder / MANIFEST).is_file():
        raise NotFoundError(f"{folder} is not a logit cache: {MANIFEST} is missing", "pass the folder of a cache")
    try:
        return CacheManifest.model_validate(read_json(folder / MANIFEST))
    except (ValidationError, ConfigError) as error:
        raise JoulelabError(
            f"{folder / MANIFEST} is not a valid cache manifest: {error}", "rebuild the cache"
        ) from None
