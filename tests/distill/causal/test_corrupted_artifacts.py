"""Corrupted artifacts are detected, renamed and made again by following the hint."""

import pytest

from joulelab.distill.logit_cache.cache_store import DEFAULT_FLUSH, shard_files
from joulelab.errors import JoulelabError
from joulelab.runs import artifacts
from joulelab.runs.execute import execute

SHORT = {"budget": {"tokens": 600}, "quality": {"against_teacher": False}}


@pytest.mark.parametrize(
    ("until", "file", "stage"),
    [("data", "data/train/trained.bin", "data.preprocess"), ("logits", "logits/*.shard", "teacher.logits")],
)
def test_an_artifact_with_a_missing_file_is_made_again(lab, tmp_path, until, file, stage):
    _, first = lab.run(tmp_path, "kd", until=until, **SHORT)
    again, _ = lab.run(tmp_path, "kd", until=until, **SHORT)
    assert again.stage(stage) is None  # whole, and found
    (path,) = first.artifacts.glob(file)
    path.unlink()
    made, paths = lab.run(tmp_path, "kd", until=until, **SHORT)
    assert made.stage(stage) is not None
    assert any(f"from {first.run_id}: it is corrupted (" in line for line in lab.listening.messages)
    assert list(paths.artifacts.glob(file))
    assert (first.artifacts / until / "bill.damaged.json").exists()
    found, _ = lab.run(tmp_path, "kd", until=until, **SHORT)
    assert found.stage(stage) is None


def test_a_flipped_byte_stops_training_and_the_resumed_run_computes_the_cache_again(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "SUMMED_BYTES", 0)  # as if it were larger: seen only when it is read
    _, first = lab.run(tmp_path, "kd", until="logits", **SHORT)
    (shard,) = shard_files(first.artifacts / "logits")
    written = bytearray(shard.read_bytes())
    for place in range(0, len(written) // 2, 20):  # whichever entry comes first
        written[place] ^= 1
    shard.write_bytes(written)
    paths = lab.paths(tmp_path, "kd", **SHORT)
    with pytest.raises(JoulelabError, match=r"corrupted.*it was renamed to") as output_text:
        execute(paths, lab.listening)
    assert "joulelab run --resume" in output_text.value.hint
    record = execute(paths, lab.listening)
    assert record.stage("teacher.logits").tokens > 0
    assert record.results["student.train.steps"].value > 0


def test_only_the_corrupted_part_of_a_shard_is_computed_again(lab, tmp_path, monkeypatch):
    monkeypatch.setitem(vars(DEFAULT_FLUSH), "seconds", 0.0)  # a shard for every batch
    _, paths = lab.run(tmp_path, "kd", until="logits", shard="0/2", **SHORT)
    first, *others = shard_files(paths.artifacts / "logits-0-of-2")
    assert others
    first.write_bytes(first.read_bytes()[:-1])
    whole, joined = lab.run(tmp_path, "kd", until="logits", **SHORT)
    assert {shard.name for shard in others} < {shard.name for shard in shard_files(joined.artifacts / "logits")}
    assert any(str(first) in line and "its rows are computed again" in line for line in lab.listening.messages)
    assert any(one.name == "logits-0-of-2" for one in whole.inherited)
