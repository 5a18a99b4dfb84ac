"""Tables of an inference run: time and energy of forward passes and of generation, ratios, state of the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.infer.energy import ItemEnergy
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.tables.inference_rows import (
    GENERATION,
    InferenceRow,
    Named,
    contention_notes,
    ended_notes,
    energy_cell,
    energy_notes,
    inference_rows,
    input_text,
    memory_notes,
    missing_notes,
    pareto,
    ratio_grid,
    row_ratios,
    unused_gpu_notes,
    where_text,
    why_no_front,
)
from joulelab.report.tables.inference_rows import GENERATION as TRACKER
from joulelab.report.tables.serving_tables import serving_grids
from joulelab.report.wording import INCONCLUSIVE, NOTHING
from joulelab.runs.record import RunRecord
from joulelab.units import count_text, percent_text, plural, size_text, three_digits, with_prefix

_WAYS = {"mode": "Mode!", "dtype": "Dtype!"}


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
        """Tokens of a response from decoding; the first comes from prefill."""
        return int(self.whole.values["new_tokens"]) - 1

    @property
    def token_s(self) -> float:
        return self.decode.latency_s / self.decoded

    @property
    def summed_j(self) -> tuple[float, float] | None:
        """Prefill plus decode with its half-width, to compare with whole responses."""
        parts = [self.prefill.energy, self.decode.energy]
        if any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        return sum(part.gross_j for part in known), math.hypot(*(part.gross_half_width_j for part in known))

    @property
    def named_parts(self) -> tuple[tuple[str, InferenceRow], ...]:
        return ("prefill", self.prefill), ("decode", self.decode), ("response", self.whole)


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
    return [(f"batch {row.batch}, {row.whole.name}, {part}", found) for row in rows for part, found in row.named_parts]


def prompt_notes(rows: Sequence[InferenceRow]) -> list[str]:
    """About prompts from a file; empty for random ones."""
    notes = []
    for row in rows:
        facts = row.values.get("prompts")
        if not facts:
            continue
        text = (
            f"Prompts: {facts['count']} of {facts['file']}, {_length_range(facts['shortest'], facts['longest'])}, "
            "padded to the longest of a batch."
        )
        if facts["repeated"]:
            text += f" {facts['repeated']} of them are used twice to fill the last batch."
        if facts["batches_measured"] < facts["batches"]:
            text += (
                f" Only {facts['batches_measured']} of {facts['batches']} batches were measured in the given time; "
                "raise --min-run-time to cover all."
            )
        notes.append(text)
    return list(dict.fromkeys(notes))


def _weight_notes(rows: Sequence[InferenceRow]) -> list[str]:
    if not rows[0].values.get("dequantized"):  # older records have no such value
        return []
    dtypes = ", ".join(dict.fromkeys(str(row.values["dtype"]) for row in rows))
    return [f"The weights of the GGUF file were dequantized: the model ran as {dtypes}, not in the file's format."]


def _length_range(shortest: int, longest: int) -> str:
    return plural(longest, "token") if shortest == longest else f"{shortest} to {plural(longest, 'token')}"


def _counted(number: float, noun: str) -> str:
    """`1 token`, `2.5 tokens`: the mean length of prompts need not be whole."""
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _how(rows: Sequence[GenerationRow]) -> tuple[str, Callable[[GenerationRow], tuple[str, ...]]]:
    """Titles and cells of the settings that differ; common ones are in the caption."""
    keys = [key for key in _WAYS if len({row.whole.values[key] for row in rows}) > 1]
    titles = "".join(f"|{_WAYS[key]}" for key in keys)
    return f"Batch>{titles}", lambda row: (str(row.batch), *(str(row.whole.values[key]) for key in keys))


def _common(rows: Sequence[GenerationRow]) -> str:
    values = rows[0].whole.values
    return "".join(f", {values[key]}" for key in _WAYS if len({row.whole.values[key] for row in rows}) == 1)


def _time_grid(rows: Sequence[GenerationRow]) -> Grid:
    values, (how, settings_of) = rows[0].whole.values, _how(rows)
    has_energy = any(part.energy for row in rows for _, part in row.named_parts)
    cells = [
        (
            *settings_of(row),
            *((energy_cell(row.decode.energy, row.decoded), energy_cell(row.whole.energy)) if has_energy else ()),
            f"{1000 * row.prefill.latency_s:.4g} ({1000 * row.prefill.values['latency']['iqr_s']:.3g})",
            f"{1000 * row.token_s:.4g} ({1000 * row.decode.values['latency']['iqr_s'] / row.decoded:.3g})",
            f"{count_text(row.prefill.items_per_s * values['prompt_tokens'])}, "
            f"{count_text(row.decode.items_per_s * row.decoded)}",
            f"{row.whole.latency_s:.4g}",
            size_text(row.whole.values["memory_bytes"]),
        )
        for row in rows
    ]
    energy = "Energy per\noutput token>|Energy per\nresponse>|" if has_energy else ""
    titles = (
        f"{how}|{energy}First token\nms (IQR)>|Per token\nms (IQR)>|Tokens/s\nprefill,\ndecode>|Response\ns>|Memory>"
    )
    note = "".join(f"{text} " for text in contention_notes(_named(rows))) + (
        "First token: prefill, which processes the prompt and selects the first token. Per token: steady state, "
        f"decoding {_counted(values['new_tokens'] - 1, 'token')} repeatedly from the end of a prompt of "
        f"{_counted(values['prompt_tokens'], 'token')}, with a cache of fixed size, compiled and warmed up. "
        "Times are medians. Tokens/s: of all sequences of a batch, a mean over all calls, like power and energy. "
        "The mode is that of the decoding step; prefill always runs eagerly."
    )
    whole = [row.whole for row in rows]
    note = " ".join([*prompt_notes(whole), note, *_weight_notes(whole), *memory_notes(whole)])
    mean = " (mean)" if values.get("prompts") else ""
    lengths = (
        f"{_counted(values['prompt_tokens'], 'prompt token')}{mean}, {_counted(values['new_tokens'], 'new token')}"
    )
    caption = f"Generation: {where_text(values)}, {lengths}{_common(rows)}"
    return make_grid(caption, titles, cells, note)


def _energy_grid(rows: Sequence[GenerationRow], record: RunRecord) -> Grid:
    how, settings_of = _how(rows)
    cells = [
        (
            *settings_of(row),
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
        "to whole responses, and whether it is within the intervals; inconclusive if these are wider than "
        f"±{100 * _CLOSE_REL:.0f} %."
    ]
    notes += unused_gpu_notes(parts, record)
    note = " ".join([*notes, *energy_notes(parts), *ended_notes(_named(rows))])
    return make_grid("Energy of generation", titles, cells, note)


# A difference within a wider interval shows nothing.
_CLOSE_REL = 0.1


def _power(energy: ItemEnergy | None) -> str:
    return "missing" if energy is None else three_digits(energy.power_w)


def _agreement(row: GenerationRow) -> str:
    summed, whole = row.summed_j, row.whole.energy
    if summed is None or whole is None:
        return NOTHING
    off, half_width = summed[0] / whole.gross_j - 1, math.hypot(summed[1], whole.gross_half_width_j) / whole.gross_j
    word = "differs" if abs(off) > half_width else "agrees" if half_width <= _CLOSE_REL else INCONCLUSIVE
    return f"{100 * off:+.1f} %, {word}"


Cell = Callable[[InferenceRow], str]


def inference_grids(record: RunRecord) -> list[Grid]:
    rows = inference_rows(record)
    if not rows:
        return generation_grids(record) or serving_grids(record)
    grids = [rows_grid(rows, [*missing_notes(rows, record), *unused_gpu_notes(rows, record)]), cost_grid(rows)]
    if any(row.values["state"]["readings"] for row in rows):
        grids.append(card_grid(rows))
    ratios = row_ratios(rows)
    return [*grids, ratio_grid(ratios)] if ratios else grids


def rows_grid(rows: Sequence[InferenceRow], missing: Sequence[str]) -> Grid:
    """Time and energy; settings common to all rows are in the caption."""
    item = rows[0].values["item"]
    front = pareto(rows)
    columns: list[tuple[str, Cell]] = [
        *_differing(rows),
        ("Latency\nmedian\nms>", lambda row: _ms(row.latency_s)),
        ("IQR\nms>", lambda row: _ms(row.values["latency"]["iqr_s"])),
        (f"{item}s\nper s\nmean>", lambda row: _rate(row.items_per_s)),
    ]
    if any(row.energy for row in rows):
        columns += [
            ("W\nmean>", lambda row: three_digits(row.energy.power_w) if row.energy else "missing"),
            (f"Energy per\n{item}\ngross>", lambda row: energy_cell(row.energy)),
            ("\n\nnet>", lambda row: energy_cell(row.energy, net=True)),
        ]
        if len(rows) > 1 and front:
            columns.append(("Pareto!", lambda row: "yes" if row in front else ""))
    return _table(f"Inference: {_alike(rows)}", columns, rows, " ".join(_row_notes(rows, missing)))


def cost_grid(rows: Sequence[InferenceRow]) -> Grid:
    """Number of calls, FLOPs, utilization and memory."""
    columns: list[tuple[str, Cell]] = [
        *_differing(rows),
        ("Synchronized\nmedian ms>", lambda row: _ms(row.values["waited_s"])),
        ("Blocks>", lambda row: f"{row.values['latency']['measurements']}"),
        ("Calls>", lambda row: f"{row.values['calls']:,}"),
        ("Run for>", lambda row: f"{row.values['seconds']:.1f} s"),
        ("FLOP per\nitem>", lambda row: _flops(row)),
        ("MFU>", lambda row: percent_text(row.values["mfu"]) if row.values["mfu"] is not None else NOTHING),
        ("Memory>", lambda row: size_text(row.values["memory_bytes"])),
    ]
    return _table("How it was run", columns, rows, " ".join(_cost_notes(rows)))


def card_grid(rows: Sequence[InferenceRow]) -> Grid:
    """Medians of the GPU's state, and throttle reasons with their share of the readings."""
    columns: list[tuple[str, Cell]] = [
        *_differing(rows),
        ("SM\n%>", lambda row: _state(row, "sm_utilization_percent")),
        ("MHz>", lambda row: _state(row, "sm_clock_mhz")),
        ("°C>", lambda row: _state(row, "temperature_c")),
        ("Throttled by", lambda row: _throttle(row.values["state"]["throttled"])),
    ]
    return _table("GPU state", columns, rows, "")


