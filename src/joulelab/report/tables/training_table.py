"""Tables of a zoo training (speed, energy per item, loss, MFU), phases of a step, and utilization during a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.meter.figures import EnergyFigure, amount_text, figure_text, method_text
from joulelab.meter.trace import read_lines
from joulelab.report.compare.method_rows import last_training
from joulelab.report.energy_sums import brief_missing_text
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import NOTHING
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord, StageRecord
from joulelab.units import count_text, flops_text, percent_text, power_text, size_text, three_digits, with_prefix

# Results of a zoo training are named after these.
TRAIN, EVALUATE = "model.train", "model.evaluate"
# Best first: isolated phases, then phases long enough to measure, then shares by time.
_ENERGY_WAYS = ("isolated", "direct", "time-share")
_PHASES_OF_A_STEP = ("input", "forward", "backward", "optimizer_step")


def training_grids(record: RunRecord) -> list[Grid]:
    """The zoo's training, and the phases of any stage whose trackers recorded them."""
    stage = zoo_training(record)
    grids = [training_grid(record, stage)] if stage else []
    phases = (phase_grid(record, name) for name in record.findings)
    return [*grids, *(grid for grid in phases if grid)]


def results_in_training_table(record: RunRecord) -> set[str]:
    """Names of results that the training's own table shows."""
    return {name for name in record.results if name.startswith("model.")} if zoo_training(record) else set()


def zoo_training(record: RunRecord) -> StageRecord | None:
    return last_training(record, "student") if record.spec.get("pipeline") == "train" else None


def training_grid(record: RunRecord, stage: StageRecord) -> Grid:
    rows = [
        ("speed", _speed(record, stage)),
        ("energy", _energy(record, stage)),
    ]
    if record.status == "done" or _model_findings(record):  # the rest is written when the training ends
        rows += [
            ("loss", _loss(record)),
            ("model", _model(record)),
            ("model FLOPs utilization (MFU)", _mfu(record)),
            ("peak memory", _value(record, "model.peak_memory_bytes", size_text)),
        ]
    if _model_findings(record).get("notes"):
        rows.append(("chosen automatically", str(_model_findings(record)["notes"])))
    return make_grid("Training", "What!|Value", rows)


def item_name(record: RunRecord) -> str:
    return str(_model_findings(record).get("item", "sample"))


def _model_findings(record: RunRecord) -> Mapping[str, Any]:
    stage = zoo_training(record)
    return record.findings.get(stage.name, {}).get("model", {}) if stage else {}


def _number(record: RunRecord, name: str) -> float | None:
    return record.results[name].value if name in record.results else None


def _value(record: RunRecord, name: str, text: Any) -> str:
    value = _number(record, name)
    return NOTHING if value is None else str(text(value))


def _speed(record: RunRecord, stage: StageRecord) -> str:
    if not stage.samples_per_s:
        return NOTHING
    parts = [f"{three_digits(stage.samples_per_s)} {item_name(record)}s/s over the stage"]
    typical = _number(record, f"{TRAIN}.items_per_s")
    if typical is not None:
        parts.append(f"{three_digits(typical)} typical (median over logging intervals)")
    if stage.tokens_per_s:
        parts.append(f"{with_prefix(stage.tokens_per_s, 'tokens/s')}")
    return "; ".join(parts)


def _energy(record: RunRecord, stage: StageRecord) -> str:
    figure = stage.item_energy or stage.best
    each = stage.energy_per("sample")
    unused = f"; GPU: {power_text(stage.unused_gpu_w)}, not used and not included" if stage.unused_gpu_w else ""
    if each is None or each.energy_j is None:
        return figure_text(figure) + unused if unused else brief_missing_text(record, figure) or figure_text(figure)
    power_w = figure.mean_power_w(stage.duration_s)
    return (
        f"{amount_text(each)} per {item_name(record)}, {method_text(figure)}; mean power {power_text(power_w)}{unused}"
    )


