"""The six pipelines at tiny size: stages, artifacts, inherited energy and results."""

import json
import math
import re

import pytest
import torch
import transformers

from joulelab.data.chat.encoding import DocumentStore
from joulelab.distill.causal import students
from joulelab.errors import JoulelabError
from joulelab.report.compare.quality import quality_of
from joulelab.runs.artifacts import read_bill
from joulelab.runs.execute import execute
from joulelab.runs.paths import read_metrics
from joulelab.runs.verification import verify_runs

STAGES = {
    "sft": ["data.preprocess", "student.train", "student.evaluate"],
    "kd": ["teacher.evaluate", "teacher.logits", "student.train", "student.evaluate"],
    "synthetic": [
        "teacher.generate",
        "data.synthetic",
        "student.train",
        "student.evaluate",
        "student.completions-evaluate",
    ],
    "dpo": [
        "teacher.judge",
        "data.preferences",
        "student.sft",
        "student.reference",
        "student.train",
        "student.evaluate",
        "student.start-evaluate",
    ],
    "on-policy": ["student.train", "student.generate", "teacher.score", "student.evaluate", "student.start-evaluate"],
    "self": ["teacher.logits", "student.train", "student.evaluate", "student.start-evaluate"],
}


def stages(record):
    return [stage.name for stage in record.stages if stage.is_method_work]


@pytest.mark.parametrize("name", STAGES)
def test_a_pipeline_runs_its_own_stages_and_inherits_the_others(finished, name):
    record, paths = finished[name]
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    evaluations = [line for line in lines if line["stage"] == "student.validate" and "held_out_loss" in line]
    assert record.stage("student.validate").tokens == len(evaluations) * record.stage("student.evaluate").tokens > 0
    own = [stage for stage in stages(record) if not stage.endswith("validate")]
    assert own == STAGES[name]
    counted = {stage.name: stage.tokens for stage in record.stages}
    assert all(counted[stage] for stage in own if stage not in ("teacher.judge",)), counted


def test_the_teachers_work_is_reused_with_its_energy(finished):
    inherited = {
        name: {stage for ancestor in record.inherited for stage in ancestor.stages}
        for name, (record, _) in finished.items()
    }
    assert inherited["sft"] == set()
    assert inherited["kd"] == {"data.preprocess"}
    assert "teacher.evaluate" in inherited["synthetic"]
    assert {"teacher.generate", "teacher.evaluate", "data.preprocess"} <= inherited["dpo"]
    assert {"student.sft", "student.sft-validate"} <= inherited["self"]
    paid = {ancestor.name: ancestor for ancestor in finished["self"][0].inherited}["sft-student"]
    trained = finished["dpo"][0].stage("student.sft").energy.cpu_estimate.energy_j
    assert paid.energy["cpu_estimate"].energy_j >= trained > 0
    assert read_bill(finished["dpo"][1].artifacts / "final_policy").ancestry


def test_the_record_states_which_rows_are_used_and_why_the_others_are_not(finished):
    for record, _ in finished.values():
        notes = [note.text for note in record.validity.notes]
        (train,) = [text for text in notes if text.startswith("train: ")]
        assert "rows are used" in train and "validation split, which this pipeline does not use" in train
        for text in notes:  # used rows and those left out for a reason are all rows
            if found := re.match(r"(?:train|validation|test): ([\d,]+) of ([\d,]+) rows are used(?: \((.*)\))?$", text):
                kept, total = (int(number.replace(",", "")) for number in found.group(1, 2))
                reasons = [
                    reason for reason in (found[3] or "").split("; ") if reason and "of those used" not in reason
                ]
                assert kept + sum(int(reason.split()[0].replace(",", "")) for reason in reasons) == total, text
        assert any(text.startswith("test: ") for text in notes)


def test_a_row_that_is_not_trained_on_is_counted_once_and_not_as_a_used_one(lab, tmp_path):
    without_answer, too_long = {"prompt": "w1", "response": None}, "w2 " * 50
    rows = [{"prompt": f"w{n} " + too_long * (n % 3 == 0), "response": f"w{n}"} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [without_answer] * 5 + rows))
    record, paths = lab.run(tmp_path, "sft", until="data", data={"source": str(tmp_path / "rows.jsonl")})
    notes = {text.partition(":")[0]: text for text in (note.text for note in record.validity.notes)}
    assert " of 65 rows are used" in notes["train"]
    assert "5 no assistant answer" in notes["train"] and "no assistant answer" not in notes["test"]
    for split in ("train", "test"):
        stored = DocumentStore.open(paths.artifacts / "data" / split)
        assert notes[split].startswith(f"{split}: {len(stored)} of ")
        lost = stored.attributes["documents_without_trained_tokens"]
        assert lost and f"{lost} have no token to train on before max_tokens=32" in notes[split]


