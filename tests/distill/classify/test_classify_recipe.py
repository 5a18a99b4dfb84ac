"""The pipeline as a whole, on models of a few thousand numbers: its stages, its bills, its files, its refusals."""

import csv
import json
import shutil
from contextlib import contextmanager
from itertools import permutations

import pytest
import tiny_reviews as tiny

from joulelab.data.splits import split_of, text_id
from joulelab.distill.classify import recipe
from joulelab.errors import ConfigError
from joulelab.runs.context import RunContext
from joulelab.runs.store import load_record


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny.write_encoder(folder / "encoder"), tiny.write_reviews(folder / "reviews.csv")


@pytest.fixture(scope="module")
def hinted(world):
    """Response, features and relations at once, after a hint stage, on a student drawn narrower than its teacher."""
    folder, encoder, reviews = world
    chosen = tiny.settings(encoder, reviews)
    chosen["student"] = {"init": str(encoder), "layers": 2, "width": 8, "heads": 2, "hint": {"epochs": 1}}
    chosen["distill"] = {
        "kd_alpha": 0.5, "feat_beta": 1.0, "t_layer": "encoder.layer.0", "s_layer": 1, "feat_ln": True,
        "feat_normalize": True, "rel_distance": 1.0, "rel_angle": 1.0,
    }  # fmt: skip
    return tiny.run(folder / "runs", chosen)


def test_each_step_is_a_stage_of_its_own_in_order(hinted):
    names = [stage.name for stage in hinted[1].stages if stage.is_method_work]
    assert names == [
        "data.preprocess", "teacher.train", "teacher.validate", "teacher.evaluate", "teacher.logits", "student.hint",
        "student.train", "student.validate", "student.evaluate",
    ]  # fmt: skip


def test_quality_is_reported_per_epoch_and_at_the_end(hinted):
    folder, record = hinted
    epochs = {f"student.validate.accuracy.epoch_{number}" for number in (1, 2, 3)}
    final = {f"student.{name}" for name in ("accuracy", "macro_f1", "calibration_error", "agreement", "over_teacher")}
    assert epochs | final <= set(record.results)
    assert record.results["teacher.accuracy"].value > 0.9
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["stage"] == "student.validate" and "epoch" in line]
    assert [line["epoch"] for line in evaluations] == [1.0, 2.0, 3.0]
    assert {"loss", "accuracy", "macro_f1", "calibration_error", "agreement"} <= set(evaluations[0])
    validated = record.stage("student.validate")
    assert validated is not None
    assert validated.samples == 3 * 20
    assert record.stage("teacher.evaluate").samples == 20 + 40  # validation and test texts