def _loss(record: RunRecord) -> str:
    first, last = _number(record, f"{TRAIN}.first_loss"), _number(record, f"{TRAIN}.final_loss")
    if first is None or last is None:
        return NOTHING
    text = f"{first:.4g} -> {last:.4g}"
    steps = _number(record, f"{TRAIN}.steps")
    text += f" in {steps:.0f} steps" if steps is not None else ""
    held_out = _number(record, f"{EVALUATE}.loss")
    return text if held_out is None else f"{text}; {held_out:.4g} on held-out data"


def _model(record: RunRecord) -> str:
    parts = [f"{_value(record, 'model.parameters', count_text)} parameters"]
    forward = _number(record, "model.forward_flops_per_item")
    training = _number(record, "model.training_flops_per_item")
    how = _model_findings(record).get("flops_counted_on", "")
    if forward is None or training is None:
        return f"{parts[0]}; FLOPs not counted: {how}"
    parts.append(
        f"{flops_text(forward)} forward and {flops_text(training)} forward and backward per {item_name(record)}"
    )
    return f"{'; '.join(parts)} (analytic, counted on {how})"


def _mfu(record: RunRecord) -> str:
    found = _number(record, f"{TRAIN}.mfu")
    return (
        percent_text(found)
        if found is not None
        else f"not computed: {_model_findings(record).get('mfu_missing', NOTHING)}"
    )


def phase_grid(record: RunRecord, stage: str) -> Grid | None:
    """None unless a tracker recorded phases."""
    times, joules, parts = phase_times(record, stage), phase_joules(record, stage), forward_parts(record, stage)
    names = [name for name in _PHASES_OF_A_STEP if name in times or name in joules]
    if not names:
        return None
    whole_j = sum(row["energy_j"] for row in joules.values())
    sensed = _sensed(record, stage)
    rows = []
    for name in names:
        cells = _joule_cells(joules.get(name), whole_j, sensed) if joules else ()
        rows.append((name.replace("_", " "), *_time_cells(name, times), *cells))
        if name == "forward" and joules:
            for part, row in parts.items():
                rows.append((f"  {part}", NOTHING, NOTHING, *_joule_cells(row, whole_j, sensed)))
    titles = "Phase!|Mean ms\nper step>|Share of\ntime>"
    titles += "|Energy\nper step>|Share of\nenergy>|Method" if joules else ""
    of_stage = "" if record.spec.get("pipeline") == "train" else f" of {stage}"
    caption = f"Phases of a step{of_stage} ({phase_clock(record, stage)} time)"
    return make_grid(caption, titles, rows, _checkpoint_note(record, stage))


def _checkpoint_note(record: RunRecord, stage: str) -> str:
    """Time for which checkpoints paused training: they are copied first and written in the background."""
    found = record.stage(stage)
    saved = found.phases.get("checkpoint") if found else None
    if saved is None or not saved.count:
        return ""
    if saved.count == 1:
        return f"A checkpoint paused training for {1000 * saved.sum_s:.0f} ms."
    each = f"{1000 * saved.mean_s:.0f} ms each"
    return f"{saved.count} checkpoints paused training for {each}, {saved.sum_s:.2f} s in total."


def _time_cells(name: str, times: Mapping[str, float]) -> tuple[str, str]:
    whole_s = sum(times.values())
    if name not in times or not whole_s:
        return NOTHING, NOTHING
    return f"{1000 * times[name]:.2f}", percent_text(times[name] / whole_s, 0)


def _sensed(record: RunRecord, stage: str) -> EnergyFigure | None:
    """How the tracker's energy was obtained: method and gain error. Energy of a step is that of covered time."""
    found = record.findings.get(stage, {}).get("energy", {}).get("figure")
    return EnergyFigure.model_validate(found | {"coverage": 1.0, "lower_bound": False}) if found else None


def _joule_cells(found: Mapping[str, Any] | None, whole_j: float, sensed: EnergyFigure | None) -> tuple[str, str, str]:
    if found is None:
        return NOTHING, NOTHING, NOTHING
    share = percent_text(found["energy_j"] / whole_j, 0) if whole_j else NOTHING
    known = sensed or EnergyFigure(energy_j=None, method="counter")
    how = f", {method_text(sensed)}" if sensed else ""
    return amount_text(known.with_interval(found["energy_j"], found["half_width_j"])), share, f"{found['method']}{how}"


