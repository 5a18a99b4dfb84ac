"""Caches on disk: looked up by content, complete after a kill, checked on read, and merged from shards."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from cached_positions import encoded, make_manifest

from joulelab.distill.logit_cache.cache_store import (
    CacheWriter,
    FlushPolicy,
    LogitCache,
    merge_caches,
    quarantine_damaged,
    shard_files,
)
from joulelab.distill.logit_cache.target_encoding import document_key, document_spans
from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.phases import Shard

EVERY_ENTRY = FlushPolicy(bytes=1)


def texts(count=12):
    random = np.random.default_rng(0)
    return [random.integers(0, 300, size=random.integers(3, 9)) for _ in range(count)]


def add(writer, ids):
    """As if the teacher were sure of the ids that come next: what is read back tells which text it belongs to."""
    logits = torch.full((len(ids) - 1, 300), -20.0)
    logits[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])] = 20.0
    writer.add([document_key(ids)], encoded(writer.manifest, logits, torch.full((len(ids) - 1,), 0.5), [len(ids) - 1]))


def words_of(cache, some):
    return cache.targets([document_key(ids) for ids in some]).decoded().ids_NK[:, 0].tolist()


def test_targets_are_found_by_content_after_a_shuffle(tmp_path):
    every = texts()
    with CacheWriter(tmp_path, make_manifest()) as writer:
        for ids in every:
            add(writer, ids)
    shuffled = [every[place] for place in np.random.default_rng(1).permutation(len(every))]
    assert words_of(LogitCache.open(tmp_path), shuffled) == [int(word) for ids in shuffled for word in ids[1:]]


def test_a_key_depends_on_the_ids_and_the_trained_mask():
    ids, trained = np.array([5, 6, 7]), np.array([False, True, False])
    assert document_key(ids, trained) == document_key(
        ids.astype(np.int32), np.array([True, True, False])
    )  # the first never is
    others = {
        document_key(ids),
        document_key(ids[::-1], trained),
        document_key(ids[:2], trained[:2]),
        document_key(ids, trained),
    }
    assert len(others) == 4


def test_each_trained_document_of_a_row_has_its_own_key():
    ids = np.array([[1, 2, 3, 4, 5, 6, 7, 0, 0]])
    documents = np.array([[0, 0, 0, 1, 1, 2, 2, -1, -1]])
    trained = np.array([[False, True, True, False, False, False, True, False, False]])
    pieces = document_spans(ids, trained, documents)
    assert [(piece.start, piece.stop, piece.targets) for piece in pieces] == [(0, 3, 2), (5, 7, 1)]
    assert pieces[1].key == document_key(np.array([6, 7]))
    assert len(document_spans(ids, trained)) == 1


def test_a_killed_writer_resumes_with_what_is_missing(tmp_path):
    every, manifest = texts(), make_manifest()
    child = os.fork()
    if child == 0:
        writer = CacheWriter(tmp_path, manifest, flush_policy=EVERY_ENTRY)
        for ids in every[:5]:
            add(writer, ids)
        writer._flush_policy = FlushPolicy()
        add(writer, every[5])  # added, and not yet in a file
        (tmp_path / ".half.shard.1.tmp").write_bytes(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with CacheWriter(tmp_path, manifest) as writer:
        missing = writer.missing([document_key(ids) for ids in every])
        assert missing == list(range(5, 12))
        for place in missing:
            add(writer, every[place])
    cache = LogitCache.open(tmp_path)
    assert len(cache) == len(every)
    assert words_of(cache, every) == [int(word) for ids in every for word in ids[1:]]


@pytest.mark.parametrize("where", ["entry", "index", "footer", "cut"])
def test_a_flipped_byte_is_detected(tmp_path, where):
    every = texts(3)
    with CacheWriter(tmp_path, make_manifest()) as writer:
        for ids in every:
            add(writer, ids)
    (path,) = shard_files(tmp_path)
    written = bytearray(path.read_bytes())
    if where == "cut":
        path.write_bytes(written[:-9])
    else:
        written[{"entry": 11, "index": -60, "footer": -20}[where]] ^= 4
        path.write_bytes(written)
    with pytest.raises(JoulelabError, match="corrupted") as found:
        words_of(LogitCache.open(tmp_path), every)
    assert "run it again" in found.value.hint
    # an entry is read in the middle of a training: whoever comes next finds the file gone, and asks the teacher again
    assert bool(shard_files(tmp_path)) == (where != "entry")
    quarantine_damaged(tmp_path)
    assert not shard_files(tmp_path)
    assert path.with_name(path.name + ".damaged").exists()


def test_two_writers_with_a_shard_each_make_one_cache(tmp_path):
    every, manifest = texts(40), make_manifest()
    names = [document_key(ids).hex() for ids in every]
    for share in (Shard(0, 2), Shard.parse("1/2")):
        with CacheWriter(tmp_path / str(share.number), manifest, share) as writer:
            for place in share.units(names):
                add(writer, every[place])
    alone = LogitCache.open(tmp_path / "0")
    assert len(alone) == 20
    with pytest.raises(JoulelabError, match="not in the cache"):
        words_of(alone, every)
    merge_caches([tmp_path / "0", tmp_path / "1"], tmp_path / "both")
    assert words_of(LogitCache.open(tmp_path / "both"), every) == [int(word) for ids in every for word in ids[1:]]
    for text in ("2/2", "1", "a/b", "-1/2"):
        with pytest.raises(ConfigError):
            Shard.parse(text)


def test_a_cache_accepts_one_teacher_temperature_and_codec_only(tmp_path):
    CacheWriter(tmp_path, make_manifest())
    for other in ({"temperature": 2.0}, {"codec": "hybrid32"}, {"vocabulary": 299}):
        with pytest.raises(ConfigError, match=next(iter(other))):
            CacheWriter(tmp_path, make_manifest(**other))
    with pytest.raises(JoulelabError, match="empty"):
        LogitCache.open(tmp_path)
    with pytest.raises(NotFoundError):
        LogitCache.open(tmp_path / "nowhere")


def test_a_sampled_token_takes_three_bytes_or_less(tmp_path):
    """Some 24 of 50 draws from a distribution like a small language model's are different words."""
    torch.manual_seed(0)
    logits = -1.1 * torch.arange(1.0, 3001).log() + torch.randn(500, 3000)
    manifest = make_manifest(vocabulary=3000)
    kept = encoded(manifest, logits, torch.rand(500), [500])
    with CacheWriter(tmp_path, manifest) as writer:
        writer.add([document_key(np.arange(501))], kept)
    words = kept.counts_N.mean()
    assert 10 < words < 40
    assert LogitCache.open(tmp_path).bytes_per_token < 3 * words + 3


