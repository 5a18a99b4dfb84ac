"""A model of torch alone, for tests of commands: transformers takes seconds to import, in every program anew.

torch itself is imported where the model is made, so that commands that only list or check it are quick.
"""

import time

from joulelab.zoo.registry import Size, ZooEntry


def prepare(request):
    import torch
    from torch import nn

    from joulelab.data.batches import ShuffledRows, TensorBatch
    from joulelab.data.splits import parse_split
    from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload

    def make(rows, draw):
        x = torch.from_numpy(rows % 7).float()[:, None].expand(-1, 8).clone()
        return TensorBatch({"x": x}, len(rows), count=len(rows))

    def loss(model, batch):
        time.sleep(0.005)  # steps that take time and no core: a signal finds the run still training
        return ObjectiveOutput(((model(batch["x"]) - batch["x"].sum(1, keepdim=True)) ** 2).sum(), batch.count)

    torch.manual_seed(request.seed)
    batches = ShuffledRows(parse_split(request.split).rows(1000), request.rows_per_batch, request.seed, make)
    return Workload(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), PlainObjective(loss), batches)


MODEL = ZooEntry("perceptron", "f", "t", "row", "a", {"tiny": Size(81, {}, {}, 4)}, prepare, needs=("torch",))
