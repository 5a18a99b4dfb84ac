"""The pipeline `squad` from settings to record, with models of a few thousand weights drawn on the spot."""

import json
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import bert_tokenizer
from transformers import BertConfig, BertForQuestionAnswering, BertModel, DistilBertConfig, DistilBertModel

from joulelab.data.squad.questions import read_squad
from joulelab.distill.squad.objective import keep_layers, load_qa_model, require_same_tokens
from joulelab.errors import ConfigError
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check
from joulelab.runs.verification import verify_runs

FILES = Path(__file__).parents[2] / "data" / "squad"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models that share one tokenizer: a bare encoder, one that answers, and a DistilBERT."""
    root = tmp_path_factory.mktemp("models")
    questions = read_squad(FILES / "v2.json", version_2=True)
    tokenizer = bert_tokenizer([text for question in questions for text in (question.text, question.context)])
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    bert = BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, **sizes)
    torch.manual_seed(0)
    made = {
        "bare": BertModel(bert),
        "answers": BertForQuestionAnswering(bert),
        "distil": DistilBertModel(DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=32, **sizes)),
    }
    for name, model in made.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def settings(models, **changes):
    training = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3}
    version_2 = changes.pop("version_2", False)
    file = str(FILES / ("v2.json" if version_2 else "v1.json"))
    windows = {"max_seq_length": 48, "doc_stride": 16, "max_query_length": 16}
    return {
        "pipeline": "squad",
        "name": "qa",
        "data": {"train_file": file, "validation_file": file, "version_2": version_2, **windows},
        "teacher": {"model": str(models / "bare"), "training": training},
        "student": {"init": str(models / "distil")},
        "training": training,
        "device": "cpu",
        "energy": {"sample_interval_s": 0.05, "estimate_cpu": True, "gpus": "none"},
        **changes,
    }


def run(store, given):
    spec = check(given)
    spec.preflight()
    paths = create_run(store, spec)
    return execute(paths, SilentProgress()), paths


def test_teacher_and_student_are_trained_evaluated_and_billed(tmp_path, models):
    record, paths = run(tmp_path, settings(models))
    names = [stage.name for stage in record.stages if stage.is_method_work]
    assert names == ["data.preprocess", "teacher.train", "teacher.evaluate", "student.train", "student.evaluate"]
    phases = {name.split(".")[-1] for name in record.stage("student.train").phases}
    assert {"teacher", "student"} <= phases
    exact = record.results["student.exact_match"]
    assert exact.trials == 8
    assert 0 <= record.results["student.f1"].value <= 1
    reported = json.loads((paths.artifacts / "student-predictions" / "predictions.json").read_text())
    listed = json.loads((paths.artifacts / "student-predictions" / "nbest_predictions.json").read_text())
    context = {question.id: question.context for question in read_squad(FILES / "v1.json", version_2=False)}
    assert set(reported) == set(listed) == set(context)
    assert all(text in context[identity] for identity, text in reported.items())
    assert load_qa_model(str(paths.artifacts / "final_model"), 0, require_head=True) is not None
    assert [check for check in verify_runs([paths.folder]) if not check.good] == []


def test_answers_alone_train_no_teacher_and_learn_a_few_questions_by_heart(tmp_path, models):
    training = {"epochs": 60, "batch_size": 16, "learning_rate": 3e-3, "schedule": "constant"}
    distill = {"alpha_ce": 0.0, "alpha_squad": 1.0}
    student = {"init": str(models / "bare"), "layers": [0]}
    record, _ = run(tmp_path, settings(models, distill=distill, training=training, student=student))
    assert not any(stage.name.startswith("teacher") for stage in record.stages)
    assert record.results["student.f1"].value > 0.6


def test_version_2_reports_its_best_threshold(tmp_path, models):
    given = settings(models, version_2=True, distill={"alpha_ce": 0.0}, student={"init": str(models / "answers")})
    record, _ = run(tmp_path, given)
    results = record.results
    assert results["student.exact_match"].trials == 10
    assert results["student.best_exact_match"].value >= results["student.exact_match"].value
    assert "student.best_f1.threshold" in results


def test_a_teacher_with_an_untrained_head_is_refused(tmp_path, models):
    with pytest.raises(ConfigError, match="never trained to answer questions") as caught:
        run(tmp_path, settings(models, teacher={"model": str(models / "bare"), "fine_tune": False}))
    assert "teacher.fine_tune=true" in caught.value.hint


def test_a_teacher_that_answers_already_is_taken_as_it_is(tmp_path, models):
    record, _ = run(tmp_path, settings(models, teacher={"model": str(models / "answers"), "fine_tune": False}))
    assert record.stage("teacher.train") is None
    assert record.stage("teacher.evaluate") is not None
    assert any(ancestor.made_by == "elsewhere" for ancestor in record.lineage)


def test_looks_at_held_out_questions_are_billed_apart(tmp_path, models):
    training = {"epochs": 1, "batch_size": 8, "evaluate_every_steps": 2}
    record, _ = run(tmp_path, settings(models, distill={"alpha_ce": 0.0}, training=training))
    assert len(record.stage("student.evaluate").segments) > 1
    assert len(record.stage("student.train").segments) > 1


def test_layers_are_taken_with_the_head_and_give_what_the_cut_model_gives(models):
    whole = load_qa_model(str(models / "answers"), 0)
    first, last = whole.bert.encoder.layer[0], whole.bert.encoder.layer[2]
    cut = keep_layers(whole, (0, 2))
    assert cut.config.num_hidden_layers == 2
    assert list(cut.bert.encoder.layer) == [first, last]
    assert keep_layers(cut, None) is cut
    with pytest.raises(ConfigError, match=r"the model has layers 0\.\.1"):
        keep_layers(cut, (0, 5))


def test_a_teacher_of_other_tokens_is_refused(tmp_path, models):
    bert_tokenizer(["quite other words"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((models / "bare" / "config.json").read_text())
    with pytest.raises(ConfigError, match="different tokens"):
        require_same_tokens(str(tmp_path), str(models / "bare"), ["a kite"])


def test_a_cut_student_is_found_whole_after_saving(tmp_path, models):
    cut = keep_layers(load_qa_model(str(models / "answers"), 0), (2,)).eval()
    cut.save_pretrained(tmp_path)
    again = load_qa_model(str(tmp_path), 5, require_head=True).eval()
    ids = torch.arange(10).unsqueeze(0)
    torch.testing.assert_close(cut(ids).start_logits, again(ids).start_logits)


def test_a_student_and_a_teacher_of_our_own_bring_their_bills(tmp_path, models):
    first, paths = run(tmp_path, settings(models))
    ours = str(paths.artifacts / "final_model")
    taken = {"student": {"init": ours}, "teacher": {"model": ours, "fine_tune": False}, "seed": 5}
    second, _ = run(tmp_path, settings(models, **taken))
    made = {ancestor.key: ancestor for ancestor in first.lineage if ancestor.key in first.made}
    inherited = {ancestor.name: ancestor for ancestor in second.inherited}
    student = inherited["final_model"]
    assert student.energy == made[student.key].energy
    # the first step is in a setup stage, and on the bill
    trained_j = first.stage("student.train").energy.cpu_estimate.energy_j
    assert student.energy["cpu_estimate"].energy_j >= trained_j > 0
    assert inherited["teacher"].energy["cpu_estimate"].energy_j > 0  # what made it what it is, once
    assert len({ancestor.key for ancestor in second.lineage}) == len(second.lineage)
    assert ours not in inherited
