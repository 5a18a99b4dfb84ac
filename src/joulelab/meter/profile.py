"""Result of `joulelab doctor --calibrate`: properties of this machine's sensors, saved for later runs to cite.

One JSON file per host under `$XDG_CONFIG_HOME/joulelab/machines/` (default `~/.config`). A run
record has the profile's id, which identifies the calibration, its day and driver.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

from pydantic import ValidationError

from joulelab.meter.figures import Frozen

SCHEMA_VERSION = 1


class CallCost(Frozen):
    median_s: float
    p99_s: float
    calls: int


class IdleState(Frozen):
    """Power at rest in one state of the clocks."""

    sm_clock_MHz: float | None  # noqa: N815 (as in the trace)
    power_w: float
    spread_w: float
    duration_s: float


class DeviceProfile(Frozen):
    """Null: could not be determined, for a reason in the profile's notes."""

    device: str
    name: str
    refresh_s: dict[str, float | None] = {}
    """By what is read: `counter`, `instant`, `average`, a RAPL domain."""
    call_cost: dict[str, CallCost] = {}
    averaging_window_s: dict[str, float | None] = {}
    agreement_rel: float | None = None
    """Integrated power against the counter, minus 1, under load."""
    idle: tuple[IdleState, ...] = ()


class MachineProfile(Frozen):
    schema_version: int = SCHEMA_VERSION
    profile_id: str = ""
    host: str
    made_at: str
    joulelab: str
    python: str
    processor: str
    driver: str | None = None
    load: str | None = None
    """The load on the GPU during calibration."""
    devices: tuple[DeviceProfile, ...] = ()
    fsync_s: CallCost | None = None
    recorder_cpu_share: float | None = None
    """Fraction of one core, with default settings of the recorder."""
    notes: tuple[str, ...] = ()


def home_folder() -> Path:
    """The user's home; a folder for temporary files if there is none, as for an arbitrary user of a container."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"joulelab-{os.getuid()}"


def config_folder() -> Path:
    """The user's files for joulelab: `joulelab` in `XDG_CONFIG_HOME`, else in `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or home_folder() / ".config") / "joulelab"


def machines_folder() -> Path:
    return config_folder() / "machines"


def profile_path(host: str | None = None) -> Path:
    return machines_folder() / f"{host or platform.node() or 'localhost'}.json"


def with_id(profile: MachineProfile) -> MachineProfile:
    """Host, day, and a hash of the content: two calibrations never share an id."""
    bare = profile.model_copy(update={"profile_id": ""})
    digest = hashlib.sha256(bare.model_dump_json().encode()).hexdigest()[:8]
    return bare.model_copy(update={"profile_id": f"{profile.host}-{profile.made_at[:10].replace('-', '')}-{digest}"})


def save_profile(profile: MachineProfile) -> Path:
    path = profile_path(profile.host)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def load_profile(host: str | None = None) -> MachineProfile | None:
    """None if there is no profile or it cannot be read: calibration is optional."""
    try:
        return MachineProfile.model_validate_json(profile_path(host).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def profile_id() -> str | None:
    """The id of this machine's calibration, if it has one; recorded in every run."""
    profile = load_profile()
    return profile.profile_id if profile else None
