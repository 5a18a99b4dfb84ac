"""Tables of a server under load: latency and throughput, energy per token and request, and the choice by a limit.

Net energy is computed here and not while the run ran, because the idle baseline after it comes last.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.infer.energy import ItemEnergy
from joulelab.meter.figures import method_text
from joulelab.meter.health import CoreUse
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.tables.inference_rows import energy_cell, energy_notes_of, with_net
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord
from joulelab.units import count_text, plural, three_digits

TRACKER = "serving"


@dataclass(frozen=True)
class ServingRow:
    """One level of load."""

    stage: str
    values: Mapping[str, Any]
    energy: Mapping[str, ItemEnergy | None]
    """By what it is divided by: output_token, input_token, token, request."""
    core_use: CoreUse | None = None

    @property
    def level(self) -> str:
        concurrency = self.values["concurrency"]
        return f"{concurrency}" if concurrency else f"{self.values['rate_per_s']:g}/s"

    def latency_ms(self, name: str, percentile: int | str) -> float | None:
        found = self.values[name]
        return None if found is None else 1000 * float(found[f"p{percentile}" if percentile != "mean" else "mean"])

    @property
    def keeps_limits(self) -> bool:
        """Within the limits at their percentile, steady, and without failed requests."""
        limits, ok = self.values["limits"], self.values["steady"] and not self.values["failed"]
        for name, limit in (("time_to_first_token_s", "ttft_ms"), ("time_per_output_token_s", "tpot_ms")):
            if limits[limit] is not None:
                found = self.latency_ms(name, limits["percentile"])
                ok = ok and found is not None and found <= limits[limit]
        return bool(ok)


def serving_rows(record: RunRecord) -> list[ServingRow]:
    cores = {stage.name: stage.core_use for stage in record.stages}
    return [
        ServingRow(
            stage.name,
            values,
            {unit: with_net({"energy": energy}, record) for unit, energy in values["energy"].items()},
            cores.get(stage.name),
        )
        for stage in record.stages
        if (values := record.findings.get(stage.name, {}).get(TRACKER)) is not None
    ]


def measures_only_the_client(record: RunRecord) -> bool:
    """Whether the server is on another machine, so that the energy of the run is that of the client."""
    rows = serving_rows(record)
    return bool(rows) and not any(row.values["device"] for row in rows)


def best_serving_row(rows: Sequence[ServingRow]) -> ServingRow | None:
    """The least energy per output token within the limits; without energy, the highest throughput within them."""
    within = [row for row in rows if row.keeps_limits]
    known = [(energy.gross_j, row) for row in within if (energy := row.energy["output_token"]) is not None]
    if known:
        return min(known, key=lambda one: one[0])[1]
    return max(within, key=lambda row: float(row.values["output_tokens_per_s"]), default=None)


def limits_text(rows: Sequence[ServingRow]) -> str:
    """`p95 of time per output token at most 50 ms`; empty without limits."""
    limits = rows[0].values["limits"]
    names = (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token"))
    parts = [f"{name} at most {limits[key]:g} ms" for key, name in names if limits[key] is not None]
    return f"p{limits['percentile']} of {' and '.join(parts)}" if parts else ""


def serving_answer(record: RunRecord) -> str:
    """`1.21 J ±2 % per output token, estimated, at 16 concurrent requests (62 tokens/s; p95 of ...)`."""
    rows = serving_rows(record)
    if not rows:
        return ""
    best, limits = best_serving_row(rows), limits_text(rows)
    if best is None:
        why = limits or "steady load without failed requests"
        return f"no level of load meets the condition ({why})"
    energy = best.energy["output_token"]
    amount = "energy per output token missing"
    if energy is not None:
        amount = f"{energy_cell(energy)} per output token, {method_text(energy.gross())}"
    of = f", lowest of {len(rows)} levels" if len(rows) > 1 and energy is not None else ""
    return f"{amount}, at {_load_text(best)}{of} ({_rate(best)} output tokens/s{'; ' + limits if limits else ''})"


def _marked_level(row: ServingRow) -> str:
    return row.level if row.values["steady"] else f"{row.level} *"


def _load_text(row: ServingRow) -> str:
    concurrency = row.values["concurrency"]
    return plural(concurrency, "concurrent request") if concurrency else f"{row.values['rate_per_s']:g} requests/s"


def serving_grids(record: RunRecord) -> list[Grid]:
    rows = serving_rows(record)
    return [latency_grid(rows), energy_grid(rows, record)] if rows else []


def latency_grid(rows: Sequence[ServingRow]) -> Grid:
    best = best_serving_row(rows)
    limited = bool(limits_text(rows))
    titles, cells = _latencies(rows)
    values = rows[0].values
    notes = [
        *_contention(rows),
        "Load: concurrent requests (each client sends its next request when its answer is complete), or arrivals per "
        "second (Poisson). All figures are of the steady window: the warm-up was left out "
        f"({_seconds(rows, 'warm_up_s')}), and {_seconds(rows, 'seconds')} were measured while the load continued.",
        "Per token: time between the first and the last token of an answer over the tokens after the first.",
        *(["*: the load was not steady."] if not all(row.values["steady"] for row in rows) else []),
    ]
    if limited:
        notes.append(f"Limits: {limits_text(rows)}; steady, no failed request.")
        notes.append("No level is within them." if best is None else f"Least energy within them: {_load_text(best)}.")
    for row in rows:
        notes += [f"{_load_text(row).capitalize()}: {text}." for text in row.values["notes"]]
    lengths = f"{_tokens(rows, 'mean_input_tokens')} in, {_tokens(rows, 'mean_output_tokens')} out"
    where = {"cuda": "GPU", "cpu": "CPU"}.get(values["device"], "unknown hardware")
    dtype = (values.get("engine") or {}).get("dtype")  # unknown of a server that runs already
    how = ", ".join(filter(None, [values["server"], where, dtype]))
    return make_grid(f"Serving {values['model']} ({how}): {lengths}", titles, cells, _join(notes))


def _latencies(rows: Sequence[ServingRow]) -> tuple[str, list[tuple[str, ...]]]:
    """Titles and cells: load, energy, throughput, latency, and whether the row is within the limits."""
    has_energy = any(row.energy["output_token"] for row in rows)
    limited = any(limits_text([row]) for row in rows)
    cells = [
        (
            _marked_level(row),
            *((energy_cell(row.energy["output_token"]),) if has_energy else ()),
            _rate(row),
            *(_ms(row, "time_to_first_token_s", percentile) for percentile in (50, 95)),
            *(_ms(row, "time_per_output_token_s", percentile) for percentile in (50, 95)),
            *(("yes" if row.keeps_limits else "no",) if limited else ()),
        )
        for row in rows
    ]
    titles = (
        "Load>|"
        + ("Energy per\noutput token>|" if has_energy else "")
        + "Output\ntokens/s>|First token\nms, p50>|p95>|Per token\nms, p50>|p95>"
        + ("|Within\nlimits!" if limited else "")
    )
    return titles, cells


# Several runs: only figures per token and latencies are compared. The energy of a whole run follows from how long the
# load was.


def loads_grid(records: Sequence[RunRecord]) -> Grid | None:
    """One line per level of every run; None if no level was measured."""
    named = [(record.label, row) for record in records for row in serving_rows(record)]
    if not named:
        return None
    rows = [row for _, row in named]
    titles, cells = _latencies(rows)
    known = [energy for row in rows if (energy := row.energy["output_token"]) is not None]
    notes = [
        *_contention(rows),
        *(["*: the load was not steady."] if not all(row.values["steady"] for row in rows) else []),
        "Load: concurrent requests, or arrivals per second. Energy: gross, reading prompts included.",
        *(f"Limits: {text}." for text in dict.fromkeys(limits_text([row]) for row in rows) if text),
        *energy_notes_of(known),
        *_missing_energy(rows),
    ]
    lines = [(label, *line) for (label, _), line in zip(named, cells, strict=True)]
    return make_grid("Servers under load", f"Run!|{titles}", lines, _join(notes))


def loads_headline(records: Sequence[RunRecord]) -> str:
    """The run and load with the least energy per output token within the limits of its run."""
    found = [(record.label, best) for record in records if (best := best_serving_row(serving_rows(record)))]
    if len({_request_lengths(record) for record in records}) > 1:
        return "The runs have different prompts or lengths; their energy per token cannot be compared."
    known = [(energy, label, row) for label, row in found if (energy := row.energy["output_token"]) is not None]
    if not known:
        return "No level of load has energy per output token."
    energy, label, row = min(known, key=lambda one: one[0].gross_j)
    return f"Lowest energy per output token: {label} at {_load_text(row)}, {energy_cell(energy)}."


def _request_lengths(record: RunRecord) -> tuple[object, ...]:
    return tuple(record.spec.get(name) for name in ("prompts", "prompt_tokens", "new_tokens"))


def energy_grid(rows: Sequence[ServingRow], record: RunRecord) -> Grid:
    cells = []
    for row in rows:
        output = row.energy["output_token"]
        cells.append(
            (
                _marked_level(row),
                three_digits(output.power_w) if output else "missing",
                energy_cell(output),
                energy_cell(output, net=True),
                energy_cell(row.energy["input_token"]),
                energy_cell(row.energy["token"]),
                energy_cell(row.energy["request"]),
                energy_cell(row.energy["request"], net=True),
                f"{row.values['requests']}",
                f"{row.values['mean_in_flight']:.1f}",
            )
        )
    titles = (
        "Load>|Mean W>|Energy per\noutput token>|net>|per input\ntoken>|per token\nin + out>|per\nrequest>|net>|"
        "Requests>|In flight>"
    )
    known = [energy for row in rows if (energy := row.energy["output_token"]) is not None]
    notes = [
        "The energy of the window, reading prompts included, divided by the output tokens that arrived in it, by the "
        "input tokens, by both, and by the finished requests: four ways to state one energy, not to be added. Net: "
        "above the idle server or machine before and after.",
        *energy_notes_of(known),
    ]
    return make_grid("Energy of serving", titles, cells, _join([*notes, *_missing_energy(rows)]))


def _missing_energy(rows: Sequence[ServingRow]) -> list[str]:
    missing = list(dict.fromkeys(row.values["why_no_energy"] for row in rows if row.energy["output_token"] is None))
    return [f"Energy is missing: {'; '.join(missing)}."] if missing else []


def _join(notes: Sequence[str]) -> str:
    return " ".join(notes)


def _rate(row: ServingRow) -> str:
    rate = float(row.values["output_tokens_per_s"])
    return three_digits(rate) if rate < 1000 else count_text(rate)


def _ms(row: ServingRow, name: str, percentile: int) -> str:
    found = row.latency_ms(name, percentile)
    return NOTHING if found is None else f"{found:.3g}" if found < 1000 else f"{found:,.0f}"


def _seconds(rows: Sequence[ServingRow], key: str) -> str:
    values = [float(row.values[key]) for row in rows]
    low, high = (f"{value:.1f}" for value in (min(values), max(values)))
    return f"{low} s" if low == high else f"{low} to {high} s"


def _tokens(rows: Sequence[ServingRow], key: str) -> str:
    known = [row.values[key] for row in rows if row.values[key] is not None]
    return f"{sum(known) / len(known):.0f} tokens" if known else "unknown tokens"


def _contention(rows: Sequence[ServingRow]) -> list[str]:
    contended = any(row.core_use is not None and row.core_use.contended for row in rows)
    return ["CPU contention: latencies are upper bounds; rerun on an idle machine."] if contended else []


def serving_data(record: RunRecord) -> list[dict[str, Any]]:
    """The rows as plain data with net energy and the names of ML.ENERGY's tables."""
    return [
        {
            **mlenergy_row(row),
            **row.values,
            "within_limits": row.keeps_limits,
            "energy": {unit: energy.model_dump() if energy else None for unit, energy in row.energy.items()},
        }
        for row in serving_rows(record)
    ]


