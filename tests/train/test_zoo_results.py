"""Speed from lines of metrics, the share of a GPU's peak, and looks at held-out data that leave no trace."""

import json

import pytest
import torch
from torch import nn

from joulelab.data.batches import TensorBatch
from joulelab.train.zoo_pipeline import Speed, held_out_loss, model_flops_utilization, read_speed
from joulelab.zoo.cost import ModelCost
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.pretrained import load_weights, save_weights

COST = ModelCost(parameters=1, others=0, factored=1, forward_flops=1e9, training_flops=3e9)


def write_metrics(path, rows):
    lines = [
        {
            "kind": "x",
            "step": n,
            "attempt": attempt,
            "mono_ns": int(s * 1e9),
            "stage": stage,
            "loss": loss,
            "samples": m,
        }
        for n, (attempt, s, stage, loss, m) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_one_slow_segment_does_not_change_the_typical_speed(tmp_path):
    rows = [(1, 0, "t", 5.0, 0), (1, 60, "t", 4.0, 10), (1, 61, "t", 3.0, 20), (1, 62, "t", 2.0, 30)]
    write_metrics(tmp_path / "metrics.jsonl", [*rows, (1, 99, "other", 9.0, 999)])
    assert read_speed(tmp_path / "metrics.jsonl", "t") == Speed(first_loss=5.0, items_per_s=10.0)


def test_the_pause_between_two_attempts_is_no_segment(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [(1, 0, "t", 5.0, 0), (2, 500, "t", 4.0, 10), (2, 501, "t", 3.0, 14)])
    assert read_speed(tmp_path / "metrics.jsonl", "t").items_per_s == 4.0


def test_a_single_line_states_no_speed(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [(1, 0, "t", 5.0, 8)])
    assert read_speed(tmp_path / "metrics.jsonl", "t") == Speed(first_loss=5.0, items_per_s=None)


def test_the_share_of_the_peak_or_why_it_is_not_known():
    speed = Speed(5.0, 1e5)
    assert model_flops_utilization(COST, speed, "NVIDIA H200", "bf16", 1)[0] == pytest.approx(3e14 / 989.4e12)
    assert model_flops_utilization(COST, speed, "NVIDIA H200", "bf16", 2)[0] == pytest.approx(1.5e14 / 989.4e12)
    assert "the peak FLOP/s of Z9000" in model_flops_utilization(COST, speed, "Z9000", "bf16", 1)[1]
    assert "too few steps" in model_flops_utilization(COST, Speed(5.0, None), "NVIDIA H200", "bf16", 1)[1]


class Rows:
    batches_per_epoch = 3

    def at(self, epoch, index):
        return TensorBatch({"x": torch.full((2, 4), float(index))}, samples=2, count=2)


def make_workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    loss = PlainObjective(lambda model, batch: ObjectiveOutput(model(batch["x"]).square().sum(), batch.count))
    return Workload(model, loss, Rows(), Rows())


def test_a_look_at_held_out_data_leaves_no_trace_in_the_training():
    workload = make_workload()
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    random = torch.get_rng_state()
    seen = []
    first = held_out_loss(workload, 2, torch.device("cpu"), "fp32", seen.append)
    assert len(seen) == 2
    assert held_out_loss(workload, 99, torch.device("cpu"), "fp32", seen.append) != first
    assert len(seen) == 2 + 3
    assert torch.equal(torch.get_rng_state(), random)
    assert workload.model.training
    assert all(torch.equal(value, before[name]) for name, value in workload.model.state_dict().items())
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_weights_of_any_module_are_saved_and_read_back(tmp_path):
    saved, other = make_workload().model, make_workload().model
    nn.init.ones_(saved[0].weight)
    save_weights(saved, tmp_path, saved.state_dict())
    load_weights(other, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters(), strict=True))
