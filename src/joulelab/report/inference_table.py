"""An inference run as tables: the rows, what taking turns says about them, and what was not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from joulelab.report.grid import Grid, make_grid
from joulelab.report.inference_generation import generation_grids
from joulelab.report.inference_notes import (
    crowd_notes,
    ended_notes,
    energy_notes,
    memory_notes,
    missing_notes,
    unused_gpu_notes,
)
from joulelab.report.inference_ratios import input_text, ratio_grid
from joulelab.report.inference_rows import GENERATION, InferenceRow, inference_rows, pareto, row_ratios, why_no_front
from joulelab.report.inference_words import energy_cell, where_text
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord
from joulelab.units import count_text, percent_text, size_text, three_digits, with_prefix

Cell = Callable[[InferenceRow], str]


def inference_grids(record: RunRecord) -> list[Grid]:
    rows = inference_rows(record)
    if not rows:
        return generation_grids(record)
    grids = [rows_grid(rows, [*missing_notes(rows, record), *unused_gpu_notes(rows, record)]), cost_grid(rows)]
    if any(row.values["state"]["readings"] for row in rows):
        grids.append(card_grid(rows))
    ratios = row_ratios(rows)
    return [*grids, ratio_grid(ratios)] if ratios else grids


def rows_grid(rows: Sequence[InferenceRow], missing: Sequence[str]) -> Grid:
    """Time and joules; a column that says the same in every row stands in the caption."""
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
    """How much was run, and how well the machine was used."""
    columns: list[tuple[str, Cell]] = [
        *_differing(rows),
        ("Waited for\nmedian ms>", lambda row: _ms(row.values["waited_s"])),
        ("Blocks>", lambda row: f"{row.values['latency']['measurements']}"),
        ("Calls>", lambda row: f"{row.values['calls']:,}"),
        ("Run for>", lambda row: f"{row.values['seconds']:.1f} s"),
        ("FLOP per\nitem>", lambda row: _flops(row)),
        ("MFU>", lambda row: percent_text(row.values["mfu"]) if row.values["mfu"] is not None else NOTHING),
        ("Memory>", lambda row: size_text(row.values["memory_bytes"])),
    ]
    return _table("How it was run", columns, rows, " ".join(_cost_notes(rows)))


def card_grid(rows: Sequence[InferenceRow]) -> Grid:
    """What the GPU was like meanwhile: medians, and what held it back for which share of the readings."""
    columns: list[tuple[str, Cell]] = [
        *_differing(rows),
        ("SM\n%>", lambda row: _state(row, "sm_utilisation_percent")),
        ("MHz>", lambda row: _state(row, "sm_clock_mhz")),
        ("°C>", lambda row: _state(row, "temperature_c")),
        ("Held back by", lambda row: _throttle(row.values["state"]["throttled"])),
    ]
    return _table("The GPU meanwhile", columns, rows, "")


def _table(caption: str, columns: Sequence[tuple[str, Cell]], rows: Sequence[InferenceRow], note: str) -> Grid:
    cells = [tuple(cell(row) for _, cell in columns) for row in rows]
    return make_grid(caption, "|".join(title for title, _ in columns), cells, note)


_SETTINGS = {"batch_size": "Batch>", "tokens": "Tokens>", "norm": "Norm!", "mode": "Mode!", "dtype": "Numbers!"}


def _differing(rows: Sequence[InferenceRow]) -> list[tuple[str, Cell]]:
    """What tells the rows apart; a single row has its batch size."""
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
    """By its way, and by its input where there are several."""
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
    return "; ".join(f"{reason} ({percent_text(share, 0)})" for reason, share in shares.items()) or "nothing"


def _row_notes(rows: Sequence[InferenceRow], missing: Sequence[str]) -> list[str]:
    item = rows[0].values["item"]
    named = [(_called(row, rows), row) for row in rows]
    crowded = crowd_notes(named)
    no_front = why_no_front(rows) if len(rows) > 1 and any(row.energy for row in rows) else ""
    notes = [
        *crowded,
        *([f"No Pareto front is marked: {no_front}."] if no_front else []),
        "Latency: median of torch.utils.benchmark's blocks, each a stream of calls between two synchronisations. "
        f"Per second and per {item}: means over all calls in the same windows.",
        *missing,
        *energy_notes(rows),
    ]
    return [*notes, *ended_notes(named)]


def _cost_notes(rows: Sequence[InferenceRow]) -> list[str]:
    notes = ["Waited for: the host waits for each result before it starts the next."]
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
    said = list(dict.fromkeys(note for row in rows for note in row.values["notes"]))
    return [*notes, *([f"Notes: {'; '.join(said)}."] if said else [])]


def rows_data(record: RunRecord) -> list[dict[str, Any]]:
    """The rows as plain data with net joules, for scripts; parts of a generation are rows as well."""
    rows = inference_rows(record) or inference_rows(record, GENERATION)
    front, told = pareto(rows), not why_no_front(rows)
    return [
        {
            "stage": row.stage,
            **row.values,
            "items_per_s": row.items_per_s,
            "energy": None if row.energy is None else row.energy.model_dump(),
            "on_pareto_front": row in front if told else None,
        }
        for row in rows
    ]
