"""Speech to text: from 30 s of log-mel features to the tokens of the transcript.

Shapes: B clips, T target tokens, M mel bands, F frames of 10 ms, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data import sources
from joulelab.data.audio import SAMPLING_HZ, Clips, read_manifest, read_wav
from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.synthetic import speak
from joulelab.errors import ConfigError
from joulelab.zoo import objective
from joulelab.zoo.objective import Objective, ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.pretrained import import_transformers
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset
from joulelab.zoo.tasks.token_rows import TokenRows, choose_tokenizer, open_rows, summed_cross_entropy

# Batches of a user's recordings: features by transformers' extractor, padded texts.
#
# Legend: B clips, T target tokens of the longest text allowed.


FRAMES_PER_SECOND = 100
HELD_OUT_SHARE = 0.05
NOT_TRAINED = -100
"""Ignored by torch's cross-entropy. The end-of-text token is trained like any other."""


def open_recordings(request: WorkloadRequest, model: nn.Module, objective: Objective[TensorBatch]) -> Workload:
    path = sources.parse(request.dataset).path
    if path is None or not path.is_file():
        raise refuse_dataset(request)
    clips, config = read_manifest(path), model.config
    chosen = choose_tokenizer(request, config, sentinels=0)
    ids = [_closed(row, chosen.vocabulary.end_id) for row in chosen.encoding.encode(list(clips.texts))]
    _require_short(ids, request.shape["tokens"], path.name)
    rows = request.wanted_split.rows(len(ids))
    kept = len(rows) - max(1, round(HELD_OUT_SHARE * len(rows)))
    if not kept:
        raise ConfigError(f"{path} has one clip; expected two or more, as one is held out")
    batches = _Recordings(request, clips, ids, config)
    return Workload(model, objective, batches.of(rows[:kept]), batches.of(rows[kept:]), notes=(chosen.note,))


def _closed(row: Any, end_id: int) -> list[int]:
    return [*(int(number) for number in row), end_id]


def _require_short(ids: Sequence[list[int]], most: int, name: str) -> None:
    longest = max(len(row) for row in ids)
    if longest > most:
        raise ConfigError(f"a text of {name} has {longest} tokens; {most} are allowed", f"set tokens={longest} or more")


class _Recordings:
    def __init__(self, request: WorkloadRequest, clips: Clips, ids: list[list[int]], config: Any) -> None:
        self._request, self._clips, self._ids = request, clips, ids
        self._start_id = int(config.decoder_start_token_id)
        self._extract = import_transformers().WhisperFeatureExtractor(
            feature_size=int(config.num_mel_bins), chunk_length=request.shape["frames"] // FRAMES_PER_SECOND
        )

    def of(self, rows: Rows) -> ShuffledRows:
        return ShuffledRows(rows, self._request.rows_per_batch, self._request.seed, self._batch)

    def _batch(self, rows: Rows, draw: int) -> TensorBatch:
        texts, tokens = [self._ids[row] for row in rows], self._request.shape["tokens"]
        targets_BT = np.full((len(rows), tokens), NOT_TRAINED)
        inputs_BT = np.full((len(rows), tokens), self._start_id)
        for place, text in enumerate(texts):
            targets_BT[place, : len(text)] = text
            inputs_BT[place, 1 : len(text)] = text[:-1]
        sounds = [read_wav(self._clips.files[row]) for row in rows]
        features = self._extract(sounds, sampling_rate=SAMPLING_HZ, return_tensors="pt")["input_features"]
        ids = {"targets": torch.from_numpy(targets_BT), "decoder_input_ids": torch.from_numpy(inputs_BT)}
        count = sum(len(text) for text in texts)
        return TensorBatch({"features": features, **ids}, len(rows), tokens=count, count=count)


Ids = NDArray[np.int64]


def prepare(request: WorkloadRequest) -> Workload:
    frames, tokens = request.shape["frames"], request.shape["tokens"]
    # the encoder has one position per two frames
    model: Any = objective.build(request, max_source_positions=frames // 2).float()
    _require_fit(request, model.config, frames, tokens)
    if request.dataset != SYNTHETIC:
        return open_recordings(request, model, PlainObjective(transcription_loss))
    data = open_rows(request, model.config, tokens)
    assert data.held_out is not None  # synthetic text has a separate validation split
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
            f"these weights need {2 * config.max_source_positions} frames; {frames} were requested",
            "omit `frames`, or start without weights",
        )
    if tokens > config.max_target_positions:
        raise ConfigError(
            f"{request.entry.name} has {config.max_target_positions} positions for text; {tokens} tokens were requested"
        )
    if tokens > frames:
        raise ConfigError(f"{tokens} tokens do not fit into {frames} frames", "request fewer tokens")


def _spoken(request: WorkloadRequest, source: TokenRows, config: Any) -> ShuffledRows:
    frames, mels, start_id = request.shape["frames"], int(config.num_mel_bins), int(config.decoder_start_token_id)

    def make(rows: Rows, draw: int) -> TensorBatch:
        targets_BT = source.sequences(rows)
        shifted_BT = np.hstack([np.full((len(rows), 1), start_id), targets_BT[:, :-1]])
        tensors = {"targets": torch.from_numpy(targets_BT), "decoder_input_ids": torch.from_numpy(shifted_BT)}
        expand = partial(speak, mels=mels, frames=frames, seed=draw)
        return TensorBatch(tensors, len(rows), tokens=targets_BT.size, count=targets_BT.size, expand=expand)

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
