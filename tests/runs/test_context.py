"""One run from inside: stages as segments, artifacts with bills, and a record that closes on its trace."""

import os
import signal
import time
from contextlib import nullcontext

import pytest

from joulelab.errors import EndedBySignal, JoulelabError, NonFiniteLoss
from joulelab.lookup import PIPELINES
from joulelab.meter.figures import EnergyFigure
from joulelab.runs import context
from joulelab.runs.artifacts import external
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress, StopRequest
from joulelab.runs.execute import execute
from joulelab.runs.paths import read_json
from joulelab.runs.record import Result
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))


def test_a_stage_inside_another_suspends_it_and_is_never_billed_to_it(play):
    def story(run):
        with run.stage("student.train"):
            busy(0.3)
            with run.stage("student.evaluate"):
                busy(0.6)
            busy(0.3)

    record = play(story)
    train, evaluate = record.stage("student.train"), record.stage("student.evaluate")
    assert len(train.segments) == 2
    assert evaluate.best.energy_j == pytest.approx(train.best.energy_j, rel=0.5)
    (first, second), (inner,) = train.segments, evaluate.segments
    assert first.end_ns <= inner.start_ns < inner.end_ns <= second.start_ns


def test_stages_and_overhead_sum_to_the_total(play):
    def story(run):
        with run.stage("data.preprocess"):
            busy(0.2)
        busy(0.2)
        with run.stage("student.train"):
            busy(0.2)

    record = play(story)
    parts = [stage.best.energy_j for stage in record.stages]
    assert [stage.name for stage in record.stages] == ["data.preprocess", "student.train", "run.overhead"]
    assert sum(parts) == pytest.approx(record.totals.best.energy_j)
    assert sum(stage.duration_s for stage in record.stages) == pytest.approx(record.totals.duration_s)


def test_an_estimate_is_next_to_the_total_and_never_in_it(play):
    record = play(lambda run: busy(0.1))
    assert record.totals.energy_j is None
    assert record.totals.figure.method == "missing"
    assert record.totals.cpu_estimate.energy_j > 0
    assert record.totals.best.method == "estimated"
    assert any("ESTIMATED" in note.text for note in record.validity.notes)


def test_idle_stands_outside_the_totals(play):
    def story(run):
        with run.stage("student.train"):
            busy(0.1)

    record = play(story, energy={**play.energy, "idle_before_s": 1.0})
    assert record.stage("idle.before").outside_totals
    assert record.stage("idle.before").duration_s == pytest.approx(1.0, abs=0.4)
    assert record.totals.duration_s < 1.0


def test_two_stages_of_one_name_are_refused_rather_than_merged(play):
    def story(run):
        for _ in range(2):
            with run.stage("student.train"):
                pass

    with pytest.raises(JoulelabError, match="opened twice"):
        play(story)


def test_a_stage_opened_again_on_purpose_has_another_segment(play):
    def story(run):
        for _ in range(3):
            with run.stage("student.evaluate", again=True):
                busy(0.05)

    assert len(play(story).stage("student.evaluate").segments) == 3


def test_counts_give_rates_and_phases_give_times(play):
    def story(run):
        with run.stage("student.train") as stage:
            for step in range(1, 6):
                with run.meter.phase("step"):
                    busy(0.02)
                stage.count(samples=8 * step, tokens=100 * step)

    stage = play(story).stage("student.train")
    assert (stage.samples, stage.tokens) == (40, 500)
    assert stage.j_per_token == pytest.approx(stage.best.energy_j / 500)
    assert stage.phases["step"].count == 5
    # at least its CPU time; on a busy machine longer, but never longer than the stage around it
    assert 0.02 <= stage.phases["step"].mean_s <= stage.duration_s / 5


def test_a_failed_run_keeps_its_joules_and_its_reason(play):
    def story(run):
        with run.stage("student.train"):
            busy(0.2)
            raise NonFiniteLoss("the loss became nan by step 3", "lower the learning rate")

    with pytest.raises(NonFiniteLoss):
        play(story)
    record = load_record(play.paths.folder)
    assert (record.status, record.stage("student.train").status) == ("failed", "failed")
    assert record.error.message == "the loss became nan by step 3"
    assert record.totals.best.energy_j > 0


def test_a_bug_keeps_its_traceback_in_the_record(play):
    def story(run):
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        play(story)
    assert "ZeroDivisionError: ours" in load_record(play.paths.folder).error.traceback