def _table(caption: str, columns: Sequence[tuple[str, Cell]], rows: Sequence[InferenceRow], note: str) -> Grid:
    cells = [tuple(cell(row) for _, cell in columns) for row in rows]
    return make_grid(caption, "|".join(title for title, _ in columns), cells, note)


_SETTINGS = {"batch_size": "Batch>", "tokens": "Tokens>", "norm": "Norm!", "mode": "Mode!", "dtype": "Dtype!"}


def _differing(rows: Sequence[InferenceRow]) -> list[tuple[str, Cell]]:
    """Settings that differ between the rows; a single row has its batch size."""
    found = [key for key in _SETTINGS if len({row.values[key] for row in rows}) > 1] or ["batch_size"]

    def cell(key: str) -> Cell:
        return lambda row: str(row.values[key] or NOTHING)

    return [(_SETTINGS[key], cell(key)) for key in found]


def _alike(rows: Sequence[InferenceRow]) -> str:
    words = {"batch_size": "batch {}", "tokens": "{} tokens", "norm": "{}", "mode": "{}", "dtype": "{}"}
    first = rows[0].values
    same = [key for key in _SETTINGS if first[key] and len({row.values[key] for row in rows}) == 1]
    texts = [words[key].format(first[key]) for key in same if len(rows) > 1 or key != "batch_size"]
    return ", ".join([where_text(first), *texts])


