"""Roles and activities that a stage declares decide what the report does with it; its name is only a label."""

from __future__ import annotations

from joulelab.report.compare.break_even_report import LossCurve, _beyond_the_teacher, costs_in_use, serving_costs
from joulelab.report.compare.method_rows import compare, compared_runs, select, training_stage
from joulelab.report.energy_sums import all_parts
from joulelab.report.figures.chart_base import is_overhead
from joulelab.report.figures.serving_figures import joules_against_time
from joulelab.report.tables.overview_table import brief_grid, overview_grid
from joulelab.report.tables.training_table import training_grids
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Result, RunRecord

OWN_NAMES = {"student.train": "fit", "student.evaluate": "score it", "run.overhead": "rest"}


def renamed(record: RunRecord) -> RunRecord:
    """As a user's own pipeline leaves it: the same roles and activities under other names."""
    stages = tuple(one.model_copy(update={"name": OWN_NAMES.get(one.name, one.name)}) for one in record.stages)
    return record.model_copy(update={"stages": stages})


def test_a_training_under_any_name_is_the_training(made) -> None:
    record = made.demo_records()[-1]
    assert training_stage(record).name == "student.train"
    assert training_stage(renamed(record)).name == "fit"


def test_of_several_trainings_the_last_of_the_student_is_the_main_one(made) -> None:
    parts = [made.Part(name, 1.0, 5.0) for name in ("teacher.train", "student.sft", "student.train", "teacher.sft")]
    record = made.demo_records()[-1].model_copy(update={"stages": made.stages_of(parts, measured=False)})
    assert training_stage(record).name == "student.train"
    only_teacher = record.model_copy(update={"stages": record.stages[:1]})
    assert training_stage(only_teacher).name == "teacher.train"


def test_models_evaluated_alike_are_compared_whatever_the_stage_is_called(made, tmp_path) -> None:
    record = made.demo_records()[-1]
    (run,) = compared_runs(record, tmp_path, None)
    (other,) = compared_runs(renamed(record), tmp_path, None)
    assert costs_in_use(run).stage.name == "student.evaluate"
    assert costs_in_use(other).stage.name == "score it"
    assert costs_in_use(other).j_per_item == costs_in_use(run).j_per_item


def test_the_evaluation_of_a_training_run_is_not_its_serving_cost(made, tmp_path) -> None:
    (run,) = compared_runs(made.demo_records()[-1], tmp_path, None)
    assert serving_costs(run) is None
    made.write_group(tmp_path, made.demo_records(True), True)
    comparison = select(tmp_path, ["made-labels-*", "made-response-KD-*"]).comparison(tmp_path)
    assert joules_against_time(comparison) is None
    assert not any("Serving" in column.title for column in overview_grid(comparison).columns)


def test_time_of_a_method_leaves_out_setup_and_the_shared_teacher(made, tmp_path) -> None:
    """Whichever member runs first imports the framework, prepares the data and trains the teacher for all of them."""
    shared = [("run.overhead", 9.0), ("data.preprocess", 4.0), ("teacher.train", 30.0)]
    parts = [*shared, ("student.train", 5.0), ("student.evaluate", 2.0)]
    stages = made.stages_of([made.Part(name, seconds, 1.0) for name, seconds in parts], measured=False)
    teacher, *_, record = made.demo_records()
    record = record.model_copy(update={"stages": stages})
    grid = brief_grid(compare(made.group_of([teacher, record]), [teacher, record], tmp_path))
    times = {row[0]: row[[column.title for column in grid.columns].index("Time for one student")] for row in grid.rows}
    assert times == {"teacher": "-", record.label: "7.0 s"}