def phase_clock(record: RunRecord, stage: str) -> str:
    """`device` if a tracker timed phases on the device, else `host`."""
    return "device" if any(row["clock"] == "device" for row in _timed_rows(record, stage)) else "host"


def phase_times(record: RunRecord, stage: str) -> dict[str, float]:
    """Mean seconds of each phase in one optimizer step."""
    clock, rows = phase_clock(record, stage), _timed_rows(record, stage)
    steps = next((row["count"] for row in rows if row["phase"] == "step" and row["clock"] == clock), 0)
    return {
        row["phase"]: row["mean_s"] * row["count"] / steps
        for row in rows
        if steps and row["clock"] == clock and row["phase"] in _PHASES_OF_A_STEP
    }


def _timed_rows(record: RunRecord, stage: str) -> list[dict[str, Any]]:
    return list(record.findings.get(stage, {}).get("simple", {}).get("phases", []))


def forward_parts(record: RunRecord, stage: str) -> dict[str, dict[str, Any]]:
    """Energy of the teacher's, the student's and other parts of the forward pass, if isolated."""
    return dict(record.findings.get(stage, {}).get("energy", {}).get("isolated", {}).get("parts", {}))


def phase_joules(record: RunRecord, stage: str) -> dict[str, dict[str, Any]]:
    """By the best method that the energy tracker has."""
    found = record.findings.get(stage, {}).get("energy", {})
    ways = [found.get(way, {}).get("phases", {}) for way in _ENERGY_WAYS]
    whole = [way for way in ways if set(_PHASES_OF_A_STEP[1:]) <= set(way)]
    return {name: dict(values) for name, values in whole[0].items()} if whole else {}


@dataclass(frozen=True)
class Utilization:
    gpu_percent: float | None
    """Share of time in which some kernel ran, mean over the GPUs; not the share of a GPU's capacity."""
    cpu_percent: float | None
    """Percentage of all hardware threads of the host."""


def utilization(folder: Path, stage: StageRecord) -> Utilization:
    found: dict[str, list[float]] = {"gpu": [], "host": []}
    for host, attempt, path in RunPaths(folder).traces():
        windows = [(s.start_ns, s.end_ns) for s in stage.segments if (s.host, s.attempt) == (host, attempt)]
        for line in read_lines(path) if windows else ():
            value = _percent(line)
            if value is not None and any(start <= line["mono_ns"] <= end for start, end in windows):
                found[line["kind"]].append(value)
    return Utilization(_mean(found["gpu"]), _mean(found["host"]))


def _percent(line: dict[str, Any]) -> float | None:
    names = {"gpu": "gpu_utilization_percent", "host": "cpu_utilization_percent"}
    return line.get(names.get(str(line.get("kind")), ""))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Tables of the zoo: all models, or one with its sizes and analytic FLOPs and bytes.


def families_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """The names alone, by family."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append(row["name"] if all(row["needs"].values()) else f"{row['name']} ✗")
    cells = [(family, ", ".join(names)) for family, names in found.items()]
    note = "✗ needs a package that is not installed." if any("✗" in names for _, names in cells) else ""
    return make_grid("", "Family!|Models", cells, note)


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
    note = (
        "Sizes with parameters, the published default first. Input: of the default size. ✓ installed, ✗ not installed."
    )
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
    note = "Training memory that does not depend on the batch size; activations come in addition and grow with it."
    return make_grid("Bytes", f"Precision!|Optimizer!|{parts}|Sum>", cells, note)


def shape_text(shape: Mapping[str, int]) -> str:
    """`tokens 1024`"""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items()) or NOTHING


def needs_text(needs: Mapping[str, bool]) -> str:
    return ", ".join(f"{name} {'✓' if there else '✗'}" for name, there in needs.items())
