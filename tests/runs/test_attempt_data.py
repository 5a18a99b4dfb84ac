"""Setup inside a stage and work that an interruption lost have lines of their own; the rest is the method's."""

import sys
from types import SimpleNamespace

import pytest
from simulated_machine import machine  # noqa: F401 (a fixture)

from joulelab.clock import NS
from joulelab.errors import EndedBySignal
from joulelab.meter.figures import EnergyFigure, amount_text, missing
from joulelab.report.tables.bill_tables import find_bill
from joulelab.runs.attempt_data import idle_baselines
from joulelab.runs.record import EnergyByComponent
from joulelab.runs.store import load_record

GPU = {"energy": {"total_energy_policy": "gpu_only"}}


@pytest.fixture
def play(play, machine):  # noqa: F811
    def around(story):
        """A second before and after, so that no stage ends where the trace does."""

        def longer(run):
            machine.work(1)
            try:
                story(run)
            finally:
                machine.work(1)

        return longer

    def start(story, after=True, **overrides):
        return play(around(story) if after else story, **GPU, **overrides)

    start.again, start.machine = lambda story: play.again(around(story)), machine
    start.folder = lambda: play.paths.folder
    return start


def joules(record):
    return {stage.name: round(stage.best.energy_j, 1) for stage in record.stages if stage.name != "run.overhead"}


def whole(record):
    return sum(stage.best.energy_j for stage in record.stages)


def test_a_total_with_a_lower_bound_in_it_is_one_however_short_that_stage_is(play, monkeypatch):
    """99.96 % of the time is covered, and the sum of the stages' lines still lacks something."""

    def story(run):
        with run.stage("student.train", role="student", activity="train"):
            play.machine.work(200)
        with run.stage("student.evaluate", role="student", activity="evaluate"):
            play.machine.work(0.3)
            monkeypatch.setattr(play.machine.meters[0], "read", lambda now_ns: None)
            play.machine.work(0.03)

    record = play(story, after=False)
    evaluated = record.stage("student.evaluate")
    assert evaluated.best.is_lower_bound and not record.stage("student.train").best.is_lower_bound
    assert record.totals.best.coverage > 0.999
    assert amount_text(record.totals.best).startswith("≥ ") and amount_text(record.totals.gpu).startswith("≥ ")


def test_idle_power_is_that_of_covered_time():
    """Half of an idle stretch without readings is not half the idle power."""
    idle = EnergyFigure(energy_j=400.0, method="counter", coverage=0.5)
    energy = EnergyByComponent(gpu=idle, **dict.fromkeys(("cpu", "dram", "cpu_estimate"), missing("no sensor")))
    attempt = SimpleNamespace(
        number=1,
        host="here",
        idle_stages=["idle.before"],
        windows={"idle.before": [(0, 10 * NS)]},
        energy=lambda windows: energy,
        health=SimpleNamespace(during=lambda windows: []),
    )
    (found,) = idle_baselines([attempt], "measured")
    assert found.power_w == pytest.approx(80)


def test_compilation_inside_a_training_is_a_setup_stage_outside_rates(play):
    """500 steps at 599 k tokens/s with 20 s of compilation in the first one, as on an H200."""
    steps, tokens_a_step, step_s = 500, 16_384, 16_384 / 599_000

    def story(run):
        with run.stage("student.train", role="student", activity="train") as stage:
            for step in range(1, steps + 1):
                with run.meter.phase("step"):
                    if step == 1:
                        begin_ns = play.machine.now_ns
                        play.machine.work(20)
                        run.note_setup("compile", begin_ns, play.machine.now_ns)
                    play.machine.work(step_s)
                stage.count(tokens=step * tokens_a_step)

    record = play(story)
    train, setup = record.stage("student.train"), record.stage("student.train.setup")
    assert train.tokens_per_s == pytest.approx(599_000, rel=1e-4)
    assert train.j_per_token == pytest.approx(100 / 599_000, rel=1e-4)
    assert (setup.role, setup.activity, setup.part_of) == ("setup", "compile", "student.train")
    assert setup.best.energy_j == pytest.approx(2000)
    assert train.phases["step"].max_s == pytest.approx(step_s, rel=1e-3)
    assert whole(record) == pytest.approx(record.totals.best.energy_j)


