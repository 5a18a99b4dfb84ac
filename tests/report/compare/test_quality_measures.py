"""Whatever a pipeline measures can be compared: shares, losses, scores, or joules alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from joulelab.errors import UsageError
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.quality import common_measure, quality_of
from joulelab.report.compare.verdict import verdict
from joulelab.report.opening import run_headline, run_tiles
from joulelab.report.tables.comparison_tables import comparison_markdown, runs_grid
from joulelab.report.tables.run_tables import run_remarks, run_result
from joulelab.runs.index import listed_run, row_of
from joulelab.runs.record import Note, Result
from joulelab.runs.validity import interruption_text


def with_results(record, **results):
    named = {name.replace("__", "."): result for name, result in results.items()}
    return record.model_copy(update={"results": named})


def squad(made):
    """Exact matches of 1,000 questions, an F1 beside them, and figures that describe them."""
    changed = []
    for record in made.demo_records():
        share = next(iter(record.results.values()))
        who = "teacher" if record.label == "teacher" else "student"
        f1 = Result(value=share.value + 0.05)
        names = {f"{who}__f1": f1, f"{who}__f1__low": f1, f"{who}__exact_match": share, f"{who}__agreement": share}
        changed.append(with_results(record, **names))
    return changed


def test_exact_matches_are_compared_item_by_item_like_accuracies(made, tmp_path: Path) -> None:
    records = squad(made)
    made.write_group(tmp_path, made.demo_records())  # the predictions are the same
    comparison = compare(made.group_of(records), records, tmp_path)
    assert comparison.measure and comparison.measure.name == "exact_match"
    found = verdict(comparison)
    assert "response KD has a higher exact match (+3.7 points)" in found.headline
    assert found.sentences[0].startswith("response KD has an exact match 3.7 points higher than labels only (95 %")
    assert "| Exact match, % |" in comparison_markdown(comparison)


def test_a_figure_can_be_requested_by_name_and_has_the_seeds_as_its_sample(made, tmp_path: Path) -> None:
    records = squad(made)
    row = compare(made.group_of(records), records, tmp_path, wanted="f1").row("response KD")
    assert row and row.quality == pytest.approx(0.88)
    assert row.difference and row.difference.paired is None and row.difference.over_seeds
    assert row.difference.over_seeds.value == pytest.approx(0.037)


def test_a_name_that_no_run_has_is_refused_with_those_there_are(made, tmp_path: Path) -> None:
    records = squad(made)
    with pytest.raises(UsageError, match="'bleu'") as output_text:
        compare(made.group_of(records), records, tmp_path, wanted="bleu")
    assert "exact_match" in output_text.value.hint


def test_a_training_loss_is_no_quality_and_where_it_is_requested_it_is_called_one(made, tmp_path: Path) -> None:
    """Self-distillation has the training loss of its half-way start among its results, before the held-out one."""
    records = [
        with_results(
            record,
            student__sft__final_loss=Result(value=9.056, lower_is_better=True),
            student__train__final_loss=Result(value=2.0 + record.spec["seed"] / 100),
            student__clm_loss=Result(value=7.919, lower_is_better=True),
        )
        for record in made.demo_records()
        if record.label in ("labels only", "response KD")
    ]
    found = quality_of(records[0])
    assert found and found.measure.name == "clm_loss" and found.result.value == 7.919
    only = with_results(records[0], student__sft__final_loss=Result(value=9.056, lower_is_better=True))
    assert quality_of(only) is None
    for wanted in ("train.final_loss", "sft.final_loss"):
        comparison = compare(made.group_of(records), records, tmp_path, wanted=wanted)
        output_text = verdict(comparison)
        assert "training loss" in output_text.headline and "validation" not in " ".join(
            (output_text.headline, *output_text.sentences)
        )
        assert any("if the objectives differ, lower is not better" in text for text in output_text.sentences)
    output_text = verdict(compare(made.group_of(records), records, tmp_path))
    assert "held-out loss" in output_text.headline and not any(
        "training loss" in text for text in output_text.sentences
    )


def test_a_loss_is_a_loss_also_where_its_record_does_not_report_it(made) -> None:
    record = with_results(
        made.labels_only(0, 1), model__evaluate__loss=Result(value=2.5), model__train__final_loss=Result(value=2.0)
    )
    quality = quality_of(record)
    assert quality and quality.measure.lower_is_better and quality.text() == "2.500"


def test_the_measure_that_most_runs_share_is_compared(made) -> None:
    both = with_results(
        made.labels_only(0, 1), student__accuracy=Result(value=0.5, trials=10), student__score=Result(value=3)
    )
    score = with_results(made.labels_only(1, 1), student__score=Result(value=4))
    measure = common_measure([both, score])
    assert measure and measure.name == "score" and not measure.percent


def test_runs_without_any_quality_are_compared_by_joules_alone(made, tmp_path: Path) -> None:
    records = [with_results(record) for record in made.demo_records() if record.label != "teacher"]
    comparison = compare(made.group_of(records), records, tmp_path)
    assert comparison.measure is None and not comparison.incomplete
    assert verdict(comparison).headline == (
        "Compared with labels only, including the teacher, the methods use 6.48x to 6.61x the energy."
    )
    assert "Quality" not in comparison_markdown(comparison)


def test_tasks_of_the_harness_and_exact_answers_are_paired_item_by_item(made, tmp_path):
    records = []
    for label, right in (("labels only", 600), ("response KD", 700)):
        for seed in (0, 1):
            run = made.labels_only(seed, 0) if label == "labels only" else made.distilled(label, seed, 0, 131.0)
            share = Result(value=right / 1000, trials=1000, successes=right, standard_error=0.015)
            results = {
                "student.clm_loss": Result(value=3.0 + seed / 100, lower_is_better=True),
                "student.harness.gsm8k.exact_match.strict.value": share,
                "student.exact_answers": share,
            }
            record = run.model_copy(update={"results": results})
            records.append(record)
            place = tmp_path / record.run_id / "artifacts" / "student-quality"
            place.mkdir(parents=True)
            scores = {str(item): float(item < right + seed) for item in range(1000)}
            task = {"task": "gsm8k", "metric": "exact_match.strict", "scores": scores}
            (place / "harness.json").write_text(json.dumps({"tasks": [task]}))
            (place / "answers.json").write_text(json.dumps({"right": [bool(score) for score in scores.values()]}))
    group = made.group_of(records)
    assert compare(group, records, tmp_path).measure.name == "clm_loss"
    for wanted in ("harness.gsm8k.exact_match.strict.value", "exact_answers"):
        difference = compare(group, records, tmp_path, wanted=wanted).row("response KD").difference
        assert difference.paired.items == 1000 and difference.paired.discordant >= 100
        assert difference.significant and difference.interval.value == pytest.approx(0.1)
    agreement = [one.model_copy(update={"results": {"student.agreement": share}}) for one in records]
    assert compare(group, agreement, tmp_path, wanted="agreement").row("response KD").difference.paired is None


def interrupted_student(made):
    """Killed while the student was trained: the teacher is evaluated, the student is not."""
    parts = (*made.TEACHER_PARTS[:3], made.Part("student.train", 4.0, 12.0, 100))
    return made.make_record(
        "response KD", 0, parts, correct=883, result="teacher.accuracy", status="truncated", made=("key-teacher",)
    )


def test_the_accuracy_of_a_teacher_is_not_that_of_the_student_that_was_not_evaluated(made) -> None:
    record = interrupted_student(made)
    assert quality_of(record) is None and quality_of(made.teacher_run()) is not None
    listed = listed_run(row_of(record)["listing"])
    assert runs_grid([listed]) == runs_grid([record])
    assert "88.3" not in str(runs_grid([record]).rows) + run_result(record) + str(run_tiles(record))
    assert "88.3" not in run_headline(record)


def test_a_student_run_interrupted_before_its_first_student_stage_has_no_quality(made) -> None:
    record = interrupted_student(made)
    early = record.model_copy(update={"stages": record.stages[:3], "spec": {**record.spec, "student": {"layers": 2}}})
    assert quality_of(early) is None
    teacher = early.model_copy(update={"spec": {**early.spec, "until": "teacher"}})
    assert quality_of(teacher) is not None


@pytest.mark.parametrize(
    "name", ["synthetic.energy_j", "synthetic.unigram_loss", "preferences.j_per_pair", "student.energy_j"]
)
def test_energy_and_the_results_of_made_data_are_no_quality_of_a_run_without_another(made, name) -> None:
    record = made.demo_records()[-1]
    record = record.model_copy(update={"results": {name: Result(value=386.03, lower_is_better=True)}})
    assert quality_of(record) is None
    assert "386" not in run_result(record)
    loss = Result(value=2.5, lower_is_better=True)
    evaluated = record.model_copy(update={"results": record.results | {"student.synthetic.loss": loss}})
    assert quality_of(evaluated).result == loss  # an evaluator of that name


def test_a_killed_run_is_shown_with_its_cause(made) -> None:
    record = interrupted_student(made)
    cut = Note(level="warning", text=interruption_text(record.attempts[-1].number))
    error, *others = run_remarks(record.with_notes([cut]))
    assert error.startswith("error: the process ended without closing the run (killed, ")
    assert error.endswith("; its energy ends with the last reading")
    assert others == run_remarks(record)[1:], "the interruption is stated once"
    assert not any(text.startswith("error") for text in run_remarks(made.teacher_run()))


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("exact_answers", "share of exact answers"),
        ("next_token", "share of right next tokens"),
        ("harness.arc_easy.acc.value", "arc_easy acc score"),
        ("judge.grade", "mean grade of the judge"),
    ],
)
def test_the_name_of_a_measure_fits_into_a_sentence(made, tmp_path: Path, name, title) -> None:
    records = [
        record.model_copy(update={"results": {f"model.{name}": Result(value=0.5)}})
        for record in made.demo_records()[1:5]
    ]
    comparison = compare(made.group_of(records), records, tmp_path, wanted=name)
    assert f"no method has a significantly higher or lower {title};" in verdict(comparison).headline


def test_the_quality_of_judged_answers_is_their_grade_and_not_the_number_without_one(made) -> None:
    unjudged, grade = Result(value=3.0, lower_is_better=True), Result(value=2.0)
    found = quality_of(with_results(made.labels_only(0, 1), model__judge__unjudged=unjudged, model__judge__grade=grade))
    assert found and found.measure.name == "judge.grade" and found.text() == "2.000"
