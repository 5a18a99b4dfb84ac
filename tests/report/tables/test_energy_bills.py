"""A bill counts each ancestor once, shares the teacher, and leaves as Markdown, JSON, model card and CSV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.data import sources
from joulelab.errors import UsageError
from joulelab.meter.figures import missing
from joulelab.meter.importers import emissions_csv
from joulelab.report.energy_sums import run_energy
from joulelab.report.export import codecarbon_csv, model_card, training_type, write_model_cards
from joulelab.report.tables.bill_tables import find_bill, run_bill, sentences, tree_grid
from joulelab.runs.artifacts import Bill, ancestry_of, external, read_bill, unmetered, write_bill
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import EnergyByComponent
from joulelab.runs.store import load_record


@pytest.fixture
def store(made, tmp_path: Path) -> Path:
    """A distilled run whose cache and student both come from the same data, and its student as an artifact."""
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
    write_bill(place, Bill(artifact=student, ancestry=lineage, made_at=made.STAMP, code_version="", inputs={}))
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


def test_a_run_that_no_one_measured_reports_it_once_and_in_one_word(made, tmp_path: Path) -> None:
    unknown = made.make_record("KD", 0, made.student_parts(131.0), measured=True)
    gone = missing("no sensor was there")
    nothing = dict.fromkeys(("gpu", "cpu", "dram", "cpu_estimate"), gone)
    changed = {"energy": EnergyByComponent(**nothing), "best": gone, "energy_j": None}
    stages = [stage.model_copy(update=changed) for stage in unknown.stages]
    totals = unknown.totals.model_copy(update={**nothing, "figure": gone, "best": gone, "energy_j": None})
    made.write_run(tmp_path, unknown.model_copy(update={"stages": tuple(stages), "totals": totals}), True)
    output_text = ask(tmp_path, "made-KD")
    assert "Energy of made-KD-20260301T100000Z-0000: missing." in output_text and "(missing)" not in output_text
    assert output_text.count("missing, as above") == len(stages) - 1


def long_bill(made, store: Path) -> str:
    """Twelve small stages, then a large one; and a large ancestor below a small one, which comes last in the tree."""
    weights, data, teacher, _ = made.teacher_lineage(True)
    data = data.model_copy(update={"parents": (teacher.key,)})
    teacher = teacher.model_copy(update={"parents": (weights.key,)})
    parts = [made.Part(f"stage-{number}", 1.0, float(number)) for number in range(1, 13)]
    parts.append(made.Part("student.train", 9.0, 500.0))
    record = made.make_record("KD", 0, parts, measured=True, lineage=(weights, data, teacher))
    made.write_run(store, record, True)
    return record.run_id


def test_a_screen_hides_the_smallest_rows_of_a_long_bill_and_states_their_energy(made, tmp_path: Path) -> None:
    """1 + ... + 5 J of small stages are hidden, and the weights of unknown energy; the large ancestor stays."""
    grid = tree_grid(find_bill(tmp_path, long_bill(made, tmp_path)))
    cells = {row[0].replace("\u00a0", "").removeprefix("└ "): row[3] for row in grid.rows}
    assert len(grid.rows) == 12 and {"student.train", "teacher", "tokenized-reviews", "stage-12"} <= set(cells)
    assert "stage-5" not in cells and cells["6 smaller rows"].startswith("15.0 J")
    *joules, sum_kj = [float(text.split()[0]) for text in cells.values()]
    assert sum(joules) == pytest.approx(1000 * sum_kj, rel=0.001)


def test_unmetered_work_is_never_among_the_smaller_rows(made, tmp_path: Path) -> None:
    record = made.make_record(
        "synthetic", 0, [made.Part(f"stage-{number}", 1.0, float(number)) for number in range(1, 14)], measured=True,
        lineage=ancestry_of([unmetered("teacher.generate on another machine", "key", "no sensor includes it")]),
    )  # fmt: skip
    made.write_run(tmp_path, record, True)
    grid = tree_grid(find_bill(tmp_path, record.run_id))
    cells = {row[0].replace("\u00a0", "").removeprefix("└ "): row[3] for row in grid.rows}
    assert cells["teacher.generate on another machine"] == "missing" and "smaller rows" in " ".join(cells)


@pytest.mark.parametrize("columns", ["80", "140"])
def test_what_is_printed_of_a_long_bill_adds_up_and_all_of_it_is_in_v(made, tmp_path: Path, columns) -> None:
    name = long_bill(made, tmp_path)
    words = ["bill", name, "--runs-dir", str(tmp_path)]
    brief, full = (CliRunner().invoke(app, [*words, *more], env={"COLUMNS": columns}).output for more in ([], ["-v"]))
    assert "smaller rows" in brief and "└ teacher" in brief and "more row" not in brief
    assert "smaller row" not in full and all(f"stage-{number} " in full for number in range(1, 13))


def test_a_lower_bound_names_what_was_not_metered(made, tmp_path: Path) -> None:
    unseen = unmetered("teacher.generate on http://far:8000/v1", "key", "far is no address of this machine").artifact
    made.write_run(
        tmp_path, made.make_record("KD", 0, made.student_parts(131.0), measured=True, lineage=(unseen,)), True
    )
    bill = find_bill(tmp_path, "made-KD")
    assert "Lower bound, because this was not metered: teacher.generate on http://far:8000/v1." in sentences(bill)


def test_students_share_the_teacher_and_nothing_else(store: Path) -> None:
    bill = find_bill(store, "made-KD/final_model", students=10)
    assert bill.whole.energy_j == pytest.approx(131 + 12 + (640 + 130) / 10)
    data = json.loads(ask(store, "made-KD/final_model", "--students", "10", "--json"))
    shares = {line["name"]: line["share"]["energy_j"] for line in data["lines"]}
    assert shares["teacher"] == pytest.approx(64) and shares["tokenized-reviews"] == pytest.approx(12)


def test_nothing_is_shared_where_there_is_no_teacher(made, tmp_path: Path) -> None:
    made.write_run(tmp_path, made.labels_only(0, 500), True)
    text = ask(tmp_path, "last", "--students", "10")
    assert "share the teacher" not in text and "Share of 1" not in text
    assert "--students 10 has no effect: no teacher's work is in this bill." in text


def test_a_truncated_run_says_what_its_bill_lacks(made, tmp_path: Path) -> None:
    made.write_run(tmp_path, made.labels_only(0, 500).model_copy(update={"status": "truncated"}), True)
    text = " ".join(ask(tmp_path, "last").split())
    assert "The run is truncated: stages that it did not reach are not included." in text


def test_an_artifact_is_found_by_folder_by_name_and_by_key(store: Path) -> None:
    folder = next(store.glob("made-KD-*/artifacts/final_model"))
    ways = [str(folder), "made-KD/final_model", "key-final_model"]
    assert {find_bill(store, way).whole.energy_j for way in ways} == {find_bill(store, str(folder)).whole.energy_j}


def test_a_model_card_has_grams_and_what_they_rest_on(store: Path) -> None:
    text = ask(store, "made-KD", "--grid", "100", "--format", "model-card")
    card = yaml.safe_load(text.strip("-\n"))["co2_eq_emissions"]
    middle_g = 926 / 3.6e6 * 100 * 1.2  # the ends lie 5 % of scale and 0.2 % of noise around it; the run has a PUE
    assert card["emissions"] == pytest.approx(middle_g, rel=0.01) and "with the building" in card["source"]
    assert "energy counter" in card["source"] and "sample:minilm" in card["source"]
    assert card["training_type"] == "pre-training"  # the weights from elsewhere are its teacher's


def test_a_run_that_trained_no_model_has_no_model_card(store: Path) -> None:
    folder = next(store.glob("made-KD-*"))
    record = load_record(folder)
    stages = tuple(stage.model_copy(update={"role": "inference"}) for stage in record.stages)
    bill = run_bill(record.model_copy(update={"stages": stages}))
    with pytest.raises(UsageError, match="trained no model"):
        model_card(bill, None, None)


def test_the_folder_of_a_model_has_a_card_that_the_hub_reads(made, store: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = next(store.glob("made-KD-*"))
    bill = read_bill(folder / "artifacts" / "final_model")
    assert bill is not None
    base = external("org/base@v1", "model", f"org/base@{'b' * 40}", commit="b" * 40).artifact
    base = base.model_copy(update={"used_as": "student"})
    data = external("org/texts:part", "text", f"org/texts:part@{'c' * 40}", commit="c" * 40).artifact
    file = external("/home/me/texts.csv", "text", "/home/me/texts.csv@0123456789abcdef").artifact
    write_bill(
        folder / "artifacts" / "final_model", bill.model_copy(update={"ancestry": (*bill.ancestry, base, data, file)})
    )
    (folder / "artifacts" / "final_model" / "model.safetensors").write_bytes(b"weights")
    before = sources.content_hash(folder / "artifacts" / "final_model")
    record = load_record(folder)
    spec = {**record.spec, "teacher": {"model": "sample:minilm"}, "student": {"model": "org/base@v1"}}
    record = record.model_copy(update={"made": (bill.key,), "spec": spec})
    write_model_cards(RunPaths(folder), record)
    text = (folder / "artifacts" / "final_model" / "README.md").read_text()
    card = hub.ModelCard(text).data.to_dict()
    assert card["base_model"] == "org/base"
    assert card["datasets"] == ["org/texts"]
    assert card["co2_eq_emissions"]["emissions"] > 0 and "Wh" in card["co2_eq_emissions"]["source"]
    assert f"base model: org/base@v1 at commit {'b' * 40}" in text
    assert "teacher: sample:minilm (content hash " in text and "/home/me" not in text
    assert "CO2e: " in text and "\n\nGrid: " in text
    assert "teacher-cache" in text and "inherited" in text
    assert "## How to reproduce\n\n    joulelab run " in text
    assert sources.content_hash(folder / "artifacts" / "final_model") == before  # the card changes no key
    copied = {**spec, "student": {"layers": [0, 5]}}  # the student takes its teacher's layers
    write_model_cards(RunPaths(folder), record.model_copy(update={"spec": copied}))
    text = (folder / "artifacts" / "final_model" / "README.md").read_text()
    assert "teacher, which also provided initial weights: sample:minilm" in text


def test_the_card_of_a_teacher_names_its_base_model(made, store: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = next(store.glob("made-KD-*"))
    teacher = next(one for one in load_record(folder).lineage if one.name == "teacher")
    base = external("org/base", "model", f"org/base@{'b' * 40}", commit="b" * 40).artifact
    base = base.model_copy(update={"used_as": "teacher"})
    place = folder / "artifacts" / "teacher"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"weights")
    teacher = teacher.model_copy(update={"parents": (base.key,)})
    write_bill(place, Bill(artifact=teacher, ancestry=(base,), made_at=made.STAMP, code_version="", inputs={}))
    record = load_record(folder)
    spec = {**record.spec, "teacher": {"model": "org/base"}, "student": {"layers": [0, 5]}}
    write_model_cards(RunPaths(folder), record.model_copy(update={"made": (teacher.key,), "spec": spec}))
    text = (place / "README.md").read_text()
    assert hub.ModelCard(text).data.to_dict()["base_model"] == "org/base"
    assert "- base model: org/base at commit" in text and "- teacher" not in text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"student": {"size": "tiny"}}, "pre-training"),  # the teacher answers while it trains
        ({"student": {"layers": [0, 5]}}, "fine-tuning"),  # it takes its teacher's layers
        ({"student": {"init": "sample:minilm"}}, "fine-tuning"),
    ],
)
def test_weights_that_a_student_itself_began_with_make_it_fine_tuning(made, settings, wanted) -> None:
    weights, data, teacher, cache = made.teacher_lineage(True)
    teacher = teacher.model_copy(update={"parents": (weights.key,)})
    student = made.ancestor("final_model", 131.0, ("student.train",), True)
    student = student.model_copy(update={"parents": (cache.key, data.key, weights.key)})
    record = made.make_record(
        "KD", 0, made.student_parts(131.0), lineage=(weights, data, teacher, cache, student), made=(student.key,)
    )
    spec = {"teacher": {"model": "sample:minilm"}, **settings}
    assert training_type(run_bill(record.model_copy(update={"spec": spec}))) == wanted
    lines = (weights, data, teacher)
    own = made.make_record("teacher", 0, made.TEACHER_PARTS[1:2], lineage=lines, made=(teacher.key,))
    assert training_type(run_bill(own.model_copy(update={"spec": spec}))) == "fine-tuning"


def test_codecarbons_row_comes_back_with_the_same_joules(store: Path) -> None:
    text = ask(store, "made-KD", "--grid", "100", "--pue", "1", "--format", "codecarbon")
    own, rest = emissions_csv.read(text.splitlines(), None).runs
    assert own.total_j == own.gpu_j == pytest.approx(131 + 9 + 4) and own.cpu_j is None
    # joules stand beside the seconds they were spent in: other runs had those of what was inherited
    assert own.mean_power_w == pytest.approx(144 / 29) and rest.duration_s is None
    assert rest.total_j == pytest.approx(12 + 640 + 130) and rest.project.endswith(", inherited")
    assert own.emissions_kg + rest.emissions_kg == pytest.approx(926 / 3.6e6 * 0.1, rel=0.01)
    assert "joulelab: energy counter" in text
    assert codecarbon_csv(find_bill(store, "made-KD"), None, None, None).splitlines()[1].split(",")[5] == ""
    with_building = ask(store, "made-KD", "--grid", "100", "--pue", "1.5", "--format", "codecarbon")
    runs = emissions_csv.read(with_building.splitlines(), None).runs
    assert sum(run.total_j for run in runs) == pytest.approx(1.5 * 926)  # CodeCarbon's energies have the PUE inside
    assert sum(run.emissions_kg for run in runs) == pytest.approx(1.5 * 926 / 3.6e6 * 0.1, rel=0.01)


def test_the_bill_of_a_run_agrees_with_the_other_tables_about_its_interval(store: Path) -> None:
    bill = find_bill(store, "made-KD")
    assert bill.record
    joules = run_energy(bill.record)
    assert bill.own_figure.half_width_j == joules.own.half_width_j
    assert bill.own_component("gpu").half_width_j == joules.own.half_width_j
    assert bill.whole.half_width_j == pytest.approx(joules.whole.half_width_j)


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
        (["made-KD/nothing"], "has no artifact 'nothing'"),
        (["made-KD", "--format", "model-card", "--grid", "none"], "needs CO2e"),
        (["made-KD", "--grid", "atlantis"], "no grid 'atlantis'"),
        (["nobody"], "unknown run 'nobody'"),
        (["made-KD", "--pue", "inf"], "--pue inf"),
        (["made-KD", "--grid", "none", "--pue", "1.2"], "needs a grid"),
    ],
)
def test_what_cannot_be_billed_is_answered(store: Path, words: list[str], answer: str) -> None:
    done = CliRunner().invoke(app, ["bill", *words, "--runs-dir", str(store)])
    assert done.exit_code != 0 and answer in str(done.exception)
