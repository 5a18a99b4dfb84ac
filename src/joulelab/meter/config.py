"""Settings of the meter, as a user writes them under `energy:`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EnergyConfig(BaseModel):
    """What is measured, how often, and what may be called the total."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    sample_interval_s: float = Field(0.5, ge=0.02, le=60)
    """Seconds between readings of the counters; a killed run loses at most this much of its trace."""
    gpus: str = "auto"
    """`auto` (the GPUs this process may use), `none`, or GPU UUIDs and indices separated by commas."""
    rapl_root: str = "/sys/class/powercap"
    """Where the kernel's RAPL tree is; another tree can stand in for it."""
    estimate_cpu: bool = False
    """Also estimate CPU energy from CPU time; shown beside the measured total, never inside it."""
    idle_before_s: float = Field(0.0, ge=0, le=600)
    """Seconds of idle baseline recorded before the first stage; outside the totals."""
    idle_after_s: float = Field(0.0, ge=0, le=600)
    """Seconds of idle baseline recorded after the last stage; outside the totals."""
    total_energy_policy: Literal["measured", "gpu_only"] = "measured"
    """What `totals.energy_j` means: all that sensors measured, or the GPUs alone."""
