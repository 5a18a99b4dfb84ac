"""Speech to text: thirty seconds of log-mel features go in, the tokens of what was said come out.

Shapes: B clips, T target tokens, M mel bands, F frames of 10 ms, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.synthetic import speak
from joulelab.errors import ConfigError
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective
from joulelab.zoo.request import SYNTHETIC, WorkloadRequest
from joulelab.zoo.tasks.recorded_speech import open_recordings
from joulelab.zoo.tasks.token_loss import summed_cross_entropy
from joulelab.zoo.tasks.token_rows import TokenRows, open_rows
from joulelab.zoo.workload import Workload

Ids = NDArray[np.int64]


def prepare(request: WorkloadRequest) -> Workload:
    frames, tokens = request.shape["frames"], request.shape["tokens"]
    # two frames become one position of the encoder
    model: Any = architectures.build(request, max_source_positions=frames // 2).float()
    _require_fit(request, model.config, frames, tokens)
    if request.dataset != SYNTHETIC:
        return open_recordings(request, model, PlainObjective(transcription_loss))
    data = open_rows(request, model.config, tokens)
    assert data.held_out is not None  # synthetic text has a split of its own for that
    train, held_out = (_spoken(request, rows, model.config) for rows in (data.train, data.held_out))
    return Workload(model, PlainObjective(transcription_loss), train, held_out)


def transcription_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BTV = model(
        input_features=batch["features"], decoder_input_ids=batch["decoder_input_ids"], use_cache=False
    ).logits
    return ObjectiveOutput(summed_cross_entropy(logits_BTV, batch["targets"]), batch.count)


def _require_fit(request: WorkloadRequest, config: Any, frames: int, tokens: int) -> None:
    if 2 * config.max_source_positions != frames:
        raise ConfigError(
            f"these weights hear {2 * config.max_source_positions} frames; {frames} were asked for",
            "leave `frames` out, or start without weights",
        )
    if tokens > config.max_target_positions:
        raise ConfigError(
            f"{request.entry.name} has {config.max_target_positions} positions for text; {tokens} tokens were asked for"
        )
    if tokens > frames:
        raise ConfigError(f"{tokens} tokens do not fit into {frames} frames", "ask for fewer tokens")


def _spoken(request: WorkloadRequest, source: TokenRows, config: Any) -> ShuffledRows:
    frames, mels, start_id = request.shape["frames"], int(config.num_mel_bins), int(config.decoder_start_token_id)

    def make(rows: Rows, draw: int) -> TensorBatch:
        targets_BT = source.sequences(rows)
        shifted_BT = np.hstack([np.full((len(rows), 1), start_id), targets_BT[:, :-1]])
        tensors = {"targets": torch.from_numpy(targets_BT), "decoder_input_ids": torch.from_numpy(shifted_BT)}
        voice = partial(speak, mels=mels, frames=frames, seed=draw)
        return TensorBatch(tensors, len(rows), tokens=targets_BT.size, count=targets_BT.size, expand=voice)

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