def test_rows_held_out_for_the_test_are_counted_also_with_own_validation_rows(lab, tmp_path):
    for name, first in (("rows", 0), ("own", 60)):
        rows = [{"prompt": f"w{n % 30} w{n // 30}", "response": "w1"} for n in range(first, first + 60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / "own.jsonl")}
    record, _ = lab.run(tmp_path, "sft", until="data", data=data)
    (note,) = [note.text for note in record.validity.notes if note.text.startswith("train: ")]
    assert re.fullmatch(r"train: \d+ of 60 rows are used \(\d+ in the test split\)", note)


def test_self_distillation_names_its_real_teacher(finished):
    notes = {name: [note.text for note in record.validity.notes] for name, (record, _) in finished.items()}
    (named,) = [text for text in notes["self"] if text.startswith("the teacher of this run is its own SFT student")]
    maker = finished["dpo"][0].run_id  # it trained the student that this run starts from
    assert f"artifact sft-student of run {maker}" in named and "is not used" in named
    assert not any("SFT student (" in text for name in ("sft", "kd") for text in notes[name])


def test_all_students_process_the_same_number_of_tokens_including_the_sft_student(finished):
    for name, (record, paths) in finished.items():
        train = record.stage("student.train").tokens + record.stage("student.train.setup").tokens
        start = record.results["budget.start_tokens"].value
        assert (start > 0) == (name in ("dpo", "on-policy", "self"))
        assert 2400 <= start + train < 2400 + 4 * 64 * 2
        artifact = "final_policy" if name == "dpo" else "final_model"
        noted = json.loads((paths.artifacts / artifact / "training.json").read_text())
        assert noted["tokens"] == train


def test_quality_is_reported_relative_to_the_teacher(finished):
    for name, (record, _) in finished.items():
        results = record.results
        assert results["student.clm_loss"].lower_is_better
        assert results["student.clm_loss.perplexity"].value == pytest.approx(
            math.exp(results["student.clm_loss"].value)
        )
        requested = name not in ("sft", "self")
        assert ("student.agreement" in results) == requested
        if requested:
            over = results["student.clm_loss"].value / results["teacher.clm_loss"].value
            assert results["student.clm_loss.over_teacher"].value == pytest.approx(over)
            assert results["teacher.clm_loss"].value < results["data.unigram_loss"].value
    assert finished["kd"][0].results["student.clm_loss"].value < finished["dpo"][0].results["student.clm_loss"].value


def test_methods_that_start_from_an_sft_student_report_its_loss_too(finished):
    starts = {name: record.results.get("student.start.clm_loss") for name, (record, _) in finished.items()}
    assert {name for name, start in starts.items() if start} == {"dpo", "on-policy", "self"}
    assert len({start.value for start in starts.values() if start}) == 1, "they share one SFT student"
    assert starts["self"].value < finished["self"][0].results["data.unigram_loss"].value
    assert starts["self"].value != finished["self"][0].results["student.clm_loss"].value
    agreed = {name: record.results.get("student.start.agreement") for name, (record, _) in finished.items()}
    assert {name for name, start in agreed.items() if start} == {"dpo", "on-policy"}, "self evaluates no other teacher"
    assert agreed["dpo"].value == agreed["on-policy"].value
    assert agreed["on-policy"].value < finished["on-policy"][0].results["student.agreement"].value


def test_completions_of_held_out_prompts_are_not_trained_on_and_measure_the_student(finished):
    record, paths = finished["synthetic"]
    folder, results = paths.artifacts / "synthetic", record.results
    trained, held_out = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("kept.jsonl", "held_out.jsonl")
    )
    prompts = [{json.dumps(row["messages"][:-1]) for row in rows} for rows in (trained, held_out)]
    assert not prompts[0] & prompts[1]
    assert len(held_out) == results["synthetic.held_out"].value == results["synthetic.kept"].value - len(trained) > 0
    assert len(DocumentStore.open(folder / "train")) == len(trained)
    store = DocumentStore.open(folder / "test")
    targets = sum(int(store.document(number).trained[1:].sum()) for number in range(len(store)))
    assert record.stage("student.completions-evaluate").tokens == targets
    assert results["student.completions.clm_loss"].lower_is_better
    assert results["student.completions.clm_loss"].value != results["student.clm_loss"].value
    assert results["synthetic.unigram_loss"].value != results["data.unigram_loss"].value
    assert quality_of(record).measure.name == "clm_loss", "methods are compared on the data"


def test_models_are_saved_in_hugging_face_format_and_as_bare_state(finished):
    for name, folder in (("kd", "final_model"), ("dpo", "final_policy")):
        place = finished[name][1].artifacts / folder
        model = transformers.AutoModelForCausalLM.from_pretrained(place)
        assert transformers.AutoTokenizer.from_pretrained(place).chat_template
        assert (place / "model.pt").exists() == (name == "kd")
        if name == "kd":
            state = torch.load(place / "model.pt", weights_only=True)
            assert torch.equal(state["model.norm.weight"], model.state_dict()["model.norm.weight"])


