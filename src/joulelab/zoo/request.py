"""What a user asks of a model of the zoo; checked without importing a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from joulelab import lookup
from joulelab.data.splits import Split, parse_split
from joulelab.errors import ConfigError
from joulelab.zoo.entry import Size, ZooEntry

SYNTHETIC = "synthetic"

# How architectures of transformers call the number of their positions.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")


@dataclass(frozen=True)
class WorkloadRequest:
    """What a user asks of a model of the zoo."""

    entry: ZooEntry
    size_name: str = ""
    batch_size: int = 0
    seed: int = 0
    dataset: str = SYNTHETIC
    """`synthetic`, a path or a hub id."""
    split: str = "train"
    weights: str = ""
    """A folder, hub id or `published` to start from; empty: drawn from the seed."""
    asked_shape: Mapping[str, int] = field(default_factory=dict)
    tokenizer: str = ""
    """For text: a folder, hub id or sample; empty: that of the weights, the size's published one, or bytes."""

    def __post_init__(self) -> None:
        for known, asked, what in (
            (self.entry.sizes, [self.size_name] if self.size_name else [], "size"),
            (self.size.shape if self.size_name in ("", *self.entry.sizes) else {}, self.asked_shape, "input dimension"),
        ):
            for name in asked:
                if name not in known:
                    hint = f"`joulelab zoo {self.entry.name}` lists its sizes and their input dimensions"
                    raise lookup.unknown(f"{what} of {self.entry.name}", name, known, hint)

    @property
    def size(self) -> Size:
        return self.entry.sizes[self.size_name or self.entry.default_size]

    @property
    def shape(self) -> dict[str, int]:
        return {**self.size.shape, **self.asked_shape}

    def require_length(self) -> None:
        """Refuse an input that is too long, by what the entry declares: no framework is imported.

        Weights other than the published ones may have more positions; `prepare` compares with their configuration.
        """
        tokens, settings, options = self.shape.get("tokens"), self.size.settings, self.entry.options
        if tokens is None or self.weights not in ("", "published"):
            return
        if "settings" in options:
            options["settings"](settings, tokens)
        declared = [settings[key] for key in _POSITIONS if key in settings]
        self.require_positions(declared[0] if declared else options.get("positions"), tokens)

    def require_positions(self, positions: int | None, tokens: int) -> None:
        unused = self.entry.options.get("unused_positions", 0)
        if positions is not None and tokens > positions - unused:
            raise ConfigError(
                f"{self.entry.name} has {positions - unused:,} positions; {tokens:,} tokens were requested",
                f"request at most {positions - unused:,} tokens, or choose another size",
            )

    @property
    def rows_per_batch(self) -> int:
        return self.batch_size or self.size.batch_size

    @property
    def wanted_split(self) -> Split:
        return parse_split(self.split)


def refuse_dataset(request: WorkloadRequest) -> ConfigError:
    return ConfigError(
        f"{request.entry.name} cannot read the dataset '{request.dataset}'",
        f"it takes `synthetic`{' or ' + request.entry.dataset if request.entry.dataset else ''}",
    )
