"""Published weights of DeiT and BERT, in our encoders: Hugging Face's names are given ours, q, k and v put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from joulelab.errors import ConfigError
from joulelab.zoo.norms.bert import Bert
from joulelab.zoo.norms.deit import Deit
from joulelab.zoo.norms.layers import Encoder
from joulelab.zoo.pretrained import explained_load, import_transformers

PUBLISHED = "published"


def load_published(model: Encoder, name: str) -> None:
    """`published`, a folder or a hub id of a `ViTForImageClassification` or a BERT."""
    transformers = import_transformers()
    place = model.shape.hub_id if name == PUBLISHED else name
    kinds = (transformers.ViTForImageClassification, transformers.BertForSequenceClassification)
    source = explained_load(kinds[isinstance(model, Bert)], place)
    config: Any = source.config
    _require("width", config.hidden_size, model.shape.width, place)
    _require("layers", config.num_hidden_layers, model.shape.layers, place)
    take_weights(model, source.state_dict())


def _require(what: str, found: int, wanted: int, place: str) -> None:
    if found != wanted:
        raise ConfigError(f"{place} has {what} {found}, expected {wanted}", "name weights of the same size")


@torch.no_grad()
def take_weights(model: Encoder, state: Mapping[str, Tensor]) -> None:
    """From the state of transformers' ViT or BERT with a classifying head."""
    published = "pre-ln" if isinstance(model, Deit) else "post-ln"
    if model.shape.norm != published:
        raise ConfigError(
            f"published weights belong to {published}; {model.shape.norm} would compute something else with them",
            "leave --weights out: weights drawn from the seed take the same time and joules",
        )
    names = _deit_names(state) if isinstance(model, Deit) else _bert_names(state)
    wanted = model.state_dict()
    for name, tensor in wanted.items():
        value = names[name]
        if name in ("head.weight", "head.bias") and value.shape != tensor.shape:
            raise ConfigError(f"these weights have {len(value)} classes, expected {len(tensor)}", "name others")
        tensor.copy_(value.reshape(tensor.shape))


def _blocks(state: Mapping[str, Tensor], layers: str, ours: Mapping[str, str], qkv: Sequence[str]) -> dict[str, Tensor]:
    found = {}
    number = 0
    while any(name.startswith(f"{layers}.{number}.") for name in state):
        for ending in ("weight", "bias"):
            parts = [state[f"{layers}.{number}.{part}.{ending}"] for part in qkv]
            found[f"blocks.{number}.qkv.{ending}"] = torch.cat(parts)
            for mine, theirs in ours.items():
                found[f"blocks.{number}.{mine}.{ending}"] = state[f"{layers}.{number}.{theirs}.{ending}"]
        number += 1
    return found


# transformers renamed its ViT; earlier spelling -> later one, in this order
_RENAMED = (
    ("vit.encoder.layer.", "vit.layers."),
    ("attention.attention.query.", "attention.q_proj."),
    ("attention.attention.key.", "attention.k_proj."),
    ("attention.attention.value.", "attention.v_proj."),
    ("attention.output.dense.", "attention.o_proj."),
    ("intermediate.dense.", "mlp.fc1."),
    ("output.dense.", "mlp.fc2."),
)


def _deit_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for before, after in _RENAMED:
            name = name.replace(before, after)
        renamed[name] = tensor
    ours = {
        "norm1": "layernorm_before",
        "out": "attention.o_proj",
        "norm2": "layernorm_after",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    }
    found = _blocks(renamed, "vit.layers", ours, [f"attention.{letter}_proj" for letter in "qkv"])
    for ending in ("weight", "bias"):
        found[f"patches.{ending}"] = renamed[f"vit.embeddings.patch_embeddings.projection.{ending}"]
        found[f"norm.{ending}"] = renamed[f"vit.layernorm.{ending}"]
        found[f"head.{ending}"] = renamed[f"classifier.{ending}"]
    return found | {
        "class_token": renamed["vit.embeddings.cls_token"],
        "positions": renamed["vit.embeddings.position_embeddings"],
    }


def _bert_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ours = {
        "norm1": "attention.output.LayerNorm",
        "out": "attention.output.dense",
        "norm2": "output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
    }
    qkv = [f"attention.self.{part}" for part in ("query", "key", "value")]
    found = _blocks(state, "bert.encoder.layer", ours, qkv)
    for ending in ("weight", "bias"):
        found[f"embedding_norm.{ending}"] = state[f"bert.embeddings.LayerNorm.{ending}"]
        found[f"pooler.{ending}"] = state[f"bert.pooler.dense.{ending}"]
        found[f"head.{ending}"] = state[f"classifier.{ending}"]
    for mine, theirs in (("words", "word"), ("positions", "position"), ("segments", "token_type")):
        found[f"{mine}.weight"] = state[f"bert.embeddings.{theirs}_embeddings.weight"]
    return found
