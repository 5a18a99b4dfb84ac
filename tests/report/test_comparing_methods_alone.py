"""A comparison compares methods, nothing else: no order of members, no interruption and no repeat shifts a ratio."""

import sys

import pytest
from simulated_machine import machine  # noqa: F401 (a fixture)

from joulelab.errors import EndedBySignal
from joulelab.lookup import PIPELINES
from joulelab.report.compare import compare
from joulelab.report.parts import datasets
from joulelab.report.tables import comparison_grids, render_text, to_rich
from joulelab.report.verdict import verdict
from joulelab.runs.attempt import create_run
from joulelab.runs.context import RunContext
from joulelab.runs.execute import execute
from joulelab.runs.groups import create_group, execute_group, group_records
from joulelab.runs.listeners import Silent
from joulelab.runs.paths import RunPaths
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record

GPU = {"total_energy_policy": "gpu_only"}


def spec(label, seed=0):
    return load_spec("demo-kd", {"label": label, "seed": seed, "energy": GPU, "reuse_artifacts": False})


@pytest.fixture
def heavy_import(tmp_path, monkeypatch, machine):  # noqa: F811
    """A framework whose first import in a process takes 10 s."""
    (tmp_path / "heavy_framework.py").write_text("from pass_time import machine\nmachine.work(10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "pass_time", type(sys)("pass_time"))
    sys.modules["pass_time"].machine = machine
    yield
    sys.modules.pop("heavy_framework", None)


SECONDS = {"labels only": 8.0, "KD": 10.0}


def ratio_of_group(store, order, machine, monkeypatch):  # noqa: F811
    """KD over labels only in a group that runs its members in this order, in one process, as `joulelab run` does."""
    sys.modules.pop("heavy_framework", None)

    def pipeline(run: RunContext) -> None:
        machine.work(1)
        with run.stage("student.train", role="student", activity="train"):
            import heavy_framework  # noqa: F401

            machine.work(SECONDS[run.spec.label] + 0.1 * run.spec.seed)
        machine.work(1)

    monkeypatch.setattr(PIPELINES, "resolve", lambda name: pipeline)
    specs = [spec(label, seed) for label in order for seed in (0, 1)]
    group = create_group(store, specs, name="reversed", about="", baseline="labels only")
    execute_group(group, Silent())
    row = compare(*group_records(group.folder), store).row("KD")
    return row.student_ratio.ratio, row.full_ratio.ratio


def test_reversing_the_members_of_a_group_shifts_no_ratio(tmp_path, machine, heavy_import, monkeypatch):  # noqa: F811
    """With imports billed to the first member the ratio was 0.64x in one order and 1.85x in the other."""
    forward, backward = (
        ratio_of_group(tmp_path / name, order, machine, monkeypatch)
        for name, order in (("forward", ["labels only", "KD"]), ("backward", ["KD", "labels only"]))
    )
    expected = ((10.0 / 8.0) * (10.1 / 8.1)) ** 0.5
    for ratios in (forward, backward):
        assert [ratio.value for ratio in ratios] == pytest.approx([expected] * 2, rel=1e-9)
    assert forward[0].low == pytest.approx(backward[0].low, rel=1e-6)


def trained(machine, begin, end):  # noqa: F811
    def train(stage, step_s):
        if begin:
            stage.resumed(begin)
        for step in range(begin + 1, abs(end) + 1):
            machine.work(step_s)
            stage.count(tokens=1000 * step)
            if step % 20 == 0:
                stage.checkpointed(step)
        if end < 0:
            raise EndedBySignal(15)

    def pipeline(run):
        machine.work(1)
        try:
            with run.stage("student.train", role="student", activity="train") as stage:
                train(stage, 0.1 if run.spec.label == "labels only" else 0.11)
        finally:
            machine.work(1)

    return pipeline


@pytest.fixture
def interrupted(tmp_path, machine, monkeypatch):  # noqa: F811
    """labels only without interruption, and KD, which uses 1.1x of it, killed at step 59 and resumed at step 40."""

    def play(paths, pipeline):
        monkeypatch.setattr(PIPELINES, "resolve", lambda name: pipeline)
        return execute(paths, Silent())

    play(create_run(tmp_path, spec("labels only")), trained(machine, 0, 80))
    paths: RunPaths = create_run(tmp_path, spec("KD"))
    with pytest.raises(EndedBySignal):
        play(paths, trained(machine, 0, -59))
    play(paths, trained(machine, 40, 80))
    return [load_record(folder) for folder in sorted(tmp_path.glob("demo-kd-*"))]


def row_of(records, store, **options):
    from joulelab.report.selection import select

    return select(store, [record.run_id for record in records], "labels only").comparison(store, **options).row("KD")


def test_work_repeated_after_an_interruption_is_in_no_ratio_unless_it_is_asked_for(interrupted, tmp_path):
    """80 steps of which 19 were done twice: 1.35x was printed where 1.1x is right."""
    row = row_of(interrupted, tmp_path)
    assert row.student_ratio.ratio.value == pytest.approx(1.1, rel=1e-6)
    assert row.repeated.energy_j == pytest.approx(19 * 11, rel=1e-3)
    assert row.whole.energy_j == pytest.approx(row.with_teacher.energy_j + row.setup.energy_j + row.repeated.energy_j)
    with_repeated = row_of(interrupted, tmp_path, include_repeated=True)
    assert with_repeated.student_ratio.ratio.value == pytest.approx(1.1 * 99 / 80, rel=1e-3)
    assert with_repeated.repeated is None


def test_tables_page_and_verdict_come_from_the_same_energy(interrupted, tmp_path):
    from joulelab.report.selection import select

    comparison = select(tmp_path, [r.run_id for r in interrupted], "labels only").comparison(tmp_path)
    text = "\n".join(render_text(to_rich(grid)) for grid in comparison_grids(comparison))
    assert "1.10x" in text and "student.train.repeated" in text and "all energy used" in text
    assert any("1.10x" in sentence for sentence in verdict(comparison).sentences)
    on_page = {part["stage"] for part in datasets(comparison)["parts"]}
    assert on_page == {"student.train"}
