"""Losses over pairs: initial values, training, and that sharing prompts changes nothing."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tiny_pairs import WORDS, make_model, make_pairs, plain_logs

from joulelab.distill.preferences.pairs import Pair, PairBatches, PairLayout, PairStore, shared_prompt_mask, write_pairs
from joulelab.distill.preferences.preference_loss import (
    PreferenceObjective,
    ReferenceLogProbabilities,
    TargetLogProbabilities,
    answer_log_probabilities,
    disable_dropout,
    dpo_loss,
    ipo_loss,
    preference_loss,
    require_shared_prompt,
    write_reference,
)
from joulelab.errors import ConfigError, JoulelabError
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer

CPU = torch.device("cpu")
HOW = TargetLogProbabilities(chunk=7)


def no_phase(name):
    return nullcontext()


@pytest.fixture
def store(tmp_path):
    return write_pairs(tmp_path / "pairs", make_pairs(6), vocab_size=WORDS, tokenizer="tiny")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kept_bytes", [0, 2**30], ids=["logits twice", "logits kept"])
def test_a_shared_prompt_gives_the_loss_and_gradient_of_separate_rows(attention, kept_bytes):
    model, pairs = make_model(attention=attention), make_pairs()
    how = TargetLogProbabilities(chunk=7, kept_bytes=kept_bytes)
    expected = plain_logs(model, pairs)
    wanted = torch.autograd.grad(dpo_loss(expected[:, 0] - expected[:, 1], 0.3), list(model.parameters()))
    for shared in (True, False):
        batch = PairLayout(shared_prompt=shared).batch(pairs).to(CPU)
        found = answer_log_probabilities(model, model, batch, how)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-5)
        grads = torch.autograd.grad(dpo_loss(found[:, 0] - found[:, 1], 0.3), list(model.parameters()))
        for one, other in zip(grads, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_a_shared_prompt_is_computed_and_counted_once():
    pairs = make_pairs()
    once, twice = (PairLayout(shared_prompt=shared).batch(pairs).tokens for shared in (True, False))
    assert twice - once == sum(len(pair.prompt) for pair in pairs)


def test_the_rejected_answer_does_not_attend_to_the_chosen_one():
    pair = Pair(*(np.array(ids) for ids in ([1, 2], [3], [4, 5])))
    batch = PairLayout(aligned=8).batch([pair]).to(CPU)
    assert batch["position_ids"][0, :5].tolist() == [0, 1, 2, 2, 3]
    seen = shared_prompt_mask(batch["segments"])[0, 0].int().tolist()
    assert seen[:5] == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
    ]
    assert seen[6] == [1, 1, 0, 0, 0, 0, 0, 0], "padding sees something: attention over nothing would be NaN"
    assert batch["places"].tolist() == [1, 1, 3], "both first tokens are predicted by the prompt's last"


def test_a_sliding_window_shorter_than_the_row_is_refused():
    model = make_model()
    model.config.sliding_window = 16
    with pytest.raises(ConfigError, match="sliding window sees 16"):
        answer_log_probabilities(model, model, PairLayout().batch(make_pairs()).to(CPU), HOW)


def test_a_model_that_ignores_the_mask_is_refused():
    require_shared_prompt(make_model(scale=1.0))
    deaf = make_model(scale=1.0)
    forward = deaf.model.forward
    deaf.model.forward = lambda attention_mask=None, **inputs: forward(**inputs)
    with pytest.raises(ConfigError, match="differently from each alone"):
        require_shared_prompt(deaf)


def test_in_half_precision_it_is_the_same_within_rounding():
    model, batch = make_model(), PairLayout().batch(make_pairs()).to(CPU)
    expected = answer_log_probabilities(model, model, batch, HOW)
    with torch.autocast("cpu", torch.bfloat16):
        found = answer_log_probabilities(model, model, batch, HOW)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()
    one, other = (torch.autograd.grad(dpo_loss(logs[:, 0] - logs[:, 1], 0.01), model.model.embed_tokens.weight)[0]
                  for logs in (found, expected))  # fmt: skip
    assert (one - other).norm() < 0.1 * other.norm()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("dpo", math.log(2)), ("ipo", 1 / (4 * 0.2**2)), ("ipo-sum", 6.25), ("length-normalized", math.log(2))],
)
def test_with_the_initial_student_as_reference_the_first_margin_is_0(store, tmp_path, kind, expected):
    """Through the one loop, in training mode, with a model that would have dropout."""
    model = disable_dropout(make_model(dropout=0.3))
    logs = write_reference(tmp_path / "reference.jsonl", "start", model, store, batch_size=4, log_probabilities=HOW)
    config = TrainingConfig(batch_size=3, max_steps=1, log_every_steps=1, learning_rate=1e-4)
    objective = PreferenceObjective(model, kind, 0.2, HOW)
    trainer = SimpleTrainer(model, PairBatches(store, 3, 0, logs), objective, config, NoOpStats())
    model.train()
    trainer.step()
    loss, parts = trainer._running_loss.pop_means(trainer.ranks)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert parts["margin"] == pytest.approx(0, abs=1e-4)
    trainer.close()


def test_another_reference_than_the_initial_student_has_margins_at_once(store, tmp_path):
    """The teacher as reference was a mistake worth noticing: ln 2 then comes out for nobody."""
    logs = write_reference(
        tmp_path / "reference.jsonl", "teacher", make_model(seed=1), store, batch_size=4, log_probabilities=HOW
    )
    batch = PairBatches(store, 3, 0, logs).at(0, 0).to(CPU)
    model = make_model()
    output = PreferenceObjective(model, "dpo", 0.2, HOW)(model, batch, no_phase)
    assert abs(float(output.loss_sum.detach()) / 3 - math.log(2)) > 0.05


def test_training_prefers_the_chosen_answers(store, tmp_path):
    model = make_model()
    logs = write_reference(tmp_path / "reference.jsonl", "start", model, store, batch_size=4, log_probabilities=HOW)
    config = TrainingConfig(epochs=None, batch_size=6, max_steps=12, log_every_steps=12, learning_rate=3e-3)
    trainer = SimpleTrainer(
        model, PairBatches(store, 6, 0, logs), PreferenceObjective(model, "dpo", 0.2, HOW), config, NoOpStats()
    )
    trainer.train()
    batch = PairBatches(store, 6, 0, logs).at(0, 0).to(CPU)
    with torch.no_grad():
        output = PreferenceObjective(model, "dpo", 0.2, HOW)(model, batch, no_phase)
    assert float(output.loss_sum) / 6 < 0.3
    assert float(output.parts["accuracy"]) == 6


def test_a_live_reference_equals_the_cached_one(store, tmp_path):
    start, model = make_model(), make_model(seed=3)
    logs = write_reference(tmp_path / "reference.jsonl", "start", start, store, batch_size=4, log_probabilities=HOW)
    cached = PairBatches(store, 3, 0, logs).at(0, 0).to(CPU)
    one = PreferenceObjective(model, "ipo", 0.2, HOW)(model, cached, no_phase)
    other = PreferenceObjective(model, "ipo", 0.2, HOW, live_reference=start)(model, cached, no_phase)
    torch.testing.assert_close(one.loss_sum, other.loss_sum, rtol=1e-4, atol=1e-3)


def test_a_head_that_is_not_trained_gets_no_gradient_and_no_product(monkeypatch):
    torch.manual_seed(0)
    features, weight, targets = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4), torch.arange(7)
    module = "joulelab.distill.preferences.preference_loss"
    monkeypatch.setattr(f"{module}.add_product", lambda *arguments: pytest.fail("a product for nothing"))
    TargetLogProbabilities(3)(features, weight, targets).sum().backward()
    logs = (features @ weight.T).log_softmax(-1)[torch.arange(7), targets].sum()
    torch.testing.assert_close(features.grad, torch.autograd.grad(logs, features)[0])


def test_losses_computed_by_hand():
    policy, reference = torch.tensor([[-4.0, -9.0]]), torch.tensor([[-6.0, -8.0]])
    tokens = torch.tensor([[2.0, 4.0]])
    loss, margins = preference_loss("dpo", 0.5, policy, reference, tokens)
    assert margins.tolist() == [3.0]
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1.5)))
    assert float(ipo_loss(margins, 0.5)) == pytest.approx((3 - 1) ** 2)
    _, normalized = preference_loss("length-normalized", 0.5, policy, reference, tokens)
    assert normalized.tolist() == [2 / 2 + 1 / 4]


def test_ipo_takes_mean_log_ratios_as_trl_and_ipo_sum_the_papers_sums():
    """16 and 25 tokens: TRL's loss is 29.95, the paper's 202.5, which `ipo` gave before."""
    policy, reference = torch.tensor([[-24.5978, -25.3676]]), torch.tensor([[-20.0, -30.0]])
    tokens = torch.tensor([[16.0, 25.0]])
    mean_log_ratios = (policy - reference) / tokens  # trl: all_logps / loss_mask.sum(-1) for loss_type="ipo"
    by_trl = (mean_log_ratios[:, 0] - mean_log_ratios[:, 1] - 1 / (2 * 0.1)) ** 2
    loss, margins = preference_loss("ipo", 0.1, policy, reference, tokens)
    assert float(loss) == pytest.approx(float(by_trl.sum())) == pytest.approx(29.95, abs=0.01)
    assert margins.tolist() == pytest.approx([-0.47266], abs=1e-4)
    paper, _ = preference_loss("ipo-sum", 0.1, policy, reference, tokens)
    assert float(paper) == pytest.approx(202.5, abs=0.01)


def test_reference_values_are_found_by_content_and_model(store, tmp_path):
    file, model = tmp_path / "reference.jsonl", make_model()
    logs = write_reference(file, "start", model, store, batch_size=4, log_probabilities=HOW)
    whole = [store.pair(number) for number in range(6)]
    expected = plain_logs(model, whole).detach().numpy()
    assert np.abs(logs(whole[::-1]) - expected[::-1]).max() < 1e-3
    with pytest.raises(JoulelabError, match="no log-probabilities for 1 of 1"):
        ReferenceLogProbabilities.open(file, "another")(whole[:1])
    with pytest.raises(ConfigError, match="no log-probabilities of the reference"):
        PreferenceObjective(model)(model, PairBatches(store, 2, 0).at(0, 0).to(CPU), no_phase)


def test_the_reference_is_computed_in_the_precision_of_the_training(store, tmp_path):
    model, seen = make_model(), []
    forward = model.model.forward
    model.model.forward = lambda *given, **also: (
        seen.append(torch.get_float32_matmul_precision()) or forward(*given, **also)
    )
    for precision in ("fp32", "tf32"):
        file = tmp_path / f"{precision}.jsonl"
        rows = PairLayout(shared_prompt=False)
        write_reference(
            file, "start", model, store, batch_size=6, log_probabilities=HOW, precision=precision, layout=rows
        )
    assert seen == ["highest", "high"]


@pytest.mark.parametrize("lines", [6, 5, 1])
def test_an_interrupted_reference_pass_gives_the_same_file(store, tmp_path, lines):
    model, calls, whole, resumed = make_model(), [], [], []
    forward = model.model.forward
    file = tmp_path / "whole.jsonl"
    write_reference(file, "start", model, store, batch_size=2, log_probabilities=HOW, tick=lambda *at: whole.append(at))
    left = tmp_path / "left.jsonl"
    left.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    model.model.forward = lambda *given, **also: calls.append(1) or forward(*given, **also)
    write_reference(
        left, "start", model, store, batch_size=2, log_probabilities=HOW, tick=lambda *at: resumed.append(at)
    )
    assert left.read_text() == file.read_text(), "batches are the same ones, so every bit is"
    assert resumed == whole, "tokens of earlier attempts count"
    assert whole[-1] == (6, int(store.lengths.sum()))
    assert len(calls) - 2 == {6: 0, 5: 1, 1: 3}[lines], "what is there is not computed again; 2 look at the mask"


def test_batches_are_a_function_of_seed_and_epoch_and_include_every_pair(store):
    def keys(epoch, seed=0):
        source = PairBatches(store, 2, seed)
        return [tuple(source.at(epoch, at)["input_ids"].flatten().tolist()) for at in range(3)]

    assert keys(0) == keys(0) != keys(1)
    assert sum(PairBatches(store, 2, 0).at(0, at).tokens for at in range(3)) == int(store.lengths.sum())


def test_pairs_are_read_as_written(tmp_path):
    pairs = make_pairs()
    write_pairs(tmp_path / "pairs", pairs, vocab_size=WORDS, tokenizer="tiny", report={"ties": 2})
    store = PairStore.open(tmp_path / "pairs")
    assert [pair.key for pair in store] == [pair.key for pair in pairs]
    assert store.report == {"ties": 2}
    with pytest.raises(ConfigError, match="could be made from 9 prompts: ties 2, too long 7") as refused:
        write_pairs(
            tmp_path / "none", [], vocab_size=WORDS, tokenizer="tiny", report={"prompts": 9, "ties": 2, "too_long": 7}
        )
    assert "data.row_length" in refused.value.hint
