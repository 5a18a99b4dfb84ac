"""data.preprocess -> teacher.train -> student.train -> student.evaluate"""

import json
from dataclasses import dataclass

import torch

from joulelab.distill.runner import run_recipe
from joulelab.train.training_session import TrainingJob
from joulelab.zoo.pretrained import load_weights, save_weights, seeded_init
from line_pipeline.data import batches, points, prepare_points
from line_pipeline.objective import LineObjective


def run_line(run):
    run_recipe(run, LineRecipe)


@dataclass(frozen=True)
class Distance:
    value: float

    def save(self, folder):
        (folder / "distance.json").write_text(json.dumps(self.value))


class LineRecipe:
    def __init__(self, runner):
        self.runner, self.spec = runner, runner.spec

    def check(self):
        pass

    def data(self):
        return prepare_points(self.runner)

    def teacher(self, data):
        return self.runner.train_model(
            "teacher", lambda: self.job("teacher", data, LineObjective(1.0), self.spec.teacher, seed=0), save_weights,
            kind="line", inputs=self.spec.teacher.model_dump(mode="json"), parents=[data.bill], reuse=True,
        )  # fmt: skip

    def student(self, data, teacher):
        def job():
            objective = LineObjective(self.spec.distill.alpha, self.load(teacher) if teacher else None)
            return self.job("student", data, objective, self.spec.training, self.spec.seed)

        parents = [data.bill, *([teacher.bill] if teacher else [])]
        inputs = self.spec.model_dump(mode="json", include={"distill", "training", "seed"})
        return self.runner.train_model("final_model", job, save_weights, kind="line", inputs=inputs, parents=parents)

    def evaluate(self, data, student, teacher):
        def score(stage):
            x_N1, y_N1 = points(data)
            stage.count(samples=len(x_N1))
            with torch.no_grad():
                return Distance(float((self.load(student)(x_N1) - y_N1).abs().mean()))

        made = self.runner.evaluate(
            "student-distance", "student", score, kind="distance", inputs={}, parents=[student.bill, data.bill]
        )
        distance = json.loads((made.folder / "distance.json").read_text())
        self.runner.report("student.distance", distance, lower_is_better=True)

    def job(self, role, data, objective, config, seed):
        with seeded_init(seed):
            model = torch.nn.Linear(1, 1)
        return TrainingJob(
            f"{role}.train", role, model, batches(data, config.batch_size, seed), objective, config, seed
        )

    def load_student(self, data, student):
        return self.load(student)

    def load(self, made):
        model = torch.nn.Linear(1, 1)
        load_weights(model, made.folder)
        return model
