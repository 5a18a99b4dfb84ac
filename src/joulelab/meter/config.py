"""Settings of the meter, as a user writes them under `energy:`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from joulelab.meter.grids import parse_grid, parse_price


def are_gpu_names(text: str) -> bool:
    """Whether each name between commas is a position or the start of a UUID; no sensor is opened."""
    return all(name.strip().isdigit() or name.strip().startswith(("GPU-", "MIG-")) for name in text.split(","))


class EnergyConfig(BaseModel):
    """What is measured, how often, and what counts as the total."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    sample_interval_s: float = Field(0.5, ge=0.02, le=60)
    """Seconds between readings of the counters; a killed run loses at most this much of its trace."""
    counter_interval_s: float = Field(1.0, ge=0.1, le=60)
    """Seconds between readings of a GPU's energy counter. The call is slow, so the interval is increased if readings
    would use more than 1 % of a core."""
    gpus: str = "auto"
    """`auto` (the GPUs of this job), `none`, or a comma-separated list of UUIDs and indices among those GPUs."""
    processes: str = ""
    """Comma-separated pids of other processes that work for this run, such as a server. Their CPU time is included in
    the estimate and does not count as contention."""
    rapl_root: str = "/sys/class/powercap"
    """Root of the kernel's RAPL tree, or a copy of the tree."""
    node_shared: Literal["auto", "yes", "no"] = "auto"
    """Whether other jobs share this node; if so, RAPL is excluded from the total. `auto` reads Slurm's variables."""
    estimate_cpu: bool | Literal["auto"] = "auto"
    """Estimate CPU energy from CPU time: `auto` only if no sensor works, `true` always, `false` never."""
    estimate_machine: bool = False
    """With `estimate_cpu`: also estimate the CPU energy of all processes of this machine, reported separately."""
    replay_trace: str = ""
    """A recorded trace (JSONL) to replay in place of the sensors, with its timestamps shifted to the present."""
    replay_speed: float = Field(1.0, gt=0, le=1000)
    """Replay speed relative to the recording; energy stays the same, so power is multiplied by it."""
    idle_before_s: float = Field(0.0, ge=0, le=600)
    """Seconds of idle baseline recorded before the first stage; outside the totals."""
    idle_after_s: float = Field(0.0, ge=0, le=600)
    """Seconds of idle baseline recorded after the last stage; outside the totals."""
    total_energy_policy: Literal["measured", "gpu_only", "codecarbon", "machine"] = "measured"
    """What `totals.energy_j` means: measured energy, GPUs only, CodeCarbon's figure, or an estimate of the machine."""
    codecarbon: bool = False
    """Also run CodeCarbon, offline. Its files are in `codecarbon/`, and its figures are labeled as CodeCarbon's."""
    require: Literal["nothing", "measured"] = "nothing"
    """`measured`: refuse to start if no sensor can measure energy (exit code 3)."""
    require_grade: Literal["none", "A", "B", "C"] = "none"
    """Lowest accepted validity grade; a run with a lower grade ends with exit code 4."""
    power_cap_w: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Power limit for the job's GPUs during the run, if the driver permits it; null leaves the limits unchanged."""
    grid: str = "none"
    """Electricity grid for CO2e: an ISO code (FR, DE, US), `EU`, `world`, or g/kWh as `56` or `40-60`."""
    price: str = "none"
    """Price of electricity per kWh, with or without a currency: `0.30`, `0.30 EUR` or `0.25-0.35 EUR`."""
    prometheus: str = ""
    """Serve readings for Prometheus while recording, at `PORT` (of 127.0.0.1) or `HOST:PORT`; empty: disabled."""
    pue: float | None = Field(None, ge=1, le=5)
    """Power usage effectiveness of the data center; CO2e with it is reported separately. Null: not applied."""

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(int(pid) for pid in self.processes.split(",") if pid.strip())

    @field_validator("processes")
    @classmethod
    def _processes_are_pids(cls, value: str) -> str:
        if value and not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", value):
            raise ValueError(f"expected pids separated by commas, found '{value}'")
        return value

    @property
    def uses_codecarbon(self) -> bool:
        return self.codecarbon or self.total_energy_policy == "codecarbon"

    @field_validator("gpus")
    @classmethod
    def _gpus_are_names(cls, value: str) -> str:
        if value not in ("auto", "none") and not are_gpu_names(value):
            raise ValueError(
                f"expected auto, none, or indices and UUIDs (GPU-..., MIG-...) separated by commas, found '{value}'; "
                "`joulelab doctor` lists the GPUs of this machine"
            )
        return value

    @field_validator("grid", mode="before")
    @classmethod
    def _grid_is_text(cls, value: object) -> object:
        if value is False:
            raise ValueError("YAML reads a bare NO as false; write NOR for Norway, or `none` for no CO2e")
        return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("prometheus", mode="before")
    @classmethod
    def _port_is_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("prometheus")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and not re.fullmatch(r"(.+:)?\d{1,5}", value):
            raise ValueError(f"'{value}' is not an address; expected PORT or HOST:PORT, for example 0.0.0.0:9101")
        return value

    @field_validator("price", mode="before")
    @classmethod
    def _price_is_text(cls, value: object) -> object:
        return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("price")
    @classmethod
    def _price_is_an_amount(cls, value: str) -> str:
        parse_price(value)
        return value

    @field_validator("grid")
    @classmethod
    def _grid_is_known(cls, value: str) -> str:
        parse_grid(value)
        return value
