"""The pipeline `classify`, as a story of stages: data, teacher, its cache, student, quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from joulelab.data import labelled_text, sources, tokenised
from joulelab.data.batches import BatchStream
from joulelab.distill.classify_config import ClassifySpec
from joulelab.distill.classify_objective import LABELS_ONLY, ClassifyObjective, make_connector
from joulelab.distill.teacher_cache import TeacherCache, open_cache, write_cache
from joulelab.evaluate.classification import load_predictions, predict
from joulelab.runs.artifacts import Artifact
from joulelab.runs.bills import Bill, external
from joulelab.runs.context import RunContext, Stage
from joulelab.train.config import TrainingConfig
from joulelab.train.session import Assignment, train_in_run
from joulelab.zoo.pretrained import load_classifier, load_tokenizer, save_hf, weights_identity
from joulelab.zoo.students import take_layers


def run_classify(run: RunContext) -> None:
    spec = cast(ClassifySpec, run.spec)
    lab = _Lab(run, spec)
    data = lab.tokenised_data()
    cache = None
    if spec.until == "teacher" or spec.distill.needs_teacher:
        teacher = lab.fine_tuned_teacher(data)
        if not teacher.reused:  # the run that trained it has its accuracy, and paid for it once
            lab.evaluate("teacher", teacher, data)
        cache = lab.teacher_cache(teacher, data)
    if spec.until == "student":
        student = lab.student(data, cache)
        lab.evaluate("student", student, data)


class _Lab:
    """One run's stages; each finds or makes one artefact."""

    def __init__(self, run: RunContext, spec: ClassifySpec) -> None:
        self.run = run
        self.spec = spec
        self.device = _device(spec.device)

    def tokenised_data(self) -> Artifact:
        data = self.spec.data
        raw = self._external("texts", data.source, "text")

        def make(folder: Path) -> None:
            with self.run.stage("data.preprocess") as stage:
                texts = labelled_text.load(data.source, data.subset)
                parts = labelled_text.split(texts, data.train_size, data.validation_size, data.test_size)
                tokenizer = load_tokenizer(self.spec.teacher.model)
                counts = {"samples": 0, "tokens": 0}
                for name in ("train", "validation", "test"):
                    made = tokenised.write(
                        folder / name,
                        getattr(parts, name),
                        lambda batch: tokenizer(batch, truncation=True, max_length=data.max_tokens)["input_ids"],
                        vocab_size=len(tokenizer),
                        pad_id=tokenizer.pad_token_id,
                    )
                    counts = {
                        "samples": counts["samples"] + len(made),
                        "tokens": counts["tokens"] + made.tokens_total,
                    }
                stage.count(**counts)

        inputs = {**data.model_dump(), "tokenizer": weights_identity(self.spec.teacher.model)}
        return self.run.artifact("data", kind="tokenised-text", inputs=inputs, parents=[raw], make=make)

    def fine_tuned_teacher(self, data: Artifact) -> Artifact:
        config = self.spec.teacher
        pretrained = self._external("pretrained teacher", config.model, "model")

        def make(folder: Path) -> None:
            model = load_classifier(config.model, num_labels=self._classes(data), seed=config.seed)
            objective = ClassifyObjective(LABELS_ONLY, None, None)
            self._train("teacher.train", model, data, objective, config.training, config.seed)
            save_hf(model, load_tokenizer(config.model), folder)

        inputs = config.model_dump(mode="json")
        parents = [data.bill, pretrained]
        return self.run.artifact("teacher", kind="fine-tuned-teacher", inputs=inputs, parents=parents, make=make)

    def teacher_cache(self, teacher: Artifact, data: Artifact) -> Artifact:
        distill = self.spec.distill

        def make(folder: Path) -> None:
            model = self._load(teacher, data)
            train = tokenised.open_set(data.folder / "train")
            with self.run.stage("teacher.logits", total=len(train)) as stage:
                write_cache(
                    folder,
                    model,
                    train,
                    layer=distill.t_layer,
                    how=distill.feat_pool,
                    batch_size=self.spec.eval_batch_size,
                    device=self.device,
                    tick=lambda samples, tokens: self._tick(stage, samples, tokens),
                )

        inputs = {"t_layer": distill.t_layer, "feat_pool": distill.feat_pool}
        parents = [teacher.bill, data.bill]
        return self.run.artifact("teacher-cache", kind="teacher-cache", inputs=inputs, parents=parents, make=make)

    def student(self, data: Artifact, cache: Artifact | None) -> Artifact:
        config, distill, seed = self.spec.student, self.spec.distill, self.spec.seed
        pretrained = self._external("pretrained student layers", config.init, "model")

        def make(folder: Path) -> None:
            source = load_classifier(config.init, num_labels=self._classes(data), seed=seed)
            model = take_layers(source, config.layers, seed)
            answers = open_cache(cache.folder, tokenised.open_set(data.folder / "train")) if cache else None
            objective = ClassifyObjective(distill, answers, self._connector(model, answers))
            self._train("student.train", model, data, objective, self.spec.training, seed)
            save_hf(model, load_tokenizer(config.init), folder)

        inputs = self.spec.model_dump(mode="json", include={"student", "distill", "training", "seed"})
        parents = [data.bill, pretrained, *([cache.bill] if cache else [])]
        # trained anew in every run: its joules are what the run is for
        return self.run.artifact("final_model", kind="student", inputs=inputs, parents=parents, make=make, reuse=False)

    def evaluate(self, who: str, model: Artifact, data: Artifact) -> None:
        def make(folder: Path) -> None:
            test = tokenised.open_set(data.folder / "test")
            loaded = self._load(model, data)
            with self.run.stage(f"{who}.evaluate", total=len(test)) as stage:
                found = predict(
                    loaded,
                    test,
                    self.spec.eval_batch_size,
                    self.device,
                    lambda samples, tokens: self._tick(stage, samples, tokens),
                )
            found.save(folder)

        made = self.run.artifact(
            f"{who}-predictions",
            kind="predictions",
            inputs={},
            parents=[model.bill, data.bill],
            make=make,
            reuse=False,  # what this run has trained it also evaluates itself
        )
        accuracy = load_predictions(made.folder).accuracy()
        self.run.result(f"{who}.accuracy", accuracy)
        self.run.progress.say(f"{who} accuracy {100 * accuracy.value:.1f} % on {accuracy.trials} held-out texts")

    def _train(
        self,
        stage_name: str,
        model: nn.Module,
        data: Artifact,
        objective: ClassifyObjective,
        config: TrainingConfig,
        seed: int,
    ) -> None:
        batches = BatchStream(tokenised.open_set(data.folder / "train"), config.batch_size, seed)
        train_in_run(self.run, Assignment(stage_name, model.to(self.device), batches, objective, config, seed))

    def _tick(self, stage: Stage, samples: int, tokens: int) -> None:
        stage.count(samples=samples, tokens=tokens)
        self.run.progress.advance(samples)
        self.run.stop.check()

    def _external(self, name: str, source: str, kind: str) -> Bill:
        place = sources.parse(source)
        identity = source if place.path is None else f"{source}@{sources.content_hash(place.path)[:16]}"
        return self.run.uses(name, external(source, kind, identity))

    def _classes(self, data: Artifact) -> int:
        return int(tokenised.open_set(data.folder / "train").labels.max()) + 1

    def _connector(self, model: nn.Module, cache: TeacherCache | None) -> nn.Module | None:
        if self.spec.distill.feat_beta == 0 or cache is None:
            return None
        config: Any = model.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.spec.seed)
            return make_connector(config.hidden_size, cache.width).to(self.device)

    def _load(self, artifact: Artifact, data: Artifact) -> nn.Module:
        return load_classifier(str(artifact.folder), num_labels=self._classes(data), seed=0).to(self.device)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
