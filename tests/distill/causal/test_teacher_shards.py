"""The teacher's work in three shards by independent tasks: the same bytes as in one task, energy counted once."""

import functools
import json
import subprocess
import sys

import pytest

from joulelab.distill.causal import teacher
from joulelab.distill.causal.models import CausalContext
from joulelab.distill.logit_cache.cache_store import open_shard, read_entry, shard_files
from joulelab.distill.logit_cache.codecs import read_manifest
from joulelab.errors import ConfigError
from joulelab.report.compare.method_rows import compared_runs, make_row
from joulelab.runs.artifacts import read_bill, with_shards
from joulelab.runs.context import Stage
from joulelab.runs.execute import execute
from joulelab.runs.phases import Shard
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import check

SHARES = ("2/3", "0/3", "1/3")  # in any order
RUBRIC = {"preferences": {"judge": "rubric"}}
KINDS = {
    "logits": ("kd", {"distill": {"codec": "hidden"}}),
    "generation": ("synthetic", {}),
    "preferences": ("dpo", {}),
}


@pytest.fixture(scope="module")
def whole(lab, tmp_path_factory):
    """Made in one go, once for all tests."""

    @functools.cache
    def made(until):
        pipeline, changes = KINDS[until]
        return lab.run(tmp_path_factory.mktemp("whole"), pipeline, until=until, **changes)

    return made


def entries(folder):
    layout, found = read_manifest(folder).layout, {}
    for path in shard_files(folder):
        shard = open_shard(path)
        for row in shard.index:
            assert row["key"] not in found
            found[row["key"]] = tuple(part.tobytes() for part in read_entry(shard, row, layout))
    return found


def same(one, other, name):
    if name == "logits":
        assert entries(one / name) == entries(other / name)
    else:
        file = {"answers": "answers.jsonl", "scores": "scores.jsonl"}[name]
        assert (one / name / file).read_bytes() == (other / name / file).read_bytes()


def joules(record, stage):
    return record.stage(stage).energy.cpu_estimate.energy_j


