"""Squared distance to the points and to the teacher."""

import torch

from joulelab.zoo.objective import ObjectiveOutput


class LineObjective:
    def __init__(self, alpha, teacher=None):
        self.alpha, self.teacher = alpha, teacher

    def modules(self):
        return {}

    def after_step(self, model):
        pass

    def __call__(self, model, batch, phase):
        predicted = model(batch["x"])
        loss = self.alpha * (batch["y"] - predicted).square().sum()
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher(batch["x"])
            loss = loss + (1 - self.alpha) * (target - predicted).square().sum()
        return ObjectiveOutput(loss, batch.count, {})
