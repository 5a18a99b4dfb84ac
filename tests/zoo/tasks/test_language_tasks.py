"""What the language tasks ask: which tokens are masked, which spans are left out, and what should come back."""

import numpy as np
import pytest

from joulelab import lookup
from joulelab.data.masking import collapse, draw_spans, mask_rows, masked_per_row, plan_infilling, plan_sentinels
from joulelab.data.tokenize import Vocabulary, own_vocabulary
from joulelab.errors import ConfigError
from joulelab.zoo.objective import prepare
from joulelab.zoo.registry import WorkloadRequest
from joulelab.zoo.tasks.language_modeling import corrupt_spans, infill

WORDS = own_vocabulary(1000, None, sentinels=100)


def rows(count, tokens, seed=0):
    return np.random.default_rng(seed).integers(10, 900, size=(count, tokens))


def batch_of(name):
    return prepare(WorkloadRequest(lookup.ZOO.resolve(name), "tiny")).batches.at(0, 0)


def test_every_row_has_fifteen_percent_masked_and_the_rest_untouched():
    ids = rows(16, 200)
    masked = mask_rows(ids, WORDS, draw=7)
    assert masked.positions.shape == masked.targets.shape == (16, masked_per_row(200)) == (16, 30)
    assert all(len(set(row)) == 30 for row in masked.positions.tolist())
    np.testing.assert_array_equal(masked.targets, np.take_along_axis(ids, masked.positions, axis=1))
    elsewhere = np.ones_like(ids, dtype=bool)
    np.put_along_axis(elsewhere, masked.positions, False, axis=1)
    np.testing.assert_array_equal(masked.input_ids[elsewhere], ids[elsewhere])


def test_of_the_masked_eight_tenths_are_hidden_one_swapped_one_kept():
    masked = mask_rows(rows(200, 400), WORDS, draw=7)
    shown = np.take_along_axis(masked.input_ids, masked.positions, axis=1)
    assert (shown == WORDS.mask_id).mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == masked.targets).mean() == pytest.approx(0.1, abs=0.02)
    swapped = shown[(shown != WORDS.mask_id) & (shown != masked.targets)]
    assert swapped.min() >= WORDS.plain.start and swapped.max() < WORDS.plain.stop


def test_another_draw_masks_other_positions_and_the_same_draw_the_same():
    ids = rows(4, 100)
    first, again, other = (mask_rows(ids, WORDS, draw).positions for draw in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_ends_of_documents_are_not_masked_while_there_is_anything_else():
    ids = rows(8, 100)
    ids[:, ::3] = WORDS.end_id
    assert (mask_rows(ids, WORDS, draw=3).targets != WORDS.end_id).all()


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(ConfigError, match="no mask token"):
        mask_rows(rows(1, 10), Vocabulary(range(10, 900), end_id=2), draw=0)


def test_the_published_lengths_of_t5_give_its_published_plan():
    plan = plan_sentinels(512, 114)
    assert (plan.text, plan.gone, plan.spans) == (568, 85, 28)


@pytest.mark.parametrize(("tokens", "target_tokens"), [(512, 114), (1024, 229), (1024, 1024), (32, 16), (8, 4)])
def test_spans_go_out_behind_sentinels_and_come_back_after_them(tokens, target_tokens):
    plan = plan_sentinels(tokens, target_tokens)
    ids = rows(5, plan.text)
    inputs, targets = corrupt_spans(ids, plan, WORDS, draw=11)
    assert inputs.shape == (5, tokens) and targets.shape == (5, target_tokens)
    assert (inputs[:, -1] == WORDS.end_id).all() and (targets[:, -1] == WORDS.end_id).all()
    for row in range(5):
        spans = _by_sentinel(targets[row, :-1])
        assert list(spans) == list(WORDS.sentinels[: plan.spans])
        rebuilt = [token for mark in inputs[row, :-1].tolist() for token in spans.get(mark, [mark])]
        assert rebuilt == ids[row].tolist()


def _by_sentinel(targets):
    spans = {}
    for token in targets.tolist():
        if token in WORDS.sentinels:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    return spans


def test_infilling_hides_thirty_percent_and_asks_for_the_whole_text():
    plan = plan_infilling(510)
    assert (plan.gone, plan.spans, plan.left) == (153, 51, 408)
    ids = rows(3, 510)
    inputs, targets = infill(ids, plan, WORDS, begin_id=0, draw=5)
    np.testing.assert_array_equal(targets[:, 1:-1], ids)
    assert inputs.shape == (3, plan.left + 2) and targets.shape == (3, 512)
    assert ((inputs == WORDS.mask_id).sum(axis=1) == plan.spans).all()
    assert (inputs[:, 0] == 0).all() and (targets[:, 0] == 0).all()


def test_spans_lie_elsewhere_in_every_row_and_draw():
    plan = plan_infilling(100)
    gone, other = draw_spans(4, plan, draw=1), draw_spans(4, plan, draw=2)
    assert (gone.sum(axis=1) == plan.gone).all()
    assert (gone != other).any() and (gone[0] != gone[1]).any()


def test_a_span_becomes_one_mark():
    ids = np.arange(10, 18)[None]
    gone = np.array([[0, 1, 1, 0, 0, 1, 0, 1]], dtype=bool)
    assert collapse(ids, gone, np.array([1, 2, 3])).tolist() == [[10, 1, 13, 14, 2, 16, 3]]


@pytest.mark.parametrize(("name", "start"), [("t5", 0), ("bart", 2)])
def test_the_decoder_reads_its_targets_one_step_late(name, start):
    batch = batch_of(name)
    assert (batch["decoder_input_ids"][:, 0] == start).all()
    assert (batch["decoder_input_ids"][:, 1:] == batch["targets"][:, :-1]).all()
    assert batch.count == batch["targets"].numel()


def test_a_causal_models_targets_are_the_tokens_after():
    batch = batch_of("gpt2")
    assert batch["input_ids"].shape == batch["targets"].shape == (8, 32)
    assert (batch["input_ids"][:, 1:] == batch["targets"][:, :-1]).all()
    assert batch.count == batch.tokens == 8 * 32


def test_a_masked_models_loss_counts_masked_positions_and_its_tokens_all():
    batch = batch_of("bert")
    assert batch.count == 8 * 5 and batch.tokens == 8 * 32
