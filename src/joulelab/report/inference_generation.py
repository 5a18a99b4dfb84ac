"""Generation in two tables: time to the first token and per token, joules per token and per response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.infer.energy import PerInference
from joulelab.report.grid import Grid, make_grid
from joulelab.report.inference_rows import InferenceRow, inference_rows
from joulelab.report.inference_words import where_text, with_doubt
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord
from joulelab.units import count_text, energy_text, size_text, three_digits

TRACKER = "generation"


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
    return [_time_grid(rows), _energy_grid(rows)] if rows else []


def _how(row: GenerationRow) -> tuple[str, str]:
    return str(row.batch), f"{row.whole.values['mode']}, {row.whole.values['dtype']}"


def _time_grid(rows: Sequence[GenerationRow]) -> Grid:
    values = rows[0].whole.values
    cells = [
        (
            *_how(row),
            f"{1000 * row.prefill.latency_s:.4g}",
            f"{1000 * row.prefill.values['latency']['iqr_s']:.3g}",
            count_text(row.batch * values["prompt_tokens"] / row.prefill.latency_s),
            f"{1000 * row.token_s:.4g}",
            f"{1000 * row.decode.values['latency']['iqr_s'] / row.decoded:.3g}",
            count_text(row.batch / row.token_s),
            f"{row.whole.latency_s:.4g}",
            size_text(row.whole.values["memory_bytes"]),
        )
        for row in rows
    ]
    titles = (
        "Batch>|Decoding!|First token\nms>|IQR>|Prefill\ntokens/s>|Per token\nms>|IQR>|Decode\ntokens/s>|"
        "Response\ns>|Memory>"
    )
    note = (
        "First token: prefill, in which the prompt is read and the first token chosen. Per token: steady state, which "
        f"is decoding {values['new_tokens'] - 1} tokens from the end of a prompt of {values['prompt_tokens']}, again "
        "and again, the cache of fixed size, everything compiled and run before. Tokens/s: of all rows of a batch. "
        "The mode is that of the decoding step; the prompt is always read eagerly."
    )
    caption = (
        f"Generation: {where_text(values)}, {values['prompt_tokens']} prompt tokens, {values['new_tokens']} new ones"
    )
    return make_grid(caption, titles, cells, note)


def _energy_grid(rows: Sequence[GenerationRow]) -> Grid:
    cells = [
        (
            *_how(row),
            _power(row.prefill.energy),
            _power(row.decode.energy),
            _joules(row.prefill.energy, 1),
            _joules(row.decode.energy, row.decoded),
            _net(row.decode.energy, row.decoded),
            _joules(row.whole.energy, 1),
            _net(row.whole.energy, 1),
            _agreement(row),
        )
        for row in rows
    ]
    titles = (
        "Batch>|Decoding!|Prefill\nW>|Decode\nW>|Per prompt>|Per output\ntoken>|net>|Per\nresponse>|net>|"
        "Prefill + decode"
    )
    reasons = list(dict.fromkeys(row.whole.values["why_no_energy"] for row in rows if row.whole.energy is None))
    note = (
        f"Not measured: joules and watts. {'; '.join(reasons)}."
        if reasons
        else (
            "Prefill, decode and whole responses were measured apart; the last column is the sum of the first two "
            "beside whole responses. net: less the idle power."
        )
    )
    return make_grid("Joules of generation", titles, cells, note)


def _power(energy: PerInference | None) -> str:
    return "missing" if energy is None else three_digits(energy.power_w)


def _joules(energy: PerInference | None, over: int) -> str:
    if energy is None:
        return "missing"
    return with_doubt(energy.gross_j / over, energy.gross_half_width_j / over)


def _net(energy: PerInference | None, over: int) -> str:
    if energy is None or energy.net_j is None or energy.net_half_width_j is None:
        return NOTHING
    return with_doubt(energy.net_j / over, energy.net_half_width_j / over)


def _agreement(row: GenerationRow) -> str:
    summed, whole = row.summed_j, row.whole.energy
    if summed is None or whole is None:
        return NOTHING
    off = summed[0] / whole.gross_j - 1
    within = abs(summed[0] - whole.gross_j) <= math.hypot(summed[1], whole.gross_half_width_j)
    return f"{energy_text(summed[0])}, {100 * off:+.1f} % ({'agrees' if within else 'differs'})"
