"""A model of the zoo, an observer of the training loop, a trainer and an evaluator of a student."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from joulelab.data.batches import ShuffledRows, TensorBatch
from joulelab.data.splits import parse_split
from joulelab.train.stats.hooks import TrainerStats
from joulelab.train.trainer import SimpleTrainer
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.pretrained import seeded_init
from joulelab.zoo.registry import Size, ZooEntry

CLASSES = 10


def prepare(request):
    features, width = request.shape["features"], request.size.settings["width"]
    with seeded_init(request.seed):
        model = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def make(rows, draw):
        vectors = np.stack([np.random.default_rng([1, int(row)]).normal(size=features) for row in rows])
        tensors = {"vectors": torch.from_numpy(vectors.astype(np.float32)), "labels": torch.from_numpy(rows % CLASSES)}
        return TensorBatch(tensors, len(rows), count=len(rows))

    rows = parse_split(request.split).rows(1000)
    return Workload(model, PlainObjective(loss), ShuffledRows(rows, request.rows_per_batch, request.seed, make), None)


def loss(model, batch):
    logits = model(batch["vectors"])
    return ObjectiveOutput(functional.cross_entropy(logits, batch["labels"], reduction="sum"), batch.count)


MODEL = ZooEntry(
    name="example-mlp",
    family="vectors",
    task="classification",
    item="vector",
    about="a perceptron on random vectors, of the example plugin",
    sizes={"tiny": Size(parameters=2_410, settings={"width": 32}, shape={"features": 64}, batch_size=16)},
    prepare=prepare,
    needs=("torch",),
    learnable=False,
)


class SignTrainer(SimpleTrainer):
    """Updates the weights by the signs of the gradients."""

    def optimizer_step(self, count):
        for parameter in self.trained.parameters():
            if parameter.grad is not None:
                parameter.grad.sign_().mul_(count)
        super().optimizer_step(count)


class StepCounter(TrainerStats):
    def attach(self, context):
        self.context, self.steps = context, 0

    def stop_step(self):
        self.steps += 1

    def log_stats(self):
        self.context.result("example-steps", {"steps": self.steps})
        return f"{self.steps} steps"


def weight_norm(student, stage):
    return {"norm": float(sum(weight.detach().norm() ** 2 for weight in student.model.parameters()) ** 0.5)}
