"""Tables of the zoo: all models, or one with its sizes and analytic FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import NOTHING
from joulelab.units import count_text, flops_text, size_text


def listing_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    cells = [
        (
            row["name"],
            row["family"],
            row["task"],
            ", ".join(f"{size['name']} {count_text(size['parameters'])}" for size in row["sizes"]),
            shape_text(row["sizes"][0]["shape"]),
            needs_text(row["needs"]),
        )
        for row in rows
    ]
    note = "Sizes with their parameters, the published default first; the input is the default's. ✓ installed, ✗ not."
    return make_grid("The zoo", "Model!|Family|Task|Sizes|Input|Needs", cells, note)


def model_grids(row: Mapping[str, Any]) -> tuple[Grid, ...]:
    facts = [
        ("about", row["about"]),
        ("family", row["family"]),
        ("task", row["task"]),
        ("one item", row["item"]),
        ("data", "synthetic" + (f", or {row['dataset']}" if row["dataset"] else "")),
        ("needs", needs_text(row["needs"])),
    ]
    sizes = [
        (
            size["name"],
            count_text(size["parameters"]),
            shape_text(size["shape"]),
            str(size["batch_size"]),
            size["hub_id"] or NOTHING,
        )
        for size in row["sizes"]
    ]
    titles = "Size!|Parameters>|Input|Batch size>|Published weights"
    return (
        make_grid(str(row["name"]), "What!|Value", facts),
        make_grid("Sizes", titles, sizes, "The first is the default; shape.NAME=N sets another input."),
    )


def paper_grids(cost: Mapping[str, Any], item: str) -> tuple[Grid, ...]:
    """FLOPs and bytes of one size."""
    if cost["training_flops"] is None:
        rows = [("FLOPs", f"cannot be counted: {cost['how']}")]
    else:
        rows = [
            (f"forward, one {item}", flops_text(cost["forward_flops"])),
            (f"forward and backward, one {item}", flops_text(cost["training_flops"])),
            ("by", f"matrix products, convolutions and attention, counted on {cost['how']}"),
        ]
    size = f"{cost['size']}, {shape_text(cost['shape'])}"
    parameters = f"{cost['parameters']:,}"
    if cost["trained_parameters"] != cost["parameters"]:
        parameters += f", of which {cost['trained_parameters']:,} are trained"
    flops = make_grid(f"Analytic cost: {size}", "What!|Value", [("parameters", parameters), *rows])
    return (flops, bytes_grid(cost["bytes"]))


def bytes_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    cells = [
        (
            row["precision"],
            row["optimizer"],
            *(size_text(value) for value in row["parts"].values()),
            size_text(row["sum"]),
        )
        for row in rows
    ]
    parts = "|".join(f"{name.capitalize()}>" for name in rows[0]["parts"]) if rows else ""
    note = "Memory of training independent of the batch size; activations are additional and grow with it."
    return make_grid("Bytes", f"Precision!|Optimizer!|{parts}|Sum>", cells, note)


def shape_text(shape: Mapping[str, int]) -> str:
    """`tokens 1024`"""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items()) or NOTHING


def needs_text(needs: Mapping[str, bool]) -> str:
    return ", ".join(f"{name} {'✓' if there else '✗'}" for name, there in needs.items())
