"""Image question answering: inputs are an image and a question; only the tokens of the answer are trained.

Shapes: B images, S positions of image and text together, P prompt tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data import sources
from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.images import Questions, normalized, read_center, read_questions
from joulelab.data.splits import SYNTHETIC_SIZES, Split
from joulelab.data.synthetic import SyntheticImageText, paint_fields
from joulelab.data.tokenize import FIRST_PLAIN
from joulelab.errors import ConfigError
from joulelab.zoo import objective
from joulelab.zoo.objective import Objective, ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset
from joulelab.zoo.tasks.token_rows import choose_tokenizer, summed_cross_entropy

# Batches of a user's images with questions: each row is padding, image, question and answer.
#
# Padding comes first, so that the answers of all rows end at the same position; shorter answers are filled up with
# targets that are not trained.
#
# Shapes: B images, S positions of image and text together, A answer tokens of the longest answer allowed.


HELD_OUT_SHARE = 0.05
NOT_TRAINED = -100
# Mean and standard deviation of the pixels that CLIP, LLaVA's image encoder, was trained with.
CLIP_MEAN, CLIP_DEVIATION = (0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758)
_READERS = 8


def open_questions(request: WorkloadRequest, model: Any, objective: Objective[TensorBatch]) -> Workload:
    path = sources.parse(request.dataset).path
    if path is None or not path.is_file():
        raise refuse_dataset(request)
    found, config = read_questions(path), model.config
    chosen = choose_tokenizer(request, config.text_config, sentinels=0)

    def encoded(texts: Sequence[str]) -> list[list[int]]:
        return [np.asarray(row).tolist() for row in chosen.encoding.encode(list(texts))]

    questions = encoded(found.questions)
    answers = [[*row, chosen.vocabulary.end_id] for row in encoded(found.answers)]
    _require_fit(questions, request.shape["prompt"] - 1, "prompt", path.name)
    _require_fit(answers, request.shape["answer"], "answer", path.name)
    _require_no_image_token([*questions, *answers], int(config.image_token_index), path.name)
    rows = request.wanted_split.rows(len(questions))
    kept = len(rows) - max(1, round(HELD_OUT_SHARE * len(rows)))
    if not kept:
        raise ConfigError(f"{path} has one question; expected two or more, as one is held out")
    made = _QuestionBatches(request, found, questions, answers, config)
    return Workload(model, objective, made.of(rows[:kept]), made.of(rows[kept:]), notes=(chosen.note,))


def _require_fit(rows: Sequence[list[int]], most: int, what: str, name: str) -> None:
    longest = max(len(row) for row in rows)
    if longest > most:
        needed = longest + (what == "prompt")
        raise ConfigError(
            f"a text of {name} has {longest} tokens; {most} are allowed", f"set {what}={needed} or more, or shorten it"
        )


def _require_no_image_token(rows: Sequence[list[int]], image_id: int, name: str) -> None:
    if any(image_id in row for row in rows):
        raise ConfigError(
            f"a text of {name} contains the token that represents the image ({image_id})",
            "remove markers such as <image>: the image is inserted before the question",
        )


class _QuestionBatches:
    def __init__(
        self,
        request: WorkloadRequest,
        found: Questions,
        questions: list[list[int]],
        answers: list[list[int]],
        config: Any,
    ) -> None:
        self._request, self._found, self._questions, self._answers = request, found, questions, answers
        self._side = request.shape["side"]
        self._image = [int(config.image_token_index)] * (self._side // int(config.vision_config.patch_size)) ** 2
        start = config.text_config.bos_token_id
        self._start = [] if start is None else [int(start)]
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="joulelab-images")

    def of(self, rows: Rows) -> ShuffledRows:
        return ShuffledRows(rows, self._request.rows_per_batch, self._request.seed, self._batch)

    def _batch(self, rows: Rows, draw: int) -> TensorBatch:
        read = self._readers.map(lambda row: read_center(self._found.files[row], self._side), rows)
        prompts = [[*self._start, *self._image, *self._questions[row]] for row in rows]
        answers = [self._answers[row] for row in rows]
        front, back = max(len(row) for row in prompts), max(len(row) for row in answers)
        input_ids_BS = np.zeros((len(rows), front + back - 1), dtype=np.int64)
        seen_BS = np.zeros_like(input_ids_BS)
        answers_BA = np.full((len(rows), back), NOT_TRAINED, dtype=np.int64)
        for place, (before, answer) in enumerate(zip(prompts, answers, strict=True)):
            known = slice(front - len(before), front + len(answer) - 1)  # the last token predicts nothing
            input_ids_BS[place, known] = [*before, *answer[:-1]]
            seen_BS[place, known] = 1
            answers_BA[place, : len(answer)] = answer
        tensors = {"input_ids": input_ids_BS, "attention_mask": seen_BS, "answers": answers_BA}
        tensors["bytes"] = np.stack(list(read))
        return TensorBatch(
            {name: torch.from_numpy(value) for name, value in tensors.items()},
            samples=len(rows),
            tokens=int(seen_BS.sum()),
            count=sum(len(answer) for answer in answers),
            expand=_with_pixels,
        )


def _with_pixels(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    others = {name: value for name, value in tensors.items() if name != "bytes"}
    return {**others, "pixels": normalized(tensors["bytes"], CLIP_MEAN, CLIP_DEVIATION)}


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
    model: Any = objective.build(request, vision_config=vision)
    _require_side(request, model.config.vision_config.image_size)
    freeze_unreached(model)
    return model.to(getattr(torch, settings.get("dtype", "float32")))


def answer_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    answers_BA = batch["answers"]
    # the answer ends the sequence, so it is predicted at the last positions
    logits_BAV = model(
        input_ids=batch["input_ids"],
        attention_mask=batch.tensors.get("attention_mask"),
        pixel_values=batch["pixels"],
        use_cache=False,
        logits_to_keep=answers_BA.shape[1],
    ).logits
    return ObjectiveOutput(summed_cross_entropy(logits_BAV, answers_BA), batch.count)


def freeze_unreached(model: Any) -> None:
    """Freeze the layers of the image tower after the one that LLaVA reads (layer -2). They never get a gradient, and
    ranks that average gradients would wait for them indefinitely."""
    tower, depth = model.model.vision_tower, model.config.vision_feature_layer
    for name, module in tower.named_modules():
        if name.endswith("encoder.layers"):
            module[len(module) + 1 + depth :].requires_grad_(False)
        elif name.endswith("post_layernorm"):
            module.requires_grad_(False)


def _require_side(request: WorkloadRequest, side: int) -> None:
    if side != request.shape["side"]:
        raise ConfigError(
            f"these weights need images of {side} x {side}; {request.shape['side']} was requested",
            "omit `side`, or start without weights",
        )


def _batches(request: WorkloadRequest, config: Any, split: Split) -> ShuffledRows:
    side, prompt_tokens, answer_tokens = (request.shape[name] for name in ("side", "prompt", "answer"))
    plain = range(FIRST_PLAIN, min(int(config.text_config.vocab_size), int(config.image_token_index)))
    # splits have different seeds, so that no image is in two of them
    source = SyntheticImageText(plain, prompt_tokens, answer_tokens, seed=list(SYNTHETIC_SIZES).index(split.name))
    image_tokens = (side // int(config.vision_config.patch_size)) ** 2
    image = np.full(image_tokens, int(config.image_token_index))

    def make(rows: Rows, draw: int) -> TensorBatch:
        colors_BK = source.colors(rows)
        answers_BA = source.answers(colors_BK)
        input_ids_BS = interleave(source.prompt, image, answers_BA)
        tensors = {"input_ids": input_ids_BS, "answers": answers_BA, "colors": colors_BK}
        return TensorBatch(
            {name: torch.from_numpy(value) for name, value in tensors.items()},
            samples=len(rows),
            tokens=input_ids_BS.size,
            count=answers_BA.size,
            expand=partial(paint_fields, side=side, seed=draw),
        )

    return ShuffledRows(split.rows(SYNTHETIC_SIZES[split.name]), request.rows_per_batch, request.seed, make)


def interleave(prompt_P: Ids, image: Ids, answers_BA: Ids) -> Ids:
    """The first token of the prompt, the image, the rest of the prompt, and the answer without its last token, after
    which nothing is predicted."""
    before = np.concatenate([prompt_P[:1], image, prompt_P[1:]])
    return np.hstack([np.tile(before, (len(answers_BA), 1)), answers_BA[:, :-1]])
