"""The objective equals the plain loss for every family; what is off costs nothing; splits give the same gradient."""

import copy

import numpy as np
import pytest
import torch
import transformers
from lm_tiny import make_model
from torch import nn

from joulelab.data.token_store import write_store
from joulelab.distill.distilbert import objective as objective_module
from joulelab.distill.distilbert.config import LmDistillation, LmStudent
from joulelab.distill.distilbert.data import Limits, LmBatches, LmTask, MaskRecipe, cut_sequences, pack_rows
from joulelab.distill.distilbert.objective import (
    FrozenTeacher,
    LmObjective,
    Scales,
    decoder_of,
    freeze_embeddings,
    open_for_loss,
    plain_loss,
    require_comparable,
    student_config,
)
from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks

VOCABULARY = 71
SPECIALS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def make_student(family):
    if family != "bert":
        return open_for_loss(make_model(family, VOCABULARY, layers=2))
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=66
    )
    return open_for_loss(transformers.DistilBertForMaskedLM(config))


def pair(family):
    torch.manual_seed(1)
    student, teacher = make_student(family).eval(), open_for_loss(make_model(family, VOCABULARY)).eval()
    for model in (student, teacher):  # zeros and small numbers would hide a forgotten bias or transform
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    return student, teacher


@pytest.fixture
def sequences(tmp_path):
    random = np.random.default_rng(0)
    rows = [[2, *random.integers(5, VOCABULARY, size=n), 3] for n in random.integers(12, 30, size=24)]
    store = write_store(tmp_path / "s", rows, vocab_size=VOCABULARY, specials=SPECIALS, tokenizer="tiny")
    return cut_sequences(store, np.arange(24), Limits(32, 5, 0.5))


def make_batches(sequences, config, batch_size=4):
    weights = np.ones(VOCABULARY)
    weights[:5] = 0
    recipe = MaskRecipe(0.15, 0.8, 0.1, 4, weights) if config.mlm else None
    task = LmTask(recipe, config.everywhere, pad_id=0)
    made = LmBatches(sequences, task, batch_size, seed=0)
    return made, Scales.of(config, task.targets_share(made.lengths))


ALL = {"alpha_ce": 5.0, "alpha_mse": 0.01, "alpha_cos": 1.0, "temperature": 2.0}
MASKED = LmDistillation(**ALL, alpha_mlm=2.0)
RESTRICTED = LmDistillation(**ALL, alpha_mlm=2.0, restrict_ce_to_mask=True)
CAUSAL = LmDistillation(**ALL, alpha_clm=2.0, mlm=False)
phase = TrainerCallbacks().phase