@pytest.mark.parametrize("codec", ["rs50", "hybrid8", "topk5-ghost"])
def test_the_reader_in_the_documentation_reads_what_the_cache_returns(tmp_path, codec):
    page = (Path(__file__).parents[3] / "docs" / "teacher-outputs.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def read_cache" in text]
    names = {}
    exec(block, names)
    random, every = torch.Generator().manual_seed(0), texts()
    with CacheWriter(tmp_path, make_manifest(codec=codec)) as writer:
        for ids in every:
            logits = 3 * torch.randn(len(ids) - 1, 300, generator=random)
            offsets = torch.rand(len(ids) - 1, generator=random)
            writer.add([document_key(ids)], encoded(writer.manifest, logits, offsets, [len(ids) - 1]))
    read = names["read_cache"](tmp_path)
    assert set(read) == {document_key(ids) for ids in every}
    cache = LogitCache.open(tmp_path)
    for ids in every:
        ours = cache.targets([document_key(ids)]).decoded()
        for position, found in enumerate(read[document_key(ids)]):
            expected = {}
            for token, weight in zip(ours.ids_NK[position].tolist(), ours.weights_NK[position].tolist(), strict=True):
                if weight:
                    expected[token] = expected.get(token, 0.0) + weight
            assert found == pytest.approx(expected, abs=1e-6)