def test_an_import_inside_a_stage_belongs_to_the_overhead_of_the_run(play, tmp_path, monkeypatch):
    (tmp_path / "heavy_framework.py").write_text("from pass_time import machine\nmachine.work(10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "pass_time", type(sys)("pass_time"))
    sys.modules["pass_time"].machine = play.machine

    def story(run):
        with run.stage("teacher.logits"):
            play.machine.work(1)
            import heavy_framework  # noqa: F401

            play.machine.work(2)

    record = play(story)
    monkeypatch.delitem(sys.modules, "heavy_framework")
    assert joules(record) == {"teacher.logits": 300}
    overhead = record.stage("run.overhead")
    assert (overhead.role, overhead.best.energy_j) == ("setup", pytest.approx(1200, abs=10))


def train(play, begin, end):
    """Steps of 1 s and 1000 tokens, an evaluation every 10 and a checkpoint every 20; `end < 0`: a kill after it."""

    def story(run):
        with run.stage("student.train", role="student", activity="train") as stage:
            if begin:
                play.machine.work(3)
                stage.resumed(begin)
                run.note_setup("load", play.machine.now_ns - 3 * NS, play.machine.now_ns)
            for step in range(begin + 1, abs(end) + 1):
                play.machine.work(1)
                stage.count(tokens=1000 * step)
                if step % 10 == 0:
                    with run.stage("student.validate", again=True, role="student", activity="validate"):
                        play.machine.work(0.5)
                if step % 20 == 0:
                    stage.checkpointed(step)
            if end < 0:
                raise EndedBySignal(15)

    return story


def test_steps_between_the_last_checkpoint_and_the_kill_are_repeated_work(play):
    with pytest.raises(EndedBySignal):
        play(train(play, 0, -35))
    alone = load_record(play.folder())
    assert joules(alone)["student.train"] == 3500
    assert not any(stage.repeated for stage in alone.stages), "nothing has been done again yet"
    record = play.again(train(play, 20, 40))
    assert joules(record) == {
        "student.train": 4000,
        "student.validate": 200,
        "student.train.repeated": 1500,
        "student.validate.repeated": 50,
        "student.train.setup": 300,
    }
    trained, repeated = record.stage("student.train"), record.stage("student.train.repeated")
    assert (trained.tokens, trained.j_per_token) == (40_000, pytest.approx(0.1))
    assert trained.tokens_per_s == pytest.approx(1000)
    assert (repeated.role, repeated.repeated, repeated.part_of) == ("student", True, "student.train")
    assert whole(record) == pytest.approx(record.totals.best.energy_j)


def test_a_stage_that_begins_anew_lost_all_of_its_first_attempt(play):
    with pytest.raises(EndedBySignal):
        play(train(play, 0, -8))
    record = play.again(train(play, 0, 10))
    assert joules(record) == {"student.train": 1000, "student.validate": 50, "student.train.repeated": 800}
    assert record.stage("student.train").tokens == 10_000


def test_a_stage_done_anew_is_complete_and_comes_after_what_it_uses(play):
    def prepared(run):
        with run.stage("data.preprocess"):
            play.machine.work(2)
        train(play, 0, -8)(run)

    with pytest.raises(EndedBySignal):
        play(prepared)
    record = play.again(train(play, 0, 10))
    trained = record.stage("student.train")
    assert not trained.best.is_lower_bound and trained.best.coverage == pytest.approx(1.0)
    names = [stage.name for stage in record.stages]
    assert names.index("data.preprocess") < names.index("student.train")
    assert len({segment.attempt for segment in trained.segments}) == 1


def test_attempts_that_kept_nothing_are_lost_whole_and_the_one_before_up_to_its_checkpoint(play):
    with pytest.raises(EndedBySignal):
        play(train(play, 0, -35))
    with pytest.raises(EndedBySignal):
        play.again(train(play, 20, -28))
    record = play.again(train(play, 20, 30))
    assert joules(record)["student.train"] == 3000
    assert joules(record)["student.train.repeated"] == 1500 + 800
    assert joules(record)["student.train.setup"] == 600, "start-up of the later attempts"
    assert record.stage("student.train").tokens == 30_000


def test_work_that_became_an_artifact_is_never_repeated(play):
    def evaluated(run, split, seconds):
        def make(folder):
            with run.stage("student.evaluate", again=True, role="student", activity="evaluate"):
                play.machine.work(seconds)

        run.artifact(f"predictions-{split}", kind="predictions", inputs={"split": split}, parents=[], make=make)

    def truncated(run):
        evaluated(run, "validation", 4)
        with run.stage("student.evaluate", again=True, role="student", activity="evaluate"):
            play.machine.work(1)
            raise EndedBySignal(15)

    def finish(run):
        evaluated(run, "validation", 4)
        evaluated(run, "test", 3)

    with pytest.raises(EndedBySignal):
        play(truncated)
    assert joules(play.again(finish)) == {"student.evaluate": 700, "student.evaluate.repeated": 100}


def test_an_artifact_has_one_price_however_often_it_was_interrupted(play):
    def made(story):
        def pipeline(run):
            run.artifact("model", kind="model", inputs={}, parents=[], make=lambda folder: story(run))

        return pipeline

    with pytest.raises(EndedBySignal):
        play(made(train(play, 0, -35)), reuse_artifacts=False)
    interrupted = play.again(made(train(play, 20, 40)))
    uninterrupted = play(made(train(play, 0, 40)), reuse_artifacts=False)
    price, other = interrupted.lineage[0], uninterrupted.lineage[0]
    assert price.work["gpu"].energy_j == pytest.approx(other.energy["gpu"].energy_j)
    assert other.work == {}, "nothing to leave out"
    assert price.setup["gpu"].energy_j == pytest.approx(300)
    assert price.repeated["gpu"].energy_j == pytest.approx(1550)
    assert price.energy["gpu"].energy_j == pytest.approx(4200 + 300 + 1550)
    bill = find_bill(play.folder().parent, f"{interrupted.run_id}/model")
    lines = {line.name: round(line.figure.energy_j) for line in bill.own}
    assert lines == {"model": 4200, "model, setup": 300, "model, repeated": 1550}
    assert bill.whole.energy_j == pytest.approx(6050)


def test_a_first_step_that_was_setup_has_its_tokens_outside_the_rates(play):
    """100 steps of 1 s, the first of 6 s; the attempt that kept nothing takes its first step along."""

    def story(first, last, killed=False):
        def steps(run):
            with run.stage("student.train", role="student", activity="train") as stage:
                begin_ns = play.machine.now_ns
                for step in range(first, last + 1):
                    play.machine.work(6 if step == first else 1)
                    stage.count(tokens=1000 * step)
                    if step == first:
                        run.note_setup("warmup", begin_ns, play.machine.now_ns)
                        stage.count_as_setup(tokens=1000)
                if killed:
                    raise EndedBySignal(15)

        return steps

    with pytest.raises(EndedBySignal):
        play(story(1, 8, killed=True))
    record = play.again(story(1, 100))
    trained, setup = record.stage("student.train"), record.stage("student.train.setup")
    assert (trained.tokens, trained.tokens_per_s) == (99_000, pytest.approx(1000))
    assert trained.j_per_token == pytest.approx(0.1)
    assert (setup.tokens, setup.tokens_per_s, setup.j_per_token) == (1000, None, None)
    assert joules(record) == {
        "student.train": 9900,
        "student.train.setup": 1200,
        "student.train.repeated": 700,
    }