def test_telemetry_has_a_row_where_a_training_starts_every_few_steps_and_after_each_validation(hinted):
    with (hinted[0] / "distill_power.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = {"teacher": 24, "hint": 8, "student": 24}
    assert len(rows) == len(steps) + sum(steps.values()) // 4 + 6
    elapsed = [float(row["elapsed_sec"]) for row in rows]
    assert elapsed == sorted(elapsed)  # one time for the whole run, whoever is trained


@pytest.mark.parametrize(("side", "layer"), [("t_layer", 5), ("s_layer", "encoder.layer.1")])
def test_a_missing_layer_is_refused_before_anything_is_trained(world, side, layer):
    folder, encoder, reviews = world
    chosen = tiny.settings(encoder, reviews)
    chosen["distill"] = {**chosen["distill"], side: layer}
    with pytest.raises(ConfigError, match=f"distill.{side}="):
        tiny.run(folder / f"wrong-{side}", chosen)
    (made,) = (folder / f"wrong-{side}").iterdir()
    assert load_record(made).stages[0].name == "run.overhead"


def test_the_terms_and_the_teachers_phase_are_in_the_record(hinted):
    folder, record = hinted
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = next(line for line in lines if line["stage"] == "student.train")
    assert {"loss.ce", "loss.kl", "loss.features", "loss.distances", "loss.angles"} <= set(trained)
    student = record.stage("student.train")
    assert student is not None
    assert "forward.teacher" in student.phases


def test_a_fine_tuned_teacher_is_taken_with_its_bill_and_not_trained_again(world, hinted):
    folder, encoder, reviews = world
    chosen = tiny.settings(encoder, reviews)
    chosen["teacher"] = {"fine_tuned": str(hinted[0] / "artifacts" / "teacher")}
    chosen["distill"] = {"kd_alpha": 0.5, "feat_beta": 0.0, "teacher": "live"}
    _, record = tiny.run(folder / "other-runs", chosen)
    names = [stage.name for stage in record.stages]
    assert "teacher.train" not in names
    assert "teacher.logits" not in names
    made_by = {ancestor.name: ancestor.made_by for ancestor in record.inherited}
    assert made_by["teacher"] == load_record(hinted[0]).run_id
    assert record.results["student.agreement"].value > 0.5


def test_corrupted_predictions_of_a_teacher_are_made_again(world, hinted, monkeypatch):
    folder, encoder, reviews = world
    load, inside = recipe.load_classifier, []

    def watched(name, **settings):
        if name == str(copied / "teacher"):
            inside.append(tuple(stage.name for stage in running()))
        return load(name, **settings)

    opened = []
    stage = RunContext.stage

    @contextmanager
    def followed(run, name, *given, **more):
        opened.append(run)
        with stage(run, name, *given, **more) as entered:
            yield entered

    def running():
        return opened[-1]._open

    monkeypatch.setattr(RunContext, "stage", followed)
    monkeypatch.setattr(recipe, "load_classifier", watched)
    copied = shutil.copytree(hinted[0], folder / "copied" / hinted[0].name) / "artifacts"
    kept = copied / "teacher-predictions" / "predictions.npz"
    kept.write_bytes(kept.read_bytes()[:-1])
    chosen = tiny.settings(encoder, reviews, distill={"kd_alpha": 0.5, "feat_beta": 0.0})
    chosen |= {"teacher": {"fine_tuned": str(copied / "teacher")}, "training": {**chosen["training"], "epochs": 1}}
    _, record = tiny.run(folder / "after-harm", chosen)
    assert inside == [("teacher.evaluate",), ("teacher.evaluate",), ("teacher.logits",)]  # and on their bills
    assert record.stage("teacher.evaluate").samples == 20 + 40  # those on validation texts were never kept
    assert any(
        "Ignoring teacher-predictions from" in note.text and "corrupted" in note.text for note in record.validity.notes
    )


def test_a_class_that_only_held_out_texts_have_counts_as_a_class_and_is_noted(world):
    folder, encoder, reviews = world
    texts = (" ".join(words) for words in permutations(tiny.GOOD, 4))
    held_out = next(text for text in texts if split_of(text_id(text)) == "validation")
    (folder / "rare.csv").write_text(f"{reviews.read_text()}\n{held_out},2\n")
    chosen = tiny.settings(encoder, folder / "rare.csv", distill={"kd_alpha": 1.0, "feat_beta": 0.0})
    chosen["data"] |= {"train_size": "all", "validation_size": "all"}
    paths, record = tiny.run(folder / "rare", chosen | {"training": {**chosen["training"], "epochs": 1}})
    assert len(json.loads((paths / "artifacts" / "final_model" / "config.json").read_text())["id2label"]) == 3
    assert "no training text has the class 2" in [note.text for note in record.validity.notes]


def test_a_teacher_with_an_untrained_head_is_refused_before_a_student_is_trained(world):
    folder, encoder, reviews = world
    chosen = tiny.settings(encoder, reviews)
    chosen["teacher"] = {"fine_tuned": str(encoder)}
    with pytest.raises(ConfigError, match=r"is correct on \d+ of 20 validation texts"):
        tiny.run(folder / "refused", chosen)
    (run,) = (folder / "refused").glob("tiny-*")
    assert "student.train" not in [stage.name for stage in load_record(run).stages]


@pytest.mark.parametrize("save_format", ["hf", "jsonl"])
def test_tokens_of_prepare_reviews_are_used_and_billed_once(world, save_format, tmp_path, monkeypatch):
    from joulelab.data import tokenize

    _, encoder, reviews = world
    made = tmp_path / "tokens"
    chosen = {"pipeline": "prepare-reviews", "source": str(reviews), "tokenizer": str(encoder), "max_length": 16,
              "out_dir": str(made), "save_format": save_format, "energy": {"gpus": "none"}}  # fmt: skip
    _, prepared = tiny.run(tmp_path / "store", chosen)
    assert prepared.status == "done"

    def refuse(self, texts):
        raise AssertionError("texts were tokenized again")

    monkeypatch.setattr(tokenize.TruncatingEncoder, "__call__", refuse)
    data = {"source": str(made), "max_tokens": 16}
    _, record = tiny.run(tmp_path / "store", tiny.settings(encoder, reviews, data=data, until="teacher"))
    assert record.status == "done"
    origin = next(line for line in record.lineage if line.kind == "prepared-reviews")
    assert origin.made_by == prepared.run_id
    assert [line.kind for line in record.lineage].count("prepared-reviews") == 1
