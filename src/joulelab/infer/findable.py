"""Whether what a user named can be found, asked before anything starts: a slip should not wait for an idle baseline."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab import lookup
from joulelab.data import hub, samples, sources
from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.runs.json_file import read_json
from joulelab.zoo.norms.shapes import SHAPES
from joulelab.zoo.registry import is_file


def is_python_file(name: str) -> bool:
    return name.endswith(".py") and is_file(name)


def require_weights(name: str, model: str) -> None:
    """`name`: where the weights of `model` are to be read from."""
    if not name:
        raise UsageError(f"no weights of {model} in this size were published", "leave --weights out, or name a folder")
    place = sources.parse(name)
    if place.kind == "hub" and "/" not in name:
        known = [*SHAPES, *lookup.ZOO.names(), *(sources.SAMPLE_PREFIX + sample for sample in samples.SAMPLES)]
        raise lookup.unknown("model", name, known, "or a folder, or a hub id such as org/name")
    if place.kind == "hub" and hub.cached_folder(name, "config.json") is None:
        hub.require_reachable(name)
    if place.kind == "sample" and samples.find(place.name).kind == "labelled-text":
        raise UsageError(f"{name} is labelled text, not a model", "use sample:minilm or sample:smollm2")
    if place.path is not None and place.path.is_dir() and not (place.path / "config.json").exists():
        raise NotFoundError(f"{place.path} holds no config.json", "name a folder in Hugging Face format")


def positions_of(model: str) -> int | None:
    """Of a sample, folder or hub id, by its config.json; None where there is no such file here, as with GGUF."""
    place = sources.parse(model)
    folder = hub.cached_folder(model, "config.json") if place.kind == "hub" else place.path
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    found = next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), None)
    return found if isinstance(found, int) else None


def require_positions(model: str, limit: int | None, lengths: Sequence[int]) -> None:
    for tokens in lengths:
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"{model} has {limit:,} positions; {tokens:,} tokens were requested",
                f"request at most {limit:,} tokens",
            )
