"""Calls that differ on macOS, with fakes of what it answers. Not run on a Mac."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from joulelab import clock
from joulelab.meter.sensors import cpu

SETTINGS = {
    "kern.bootsessionuuid": "6E0B9C1C-6B6C-4B4E-9E0B-0C1D2E3F4A5B",
    "machdep.cpu.brand_string": "Apple M3 Pro",
}


@pytest.fixture
def mac(monkeypatch):
    """No /proc, and a sysctl with two settings; returns the settings."""
    settings, read_text = dict(SETTINGS), Path.read_text

    def read(path, *args, **kwargs):
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(path)
        return read_text(path, *args, **kwargs)

    def run(command, **_):
        assert command[:2] == ["sysctl", "-n"]
        return SimpleNamespace(stdout=settings.get(command[2], "") + "\n")

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(subprocess, "run", run)
    clock.boot_id.cache_clear()
    yield settings
    clock.boot_id.cache_clear()


def test_a_boot_is_identified_by_the_kernel_and_not_by_clocks_that_a_sleep_moves_apart(mac, monkeypatch):
    assert clock.boot_id() == SETTINGS["kern.bootsessionuuid"]
    mac.clear()
    clock.boot_id.cache_clear()
    monkeypatch.setattr("psutil.boot_time", lambda: 1_700_000_000.4)
    assert clock.boot_id() == "boot-1700000000"


def test_the_processor_has_its_marketing_name(mac):
    assert cpu.processor_name() == "Apple M3 Pro"


def test_without_sysctl_the_processor_still_has_a_name(mac, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("sysctl")))
    assert cpu.processor_name()


def test_cores_are_all_cores_where_there_is_no_affinity(monkeypatch):
    monkeypatch.delattr("psutil.Process.cpu_affinity", raising=False)
    assert cpu.allowed_cores(1) == list(range(len(cpu.psutil.cpu_times(percpu=True))))


@pytest.mark.parametrize(("system", "peak_bytes"), [("linux", 3 * 2**30), ("darwin", 3 * 2**20)])
def test_the_peak_resident_size_is_kibibytes_on_linux_and_bytes_on_macos(monkeypatch, system, peak_bytes):
    torch = pytest.importorskip("torch")
    from joulelab.train import devices

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(devices.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**20))
    assert devices.peak_memory_bytes(torch.device("cpu")) == peak_bytes
