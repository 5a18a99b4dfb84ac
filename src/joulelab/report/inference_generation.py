"""Generation in two tables: time to the first token and per token, joules per token and per response."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.infer.energy import PerInference
from joulelab.report.grid import Grid, make_grid
from joulelab.report.inference_notes import (
    Named,
    crowd_notes,
    ended_notes,
    energy_notes,
    memory_notes,
    missing_notes,
    unused_gpu_notes,
)
from joulelab.report.inference_rows import GENERATION as TRACKER
from joulelab.report.inference_rows import InferenceRow, inference_rows
from joulelab.report.inference_words import energy_cell, where_text
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord
from joulelab.units import count_text, size_text, three_digits

_WAYS = {"mode": "Mode!", "dtype": "Numbers!"}


@dataclass(frozen=True)
class GenerationRow:
    prefill: InferenceRow
    decode: InferenceRow
    whole: InferenceRow

    @property
    def batch(self) -> int:
        return int(self.whole.values["batch_size"])

    @property
    def decoded(self) -> int:
        """Tokens of a response that decoding gives; the first comes from prefill."""
        return int(self.whole.values["new_tokens"]) - 1

    @property
    def token_s(self) -> float:
        return self.decode.latency_s / self.decoded

    @property
    def summed_j(self) -> tuple[float, float] | None:
        """Prefill and decode together, with half-width: what whole responses should take."""
        parts = [self.prefill.energy, self.decode.energy]
        if any(part is None for part in parts):
            return None
        told = [part for part in parts if part is not None]
        return sum(part.gross_j for part in told), math.hypot(*(part.gross_half_width_j for part in told))


def generation_rows(record: RunRecord) -> list[GenerationRow]:
    found: dict[tuple[Any, ...], dict[str, InferenceRow]] = {}
    for row in inference_rows(record, TRACKER):
        key = (row.values["batch_size"], row.values["mode"], row.values["dtype"])
        found.setdefault(key, {})[row.values["part"]] = row
    return [
        GenerationRow(parts["prefill"], parts["decode"], parts["infer"])
        for parts in found.values()
        if {"prefill", "decode", "infer"} <= set(parts)
    ]


def generation_grids(record: RunRecord) -> list[Grid]:
    rows = generation_rows(record)
    return [_time_grid(rows), _energy_grid(rows, record)] if rows else []


def _named(rows: Sequence[GenerationRow]) -> Named:
    """Each part under the row's name and its own."""
    return [
        (f"batch {row.batch}, {row.whole.name}, {part}", found)
        for row in rows
        for part, found in (("prefill", row.prefill), ("decode", row.decode), ("response", row.whole))
    ]


def _how(rows: Sequence[GenerationRow]) -> tuple[str, Callable[[GenerationRow], tuple[str, ...]]]:
    """Titles and cells of what tells the rows apart; what they have in common stands in the caption."""
    keys = [key for key in _WAYS if len({row.whole.values[key] for row in rows}) > 1]
    titles = "".join(f"|{_WAYS[key]}" for key in keys)
    return f"Batch>{titles}", lambda row: (str(row.batch), *(str(row.whole.values[key]) for key in keys))


def _common(rows: Sequence[GenerationRow]) -> str:
    values = rows[0].whole.values
    return "".join(f", {values[key]}" for key in _WAYS if len({row.whole.values[key] for row in rows}) == 1)


def _time_grid(rows: Sequence[GenerationRow]) -> Grid:
    values, (how, told) = rows[0].whole.values, _how(rows)
    cells = [
        (
            *told(row),
            f"{1000 * row.prefill.latency_s:.4g}",
            f"{1000 * row.prefill.values['latency']['iqr_s']:.3g}",
            count_text(row.prefill.items_per_s * values["prompt_tokens"]),
            f"{1000 * row.token_s:.4g}",
            f"{1000 * row.decode.values['latency']['iqr_s'] / row.decoded:.3g}",
            count_text(row.decode.items_per_s * row.decoded),
            f"{row.whole.latency_s:.4g}",
            size_text(row.whole.values["memory_bytes"]),
        )
        for row in rows
    ]
    titles = (
        f"{how}|First token\nmedian ms>|IQR\nms>|Prefill mean\ntokens/s>|Per token\nmedian ms>|IQR\nms>|"
        "Decode mean\ntokens/s>|Response\nmedian s>|Memory>"
    )
    note = "".join(f"{text} " for text in crowd_notes(_named(rows))) + (
        "First token: prefill, in which the prompt is read and the first token chosen. Per token: steady state, which "
        f"is decoding {values['new_tokens'] - 1} tokens from the end of a prompt of {values['prompt_tokens']}, again "
        "and again, the cache of fixed size, everything compiled and run before. Tokens/s: of all rows of a batch, "
        "a mean over all calls, as watts and joules are. "
        "The mode is that of the decoding step; the prompt is always read eagerly."
    )
    note = " ".join([note, *memory_notes([row.whole for row in rows])])
    lengths = f"{values['prompt_tokens']} prompt tokens, {values['new_tokens']} new ones"
    caption = f"Generation: {where_text(values)}, {lengths}{_common(rows)}"
    return make_grid(caption, titles, cells, note)


def _energy_grid(rows: Sequence[GenerationRow], record: RunRecord) -> Grid:
    how, told = _how(rows)
    cells = [
        (
            *told(row),
            f"{_power(row.prefill.energy)}, {_power(row.decode.energy)}",
            energy_cell(row.prefill.energy),
            energy_cell(row.decode.energy, row.decoded),
            energy_cell(row.decode.energy, row.decoded, net=True),
            energy_cell(row.whole.energy),
            energy_cell(row.whole.energy, net=True),
            _agreement(row),
        )
        for row in rows
    ]
    titles = (
        f"{how}|W prefill,\ndecode>|Energy per\nprompt>|Energy per\noutput token>|net>|"
        "Energy per\nresponse>|net>|Sum of\nparts"
    )
    parts = [found for _, found in _named(rows)]
    notes = missing_notes(parts, record) or [
        "Prefill, decode and whole responses were measured separately. Sum of parts: difference of prefill + decode "
        "to whole responses, and whether it is within the intervals."
    ]
    notes += unused_gpu_notes(parts, record)
    note = " ".join([*notes, *energy_notes(parts), *ended_notes(_named(rows))])
    return make_grid("Joules of generation", titles, cells, note)


def _power(energy: PerInference | None) -> str:
    return "missing" if energy is None else three_digits(energy.power_w)


def _agreement(row: GenerationRow) -> str:
    summed, whole = row.summed_j, row.whole.energy
    if summed is None or whole is None:
        return NOTHING
    off = summed[0] / whole.gross_j - 1
    within = abs(summed[0] - whole.gross_j) <= math.hypot(summed[1], whole.gross_half_width_j)
    return f"{100 * off:+.1f} %, {'agrees' if within else 'differs'}"
