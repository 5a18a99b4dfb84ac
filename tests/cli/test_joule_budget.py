"""A joule budget kept by the whole program: simulated driver, recorder, live reading, training loop, record."""

import json

import pytest
from commands import joulelab, shown
from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: F401

BUDGET_J, POWER_W = 300.0, 100.0  # of the simulated card


@pytest.mark.slow
@pytest.mark.usefixtures("nvml_sim")
def test_training_ends_at_its_joules_and_no_step_has_rate_0(tmp_path):
    """Before: 500 J were passed by 20 % by its own account, and the first second trained at rate 0."""
    store = tmp_path / "runs"
    words = ["train", "gpt2", "--size", "tiny", "--device", "cpu", "--batch_size", "2", "--runs-dir", store]
    limits = ["training.epochs=null", "training.max_steps=null", "training.max_time_s=null"]
    done = joulelab(*words, *limits, f"training.max_energy_j={BUDGET_J}", "training.log_every_steps=1")
    assert done.returncode == 0, done.stderr
    record = shown(store)
    training = [stage for stage in record["stages"] if stage["name"] in ("model.train", "model.train.setup")]
    spent_j = sum(stage["best"]["energy_j"] for stage in training)
    steps = record["results"]["model.train.steps"]["value"]
    step_j = spent_j / steps
    # what the stage does around its steps (model to device, last checkpoint) is not in the budget: 0.2 s here
    assert -0.5 * POWER_W <= spent_j - BUDGET_J <= step_j + 0.7 * POWER_W
    (metrics,) = store.glob("*/metrics.jsonl")
    rates = [row["learning_rate"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row]
    assert len(rates) == steps
    assert min(rates) > 0
