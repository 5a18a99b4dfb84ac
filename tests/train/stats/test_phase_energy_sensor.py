"""The `energy` tracker over a real recorder and the simulated driver: 400 W whatever happens, so joules are time."""

import time

import pytest
from nvml_sim.driver import SimGpu, constant
from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: F401
from stats_training import make_trainer, trained

from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter
from joulelab.train.stats.isolated import LoopPlan
from joulelab.train.stats.phase_energy import EnergyStats
from joulelab.train.trainer import SimpleTrainer


class Sleeper(SimpleTrainer):
    """A model that takes its time: 20 ms forward and 40 ms backward for each of two micro-batches, 30 ms to step."""

    def forward(self, batch):
        time.sleep(0.02)
        return super().forward(batch)

    def backward(self, output):
        time.sleep(0.04)
        super().backward(output)

    def optimizer_step(self, count):
        time.sleep(0.03)
        super().optimizer_step(count)


@pytest.mark.slow
def test_phases_through_the_recorder_have_the_joules_of_their_time(nvml_sim, tmp_path):  # noqa: F811
    nvml_sim.gpus = [SimGpu(wave=constant(400))]
    nvml_sim.write()
    meter = Meter(tmp_path / "trace.jsonl", tmp_path / "events.jsonl", EnergyConfig(total_energy_policy="gpu_only"))
    meter.start()
    results = {}
    stats = EnergyStats(warmup_steps=4, plan=LoopPlan(window_s=0.8, settle_s=0.1, rounds=2))
    trained(make_trainer(stats, kind=Sleeper, max_steps=14), meter=meter, result=results.__setitem__)
    meter.stop()
    found = results["energy"]
    assert found["figure"]["method"] == "counter"
    rows = found["isolated"]["phases"]
    for phase, seconds in (("forward", 0.04), ("backward", 0.08), ("optimizer_step", 0.03)):
        row = rows[phase]
        assert row["duration_s"] == pytest.approx(seconds, abs=0.03)  # sleeps wake late where cores are busy
        # joules are 400 W times the phase's time, within what the meter says of itself
        assert row["energy_j"] == pytest.approx(400 * row["duration_s"], abs=row["half_width_j"] + 0.5)
    assert found["isolated"]["step"]["energy_j"] == pytest.approx(
        400 * found["isolated"]["step"]["duration_s"], rel=0.03
    )
    assert found["direct"]["step"]["energy_j"] == pytest.approx(400 * found["direct"]["step"]["duration_s"], rel=0.03)
