"""Devices of Apple's GPUs, by fakes; not tested on the hardware."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.errors import DeviceMissing
from joulelab.train.devices import require_device, resolve_device
from joulelab.train.stats.hooks import device_synchronizer


class Noting:
    def __init__(self):
        self.device = None

    def note_device(self, name):
        self.device = name

    def note_setup(self, *ignored): ...


@pytest.mark.parametrize("command", [["train", "gpt2", "--size", "tiny"], ["infer", "deit-t"]])
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has it")
def test_mps_is_refused_on_other_machines_before_a_run_exists(tmp_path, monkeypatch, command):
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path / "runs"))
    done = CliRunner().invoke(app, [*command, "--device", "mps"])
    assert "device=mps was requested but this is not a Mac" in str(done.exception)
    assert done.exception.exit_code == DeviceMissing.exit_code
    assert not (tmp_path / "runs").exists()


def test_mps_is_used_where_torch_has_it_and_never_by_auto(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match=r"mps\.is_available"):
        require_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    noting = Noting()
    assert resolve_device("mps", noting) == torch.device("mps")
    assert noting.device == "mps"
    assert resolve_device("auto", noting) == torch.device("cpu")


def test_kernels_of_mps_are_waited_for_before_a_time_is_taken(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    device_synchronizer(torch.device("mps"))()
    device_synchronizer(torch.device("cpu"))()
    assert waited == ["mps"]