def mlenergy_row(row: ServingRow) -> dict[str, Any]:
    """A row with the column names of the ML.ENERGY benchmark (data set version 3), then those that it lacks."""
    values, output = row.values, row.energy["output_token"]
    per_request, per_input, per_token = (row.energy[unit] for unit in ("request", "input_token", "token"))
    return {
        "task": values["prompts"] or "random-words",
        "model_id": values["model"],
        "nickname": str(values["model"]).rpartition("/")[2],
        "gpu_model": values["gpu_model"] or ("CPU" if values["device"] == "cpu" else ""),
        "num_gpus": _or_empty(values["gpus"]),
        "max_num_seqs": values["concurrency"] or "",
        "energy_per_token_joules": _number(output),
        "output_throughput_tokens_per_sec": values["output_tokens_per_s"],
        "avg_power_watts": output.power_w if output else "",
        "mean_itl_ms": _or_empty(row.latency_ms("time_per_output_token_s", "mean")),
        "is_stable": values["steady"],
        "energy_per_token_half_width_joules": _half_width(output),
        "energy_per_token_gain_error_rel": _or_empty(output.gain_error_rel) if output else "",
        "energy_per_token_above_idle_joules": output.net_j if output and output.net_j is not None else "",
        "energy_per_input_token_joules": _number(per_input),
        "energy_per_total_token_joules": _number(per_token),
        "energy_per_request_joules": _number(per_request),
        "energy_per_input_token_half_width_joules": _half_width(per_input),
        "energy_per_total_token_half_width_joules": _half_width(per_token),
        "energy_per_request_half_width_joules": _half_width(per_request),
        "energy_method": output.method if output else "missing",
        "request_rate_per_sec": values["rate_per_s"] or "",
        "requests_per_sec": values["requests_per_s"],
        "avg_batch_size": values["mean_in_flight"],
        "avg_input_tokens": _or_empty(values["mean_input_tokens"]),
        "avg_output_tokens": _or_empty(values["mean_output_tokens"]),
        **{
            f"p{percentile}_{short}_ms": _or_empty(row.latency_ms(name, percentile))
            for name, short in (("time_to_first_token_s", "ttft"), ("time_per_output_token_s", "itl"))
            for percentile in (50, 90, 95, 99)
        },
        "failed_requests": values["failed"],
    }


def _number(energy: ItemEnergy | None) -> float | str:
    return energy.gross_j if energy else ""


def _half_width(energy: ItemEnergy | None) -> float | str:
    return energy.gross_half_width_j if energy else ""


def _or_empty(value: float | None) -> float | str:
    """An empty cell of a CSV file is a missing value, which 0 would not be."""
    return "" if value is None else value


def write_serving_table(record: RunRecord, path: Path) -> None:
    rows = [mlenergy_row(row) for row in serving_rows(record)]
    if path.suffix.lower() == ".json":
        missing = [{key: None if value == "" else value for key, value in row.items()} for row in rows]
        path.write_text(json.dumps(missing, indent=2) + "\n")
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
