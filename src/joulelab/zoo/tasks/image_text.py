"""Answers about images: an image and a question go in, and only the tokens of the answer are trained.

Shapes: B images, S positions of image and text together, P prompt tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.splits import SYNTHETIC_SIZES, Split
from joulelab.data.synthetic import SyntheticImageText, paint_fields
from joulelab.data.tokenize import FIRST_PLAIN
from joulelab.errors import ConfigError
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective
from joulelab.zoo.request import SYNTHETIC, WorkloadRequest
from joulelab.zoo.tasks.questioned_images import open_questions
from joulelab.zoo.tasks.token_loss import summed_cross_entropy
from joulelab.zoo.workload import Workload

Ids = NDArray[np.int64]


def prepare(request: WorkloadRequest) -> Workload:
    model = build(request)
    if request.dataset != SYNTHETIC:
        return open_questions(request, model, PlainObjective(answer_loss))
    train, held_out = (_batches(request, model.config, split) for split in (request.wanted_split, Split("validation")))
    return Workload(model, PlainObjective(answer_loss), train, held_out)


def build(request: WorkloadRequest) -> Any:
    settings = request.size.settings
    vision = {**settings["vision_config"], "image_size": request.shape["side"]}
    model: Any = architectures.build(request, vision_config=vision)
    _require_side(request, model.config.vision_config.image_size)
    freeze_unreached(model)
    return model.to(getattr(torch, settings.get("dtype", "float32")))


def answer_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    answers_BA = batch["answers"]
    # the answer ends the sequence, so the last positions are the ones that foretell it
    logits_BAV = model(
        input_ids=batch["input_ids"],
        attention_mask=batch.tensors.get("attention_mask"),
        pixel_values=batch["pixels"],
        use_cache=False,
        logits_to_keep=answers_BA.shape[1],
    ).logits
    return ObjectiveOutput(summed_cross_entropy(logits_BAV, answers_BA), batch.count)


def freeze_unreached(model: Any) -> None:
    """LLaVA reads its image tower before the end (layer -2). What comes after never gets a gradient, so it is no part
    of what is trained; ranks that average gradients would wait for it for ever."""
    tower, depth = model.model.vision_tower, model.config.vision_feature_layer
    for name, module in tower.named_modules():
        if name.endswith("encoder.layers"):
            module[len(module) + 1 + depth :].requires_grad_(False)
        elif name.endswith("post_layernorm"):
            module.requires_grad_(False)


def _require_side(request: WorkloadRequest, side: int) -> None:
    if side != request.shape["side"]:
        raise ConfigError(
            f"these weights see images of {side} x {side}; {request.shape['side']} was asked for",
            "leave `side` out, or start without weights",
        )


def _batches(request: WorkloadRequest, config: Any, split: Split) -> ShuffledRows:
    side, prompt_tokens, answer_tokens = (request.shape[name] for name in ("side", "prompt", "answer"))
    plain = range(FIRST_PLAIN, min(int(config.text_config.vocab_size), int(config.image_token_index)))
    # splits differ in their seed, so that no image is in two of them
    source = SyntheticImageText(plain, prompt_tokens, answer_tokens, seed=list(SYNTHETIC_SIZES).index(split.name))
    image_tokens = (side // int(config.vision_config.patch_size)) ** 2
    image = np.full(image_tokens, int(config.image_token_index))

    def make(rows: Rows, draw: int) -> TensorBatch:
        colours_BK = source.colours(rows)
        answers_BA = source.answers(colours_BK)
        input_ids_BS = interleave(source.prompt, image, answers_BA)
        tensors = {"input_ids": input_ids_BS, "answers": answers_BA, "colours": colours_BK}
        return TensorBatch(
            {name: torch.from_numpy(value) for name, value in tensors.items()},
            samples=len(rows),
            tokens=input_ids_BS.size,
            count=answers_BA.size,
            expand=partial(paint_fields, side=side, seed=draw),
        )

    return ShuffledRows(split.rows(SYNTHETIC_SIZES[split.name]), request.rows_per_batch, request.seed, make)


def interleave(prompt_P: Ids, image: Ids, answers_BA: Ids) -> Ids:
    """The first word of the prompt, the image, the rest of the prompt, and the answer but for its last token, after
    which there is nothing left to foretell."""
    before = np.concatenate([prompt_P[:1], image, prompt_P[1:]])
    return np.hstack([np.tile(before, (len(answers_BA), 1)), answers_BA[:, :-1]])
