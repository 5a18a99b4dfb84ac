"""A bill counts each ancestor once, shares the teacher, and leaves as Markdown, JSON, model card and CSV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.meter.foreign import codecarbon
from joulelab.report.bill_exports import codecarbon_csv
from joulelab.report.energy_bill import find_bill
from joulelab.report.joules import run_joules
from joulelab.runs.artifacts import write_bill
from joulelab.runs.bills import Bill


@pytest.fixture
def store(made, tmp_path: Path) -> Path:
    """A distilled run whose cache and student both come from the same data, and its student as an artefact."""
    weights, data, teacher, cache = made.teacher_lineage(True)
    data = data.model_copy(update={"parents": ()})
    teacher = teacher.model_copy(update={"parents": (data.key, weights.key)})
    cache = cache.model_copy(update={"parents": (teacher.key, data.key)})
    lineage = (weights, data, teacher, cache)
    record = made.make_record("KD", 0, made.student_parts(131.0), measured=True, correct=826, lineage=lineage)
    folder = made.write_run(tmp_path, record, True)
    student = made.ancestor("final_model", 131.0, ("student.train",), True)
    student = student.model_copy(update={"parents": (cache.key, data.key), "made_by": record.run_id})
    place = folder / "artifacts" / "final_model"
    place.mkdir(parents=True)
    write_bill(place, Bill(artefact=student, ancestry=lineage, made_at=made.STAMP, code_version="", inputs={}))
    return tmp_path


def ask(store: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["bill", *words, "--runs-dir", str(store)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_has_its_own_stages_and_each_ancestor_once(store: Path, golden) -> None:
    bill = find_bill(store, "made-KD")
    assert bill.own_figure.energy_j == pytest.approx(131 + 9 + 4)
    assert bill.inherited_figure and bill.inherited_figure.energy_j == pytest.approx(12 + 640 + 130)
    assert bill.whole.energy_j == pytest.approx(926) and bill.unknown == ("sample:minilm",)
    golden("bill.md", ask(store, "made-KD", "--format", "markdown"))


def test_students_share_the_teacher_and_nothing_else(store: Path) -> None:
    bill = find_bill(store, "made-KD/final_model", students=10)
    assert bill.whole.energy_j == pytest.approx(131 + 12 + (640 + 130) / 10)
    data = json.loads(ask(store, "made-KD/final_model", "--students", "10", "--json"))
    shares = {line["name"]: line["share"]["energy_j"] for line in data["lines"]}
    assert shares["teacher"] == pytest.approx(64) and shares["tokenised-reviews"] == pytest.approx(12)


def test_an_artefact_is_found_by_folder_by_name_and_by_key(store: Path) -> None:
    folder = next(store.glob("made-KD-*/artifacts/final_model"))
    ways = [str(folder), "made-KD/final_model", "key-final_model"]
    assert {find_bill(store, way).whole.energy_j for way in ways} == {find_bill(store, str(folder)).whole.energy_j}


def test_a_model_card_has_grams_and_what_they_rest_on(store: Path) -> None:
    text = ask(store, "made-KD", "--grid", "100", "--format", "model-card")
    card = yaml.safe_load(text.strip("-\n"))["co2_eq_emissions"]
    middle_g = 926 / 3.6e6 * 100 * 1.2  # the ends lie 5 % of scale and 0.2 % of noise around it; the run has a PUE
    assert card["emissions"] == pytest.approx(middle_g, rel=0.01) and "with the building" in card["source"]
    assert "energy counter" in card["source"] and "sample:minilm" in card["source"]
    assert card["training_type"] == "fine-tuning"


def test_codecarbons_row_comes_back_with_the_same_joules(store: Path) -> None:
    text = ask(store, "made-KD", "--grid", "100", "--pue", "1", "--format", "codecarbon")
    (run,) = codecarbon.read(text.splitlines(), None).runs
    assert run.total_j == pytest.approx(926) and run.gpu_j == pytest.approx(926) and run.cpu_j is None
    assert run.emissions_kg == pytest.approx(926 / 3.6e6 * 0.1, rel=0.01)
    assert codecarbon_csv(find_bill(store, "made-KD"), None, None, None).splitlines()[1].split(",")[5] == ""
    with_building = ask(store, "made-KD", "--grid", "100", "--pue", "1.5", "--format", "codecarbon")
    (run,) = codecarbon.read(with_building.splitlines(), None).runs
    assert run.total_j == pytest.approx(1.5 * 926)  # CodeCarbon's own energies have the PUE inside
    assert run.emissions_kg == pytest.approx(1.5 * 926 / 3.6e6 * 0.1, rel=0.01)


def test_the_bill_of_a_run_agrees_with_the_other_tables_about_its_interval(store: Path) -> None:
    bill = find_bill(store, "made-KD")
    assert bill.record
    joules = run_joules(bill.record)
    assert bill.own_figure.half_width_j == joules.own.half_width_j
    assert bill.own_component("gpu").half_width_j == joules.own.half_width_j
    assert bill.whole.half_width_j == pytest.approx(joules.with_teacher.half_width_j)


def test_a_group_is_billed_whole_each_ancestor_once(made, tmp_path: Path) -> None:
    records = made.demo_records(True)
    group = made.write_group(tmp_path, records, True)
    bill = find_bill(tmp_path, "made-demo")
    assert find_bill(tmp_path, str(group)) == bill
    assert (bill.grid, bill.pue) == (records[0].totals.grid, records[0].totals.pue) != (None, None)
    assert bill.own_figure.energy_j == pytest.approx(sum(record.totals.best.energy_j for record in records))
    keys = [line.key for line in bill.inherited]
    assert len(keys) == len(set(keys))
    made_here = {record.run_id for record in records}
    assert not made_here & {line.made_by for line in bill.inherited}
    refused = CliRunner().invoke(app, ["bill", "made-demo", "--students", "3", "--runs-dir", str(tmp_path)])
    assert refused.exit_code != 0 and "counted whole" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["made-KD/nothing"], "has no artefact 'nothing'"),
        (["made-KD", "--format", "model-card", "--grid", "none"], "wants grams"),
        (["made-KD", "--grid", "atlantis"], "no grid 'atlantis'"),
        (["nobody"], "unknown run 'nobody'"),
        (["made-KD", "--pue", "inf"], "--pue inf"),
        (["made-KD", "--grid", "none", "--pue", "1.2"], "they need a grid"),
    ],
)
def test_what_cannot_be_billed_is_answered(store: Path, words: list[str], answer: str) -> None:
    done = CliRunner().invoke(app, ["bill", *words, "--runs-dir", str(store)])
    assert done.exit_code != 0 and answer in str(done.exception)
