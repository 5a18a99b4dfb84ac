"""Rows of token ids, all of one length, for the language tasks: synthetic, or text of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.data.batch_source import Rows
from joulelab.data.splits import parse_split
from joulelab.data.synthetic.text import SAMPLES, SyntheticText
from joulelab.zoo.workload import SYNTHETIC, WorkloadRequest, refuse_dataset


@dataclass(frozen=True)
class TokenRows:
    rows: Rows
    """Which rows belong to the split."""
    sequences: Callable[[Rows], NDArray[np.int64]]
    """Their ids, [rows, tokens]."""


def open_rows(request: WorkloadRequest, vocabulary: int) -> tuple[TokenRows, TokenRows]:
    """To train on, and held out."""
    if request.dataset != SYNTHETIC:
        raise refuse_dataset(request)
    return _synthetic(request, vocabulary, request.split), _synthetic(request, vocabulary, "validation")


def _synthetic(request: WorkloadRequest, vocabulary: int, wanted: str) -> TokenRows:
    split = parse_split(wanted)
    # splits differ in their seed, so that no sequence is in two of them
    text = SyntheticText(vocabulary, request.shape["tokens"], seed=list(SAMPLES).index(split.name))
    return TokenRows(split.rows(SAMPLES[split.name]), text.sequences)
