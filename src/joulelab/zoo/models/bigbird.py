"""BigBird: attention in blocks (a window, a few global ones, a few at random), so that cost grows with length alone."""

from collections.abc import Mapping
from typing import Any

from joulelab.errors import ConfigError
from joulelab.zoo.registry import Size, ZooEntry

_BLOCK, _RANDOM_BLOCKS = 64, 3  # as published


def require_blocks(settings: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """At a length that its blocks would cover anyway, transformers quietly turns to full attention."""
    block, at_random = settings.get("block_size", _BLOCK), settings.get("num_random_blocks", _RANDOM_BLOCKS)
    needed = (5 + 2 * at_random) * block
    if tokens <= needed or tokens % block:
        raise ConfigError(
            f"bigbird's sparse attention needs more than {needed} tokens in blocks of {block}; {tokens} were asked for",
            f"ask for a multiple of {block}, at least {needed + block}",
        )
    return {}


MODEL = ZooEntry(
    name="bigbird",
    family="language",
    task="masked LM",
    item="sequence",
    about="encoder with block-sparse attention for long texts",
    architecture="BigBirdForMaskedLM",
    sizes={
        "base": Size(128_111_286, {}, {"tokens": 4096}, batch_size=4, hub_id="google/bigbird-roberta-base"),
        "large": Size(
            360_225_974,
            {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
            {"tokens": 4096},
            batch_size=2,
            hub_id="google/bigbird-roberta-large",
        ),
        "tiny": Size(
            146_048,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 64,
                "block_size": 4,
                "num_random_blocks": 1,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare_block_sparse",
    dataset="text by path or hub id (allenai/c4)",
    options={"positions": 4096, "head": ("cls",), "idle": (".pooler.",), "settings": require_blocks},
)
