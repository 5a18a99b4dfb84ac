"""A model whose steps take time and no CPU: what a scheduler does to a long training, at the price of a short one."""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from joulelab.data.batches import ShuffledRows, TensorBatch
from joulelab.data.splits import parse_split
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.pretrained import seeded_init
from joulelab.zoo.registry import Size, WorkloadRequest, ZooEntry

# A job that came back from the queue has shown what it was for, and is quick with the rest.
CAME_BACK = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
STEP_S = 0.0 if CAME_BACK else float(os.environ.get("SLOW_MODEL_STEP_S", "0.25"))


def prepare(request: WorkloadRequest) -> Workload:
    with seeded_init(request.seed):
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
    return Workload(model, PlainObjective(loss), batches(request, request.split), None)


def loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    time.sleep(STEP_S)
    logits = model(batch["vectors"])
    return ObjectiveOutput(functional.cross_entropy(logits, batch["labels"], reduction="sum"), batch.count)


def batches(request: WorkloadRequest, split: str) -> ShuffledRows:
    def make(rows: np.ndarray, draw: int) -> TensorBatch:
        vectors = np.stack([np.random.default_rng(int(row)).normal(size=8) for row in rows]).astype(np.float32)
        labels = torch.from_numpy((vectors.sum(axis=1) > 0).astype(np.int64))
        return TensorBatch({"vectors": torch.from_numpy(vectors), "labels": labels}, len(rows), count=len(rows))

    return ShuffledRows(parse_split(split).rows(1_000), request.rows_per_batch, request.seed, make)


MODEL = ZooEntry(
    name="slow",
    family="vectors",
    task="classification",
    item="vector",
    about="a small network that takes its time",
    sizes={"tiny": Size(parameters=178, settings={}, shape={"features": 8}, batch_size=4)},
    prepare=prepare,
    needs=("torch",),
)
