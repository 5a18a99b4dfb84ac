"""The student's objective: each term only when asked, and targets by content."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from joulelab.data import tokenized_text
from joulelab.data.batches import collate
from joulelab.data.labeled_text import LabeledText
from joulelab.data.splits import text_id
from joulelab.distill.classify.config import DistillConfig
from joulelab.distill.classify.data import CachedTeacher, open_cache, write_cache
from joulelab.distill.classify.objective import ClassifyObjective, TextForward, make_connector
from joulelab.distill.losses import cross_entropy_sum, feature_mse_sum, soft_target_kl_sum
from joulelab.errors import JoulelabError
from joulelab.train.trainer import TrainerCallbacks


class TinyEncoder(nn.Module):
    """Hidden states and logits like a transformers model, in a few numbers; counts what it is asked for."""

    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 2)
        self.requested_hidden = []

    def forward(self, input_ids, attention_mask, output_hidden_states=False):
        self.requested_hidden.append(output_hidden_states)
        hidden = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(hidden[:, 0]), hidden_states=(hidden, 2 * hidden, 3 * hidden))


def texts(*words):
    return LabeledText(
        ids=tuple(text_id(word) for word in words),
        texts=words,
        labels=tuple(k % 2 for k in range(len(words))),
        class_names=("0", "1"),
    )


def encode(batch):
    return [[1 + len(word), 2, 3][: 1 + len(word) % 3] for word in batch]


@pytest.fixture
def dataset(tmp_path):
    return tokenized_text.write(
        tmp_path / "set", texts("a", "bb", "ccc", "dddd", "eeeee"), encode, vocab_size=50, pad_id=0
    )


@pytest.fixture
def cache():
    return CachedTeacher(np.arange(10, dtype=np.float32).reshape(5, 2), np.ones((5, 4), dtype=np.float32))


def loss_of(config, dataset, cache, connector=None, net=None):
    batch = collate(dataset, np.arange(5))
    net = net or TinyEncoder()
    objective = ClassifyObjective(config, TextForward(config.s_layer, config.feat_pool), cache, connector)
    return objective(net, batch, TrainerCallbacks().phase), batch, net


def test_all_terms_together_are_the_formula(dataset, cache):
    config = DistillConfig(alpha=0.3, temperature=3.0, feat_beta=0.7, s_layer=-2)
    out, batch, net = loss_of(config, dataset, cache, nn.Identity())
    plain = net(batch.input_ids, batch.attention_mask, True)
    ce = cross_entropy_sum(plain.logits, batch.labels)
    kl = soft_target_kl_sum(plain.logits, torch.from_numpy(cache.logits_NC), 3.0)
    mask = batch.attention_mask.unsqueeze(-1).float()
    pooled = (plain.hidden_states[-2] * mask).sum(1) / mask.sum(1)
    features = feature_mse_sum(pooled, torch.ones(5, 4))
    assert float(out.loss_sum) == pytest.approx(float(0.3 * ce + 0.7 * kl + 0.7 * features), rel=1e-6)
    assert out.count == 5


@pytest.mark.parametrize(
    ("alpha", "beta", "terms"),
    [(1.0, 0.0, {"ce"}), (0.0, 0.0, {"kl"}), (0.5, 0.0, {"ce", "kl"}), (1.0, 1.0, {"ce", "features"})],
)
def test_a_term_with_weight_0_is_absent(dataset, cache, alpha, beta, terms):
    out, _, net = loss_of(DistillConfig(alpha=alpha, feat_beta=beta), dataset, cache, nn.Identity())
    assert set(out.parts) == terms
    assert net.requested_hidden == [beta > 0]


def test_labels_only_needs_no_teacher():
    assert not DistillConfig(alpha=1.0, feat_beta=0.0).needs_teacher
    assert DistillConfig(alpha=1.0, feat_beta=0.1).needs_teacher


def test_without_torch_the_answer_is_what_to_install(monkeypatch):
    from joulelab.errors import DependencyMissing
    from joulelab.runs.spec import load_spec

    monkeypatch.setattr("joulelab.lookup.absent_packages", lambda *names: list(names))
    with pytest.raises(DependencyMissing, match="needs torch"):
        load_spec("demo-kd").preflight()


def test_the_connector_is_identity_only_where_widths_agree():
    assert isinstance(make_connector(4, 4), nn.Identity)
    assert make_connector(4, 6)(torch.zeros(2, 4)).shape == (2, 6)


def write_teacher_cache(folder, dataset, teacher, batch_size):
    folder.mkdir()
    write_cache(
        folder, teacher, dataset, forward=TextForward(-1, "mean"), batch_size=batch_size, device=torch.device("cpu"),
        count=lambda samples, tokens: None,
    )  # fmt: skip


def test_cached_outputs_follow_the_text_and_not_its_position(tmp_path, dataset):
    teacher = TinyEncoder()
    write_teacher_cache(tmp_path / "cache", dataset, teacher, batch_size=2)
    shuffled = tokenized_text.write(
        tmp_path / "other", texts("eeeee", "a", "dddd", "bb", "ccc"), encode, vocab_size=50, pad_id=0
    )
    teacher_outputs = open_cache(tmp_path / "cache", shuffled)
    batch = collate(shuffled, np.arange(5))
    live = teacher(batch.input_ids, batch.attention_mask).logits
    torch.testing.assert_close(teacher_outputs.outputs(batch, False).logits_BC, live)


def test_a_text_the_teacher_has_not_seen_is_an_error(tmp_path, dataset):
    write_teacher_cache(tmp_path / "cache", dataset, TinyEncoder(), batch_size=8)
    other = tokenized_text.write(tmp_path / "other", texts("a", "unseen"), encode, vocab_size=50, pad_id=0)
    with pytest.raises(JoulelabError, match="1 of 2 training texts are not in the teacher's cache"):
        open_cache(tmp_path / "cache", other)
