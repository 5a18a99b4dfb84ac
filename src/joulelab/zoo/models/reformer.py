"""Reformer: attention among tokens that hash alike, and layers whose activations are recomputed, for long texts."""

import math
from collections.abc import Mapping
from typing import Any

from joulelab.errors import ConfigError
from joulelab.zoo.registry import Size, ZooEntry

_CHUNK = 64  # as published, of both kinds of attention


def fit_positions(settings: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Its positions are the cells of a grid, and in training the input has to fill the grid; nor may a chunk be cut."""
    chunk = settings.get("lsh_attn_chunk_length", _CHUNK)
    columns = settings.get("axial_pos_shape", (64, 64))[1]
    if tokens % math.lcm(columns, chunk):
        raise ConfigError(
            f"reformer's positions come in rows of {columns} and chunks of {chunk}; {tokens} tokens were asked for",
            f"ask for a multiple of {math.lcm(columns, chunk)}",
        )
    # what transformers would choose at the first batch: about two buckets for a chunk, in a power of two
    buckets = 2 ** ((2 * tokens // chunk).bit_length() - 1)
    shape = (tokens // columns, columns)
    return {"axial_pos_shape": shape, "max_position_embeddings": tokens, "num_buckets": buckets}


MODEL = ZooEntry(
    name="reformer",
    family="language",
    task="masked LM",
    item="sequence",
    about="encoder with hashed attention and reversible layers; base is transformers' default of 6 M parameters over "
    "320 ids, as milabench runs it; the published checkpoints (enwik8) are causal and serve here by their size alone",
    architecture="ReformerForMaskedLM",
    sizes={
        # without a padding id, as nothing is padded: given one, every forward pass waits for the GPU to look for it
        "base": Size(5_975_872, {"pad_token_id": None}, {"tokens": 4096}, batch_size=32),
        "enwik8": Size(
            149_182_722,
            {
                "attn_layers": ("local", "local", "lsh", "local") * 3,
                "hidden_size": 1024,
                "feed_forward_size": 4096,
                "num_attention_heads": 8,
                "attention_head_size": 128,
                "axial_pos_shape": (128, 512),
                "axial_pos_embds_dim": (256, 768),
                "vocab_size": 258,
                "pad_token_id": None,
            },
            {"tokens": 65_536},
            batch_size=1,
        ),
        "tiny": Size(
            161_856,
            {
                "attn_layers": ("local", "lsh"),
                "hidden_size": 64,
                "feed_forward_size": 128,
                "num_attention_heads": 2,
                "attention_head_size": 32,
                "local_attn_chunk_length": 8,
                "lsh_attn_chunk_length": 8,
                "axial_pos_shape": (4, 8),
                "axial_pos_embds_dim": (16, 48),
                "vocab_size": 512,
                "pad_token_id": None,
            },
            {"tokens": 32},
            batch_size=8,
        ),
    },
    prepare="joulelab.zoo.tasks.masked_lm:prepare",
    dataset="text by path or hub id (allenai/c4)",
    # transformers makes a bias for the head and does not add it
    options={"head": ("lm_head",), "idle": ("lm_head.bias",), "settings": fit_positions},
)