def test_the_first_loss_of_dpo_is_ln_2_and_the_pairs_are_reported(finished):
    record, paths = finished["dpo"]
    lines = [json.loads(line) for line in (paths.folder / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["stage"] == "student.train" and "loss" in line)
    assert first["loss"] == pytest.approx(math.log(2), abs=0.1)  # a mean over the first two steps
    results = record.results
    parts = ("pairs", "ties", "identical", "filtered", "unjudged", "too_long")
    assert sum(results[f"preferences.{part}"].value for part in parts) == results["preferences.prompts"].value == 12
    assert (
        results["preferences.j_per_pair"].value
        == results["preferences.energy_j"].value / results["preferences.pairs"].value
    )
    answers = read_bill(finished["synthetic"][1].artifacts / "answers").artifact.energy["cpu_estimate"].energy_j
    assert results["preferences.energy_j"].value >= answers > 0


def test_kept_answers_carry_the_energy_of_all_answers(finished):
    results = finished["synthetic"][0].results
    assert results["synthetic.j_per_kept_sample"].value * results["synthetic.kept"].value == pytest.approx(
        results["synthetic.energy_j"].value
    )
    reasons = ("truncated", "too_short", "too_long", "duplicates", "unjudged", "low_score")
    dropped = sum(results[f"synthetic.{reason}"].value for reason in reasons)
    assert results["synthetic.kept"].value + dropped == results["synthetic.answers"].value == 24


def test_every_run_passes_verification(finished):
    for record, paths in finished.values():
        assert [check for check in verify_runs([paths.folder]) if not check.good] == [], record.label


@pytest.mark.parametrize("candidates_from", ["teacher", "start"])
def test_an_attempt_until_the_teacher_trains_no_student(lab, tmp_path, candidates_from):
    paths = lab.paths(tmp_path, "dpo", preferences={"candidates_from": candidates_from})
    record = execute(paths, lab.listening, "teacher")
    roles = {stage.name for stage in record.stages if stage.role == "student"}
    assert not roles
    assert (record.stage("teacher.judge") is not None) == (candidates_from == "teacher")
    assert execute(paths, lab.listening).stage("student.train").tokens > 0


def test_periodic_checkpoints_stay_in_the_run_directory(lab, tmp_path):
    training = {"checkpoint_every_steps": 2, "keep_checkpoints": 2, "warmup_steps": 3}
    record, paths = lab.run(tmp_path, "sft", training=training, budget={"tokens": 1500})
    assert record.status == "done", record.error
    files = sorted((paths.checkpoints / "student.train").glob("step-*.pt"))
    steps = [torch.load(file, weights_only=True)["position"]["step"] for file in files]
    assert len(steps) == 2 and steps[0] < steps[1], steps


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_of_the_documents_is_held_out_and_all_others_are_trained_on(lab, tmp_path, share):
    data = {"test_size": share, "held_out": "all"}
    _, paths = lab.run(tmp_path, "sft", until="data", data=data)
    held_out, trained = (len(DocumentStore(paths.artifacts / "data" / name)) for name in ("test", "train"))
    assert held_out + trained == 140  # without test_size, a tenth is for validation and not used here
    assert abs(held_out - 140 * share) < 4 * (140 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("pipeline", ["sft", "on-policy"])
def test_a_failure_while_the_student_is_saved_does_not_cost_its_training(lab, tmp_path, monkeypatch, pipeline):
    training = {"checkpoint_every_steps": 2}
    changes = (
        {"generation": {"prompt_tokens": 18}, "training": training}
        if pipeline == "on-policy"
        else {"training": training}
    )
    paths, save = lab.paths(tmp_path, pipeline, **changes), students.save_student

    def full(model, tokenizer, folder, state_file=False):
        if folder.name == "final_model":
            raise OSError(28, "No space left on device")
        save(model, tokenizer, folder, state_file)

    monkeypatch.setattr(students, "save_student", full)
    with pytest.raises(JoulelabError, match="no space left"):
        execute(paths, lab.listening)
    assert any(paths.checkpoints.glob("student.train/step-*.pt"))
    assert (pipeline == "on-policy") == any(paths.checkpoints.glob("student.generate/round-*.jsonl"))
    monkeypatch.setattr(students, "save_student", save)
    record = execute(paths, lab.listening)
    steps = record.results["student.train.steps"].value
    repeated = [
        line for line in read_metrics(paths.metrics) if line["attempt"] == 2 and line["stage"] == "student.train"
    ]
    assert record.status == "done" and steps - 2 <= repeated[0]["step"] <= steps
    assert not any(paths.checkpoints.glob("*"))
