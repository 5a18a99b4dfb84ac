"""Points as an artifact, and batches of them."""

import numpy as np
import torch

from joulelab.data.batches import ShuffledRows, TensorBatch
from joulelab.distill.runner import PREPROCESS


def prepare_points(runner):
    def write(folder, stage):
        x_N = np.linspace(-1, 1, runner.spec.data.count, dtype=np.float32)
        np.save(folder / "points.npy", np.stack([x_N, 3 * x_N + 1]))
        stage.count(samples=len(x_N))

    inputs = runner.spec.data.model_dump()
    return runner.make("data", PREPROCESS, write, kind="points", inputs=inputs, parents=[])


def points(data):
    x_N, y_N = torch.from_numpy(np.load(data.folder / "points.npy"))
    return x_N[:, None], y_N[:, None]


def batches(data, batch_size, seed):
    x_N1, y_N1 = points(data)

    def batch(rows, draw):
        return TensorBatch({"x": x_N1[rows], "y": y_N1[rows]}, len(rows), len(rows), count=len(rows))

    return ShuffledRows(np.arange(len(x_N1)), batch_size, seed, batch)