@pytest.mark.parametrize(
    ("family", "config"),
    [("bert", MASKED), ("bert", RESTRICTED), ("roberta", MASKED), ("roberta", RESTRICTED), ("gpt2", CAUSAL)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_and_every_gradient_are_the_plain_ones(sequences, family, config, packed):
    student, teacher = pair(family)
    batches, scales = make_batches(pack_rows(sequences, 16) if packed else sequences, config)
    batch = batches.at(0, 0)
    assert ("attention_mask" in batch.tensors) != packed
    found = LmObjective(student, FrozenTeacher(teacher, None), scales, chunk=7)(student, batch, phase)
    expected = plain_loss(student, teacher, batch, scales)
    torch.testing.assert_close(found.loss_sum, expected, rtol=1e-5, atol=1e-4)
    assert found.count == batch.tokens
    parameters = [p for p in student.parameters() if p.requires_grad]
    for own, plain in zip(*(torch.autograd.grad(loss, parameters) for loss in (found.loss_sum, expected)), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-3)


def test_what_is_compared_is_what_the_models_themselves_would_state():
    """The opened heads give the logits of the closed ones."""
    for family in ("bert", "roberta", "gpt2"):
        for model in pair(family):
            ids = torch.randint(5, VOCABULARY, (2, 9))
            features, _ = model(ids, for_loss=True)
            opened = nn.functional.linear(features, *decoder_of(model))
            torch.testing.assert_close(opened, model(ids).logits.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_parts_are_means_over_their_own_positions(sequences):
    student, teacher = pair("bert")
    batches, scales = make_batches(sequences, MASKED)
    out = LmObjective(student, FrozenTeacher(teacher, None), scales, chunk=9)(student, batches.at(0, 0), phase)
    means = {name: float(value) / out.count for name, value in out.parts.items()}
    whole = 5 * means["kl"] + 2 * means["mlm"] + 0.01 * means["mse"] + means["cos"]
    assert float(out.loss_sum.detach()) / out.count == pytest.approx(whole, rel=1e-5)


def gradients_of_a_step(sequences, batch_size, accumulate):
    """Of 24 sequences however they are cut into micro-batches, always with the same masks."""
    student, teacher = pair("bert")
    batches, scales = make_batches(sequences, MASKED, batch_size=24)
    whole = batches.at(0, 0)
    pieces = [whole] if accumulate == 1 else split(whole, accumulate)
    objective = LmObjective(student, FrozenTeacher(teacher, None), scales, chunk=50)
    outputs = [objective(student, piece, phase) for piece in pieces]
    sum(out.loss_sum for out in outputs).backward()
    count = sum(out.count for out in outputs)
    return [p.grad / count for p in student.parameters() if p.grad is not None]


def split(whole, parts):
    """The same rows with the same masks in several batches."""
    from joulelab.distill.distilbert.data import LmBatch

    ids, mask = whole["input_ids"], whole["attention_mask"]
    targets = torch.full((ids.numel(),), -100)
    targets[whole["order"]] = whole["targets"]
    targets = targets.reshape(ids.shape)
    made = []
    for rows in torch.arange(len(ids)).chunk(parts):
        real, wanted = mask[rows].flatten(), targets[rows].flatten()
        order = torch.argsort(torch.where(wanted >= 0, 0, torch.where(real > 0, 1, 2)), stable=True)
        tensors = {
            "input_ids": ids[rows], "attention_mask": mask[rows], "order": order, "targets": wanted[order],
            "weights": real[order].float(),
        }  # fmt: skip
        tokens = int(real.sum())
        targeted = int((wanted >= 0).sum())
        batch = LmBatch(tensors, len(rows), tokens, tokens, positions_used=tokens, positions_targeted=targeted)
        made.append(batch)
    return made


def test_every_split_into_micro_batches_has_the_same_gradient(sequences):
    whole, split_up = gradients_of_a_step(sequences, 24, 1), gradients_of_a_step(sequences, 24, 5)
    for one, other in zip(whole, split_up, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Watched(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, **kwargs):
        self.calls.append(kwargs)
        return self.model(**kwargs)


def test_what_is_off_is_not_computed(sequences):
    student, teacher = pair("bert")
    called = Watched(student)
    config = LmDistillation(alpha_ce=0.0, alpha_mlm=1.0)
    batches, scales = make_batches(sequences, config)
    batch = batches.at(0, 0)
    out = LmObjective(student, None, scales, chunk=64)(called, batch, phase)
    assert set(out.parts) == {"mlm"}
    assert called.calls[0]["positions"].numel() == batch.predicted < batch.tokens / 4  # masked tokens alone
    only_cos = LmDistillation(alpha_ce=0.0, alpha_cos=1.0)
    batches, scales = make_batches(sequences, only_cos)
    watched = FrozenTeacher(Watched(teacher), None)
    out = LmObjective(student, watched, scales, chunk=64)(called, batches.at(0, 0), phase)
    assert set(out.parts) == {"cos"}
    assert [call["project"] for call in (called.calls[1], watched.model.calls[0])] == [False, False]


def test_under_bf16_with_a_bf16_teacher_loss_and_gradient_stay_near(sequences):
    student, teacher = pair("bert")
    batches, scales = make_batches(sequences, MASKED)
    batch = batches.at(0, 0)
    exact = plain_loss(student, teacher, batch, scales)
    expected = torch.autograd.grad(exact, decoder_of(student)[0])[0]
    objective = LmObjective(student, FrozenTeacher(teacher, torch.bfloat16), scales, chunk=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = objective(student, batch, phase).loss_sum
    assert float(found.detach()) == pytest.approx(float(exact.detach()), rel=0.05)
    own = torch.autograd.grad(found, decoder_of(student)[0])[0]
    assert float((own - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_16_bit_teacher_computes_gelu_with_the_product_and_stays_as_near_to_the_exact_one(
    sequences, family, device, monkeypatch
):
    batch = make_batches(sequences, MASKED)[0].at(0, 0).to(torch.device(device))
    _, teacher = pair(family)
    exact, _ = FrozenTeacher(teacher.to(device), None)(batch, project=True)
    fused, calls = torch._addmm_activation, []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch, "_addmm_activation", counted)
    joined, _ = FrozenTeacher(copy.deepcopy(teacher), torch.bfloat16)(batch, project=True)
    assert len(calls) == teacher.config.num_hidden_layers
    monkeypatch.setattr(objective_module, "_join_products_with_gelu", lambda model: None)
    separate, _ = FrozenTeacher(teacher, torch.bfloat16)(batch, project=True)
    far = [float((found.float() - exact).norm() / exact.norm()) for found in (joined, separate)]
    assert far[0] < 1.2 * far[1]


@pytest.mark.parametrize(("family", "place"), [("bert", "distilbert"), ("roberta", "roberta"), ("gpt2", "wpe")])
def test_frozen_position_embeddings_stay_frozen_while_the_rest_learns(sequences, family, place):
    student, _ = pair(family)
    freeze_embeddings(student, positions=True, token_types=family == "roberta")
    config = LmDistillation(alpha_ce=0.0, alpha_mlm=1.0) if family != "gpt2" else CAUSAL.model_copy(
        update={"alpha_ce": 0.0, "alpha_mse": 0.0, "alpha_cos": 0.0}
    )  # fmt: skip
    batches, scales = make_batches(sequences, config)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    loop = TrainingConfig(epochs=None, max_steps=3, batch_size=4, learning_rate=1e-2, weight_decay=0.1)
    SimpleTrainer(student, batches, LmObjective(student, None, scales, 64), loop, NoOpStats()).train()
    still = {name for name, value in student.state_dict().items() if torch.equal(value, before[name])}
    frozen = {name for name in before if "position_embeddings" in name or "wpe" in name or "token_type_emb" in name}
    assert frozen and frozen <= still
    assert not any("weight" in name for name in still - frozen)


def test_models_that_cannot_be_compared_are_refused_with_numbers():
    student, teacher = make_student("bert"), open_for_loss(make_model("bert", 80))
    with pytest.raises(ConfigError, match="has 71 tokens and the teacher 80"):
        require_comparable(student, teacher, same_width=False)
    wide = open_for_loss(make_model("bert", VOCABULARY, width=48))
    require_comparable(student, wide, same_width=False)
    with pytest.raises(ConfigError, match="student's width is 32 and the teacher's 48"):
        require_comparable(student, wide, same_width=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ("[1]", "has no JSON object"),
        ("\xff", "is not JSON"),
        ('{"dim": "wide"}', "is no configuration of distilbert"),
    ],
)
def test_a_configuration_of_the_student_that_cannot_be_used_is_refused(content, reason, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode("latin1"))
    student = LmStudent(config=str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match=reason):
        student_config(student, None, 100)
