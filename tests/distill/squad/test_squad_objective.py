"""Losses of question answering against closed forms, and terms that are off cost nothing."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from joulelab.data.batches import TensorBatch
from joulelab.distill.squad.config import QaDistill
from joulelab.distill.squad.objective import ANSWERS_ONLY, SpanObjective, span_ce_sum, span_kl_sum
from joulelab.train.trainer import TrainerCallbacks

T3 = torch.tensor([[True, False, True, True, False]])  # class token, question, two words, padding


def both(values):
    return torch.tensor([values]), torch.tensor([values])


def test_equal_scores_over_three_places_cost_log_3_whatever_the_masked_ones_state():
    logits = both([0.0, 99.0, 0.0, 0.0, -99.0])
    assert float(span_ce_sum(logits, torch.tensor([[2, 3]]), T3)) == pytest.approx(math.log(3))


def test_ce_is_the_mean_of_start_and_end():
    start, end = torch.tensor([[0.0, 0, math.log(2), 0, 0]]), torch.tensor([[0.0, 0, 0, 0, 0]])
    found = float(span_ce_sum((start, end), torch.tensor([[2, 0]]), T3))
    assert found == pytest.approx((math.log(4 / 2) + math.log(3)) / 2)


def test_kl_matches_the_closed_form_with_t_squared_over_answerable_places():
    two = torch.tensor([[True, False, True]])
    student = both([0.0, 7.0, 0.0])
    teacher = torch.tensor([[2 * math.log(3.0), -50.0, 0.0]]), torch.tensor([[0.0, 50.0, 0.0]])
    kl_start = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(span_kl_sum(student, teacher, two, 2.0)) == pytest.approx(4 * kl_start / 2, rel=1e-6)


def test_masked_places_get_no_gradient_and_no_nan():
    logits = torch.randn(2, 5, requires_grad=True, generator=torch.Generator().manual_seed(0))
    teacher = torch.full((2, 5), 1e4)
    valid = T3.expand(2, 5)
    loss = span_kl_sum((logits, logits), (teacher, teacher), valid, 3.0)
    loss = loss + span_ce_sum((logits, logits), torch.tensor([[0, 2], [3, 3]]), valid)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~valid] == 0).all()
    assert (logits.grad[valid] != 0).all()


class Reader(nn.Module):
    """Two scores per token, like a transformers model; counts how often it is asked."""

    def __init__(self, seed, types=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, 2)
        self.calls, self.grad_modes = [], []
        if not types:
            self.forward = self.without_types

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.without_types(input_ids, attention_mask)

    def without_types(self, input_ids, attention_mask):
        self.calls.append(input_ids)
        self.grad_modes.append(torch.is_grad_enabled())
        scores = self.embed(input_ids)
        return SimpleNamespace(start_logits=scores[..., 0], end_logits=scores[..., 1])


@pytest.fixture
def batch():
    tensors = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 0], [1, 5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "token_type_ids": torch.zeros(2, 5, dtype=torch.long),
        "answerable": torch.tensor([[1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]).bool(),
        "spans": torch.tensor([[2, 3], [0, 0]]),
    }
    return TensorBatch(tensors, samples=2, tokens=9, count=2)


def phases_of(objective, model, batch):
    seen = []

    def phase(name):
        seen.append(name)
        return TrainerCallbacks().phase(name)

    return objective(model, batch, phase), seen


def test_both_terms_together_are_the_formula(batch):
    student, teacher = Reader(0), Reader(1)
    config = QaDistill(alpha_ce=0.3, alpha_squad=0.8, temperature=3.0)
    out, phases = phases_of(SpanObjective(config, True, teacher), student, batch)
    own, reported = student.embed(batch["input_ids"]).unbind(-1), teacher.embed(batch["input_ids"]).unbind(-1)
    kl = span_kl_sum(own, reported, batch["answerable"], 3.0)
    ce = span_ce_sum(own, batch["spans"], batch["answerable"])
    assert float(out.loss_sum) == pytest.approx(float(0.3 * kl + 0.8 * ce), rel=1e-6)
    assert (out.count, set(out.parts)) == (2, {"ce", "squad"})
    assert phases == ["forward.teacher", "forward.student", "forward.loss"]


def test_the_teacher_reads_the_same_tensors_without_gradients(batch):
    student, teacher = Reader(0), Reader(1)
    out, _ = phases_of(SpanObjective(QaDistill(), True, teacher), student, batch)
    assert teacher.calls[0] is student.calls[0]
    assert teacher.grad_modes == [False]
    out.loss_sum.backward()
    assert teacher.embed.weight.grad is None


def test_without_alpha_ce_the_teacher_is_not_asked(batch):
    teacher = Reader(1)
    out, phases = phases_of(SpanObjective(ANSWERS_ONLY, True, teacher), Reader(0), batch)
    assert teacher.calls == []
    assert (set(out.parts), phases) == ({"squad"}, ["forward.student", "forward.loss"])
    assert not ANSWERS_ONLY.needs_teacher


def test_without_alpha_squad_the_marked_answers_do_not_count(batch):
    config = QaDistill(alpha_ce=1.0, alpha_squad=0.0)
    out, _ = phases_of(SpanObjective(config, True, Reader(1)), Reader(0), batch)
    batch["spans"].fill_(0)
    again, _ = phases_of(SpanObjective(config, True, Reader(1)), Reader(0), batch)
    assert set(out.parts) == {"ce"}
    assert float(out.loss_sum) == float(again.loss_sum)


def test_a_student_without_token_types_learns_from_a_teacher_with_them(batch):
    out, _ = phases_of(SpanObjective(QaDistill(), False, Reader(1)), Reader(0, types=False), batch)
    assert math.isfinite(float(out.loss_sum))


def test_alpha_ce_without_a_teacher_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="needs a teacher"):
        SpanObjective(QaDistill(), True, None)


def test_sums_do_not_depend_on_the_split_into_micro_batches(batch):
    objective, student = SpanObjective(QaDistill(), True, Reader(1)), Reader(0)
    whole, _ = phases_of(objective, student, batch)
    halves = [TensorBatch({k: v[i : i + 1] for k, v in batch.tensors.items()}, 1, 1, 1) for i in range(2)]
    parts = [phases_of(objective, student, half)[0] for half in halves]
    assert float(whole.loss_sum) == pytest.approx(sum(float(part.loss_sum) for part in parts), rel=1e-6)
