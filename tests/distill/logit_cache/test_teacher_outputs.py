"""A tiny Llama that fills a cache and teaches live: interrupted and resumed, in shards, under another packing."""

import numpy as np
import pytest
import torch
import transformers

from joulelab.data.chat.encoding import EncodedDocument
from joulelab.data.chat.packing import RowsInOrder, pack, training_batches
from joulelab.distill.logit_cache.cache_store import FlushPolicy, LogitCache, merge_caches
from joulelab.distill.logit_cache.kd_loss import KdLoss
from joulelab.distill.logit_cache.teacher_outputs import DistillationBatches, LiveTeacher, require_complete, write_cache
from joulelab.errors import ConfigError, JoulelabError
from joulelab.runs.phases import Shard

WORDS, ROWS_OF_MODEL = 300, 320


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=ROWS_OF_MODEL, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        made.lm_head.weight.mul_(15)  # or it would find all words alike
    return made


def documents(count=30):
    random = np.random.default_rng(0)
    made = []
    for length in random.integers(4, 30, count):
        trained = random.random(length) < 0.8
        trained[0], trained[-1] = False, True
        made.append(EncodedDocument(random.integers(0, WORDS, length), trained))
    return made


@pytest.fixture(scope="module")
def teacher():
    return LiveTeacher(model(), vocabulary=WORDS)


def manifest_of(teacher, codec="rs50", temperature=1.0):
    return teacher.manifest(codec, temperature, name="tiny", weights="ab", tokenizer="cd")


def write(folder, teacher, rows, manifest, tick=lambda samples, tokens: None, **more):
    write_cache(folder, teacher, rows, manifest, batch_size=2, tick=tick, **more)


def all_targets(folder, rows):
    source = DistillationBatches(training_batches(rows, 3, seed=4), LogitCache.open(folder))
    return [source.at(0, index) for index in range(source.batches_per_epoch)]


class Stopped(Exception):
    pass


def test_an_interrupted_pass_and_shards_give_the_same_cache(teacher, tmp_path):
    rows, manifest = pack(documents(), 64, seed=0), manifest_of(teacher)
    counted = []
    write(tmp_path / "whole", teacher, rows, manifest, tick=lambda samples, tokens: counted.append((samples, tokens)))
    assert counted[-1] == (len(rows), rows.tokens)
    trained = sum(np.count_nonzero(rows.row(number).trained) for number in range(len(rows)))
    assert LogitCache.open(tmp_path / "whole").positions == trained

    def stop(samples, tokens):
        if samples >= 4:
            raise Stopped

    with pytest.raises(Stopped):
        write(tmp_path / "again", teacher, rows, manifest, tick=stop, flush_policy=FlushPolicy(bytes=1))
    with pytest.raises(JoulelabError, match="lacks"):
        require_complete(tmp_path / "again", rows)
    resumed = []
    write(tmp_path / "again", teacher, rows, manifest, tick=lambda samples, tokens: resumed.append((samples, tokens)))
    assert resumed[0][0] > 4 and resumed[-1] == counted[-1] and len(resumed) < len(counted)
    for number in range(2):
        write(tmp_path / f"share{number}", teacher, rows, manifest, shard=Shard(number, 2))
    merge_caches([tmp_path / "share0", tmp_path / "share1"], tmp_path / "merged")
    expected = all_targets(tmp_path / "whole", rows)
    for folder in ("merged", "again"):
        require_complete(tmp_path / folder, rows)
        for found, batch in zip(all_targets(tmp_path / folder, rows), expected, strict=True):
            assert torch.equal(found.cached_fixed, batch.cached_fixed)
            assert torch.equal(found.cached_records, batch.cached_records)


def test_hidden_states_equal_the_live_teacher_and_an_equal_student_has_loss_0(teacher, tmp_path):
    rows = pack(documents(), 64, seed=0)
    write(tmp_path, teacher, rows, manifest_of(teacher, "hidden"))
    cache = LogitCache.open(tmp_path)
    assert cache.manifest.numbers == "float32" and cache.bytes_per_token > 4 * 32
    batch = RowsInOrder(rows, 2).at(0, 0)  # the rows as the teacher saw them: its sums round alike
    cached = DistillationBatches(training_batches(rows, 2, seed=0), cache)
    assert {tuple(cached.at(0, 0).to(torch.device("cpu")).ids.shape)} == {(2, 64)}
    keys_of_batch = cache.targets([piece.key for piece in pieces(batch)])
    hidden = teacher.targets(batch).hidden_NE
    assert torch.equal(keys_of_batch.decoded().hidden_NE, hidden)
    states = teacher.model(**teacher._attention.inputs(batch), hidden_only=True)
    for divergence in ("forward", "reverse", "jsd"):
        for targets in (keys_of_batch, teacher.targets(batch)):
            sums = KdLoss(0.0, 1.5, divergence)(states, teacher.weight_VE, targets, batch.labels, count=batch.count)
            assert float(sums.kl) == 0.0


def pieces(batch):
    from joulelab.distill.logit_cache.teacher_outputs import batch_spans

    return batch_spans(batch)


def test_targets_are_found_under_another_packing_with_the_live_gradient_on_average(teacher, tmp_path):
    """Rows of another length in another order hold the same documents."""
    write(tmp_path, teacher, pack(documents(), 64, seed=0), manifest_of(teacher, "hybrid32"))
    (batch,) = all_targets(tmp_path, pack(documents(), 300, seed=9))[:1]
    student = torch.randn(*batch.ids.shape, 32).requires_grad_()
    loss = KdLoss(0.0)
    (found,) = torch.autograd.grad(loss(student, teacher.weight_VE, batch.targets, batch.labels).loss, student)
    (live,) = torch.autograd.grad(loss(student, teacher.weight_VE, teacher.targets(batch), batch.labels).loss, student)
    assert float((found - live).norm() / live.norm()) < 0.05  # misaligned by a single token it is above 1


def test_a_teacher_with_fewer_rows_than_tokens_is_refused():
    with pytest.raises(ConfigError, match="321"):
        LiveTeacher(model(), vocabulary=ROWS_OF_MODEL + 1)