def test_a_resumed_run_has_both_attempts_joules_and_counts_redone_work_once(play):
    def truncated(run):
        with run.stage("student.train") as stage:
            busy(0.3)
            stage.count(samples=50)
            raise EndedBySignal(15)

    def finish(run):
        with run.stage("student.train") as stage:
            busy(0.3)
            stage.count(samples=100)

    with pytest.raises(EndedBySignal):
        play(truncated)
    first = load_record(play.paths.folder)
    second = play.again(finish)
    assert (first.status, second.status) == ("truncated", "done")
    assert [attempt.number for attempt in second.attempts] == [1, 2]
    assert second.stage("student.train").samples == 100
    assert second.totals.best.energy_j > 1.5 * first.totals.best.energy_j


def make_teacher(run):
    def make(folder):
        with run.stage("teacher.train"):
            busy(0.2)
        (folder / "weights.txt").write_text("w")

    outside = run.record_input("weights", external("hub/model", "model", "hub/model"))
    return run.artifact("teacher", kind="teacher", inputs={"lr": 1}, parents=[outside], make=make)


def test_an_artifact_is_found_again_with_its_bill(play):
    def story(run):
        teacher = make_teacher(run)
        run.artifact("cache", kind="cache", inputs={}, parents=[teacher.bill], make=lambda folder: None)

    first = play(story)
    second = play(story)
    assert second.stage("teacher.train") is None
    inherited = {ancestor.name: ancestor for ancestor in second.inherited}
    assert inherited["teacher"].made_by == first.run_id
    paid = first.stage("teacher.train").energy.cpu_estimate.energy_j
    assert inherited["teacher"].energy["cpu_estimate"].energy_j == pytest.approx(paid)


def test_an_artifact_that_is_requested_twice_is_reported_as_reused_once(play, monkeypatch):
    messages = []
    monkeypatch.setattr(SilentProgress, "write", lambda self, text: messages.append(text))

    def story(run):
        for _ in range(2):
            make_teacher(run)

    play(story)
    play(story)
    assert sum(text.startswith("Reusing") for text in messages) == 1


def test_weights_from_elsewhere_are_an_ancestor_with_missing_energy(play):
    record = play(lambda run: make_teacher(run) and None)
    (outside,) = [ancestor for ancestor in record.lineage if ancestor.made_by == "elsewhere"]
    assert outside.energy["all"].method == "missing"
    assert outside in record.inherited


def test_an_ancestor_reached_by_two_ways_counts_once(play):
    def story(run):
        teacher = make_teacher(run)
        left = run.artifact("left", kind="a", inputs={}, parents=[teacher.bill], make=lambda folder: None)
        right = run.artifact("right", kind="b", inputs={}, parents=[teacher.bill], make=lambda folder: None)
        run.artifact("student", kind="c", inputs={}, parents=[left.bill, right.bill], make=lambda folder: None)

    record = play(story)
    keys = [ancestor.key for ancestor in record.lineage]
    assert len(keys) == len(set(keys)) == 5
    bill = read_json(play.paths.artifacts / "student" / "bill.json")
    assert sorted(row["name"] for row in bill["ancestry"]) == ["hub/model", "left", "right", "teacher"]
    assert bill["provisional"] is False


def test_other_inputs_make_another_artifact(play):
    def story_with(rate):
        def story(run):
            run.artifact("teacher", kind="t", inputs={"lr": rate}, parents=[], make=lambda folder: None)

        return story

    play(story_with(1))
    assert play(story_with(2)).inherited == ()


def test_a_half_made_artifact_is_never_found(play, tmp_path):
    def broken(run):
        def make(folder):
            (folder / "half").write_text("x")
            raise JoulelabError("no")

        run.artifact("teacher", kind="t", inputs={}, parents=[], make=make)

    with pytest.raises(JoulelabError):
        play(broken)

    def story(run):
        made = run.artifact("teacher", kind="t", inputs={}, parents=[], make=lambda folder: None)
        assert not (made.folder / "half").exists()

    assert play(story).inherited == ()


def test_reuse_can_be_switched_off(play):
    play(lambda run: make_teacher(run) and None)
    assert play(lambda run: make_teacher(run) and None, reuse_artifacts=False).stage("teacher.train") is not None


def test_results_metrics_and_summary_are_there_for_scripts(play):
    def story(run):
        run.log(10, loss=0.5)
        run.result("student.accuracy", Result(value=0.8, trials=10, successes=8))

    play(story)
    summary = read_json(play.paths.summary)
    assert summary["student.accuracy"] == 0.8
    assert summary["status"] == "done"
    assert "run.overhead.energy_j" in summary
    assert '"loss":0.5' in play.paths.metrics.read_text()


