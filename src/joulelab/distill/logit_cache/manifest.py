"""What a cache is of: whose words, over which vocabulary, at which temperature, kept how; and what it can be used for.

Importable without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from joulelab.distill.logit_cache.codecs import Codec, codec_named, record_bytes
from joulelab.distill.logit_cache.shards import Layout
from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.storage import read_json, write_json

MANIFEST = "manifest.json"
Divergence = Literal["forward", "reverse", "jsd"]


class CacheManifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["joulelab-logits-1"] = "joulelab-logits-1"
    codec: str
    """A name of `codecs`."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of the distributions that were kept; hidden states have none."""
    vocabulary: int = Field(ge=1)
    """Ids below this are words of teacher and student both. A teacher's head may have more rows, which pad it to a
    round size (Qwen: 151,936 in one size and 152,064 in another), and their logits mean nothing."""
    teacher: str
    """Its name as the user wrote it."""
    teacher_sha256: str
    """Of its weights' files, or its hub id where we hold no files."""
    tokenizer_sha256: str
    """Ids mean something under this tokenizer alone."""
    seed: int = Field(0, ge=0)
    """Of the draws."""
    features: int | None = Field(None, ge=1)
    """Numbers of a hidden state, where these are kept."""
    numbers: Literal["float32", "bfloat16", "float16"] | None = None
    """What hidden states are kept in: what the teacher computed in."""

    @model_validator(mode="after")
    def _whole(self) -> CacheManifest:
        if self.how.is_exact != (self.features is not None) or self.how.is_exact != (self.numbers is not None):
            raise ValueError("features and numbers belong to the codec hidden, which needs both")
        record_bytes(self.vocabulary)
        return self

    @property
    def how(self) -> Codec:
        return codec_named(self.codec)

    @property
    def layout(self) -> Layout:
        number_bytes = 4 if self.numbers == "float32" else 2
        return Layout(
            fixed_bytes=self.how.fixed_bytes(self.features or 0, number_bytes),
            record_bytes=record_bytes(self.vocabulary),
            squeezed=not self.how.is_exact,
        )

    def require(
        self, *, temperature: float, divergence: Divergence = "forward", tokenizer_sha256: str | None = None
    ) -> None:
        """That a student can learn from this cache as it wants to; otherwise the reason why not."""
        refuse_use(self.codec, self.temperature, temperature, divergence)
        if tokenizer_sha256 is not None and tokenizer_sha256 != self.tokenizer_sha256:
            raise ConfigError(
                f"the cache of {self.teacher} was made with tokenizer {self.tokenizer_sha256[:12]}, "
                f"and the student has {tokenizer_sha256[:12]}: the same id is another word",
                "give the student the teacher's tokenizer, and make the rows with it",
            )


def refuse_use(codec: str, kept_temperature: float, temperature: float, divergence: Divergence) -> None:
    if codec_named(codec).is_exact:
        return
    if divergence != "forward":
        raise ConfigError(
            f"divergence {divergence} needs the teacher's whole distribution, and {codec} keeps a part of it: only the "
            "gradient of the forward KL comes out right from a part",
            "use codec hidden, a live teacher, or divergence forward",
        )
    if temperature != kept_temperature:
        raise ConfigError(
            f"the cache keeps distributions at temperature {kept_temperature:g}, and {temperature:g} was asked for: "
            "what was kept at one temperature does not tell the distribution at another",
            f"set temperature {kept_temperature:g}, make a cache at {temperature:g}, or use codec hidden",
        )


def write_manifest(folder: Path, manifest: CacheManifest) -> None:
    """The first writer's word; a later one must say the same, or two teachers would lie in one cache."""
    if not (folder / MANIFEST).exists():
        write_json(folder / MANIFEST, manifest)
        return
    found = read_manifest(folder)
    differing = [name for name in CacheManifest.model_fields if getattr(found, name) != getattr(manifest, name)]
    if differing:
        told = ", ".join(f"{name} {getattr(found, name)!r} and not {getattr(manifest, name)!r}" for name in differing)
        raise ConfigError(f"the cache {folder} is another one: {told}", "write to another folder, or remove this one")


def read_manifest(folder: Path) -> CacheManifest:
    if not (folder / MANIFEST).is_file():
        raise NotFoundError(f"{folder} holds no cache of a teacher: {MANIFEST} is missing", "name the cache's folder")
    try:
        return CacheManifest.model_validate(read_json(folder / MANIFEST))
    except (ValidationError, ConfigError) as error:
        raise JoulelabError(f"{folder / MANIFEST} is not the manifest of a cache: {error}", "make it again") from None
