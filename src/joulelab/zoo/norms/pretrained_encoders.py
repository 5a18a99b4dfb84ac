"""Published weights for the encoders, and conversions that keep the function but use cheaper norms.

Published weights are renamed from Hugging Face's names, and q, k and v are concatenated.

A pre-LN encoder reads its residual stream only through LayerNorm, which subtracts the mean first. So the mean can be
removed from everything that is added to the stream (embeddings, output matrices, biases) once in advance. LayerNorm
then sees zero-mean vectors, for which it equals RMSNorm (pre-RMSNorm). One number of a zero-mean vector is redundant
and can be omitted, so that width d becomes d - 1 (pre-CRMSNorm). See Jiang, Gu, Zhu and Pan, NeurIPS 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.errors import ConfigError
from joulelab.zoo.norms.encoders import Bert, Block, Deit, Encoder
from joulelab.zoo.pretrained import import_transformers, load_pretrained
from joulelab.zoo.registry import PUBLISHED


def load_published(model: Encoder, name: str) -> None:
    """`published`, a folder or a hub id of a `ViTForImageClassification` or a BERT."""
    transformers = import_transformers()
    place = model.shape.hub_id if name == PUBLISHED else name
    kinds = (transformers.ViTForImageClassification, transformers.BertForSequenceClassification)
    source = load_pretrained(kinds[isinstance(model, Bert)], place)
    config: Any = source.config
    _require("width", config.hidden_size, model.shape.width, place)
    _require("layers", config.num_hidden_layers, model.shape.layers, place)
    copy_published_weights(model, source.state_dict())


def _require(what: str, found: int, wanted: int, place: str) -> None:
    if found != wanted:
        raise ConfigError(f"{place} has {what} {found}, expected {wanted}", "name weights of the same size")


@torch.no_grad()
def copy_published_weights(model: Encoder, state: Mapping[str, Tensor]) -> None:
    """From the state of transformers' ViT or BERT with a classifying head."""
    published = "pre-ln" if isinstance(model, Deit) else "post-ln"
    if model.shape.norm != published:
        raise ConfigError(
            f"published weights belong to {published}; {model.shape.norm} would compute something else with them",
            "omit --weights: randomly initialized weights need the same time and energy",
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


@torch.no_grad()
def to_pre_rms(model: Encoder) -> Encoder:
    """The same function with RMSNorm, same width."""
    return _convert_norm(model, "pre-rms", model.width)


@torch.no_grad()
def to_pre_crms(model: Encoder) -> Encoder:
    """The same function with CRMSNorm, narrower by one."""
    return _convert_norm(model, "pre-crms", model.width - 1)


@torch.no_grad()
def fold_for_inference(model: Encoder) -> Encoder:
    """The same function, faster for inference: scales and shifts of the norms are folded into the following matrices,
    and the last block computes only the token that the head reads."""
    made = copy.deepcopy(model)
    made.first_only = True
    if model.shape.norm != "post-ln":  # post-norm: the residual stream reads the norm's output too
        _fold_norm_scales(made, keep_scale=False)
        for norm, _ in _branches(made):
            for name in ("weight", "bias"):
                if hasattr(norm, name):
                    setattr(norm, name, None)
    return made


def _convert_norm(model: Encoder, norm: Any, width: int) -> Encoder:
    if model.shape.norm != "pre-ln":
        raise ConfigError(f"only a pre-LN encoder can be converted; this one is {model.shape.norm}")
    source = copy.deepcopy(model)
    _fold_norm_scales(source, keep_scale=norm == "pre-rms")
    _center_residual_stream(source)
    made = type(model)(replace(model.shape, norm=norm), width).to(model.blocks[0].out.weight)  # type: ignore[union-attr, arg-type]
    _copy_narrowed(source, made, width)
    return made.eval()


def _branches(model: Encoder) -> Iterator[tuple[nn.Module, nn.Linear]]:
    """Each norm with the only matrix that reads it."""
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block.norm1, block.qkv
        yield block.norm2, block.up
    yield model.norm, model.pooler if isinstance(model, Bert) else model.head  # type: ignore[misc]


def _fold_norm_scales(model: Encoder, keep_scale: bool) -> None:
    for norm, matrix in _branches(model):
        if isinstance(norm, nn.LayerNorm):
            # W (g * x + b) + c = (W g) x + (W b + c): scale and shift of a norm move into the
            # matrix that reads it.
            matrix.bias.add_(matrix.weight @ norm.bias)
            norm.bias.zero_()
        if not keep_scale and hasattr(norm, "weight"):
            scale: Tensor = norm.weight  # type: ignore[assignment]
            matrix.weight.mul_(scale)
            scale.fill_(1)


def _center_residual_stream(model: Encoder) -> None:
    """Remove the mean of everything that is added to the residual stream, along its last axis."""
    for added in _residual_contributions(model):
        # LayerNorm subtracts the mean of the stream; the mean is linear, so it may be removed from
        # each addend in advance instead.
        added -= added.mean(-1, keepdim=True)


def _residual_contributions(model: Encoder) -> Iterator[Tensor]:
    for block in model.blocks:
        assert isinstance(block, Block)
        for matrix in (block.out, block.down):
            yield matrix.weight.T
            yield matrix.bias
    if isinstance(model, Deit):
        yield from (model.patches.weight.T, model.patches.bias, model.class_token, model.positions)
    elif isinstance(model, Bert):
        yield from (model.words.weight, model.positions.weight, model.segments.weight)


def _copy_narrowed(source: Encoder, target: Encoder, width: int) -> None:
    """Copy weights by name. If the target is narrower by one, the last row is dropped and the last column is subtracted
    from the others."""
    state = dict(source.state_dict())
    narrow = width < source.width
    if narrow:
        reading = {id(matrix) for _, matrix in _branches(source)}
        for name, module in source.named_modules():
            if isinstance(module, nn.Linear) and id(module) in reading:
                # y_d = -(y_1 + ... + y_(d-1)), so its column is subtracted from all others.
                state[f"{name}.weight"] = module.weight[:, :width] - module.weight[:, width:]
            elif isinstance(module, nn.Linear) and module.out_features == source.width:
                state[f"{name}.weight"], state[f"{name}.bias"] = module.weight[:width], module.bias[:width]
            elif isinstance(module, nn.Embedding):
                state[f"{name}.weight"] = module.weight[:, :width]
        for name in ("class_token", "positions"):
            if name in state:
                state[name] = state[name][..., :width]
    wanted = target.state_dict()
    for name in wanted:
        if narrow and ".norm" in f".{name}":
            continue  # its scale is folded into the next matrix
        wanted[name].copy_(state[name])