def test_a_result_that_is_no_number_is_a_warning_and_the_record_can_be_read(play):
    def story(run):
        run.result("student.clm_loss", Result(value=float("nan")))
        run.result("student.accuracy", Result(value=0.8, standard_error=float("inf")))
        run.meter.event("result", name="loss of an earlier version", result={"value": float("nan")})

    play(story)
    record = load_record(play.paths.folder)
    assert record.results == {"student.accuracy": Result(value=0.8)}
    assert "student.clm_loss is nan and is not recorded" in [note.text for note in record.validity.notes]


def test_a_full_disk_loses_lines_of_metrics_and_not_the_training(play, monkeypatch):
    def story(run):
        def full(*lines, **options):
            raise OSError(28, "No space left on device")

        run.log(10, loss=0.5)
        monkeypatch.setattr(run._metrics, "append", full)
        for step in (20, 30):
            run.log(step, loss=0.4)

    record = play(story)
    assert record.status == "done"
    assert [note.text for note in record.validity.notes if "metrics cannot be written" in note.text] != []
    assert sum("metrics cannot be written" in note.text for note in record.validity.notes) == 1
    assert len(play.paths.metrics.read_text().splitlines()) == 1


def test_what_a_resumed_attempt_needs_is_removed_once_the_artifact_is_complete(play):
    """A kill while a model of 26 GB is saved must not cost its training."""
    removed = []

    def broken(run):
        def make(folder):
            run.when_made(lambda: removed.append(1))
            raise RuntimeError("no space left")

        run.artifact("student", kind="s", inputs={}, parents=[], make=make)

    with pytest.raises(RuntimeError, match="no space left"):
        play(broken)
    assert removed == []

    def story(run):
        def make(folder):
            run.when_made(lambda: removed.append((folder / "bill.json").exists()))
            assert removed == []

        run.artifact("student", kind="s", inputs={}, parents=[], make=make)
        assert removed == [True]
        run.when_made(lambda: removed.append("at once"))

    play(story)
    assert removed == [True, "at once"]


def test_a_result_in_joules_is_worked_out_with_the_record_and_never_adds_an_estimate_to_a_measurement(play):
    metered = external("weights", "model", "elsewhere")
    five_j = {"gpu": EnergyFigure(energy_j=5.0, method="counter")}
    metered = metered.model_copy(update={"artifact": metered.artifact.model_copy(update={"energy": five_j})})

    def story(run):
        def make(folder):
            with run.stage("teacher.generate"):
                busy(0.2)

        answers = run.artifact("answers", kind="answers", inputs={}, parents=[], make=make).bill
        run.record_input("weights", metered)
        run.energy_result("j_per_answer", [answers], per=10)
        run.energy_result("mixed", [answers, metered])
        run.energy_result("of_none", [answers], per=0)

    record = play(story)
    assert set(record.results) == {"j_per_answer"}
    assert record.results["j_per_answer"].value == pytest.approx(record.stage("teacher.generate").best.energy_j / 10)


def test_an_attempt_ends_before_a_later_phase_and_the_next_one_continues(tmp_path, monkeypatch):
    phases = []

    def pipeline(run):
        for phase in ("data", "teacher", "train", "evaluate"):
            if not run.includes(phase):
                return
            phases.append(phase)

    monkeypatch.setattr(PIPELINES, "resolve", lambda name: pipeline)
    energy = {"sample_interval_s": 0.05, "estimate_cpu": True, "gpus": "none"}
    paths = create_run(tmp_path / "runs", load_spec("demo-kd", {"energy": energy}))
    assert execute(paths, SilentProgress(), "teacher").status == "queued"
    assert phases == ["data", "teacher"]
    assert execute(paths, SilentProgress()).status == "done"
    assert phases[2:] == ["data", "teacher", "train", "evaluate"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_closed_terminal_requests_a_stop_like_sigterm_and_ctrl_c(signum):
    with StopRequest() as stop:
        os.kill(os.getpid(), signum)
        with pytest.raises(EndedBySignal) as ended:
            stop.check()
    assert ended.value.exit_code == 128 + signum


@pytest.mark.parametrize(
    ("signum", "after_s", "interrupts"),
    [
        (signal.SIGINT, 0.5, False),
        (signal.SIGINT, 2, True),
        (signal.SIGTERM, 20, False),  # a launcher's copy
        (signal.SIGTERM, 31, True),
        (signal.SIGUSR1, 3600, False),  # `run_ranks` repeats it until the ranks have ended
    ],
)
def test_a_signal_that_comes_again_later_is_a_second_request(monkeypatch, signum, after_s, interrupts):
    with StopRequest(context.JOB_SIGNALS) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        later_s = time.monotonic() + after_s
        monkeypatch.setattr(context.time, "monotonic", lambda: later_s)
        with pytest.raises(EndedBySignal) if interrupts else nullcontext():
            os.kill(os.getpid(), signum)
        assert stop.signum == signal.SIGTERM


def test_a_program_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)