def _called(row: InferenceRow, rows: Sequence[InferenceRow]) -> str:
    """Its name, with its input if there are several."""
    return f"{input_text(row)}, {row.name}" if len({one.group for one in rows}) > 1 else row.name


def _rate(items_per_s: float) -> str:
    return three_digits(items_per_s) if items_per_s < 1000 else count_text(items_per_s)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"


def _flops(row: InferenceRow) -> str:
    flops = row.values["flops_per_item"]
    return NOTHING if flops is None else with_prefix(flops, "").strip()


def _state(row: InferenceRow, what: str) -> str:
    found = row.values["state"][what]
    return NOTHING if found is None else f"{found['median']:.0f}"


def _throttle(shares: Mapping[str, float]) -> str:
    return "; ".join(f"{reason} ({percent_text(share, 0)})" for reason, share in shares.items()) or NOTHING


def _row_notes(rows: Sequence[InferenceRow], missing: Sequence[str]) -> list[str]:
    item = rows[0].values["item"]
    named = [(_called(row, rows), row) for row in rows]
    contention = contention_notes(named)
    no_front = why_no_front(rows) if len(rows) > 1 and any(row.energy for row in rows) else ""
    notes = [
        *contention,
        *([f"No Pareto front is marked: {no_front}."] if no_front else []),
        "Latency: median of torch.utils.benchmark's blocks, each a stream of calls between two synchronizations. "
        f"Per second and per {item}: means over all calls in the same windows.",
        *missing,
        *energy_notes(rows),
    ]
    return [*notes, *ended_notes(named)]


def _cost_notes(rows: Sequence[InferenceRow]) -> list[str]:
    notes = ["Synchronized: the host waits for each result before the next call."]
    no_mfu = list(dict.fromkeys(row.values["mfu_missing"] for row in rows if row.values["mfu_missing"]))
    if no_mfu:
        notes.append(f"MFU not computed: {'; '.join(no_mfu)}.")
    if rows[0].values["device"] != "cuda":
        notes += [*memory_notes(rows), "The model ran on the CPU."]
    fastest = [row for row in rows if row.values["mode"] == "fastest"]
    notes += [
        f"Chosen for {_called(row, rows)}: {row.values['recipe']}{row.values.get('chosen_from', '')}."
        for row in fastest
    ]
    remarks = list(dict.fromkeys(note for row in rows for note in row.values["notes"]))
    return [*notes, *([f"Notes: {'; '.join(remarks)}."] if remarks else [])]


def rows_data(record: RunRecord) -> list[dict[str, Any]]:
    """The rows as plain data with net energy; parts of a generation are rows too."""
    rows = inference_rows(record) or inference_rows(record, GENERATION)
    front, known = pareto(rows), not why_no_front(rows)
    return [
        {
            "stage": row.stage,
            **row.values,
            "items_per_s": row.items_per_s,
            "energy": None if row.energy is None else row.energy.model_dump(),
            "on_pareto_front": row in front if known else None,
        }
        for row in rows
    ]
