"""A small training with everything that a step can change, and a machine whose every joule is known.

`Machine` is a clock and a power meter in one: work on it takes the time and the watts that a test says, and no real
time passes. Its meter writes a trace as a recorder would.
"""

from __future__ import annotations

import copy
import json
import random
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn

from joulelab.clock import NS
from joulelab.data.batches import TensorBatch
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats, TrackerContext
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks
from joulelab.zoo.objective import ObjectiveOutput

IDLE_W = 60.0
# What is trained here is tiny; on a busy machine threads that wait for one another take a hundred times its time.
torch.set_num_threads(1)


class Rows:
    batches_per_epoch = 7

    def at(self, epoch, index):
        random = torch.Generator().manual_seed(100 * epoch + index)
        x = torch.randn(8, 6, generator=random)
        return TensorBatch({"x": x, "y": (x[:, 0] > 0).long()}, samples=8, tokens=8, count=8)


class EmaObjective:
    """Cross-entropy, and pulled toward an average of its own past; draws from every source of random numbers."""

    def __init__(self, model):
        self.average = copy.deepcopy(model).requires_grad_(False)

    def __call__(self, model, batch, phase):
        with phase("forward.student"):
            logits = model(batch["x"] + random.random() * 1e-3 + float(np.random.rand()) * 1e-3)
            loss = nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
        with phase("forward.teacher"), torch.no_grad():
            wanted = self.average(batch["x"])
        return ObjectiveOutput(loss + 0.1 * (logits - wanted).square().sum(), batch.count, {"ce": loss.detach()})

    def modules(self):
        return {"average": self.average}

    @torch.no_grad()
    def after_step(self, model):
        for mine, theirs in zip(self.average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class Shifted(nn.Module):
    """A buffer that no checkpoint holds and that every forward pass moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.shift += 0.01
        return x + self.shift


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), Shifted(), nn.Dropout(0.3), nn.Linear(16, 2))


def make_trainer(stats=None, around=None, kind=SimpleTrainer, **config):
    model = make_model()
    defaults = {
        "epochs": None,
        "max_steps": 30,
        "accumulate": 2,
        "learning_rate": 0.01,
        "log_every_steps": 5,
        "prefetch": 0,
    }
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    settings = TrainingConfig(**{**defaults, **config})
    quiet = nullcontext()
    around = around or TrainerCallbacks(phase=lambda name: quiet)
    return kind(model, Rows(), EmaObjective(model), settings, stats or NoOpStats(), around)


def trained(trainer, **tracker_context):
    """Train with its trackers attached; what they say."""
    trainer.stats.attach(TrackerContext(trainer, trainer.device, **tracker_context))
    trainer.train()
    return trainer.stats.log_stats()


def all_numbers(trainer):
    """Every tensor that training changes, and the random numbers that would come next."""
    found = {f"model.{name}": value for name, value in trainer.trained.named_parameters()}
    found |= {f"model.{name}": value for name, value in trainer.trained.named_buffers()}
    for number, values in enumerate(trainer.optimizer.state.values()):
        found |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in values.items()}
    found["rng"] = torch.get_rng_state()
    found["python"] = torch.tensor(random.getstate()[1])
    found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same_numbers(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Machine:
    def __init__(self, folder):
        self.seconds = 1000.0
        self._joules = 0.0
        self._edges = [(self.seconds, 0.0)]
        self._folder = folder

    def spend(self, seconds, watts):
        self.seconds += seconds
        self._joules += seconds * watts
        self._edges.append((self.seconds, self._joules))

    def now_ns(self):
        return round(self.seconds * NS)

    def perf_counter(self):
        return self.seconds

    def meter(self, component="gpu", reason=""):
        return MachineMeter(self, self._folder / "trace.jsonl", component, reason)

    def lines(self):
        """The counter every 20 ms, until well after now: a recorder would go on recording."""
        edges = [*self._edges, (self.seconds + 5, self._joules + 5 * IDLE_W)]
        times = np.arange(999.9, self.seconds + 4.5, 0.02)
        joules = np.interp(times, [edge[0] for edge in edges], [edge[1] for edge in edges])
        return list(zip(times.tolist(), joules.tolist(), strict=True))


class MachineMeter:
    policy = "gpu_only"  # the model itself runs on the CPU

    def __init__(self, machine, path, component, reason):
        self._machine, self._path, self._component, self._reason = machine, path, component, reason
        self.events = []

    def event(self, kind, **fields):
        json.dumps(fields)
        self.events.append((kind, fields))

    @property
    def trace_path(self):
        device = {
            "device": "it", "component": self._component, "name": "it", "counted": True, "wrap_j": None,
            "refresh_s": 1e-6, "gain_error_rel": 0.05, "facts": {"w_per_thread": 1.0},
        }  # fmt: skip
        missing = [{"component": "gpu", "reason": self._reason, "fix": "buy one"}] if self._reason else []
        head = {"kind": "header", "mono_ns": 1, "interval_s": 0.02, "wall_minus_mono_s": 0.0}
        lines = [head | {"devices": [] if self._reason else [device], "missing": missing}]
        for seconds, joules in self._machine.lines():
            stamp = {"mono_ns": round(seconds * NS), "device": "it"}
            if self._component == "cpu_estimate":
                lines.append({"kind": "estimate", **stamp, "busy_thread_s": joules})
            else:
                lines.append({"kind": "gpu", **stamp, "energy_counter_j": joules})
        self._path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self._path


class MachineTrainer(SimpleTrainer):
    """Trains for real, and spends the machine's time and watts on every phase. Set `machine` and `costs` before use."""

    machine = None
    costs = {
        "input": (0.01, 60.0),
        "forward": (0.04, 300.0),
        "backward": (0.09, 500.0),
        "optimizer_step": (0.02, 700.0),
    }

    def spend(self, phase):
        self.machine.spend(*self.costs[phase])

    def next_batch(self):
        self.spend("input")
        return super().next_batch()

    def forward(self, batch):
        self.spend("forward")
        return super().forward(batch)

    def backward(self, output):
        self.spend("backward")
        super().backward(output)

    def optimizer_step(self, count):
        self.spend("optimizer_step")
        super().optimizer_step(count)