def sft_first(made, label, seconds, maker=None):
    """DPO or self-distillation with an SFT student of 40 s, which only the first of them trains."""
    stages = [("student.sft", 40.0), ("student.sft-validate", 2.0)]
    sft = made.ancestor("sft-student", 42.0, tuple(name for name, _ in stages), True)
    sft = sft.model_copy(update={"made_by": maker.run_id if maker else ""})
    parts = [*([] if maker else stages), ("student.train", seconds), ("teacher.score", 3.0)]
    own = [made.Part(name, duration, duration) for name, duration in parts]
    keys = () if maker else (sft.key,)
    return made.make_record(label, 0, own, measured=True, lineage=(sft,), made=keys)


def test_time_and_break_even_do_not_depend_on_which_run_trained_the_student_that_both_start_from(made, tmp_path):
    first = sft_first(made, "DPO", 10.0)
    second = sft_first(made, "self", 20.0, maker=first)

    def times(*records):
        comparison = compare(made.group_of(records, records[0].label), records, tmp_path)
        grid = brief_grid(comparison)
        assert [sum(p.figure.energy_j for p in _beyond_the_teacher(row.runs[0])) for row in comparison.rows] == [
            row.with_teacher.energy_j for row in comparison.rows
        ]
        return {row[0]: row[4] for row in grid.rows}

    assert times(first, second) == {"DPO": "55.0 s", "self": "1 min 05 s"}
    assert times(second) == {"self": "≥ 23.0 s"}, "the run that trained it is gone"
    made.write_run(tmp_path, first, True)
    assert times(second) == {"self": "1 min 05 s"}, "it is in the store"


def test_a_loss_curve_is_read_from_the_last_training_under_any_name(made, tmp_path) -> None:
    """SFT for 5 J and its validation for 1 J come before the 7 J of the last training."""
    parts = [("start", 5.0), ("check the start", 1.0), ("fit", 7.0), ("check the fit", 2.0)]
    made_stages = made.stages_of([made.Part(name, 1.0, joules) for name, joules in parts], True)
    stages = [
        stage.model_copy(update={"role": "student", "activity": activity})
        for stage, activity in zip(made_stages, ["train", "validate"] * 2, strict=True)
    ]
    record = made.demo_records()[-1].model_copy(
        update={"stages": tuple(stages), "lineage": (), "made": (), "results": {"fit.steps": Result(value=10.0)}}
    )
    lines = [("check the start", 5, 9.0), ("check the fit", 5, 3.0), ("check the fit", 10, 2.0)]
    RunPaths(tmp_path).metrics.write_text(
        "".join(f'{{"stage": "{name}", "step": {step}, "held_out_loss": {loss}}}\n' for name, step, loss in lines)
    )
    (run,) = compared_runs(record, tmp_path, None)
    curve = LossCurve.of(run)
    assert (curve.shares, curve.losses) == ((0.5, 1.0), (3.0, 2.0))
    assert (curve.before_j, curve.train_j) == (stages[0].best.energy_j + stages[1].best.energy_j, 7.0 + 2.0)


def test_a_zoo_training_under_any_name_has_its_table(made) -> None:
    record = made.demo_records()[-1]
    trained = renamed(record).model_copy(update={"spec": {**record.spec, "pipeline": "train"}})
    assert [grid.caption for grid in training_grids(trained)] == ["Training"]
    assert training_grids(renamed(record)) == []


def test_a_stage_name_with_a_plus_is_one_stage(made) -> None:
    (stage,) = made.stages_of([made.Part("fit + check", 1.0, 5.0)], measured=False)
    record = made.demo_records()[-1].model_copy(update={"stages": (stage,), "lineage": (), "made": ()})
    assert [part.stages for part in all_parts(record)] == [("fit + check",)]


def test_overhead_is_what_declares_itself_so(made) -> None:
    (stage,) = made.stages_of([made.Part("run.overhead", 1.0, 5.0)], measured=False)
    assert is_overhead(stage) and is_overhead(stage.model_copy(update={"name": "rest"}))
    assert not is_overhead(stage.model_copy(update={"part_of": "student.train"}))