@pytest.mark.parametrize(
    "until", [kind if kind == "logits" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_three_shards_join_to_the_same_bytes_and_their_energy_counts_once(lab, whole, tmp_path, until):
    pipeline, changes = KINDS[until]
    alone, at_once = whole(until)
    shares = [lab.run(tmp_path / "many", pipeline, until=until, shard=shard, **changes)[0] for shard in SHARES]
    lab.listening.messages.clear()
    joined, paths = lab.run(tmp_path / "many", pipeline, until=until, **changes)
    stages = {"logits": "teacher.logits", "answers": "teacher.generate", "scores": "teacher.judge"}
    names = {"logits": ["logits"], "generation": ["answers"], "preferences": ["answers", "scores"]}[until]
    for name in names:
        assert f"{name}: found 3 of 3 shards (their energy is included)" in lab.listening.messages
        same(paths.artifacts, at_once.artifacts, name)
        own, *parts = with_shards(read_bill(paths.artifacts / name))
        stage = stages[name]
        assert sorted(part.made_by for part in parts) == sorted(share.run_id for share in shares)
        assert own.energy["cpu_estimate"].energy_j == pytest.approx(joules(joined, stage))
        spent = sum(joules(share, stage) for share in shares)
        assert sum(part.energy["cpu_estimate"].energy_j for part in parts) == pytest.approx(spent)
        counted = [share.stage(stage).samples for share in shares]
        assert sum(counted) == alone.stage(stage).samples
        assert max(counted) < alone.stage(stage).samples
        assert joined.stage(stage).samples is None  # it asked the teacher nothing
        # of the lineage every one once: what the shares spent on data is theirs, and one of it is on this bill
        inherited = [one for one in joined.inherited if stage in one.stages]
        assert len(inherited) == 3
        row = make_row(joined.label, compared_runs(joined, paths.folder, None), [])
        shown = next(one.figure for one in row.stages if one.name == stage and one.inherited)
        assert shown.energy_j == pytest.approx(spent)
    assert len([one for one in joined.lineage if one.kind == "documents"]) == 1


def test_finished_shards_are_reused_and_missing_ones_computed(lab, whole, tmp_path):
    alone, at_once = whole("logits")
    hidden = KINDS["logits"][1]
    first, _ = lab.run(tmp_path, "kd", until="teacher", shard="0/3", **hidden)
    again, _ = lab.run(tmp_path, "kd", until="teacher", shard="0/3", seed=5, **hidden)
    assert not {"teacher.logits", "teacher.evaluate"} & {stage.name for stage in again.stages}
    student, paths = lab.run(tmp_path, "kd", **hidden)
    same(paths.artifacts, at_once.artifacts, "logits")
    requested = first.stage("teacher.logits").samples
    assert student.stage("teacher.logits").samples == alone.stage("teacher.logits").samples - requested > 0
    paid = {stage for one in student.inherited for stage in one.stages}
    assert {"teacher.evaluate", "teacher.logits"} <= paid  # by the first share
    warm, _ = lab.run(tmp_path, "kd", until="logits", distill={"codec": "hidden", "temperature": 2.0})
    assert warm.stage("teacher.logits") is None  # hidden states are good for any temperature
    late, _ = lab.run(tmp_path, "kd", until="logits", shard="1/3", **hidden)
    assert any("logits: already complete in" in line for line in lab.listening.messages)
    assert not late.made


def test_an_interrupted_shard_resumes(lab, tmp_path, monkeypatch):
    paths = lab.paths(tmp_path, "dpo", until="preferences", shard="1/2", **RUBRIC)
    count, seen = Stage.count, []

    def failing(stage, **counts):
        count(stage, **counts)
        if stage.name == "teacher.generate" and counts.get("samples"):
            seen.append(counts)
            if len(seen) == 3:
                raise RuntimeError("power failure")

    monkeypatch.setattr(Stage, "count", failing)
    with pytest.raises(RuntimeError, match="power failure"):
        execute(paths, lab.listening)
    monkeypatch.setattr(Stage, "count", count)
    record = execute(paths, lab.listening)
    other = lab.run(tmp_path / "other", "dpo", until="preferences", shard="1/2", **RUBRIC)
    for name in ("answers", "scores"):
        files = [place.artifacts / f"{name}-1-of-2" / f"{name}.jsonl" for place in (paths, other[1])]
        assert files[0].read_bytes() == files[1].read_bytes()
    generate = record.stage("teacher.generate")
    assert {segment.attempt for segment in generate.segments} == {1, 2}
    assert generate.samples == other[0].stage("teacher.generate").samples


def test_a_shard_without_a_batch_loads_no_teacher(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(CausalContext, "load_teacher", None)  # three batches of prompts, ten shares
    record, _ = lab.run(tmp_path, "dpo", until="preferences", shard="9/10")
    assert record.status == "done"
    assert [len(record.made), record.stage("teacher.generate").samples] == [3, None]
    assert any("answers: shard 9/10 has no work" in text for text in lab.listening.messages)


def test_a_shard_without_a_batch_starts_no_engine(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "make_generator", None)
    for number, changes in {8: {"teacher": {"server": "http://localhost:9/v1"}}, 9: {}}.items():
        lab.run(tmp_path, "synthetic", until="generation", shard=f"{number}/10", **changes)
        assert any(f"answers: shard {number}/10 has no work" in text for text in lab.listening.messages)


def test_a_shard_without_a_batch_is_joined_with_the_others(lab, whole, tmp_path):
    for shard in ("9/10", "1/10"):
        lab.run(tmp_path, "synthetic", until="generation", shard=shard)
    _, paths = lab.run(tmp_path, "synthetic", until="generation")
    assert any("answers: found 2 of 10 shards" in text for text in lab.listening.messages)
    same(paths.artifacts, whole("generation")[1].artifacts, "answers")


@pytest.mark.parametrize(
    ("pipeline", "settings", "text"),
    [
        ("kd", {"shard": "3/3", "until": "logits"}, "counted from 0"),
        ("kd", {"shard": "0/3"}, "until=teacher"),
        ("self", {"shard": "0/3", "until": "teacher"}, "trained first"),
        ("sft", {"shard": "0/3", "until": "teacher"}, "no teacher"),
        ("kd", {"shard": "0/3", "until": "data"}, "only that can be sharded"),
        ("kd", {"shard": "0/3", "until": "teacher", "distill": {"teacher": "live"}}, "only a cache"),
    ],
)
def test_work_that_cannot_be_sharded_is_refused_with_the_reason(lab, pipeline, settings, text):
    with pytest.raises(ConfigError, match=text):
        check(lab.settings(pipeline, **settings))


def test_shards_are_disjoint_complete_and_of_equal_size_also_among_ranks():
    names = [f"{number * 7919 % 101:x}" for number in range(50)]
    shares = [Shard(number, 4).among(rank, 2).units(names) for number in range(4) for rank in range(2)]
    assert sorted(place for share in shares for place in share) == list(range(50))
    assert {len(share) for share in shares} == {6, 7}
    assert Shard(2, 4).units(names) == sorted(
        Shard(2, 4).among(0, 2).units(names) + Shard(2, 4).among(1, 2).units(names)
    )


@pytest.mark.slow
def test_two_ranks_divide_the_teachers_work(lab, whole, tmp_path):
    alone, at_once = whole("preferences")
    settings = {key: value for key, value in lab.settings("dpo", until="preferences").items() if key != "name"}
    (tmp_path / "dpo.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "joulelab", "run"]
    command += [str(tmp_path / "dpo.yaml"), "--runs-dir", str(tmp_path / "runs"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    record = RunRecord.model_validate_json(done.stdout)
    folder = tmp_path / "runs" / record.run_id
    for name in ("answers", "scores"):
        same(folder / "artifacts", at_once.artifacts, name)
    for stage in ("teacher.generate", "teacher.judge"):
        assert record.stage(stage).samples == alone.stage(stage).samples, stage
    assert not list((folder / "checkpoints").glob("teacher.*"))
