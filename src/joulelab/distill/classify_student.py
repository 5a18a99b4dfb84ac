"""The student's part of `classify`: built, led to the teacher's features where asked, then trained whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joulelab.data.inputs import input_bill
from joulelab.distill.classify_bench import Bench
from joulelab.distill.classify_config import StudentConfig
from joulelab.distill.classify_objective import ClassifyObjective, HintObjective
from joulelab.distill.classify_teachers import Teacher
from joulelab.distill.classify_training import Lesson, train_on_texts
from joulelab.distill.classify_view import TextLook, hidden_index, layer_list, layer_place
from joulelab.distill.connectors import make_connector
from joulelab.errors import ConfigError
from joulelab.evaluate.classification import Predictions
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.zoo.pretrained import (
    import_transformers,
    load_classifier,
    load_tokenizer,
    load_weights,
    save_hf,
    save_weights,
    seeded_init,
)
from joulelab.zoo.students import take_layers

CONNECTOR = "connector.safetensors"


@dataclass(frozen=True)
class Guidance:
    """What the student learns from beside the labels."""

    teacher: Teacher
    width: int
    """Of the teacher's features."""
    parents: tuple[Bill, ...]
    """What the teacher's answers took."""
    validation: Predictions | None
    """What it says about the validation texts."""


def trained_student(bench: Bench, guidance: Guidance | None) -> Artifact:
    spec = bench.spec
    parents = [bench.data.bill, *_pretrained(bench), *(guidance.parents if guidance else ())]
    hinted = _hinted_student(bench, guidance, parents) if spec.student.hint and guidance else None

    def make(folder: Path) -> None:
        model, connector = _start(bench, guidance, hinted)
        objective = ClassifyObjective(
            spec.distill,
            guidance.teacher if guidance else None,
            connector if spec.distill.feat_beta > 0 else None,
            _look(bench, model) if spec.distill.needs_features else TextLook(-1, "mean"),
        )
        said = guidance.validation if guidance else None
        lesson = Lesson("student", "train", model, objective, spec.training, spec.seed)
        train_on_texts(bench, lesson, teacher=said)
        save_hf(model, load_tokenizer(spec.student.init), folder)

    inputs = spec.model_dump(mode="json", include={"student", "distill", "training", "seed"})
    if hinted is not None:
        parents.append(hinted.bill)
    # trained anew in every run: its joules are what the run is for
    return bench.run.artifact("final_model", kind="student", inputs=inputs, parents=parents, make=make, reuse=False)


def _hinted_student(bench: Bench, guidance: Guidance, parents: list[Bill]) -> Artifact:
    """FitNets' first stage, kept as an artefact so that a run cut off in the second one need not repeat it."""
    spec, hint = bench.spec, bench.spec.student.hint
    assert hint is not None

    def make(folder: Path) -> None:
        model, connector = _start(bench, guidance, None)
        look = _look(bench, model)
        assert connector is not None
        objective = HintObjective(spec.distill, guidance.teacher, connector, look)
        with body_up_to(model, look.layer) as body:
            train_on_texts(bench, Lesson("student", "hint", body, objective, hint, spec.seed), looks=False)
        save_weights(model, folder)
        _save_connector(connector, folder)

    inputs = spec.model_dump(mode="json", include={"student", "distill", "seed"})
    return bench.run.artifact(
        "hinted-student", kind="hinted-student", inputs=inputs, parents=parents, make=make, reuse=False
    )


@contextmanager
def body_up_to(model: nn.Module, index: int) -> Iterator[nn.Module]:
    """The model's body with its first `index` layers only, the same weights: what lies above the hint costs nothing."""
    body: Any = getattr(model, "base_model", model)
    place, whole = layer_place(model), layer_list(model)
    owner = body.get_submodule(place.rpartition(".")[0])
    setattr(owner, place.rpartition(".")[2], whole[:index])
    try:
        yield body
    finally:
        setattr(owner, place.rpartition(".")[2], whole)


def _start(bench: Bench, guidance: Guidance | None, hinted: Artifact | None) -> tuple[nn.Module, nn.Module | None]:
    """Student and connector as the stage finds them: fresh from the seed, or as the hint stage left them."""
    spec = bench.spec
    model = build_student(spec.student, bench.classes, spec.seed).to(bench.device)
    _check_vocabulary(bench, model)
    if guidance is None or not (spec.distill.feat_beta > 0 or spec.student.hint):
        return model, None
    config: Any = model.config
    with seeded_init(spec.seed):
        connector = make_connector(config.hidden_size, guidance.width, spec.distill.feat_ln).to(bench.device)
    if hinted is not None:
        load_weights(model, hinted.folder)
        _load_connector(connector, hinted.folder)
    return model, connector


def build_student(config: StudentConfig, classes: int, seed: int) -> nn.Module:
    source = load_classifier(config.init, num_labels=classes, seed=seed)
    if config.layers == "all":
        return source
    if isinstance(config.layers, int):
        return _drawn(source, config.layers, config.width, config.heads, seed)
    return take_layers(source, config.layers, seed)


def _drawn(source: nn.Module, layers: int, width: int | None, heads: int | None, seed: int) -> nn.Module:
    """A model of the same family and vocabulary, of its own size, with weights drawn from the seed."""
    config: Any = copy.deepcopy(source.config)
    width, heads = width or int(config.hidden_size), heads or int(config.num_attention_heads)
    if width % heads:
        raise ConfigError(
            f"student.width={width} is not a multiple of its {heads} attention heads", "set student.heads as well"
        )
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads = layers, width, heads
    for name in ("intermediate_size", "hidden_dim"):  # BERT's and DistilBERT's word for the same
        if hasattr(config, name):
            setattr(config, name, 4 * width)
    with seeded_init(seed):
        model: nn.Module = import_transformers().AutoModelForSequenceClassification.from_config(config)
    return model


def _pretrained(bench: Bench) -> list[Bill]:
    """A student that is drawn owes nothing to anyone."""
    if isinstance(bench.spec.student.layers, int):
        return []
    init = bench.spec.student.init
    return [input_bill(bench.run, "pretrained student layers", init, "model", role="student")]


def _look(bench: Bench, model: nn.Module) -> TextLook:
    distill = bench.spec.distill
    return TextLook(hidden_index(model, distill.s_layer, "distill.s_layer"), distill.feat_pool)


def _check_vocabulary(bench: Bench, model: nn.Module) -> None:
    config: Any = model.config
    needed = bench.set("train").vocab_size
    if config.vocab_size < needed:
        raise ConfigError(
            f"the student {bench.spec.student.init} knows {config.vocab_size:,} tokens, the texts use {needed:,}",
            "student and teacher must share a tokenizer",
        )


def _save_connector(connector: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().contiguous() for name, value in connector.state_dict().items()}
    save_file(state or {"nothing": torch.zeros(1)}, str(folder / CONNECTOR))  # an identity has nothing to keep


def _load_connector(connector: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(str(folder / CONNECTOR))
    connector.load_state_dict({name: value for name, value in state.items() if name != "nothing"})
