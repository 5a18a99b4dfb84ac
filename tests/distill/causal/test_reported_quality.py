"""What a run reports: where loading is billed, baselines of quality, names of losses."""

import json

import pytest

from joulelab.distill.causal.config import Distillation, Preferences
from joulelab.distill.causal.models import CausalContext
from joulelab.evaluate.exact_answers import Question, chance_level
from joulelab.report.compare.quality import common_measure


def test_a_teacher_is_loaded_within_the_stage_that_needs_it(lab, tmp_path, monkeypatch):
    """Else its joules are nobody's, and the second student does not inherit them."""
    load, inside = CausalContext.load_teacher, []

    def watched(tracker_context):
        inside.append(tuple(stage.name for stage in tracker_context.run._open))
        return load(tracker_context)

    monkeypatch.setattr(CausalContext, "load_teacher", watched)
    lab.run(tmp_path, "kd", until="teacher")
    lab.run(tmp_path, "dpo", until="preferences", shard="0/2", preferences={"judge": "rubric"})
    assert inside == [("teacher.evaluate",), ("teacher.logits",), ("teacher.generate",), ("teacher.judge",)]


def test_an_untrained_student_is_a_warning_and_answers_are_reported_with_chance(lab, finished, tmp_path):
    rows = [{"prompt": f"w{k} w{k + 1}", "answer": f"w{k + 2}", "choices": ["w0", f"w{k + 2}"]} for k in range(3, 9)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lab.listening.messages.clear()
    record, _ = lab.run(
        tmp_path / "runs", "sft", budget={"tokens": 256}, training={"learning_rate": 1e-9},
        quality={"answers": str(tmp_path / "questions.jsonl")},
    )  # fmt: skip
    results = record.results
    loss, guessed = results["student.clm_loss"].value, results["data.unigram_loss"].value
    assert loss > guessed
    notes = " ".join(note.text for note in record.validity.notes)
    assert f"{loss:.3f} nats per token, not below the unigram baseline of {guessed:.3f}" in notes
    learned = finished["sft"][0]
    assert learned.results["student.clm_loss"].value < learned.results["data.unigram_loss"].value
    assert not any("unigram baseline" in note.text for note in learned.validity.notes)
    answers = results["student.exact_answers"]
    assert answers.trials == 6 and answers.value == answers.successes / 6
    assert results["student.exact_answers.chance"].value == 0.5
    assert any(f"{answers.successes} of 6 exact answers (chance 50 %)" in line for line in lab.listening.messages)
    assert common_measure([record]).name == "clm_loss"  # answers are compared where they are asked for
    assert common_measure([record], "exact_answers").percent


def test_only_multiple_choice_has_a_chance_level():
    chosen, output_text = Question("?", "b", ("a", "b", "c", "d")), Question("?", "b")
    assert chance_level([chosen, output_text]) == pytest.approx(0.125)
    assert chance_level([output_text]) is None


def test_ratios_to_the_teacher_have_a_direction_and_generated_tokens_are_counted(finished):
    kd, synthetic = finished["kd"][0], finished["synthetic"][0]
    assert common_measure([kd], "clm_loss.over_teacher").lower_is_better
    assert common_measure([kd], "clm_loss.perplexity.over_teacher").lower_is_better
    assert not common_measure([kd], "next_token.over_teacher").lower_is_better
    written = synthetic.results["teacher.generate.generated_tokens"].value
    assert written == synthetic.results["synthetic.generated_tokens"].value
    assert synthetic.stage("teacher.generate").tokens == written


def test_the_name_of_a_loss_lists_its_terms():
    assert [Distillation(alpha=alpha).loss_name for alpha in (0, 0.5, 1)] == ["KL", "CE + KL", "CE"]
    assert Distillation(divergence="reverse", codec="hidden").loss_name == "CE + reverse KL"
    assert Preferences(loss="ipo").loss_name == "IPO"
