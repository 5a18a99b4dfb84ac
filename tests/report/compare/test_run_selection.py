"""Any runs can be put side by side: repeats are found, namesakes told apart, other machines flagged."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.errors import NotFoundError, UsageError
from joulelab.report.compare.method_rows import compare, select
from joulelab.report.page import write_report
from joulelab.report.tables.comparison_tables import comparison_view
from joulelab.report.tables.grid import render_text
from joulelab.report.tables.provenance import environment_differences, hardware_warning
from joulelab.runs.groups import GroupRecord
from joulelab.runs.paths import write_json
from joulelab.runs.record import RunRecord
from joulelab.runs.store import find_folder

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture
def store(made, tmp_path: Path) -> Path:
    made.write_group(tmp_path, made.demo_records(True), True)
    return tmp_path


def test_runs_and_patterns_become_a_comparison_with_repeats_grouped(store: Path) -> None:
    found = select(store, ["made-labels-only-*", "made-response-KD-*"])
    comparison = found.comparison(store)
    assert [(row.label, len(row.runs), row.role) for row in comparison.rows] == [
        ("labels only", 2, "baseline"),
        ("response KD", 2, "method"),
    ]
    assert select(store, ["made-*-KD-*", "made-labels*"], "labels only").group.baseline == "labels only"


def test_last_is_what_was_started_last_a_group_or_a_run_alone(made, tmp_path: Path) -> None:
    group = "made-demo-20260301T100000Z-beef"
    records = [
        record.model_copy(update={"run_id": record.run_id.replace("T10", "T11"), "group": group})  # made after it
        for record in made.demo_records(True)
    ]
    assert made.write_group(tmp_path, records, True) == find_folder(tmp_path, "last")
    shown = CliRunner().invoke(app, ["compare", "last", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0 and "response KD" in shown.output
    alone = made.labels_only(0, 790).model_copy(update={"run_id": "made-alone-20260301T120000Z-0001"})
    made.write_run(tmp_path, alone)
    assert find_folder(tmp_path, "last").name == alone.run_id


def test_a_label_with_two_settings_is_split(made, tmp_path: Path) -> None:
    for seed, rate in ((0, 0.1), (1, 0.1), (2, 0.2)):
        record = made.labels_only(seed, 790)
        spec = {**record.spec, "training": {"learning_rate": rate}}
        made.write_run(tmp_path, record.model_copy(update={"spec": spec}))
    labels = [record.label for record in select(tmp_path, ["made-*"]).records]
    assert labels == ["labels only, training.learning_rate=0.1"] * 2 + ["labels only, training.learning_rate=0.2"]


def with_settings(record: RunRecord, name: str, **settings: str) -> RunRecord:
    return record.model_copy(
        update={"run_id": f"{name}-20260301T090000Z-0001", "spec": {**record.spec, **settings}, "results": {}}
    )


@pytest.fixture
def store_with_parts(made, store: Path) -> Path:
    """Before the students of the group: a shard of the teacher's outputs, and a run that ended with its data."""
    teacher = made.teacher_run(True)
    shard = teacher.model_copy(update={"label": "response KD, shard 0/2 of the teacher's work"})
    made.write_run(store, with_settings(shard, "made-response-KD-teacher-0-of-2", until="teacher", shard="0/2"))
    made.write_run(store, with_settings(made.labels_only(0, 790), "made-response-KD-data", until="data"))
    return store


def compare_command(store: Path, *words: str):
    return CliRunner().invoke(app, ["compare", *words, "--runs-dir", str(store)], env={"COLUMNS": "160"})


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["made-response-KD-teacher-0-of-2-20260301T090000Z-0001"], "shard 0/2"),
        (["made-response-KD-teacher-0-of-2-20260301T090000Z-0001", "made-labels-only-*"], "shard 0/2"),
        (["made-response-KD-data-20260301T090000Z-0001", "made-labels-only-*"], "until=data"),
        (["made-*-of-2-*"], "shard 0/2"),  # the pattern matches nothing else
    ],
)
def test_a_run_that_did_a_part_of_the_work_is_refused_if_it_is_named(store_with_parts: Path, names, part) -> None:
    error = compare_command(store_with_parts, *names).exception
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert f"is a part of the work of other runs ({part}); expected runs that trained a model" in str(error)
    assert error.hint == "name the runs that used it: their energy includes it"


def test_a_pattern_leaves_parts_of_the_work_out_and_says_so(store_with_parts: Path) -> None:
    found = select(store_with_parts, ["made-response-KD-*", "made-labels-only-*"], "labels only")
    comparison = found.comparison(store_with_parts)
    assert [(row.label, row.role) for row in comparison.rows] == [
        ("response KD", "method"),
        ("labels only", "baseline"),
    ]
    assert sorted(run.why for run in comparison.incomplete) == [
        "part of the work of other runs: shard 0/2",
        "part of the work of other runs: until=data",
    ]
    shown = compare_command(store_with_parts, "made-response-KD-*", "made-labels-only-*")
    assert shown.exit_code == 0 and "Not in the comparison because incomplete: 2 runs." in shown.output


def serving_run(made, name: str) -> RunRecord:
    parts = [made.Part("serve.c1", 20.0, 300.0)]
    return with_settings(made.make_record(name, 0, parts, measured=True), name, pipeline="serving")


@pytest.mark.parametrize(
    "names", [["made-load"], ["made-load", "made-burst"], ["made-load", "made-labels-only-*"], ["*"]]
)
def test_a_serving_run_is_refused_because_its_load_has_no_energy_ratio(made, tmp_path: Path, names) -> None:
    for name in ("made-load", "made-burst"):
        made.write_run(tmp_path, serving_run(made, name), True)
    if "made-labels-only-*" in names:
        made.write_run(tmp_path, made.labels_only(0, 790, measured=True), True)
    error = compare_command(tmp_path, *names).exception
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert "is a serving run" in str(error) and error.hint.startswith("its table: joulelab show made-")


def test_a_pattern_leaves_serving_runs_out_and_says_so(made, store: Path) -> None:
    made.write_run(store, serving_run(made, "made-labels-only-load"), True)
    comparison = select(store, ["made-labels-only-*", "made-response-KD-*"]).comparison(store)
    assert comparison.baseline == "labels only" and len(comparison.rows) == 2
    assert [run.why for run in comparison.incomplete] == ["a serving run is no method"]


def load_values(j_per_token: float) -> dict:
    energy = {"gross_j": j_per_token, "gross_half_width_j": 0.1, "power_w": 200.0, "method": "counter"}
    times = {f"p{percentile}": 0.05 for percentile in (50, 90, 95, 99)} | {"mean": 0.05}
    return {
        "concurrency": 4,
        "rate_per_s": 0.0,
        "steady": True,
        "failed": 0,
        "device": "cuda",
        "notes": [],
        "limits": {"percentile": 95, "ttft_ms": None, "tpot_ms": None},
        "time_to_first_token_s": times,
        "time_per_output_token_s": times,
        "output_tokens_per_s": 80.0,
        "warm_up_s": 1.0,
        "seconds": 20.0,
        "server": "builtin",
        "model": "m",
        "requests": 40,
        "mean_in_flight": 4.0,
        "mean_input_tokens": 64.0,
        "mean_output_tokens": 64.0,
        "prompts": "",
        "gpu_model": "",
        "gpus": 1,
        "requests_per_s": 2.0,
        "why_no_energy": "",
        "energy": dict.fromkeys(("output_token", "input_token", "token", "request"), energy),
    }


@pytest.mark.parametrize("sweep", [False, True])
def test_a_group_of_serving_runs_has_one_table_of_loads_and_no_ratios(made, tmp_path: Path, sweep: bool) -> None:
    records = []
    for name, j_per_token in (("slow", 2.5), ("fast", 1.25)):
        record = serving_run(made, name)
        findings = {record.stages[0].name: {"serving": load_values(j_per_token)}}
        records.append(record.model_copy(update={"findings": findings}))
    folder = made.write_group(tmp_path, records, True)
    group = made.group_of(records)
    baseline = "" if sweep else group.baseline
    write_json(folder / "group.json", group.model_copy(update={"sweep": sweep, "baseline": baseline}))
    for command in ("show", "compare"):
        shown = CliRunner().invoke(app, [command, folder.name, "--runs-dir", str(tmp_path)])
        assert shown.exit_code == 0, shown.exception
        assert "Lowest energy per output token: fast at 4 concurrent requests, 1.25 J" in shown.output
        assert "Servers under load" in shown.output and "2.50 J" in shown.output
        assert "x baseline" not in shown.output and "J per" not in shown.output
    data = CliRunner().invoke(app, ["show", folder.name, "--json", "--runs-dir", str(tmp_path)])
    models = json.loads(data.stdout)["models"]
    assert [model["rows"][0]["energy_per_token_joules"] for model in models] == [2.5, 1.25]
    assert "Servers under load" in write_report(folder).read_text()
    assert isinstance(compare_command(tmp_path, folder.name, "--format", "csv").exception, UsageError)
    refused = compare_command(tmp_path, folder.name, "--students", "5").exception
    assert isinstance(refused, UsageError) and "--students has no effect" in str(refused)


def test_a_group_with_a_shard_among_its_members_compares_the_others(made, tmp_path: Path) -> None:
    records = made.demo_records(True)
    shard = records[0].model_copy(update={"spec": {**records[0].spec, "until": "teacher", "shard": "0/2"}})
    comparison = compare(made.group_of([shard, *records[1:]]), [shard, *records[1:]], tmp_path)
    assert "teacher" not in [row.label for row in comparison.rows] and len(comparison.rows) == 3
    (left_out,) = comparison.incomplete
    assert left_out.run_id == shard.run_id


def test_runs_that_end_with_the_same_phase_are_compared_by_energy(made, tmp_path: Path) -> None:
    """Two ways to tokenize, or to generate: no student is needed for that."""
    for label, joules in (("fast", 5.0), ("slow", 12.0)):
        record = made.make_record(label, 0, (made.Part("data.preprocess", 4.0, joules),), measured=True)
        made.write_run(tmp_path, record.model_copy(update={"spec": {**record.spec, "until": "data"}}), True)
    shown = compare_command(tmp_path, "made-fast-*", "made-slow-*")
    assert shown.exit_code == 0 and "2.40x" in shown.output


def test_measured_programs_are_distinguished_by_the_command_as_it_was_typed(made, tmp_path: Path) -> None:
    for seed, command in enumerate((["python", "t.py"], ["python", "t.py", "two words"])):
        record = made.labels_only(seed, 790)
        made.write_run(tmp_path, record.model_copy(update={"spec": {**record.spec, "command": command}}))
    labels = [record.label for record in select(tmp_path, ["made-*"]).records]
    assert labels == ["labels only, command=python t.py", "labels only, command=python t.py 'two words'"]


def test_repeats_of_one_seed_are_not_paired_with_each_other(made, tmp_path: Path) -> None:
    records = []
    for label, joules in (("a", (100.0, 101.0, 99.0)), ("b", (50.0, 51.0, 49.5))):
        for number, value in enumerate(joules):
            record = made.make_record(label, 0, made.student_parts(value))
            records.append(record.model_copy(update={"run_id": f"{record.run_id[:-2]}{number:02x}"}))
    row = compare(made.group_of(records, "a"), records, tmp_path).row("b")
    assert row and row.student_ratio and row.student_ratio.ratio and not row.student_ratio.paired
    assert row.student_ratio.ratio.value == pytest.approx(((59 * 60 * 58.5) / (109 * 110 * 108)) ** (1 / 3))
    assert row.student_ratio.significant


def other_card(record: RunRecord) -> RunRecord:
    """The same joules from another card."""
    text = record.model_dump_json().replace('"gpu:0"', '"gpu:GPU-2"')
    return RunRecord.model_validate_json(text)


def test_scale_errors_cancel_on_one_card_and_are_inside_the_interval_between_two(made, tmp_path: Path) -> None:
    base = [made.labels_only(seed, 790, 120.0 + seed, True) for seed in range(4)]
    ours = [made.distilled("response KD", seed, 820, 240.0 + seed, True) for seed in range(4)]
    same = compare(made.group_of([*base, *ours]), [*base, *ours], tmp_path).row("response KD")
    moved = [other_card(record) for record in ours]
    apart = compare(made.group_of([*base, *moved]), [*base, *moved], tmp_path).row("response KD")
    assert (
        same
        and apart
        and same.student_ratio
        and apart.student_ratio
        and same.student_ratio.ratio
        and apart.student_ratio.ratio
    )
    assert same.student_ratio.same_devices and not apart.student_ratio.same_devices
    assert same.student_ratio.ratio.high / same.student_ratio.ratio.value < 1.01
    assert apart.student_ratio.ratio.high / apart.student_ratio.ratio.value == pytest.approx(
        1.05 ** (2**0.5), rel=0.002
    )


def test_another_gpu_or_driver_is_flagged_before_other_differences(made, store: Path) -> None:
    selection = select(store, ["made-labels-only-*"])
    assert hardware_warning(selection.records, selection.folders) == ""
    folder = selection.folders[selection.records[0].run_id]
    gpus = [{"name": "NVIDIA H200", "driver": "580"}]
    (folder / "environment.json").write_text(json.dumps({**made.ENVIRONMENT, "python": "3.12.1", "gpus": gpus}))
    grid = environment_differences(selection.records, selection.folders)
    assert [row[:2] for row in grid.rows] == [("hardware", "GPUs"), ("software", "Python")]
    assert hardware_warning(selection.records, selection.folders).startswith("The runs differ in GPUs:")


def test_what_does_not_fit_is_answered(store: Path) -> None:
    with pytest.raises(NotFoundError, match="no run matches 'nothing-"):
        select(store, ["nothing-*"])
    with pytest.raises(UsageError, match="no run is labeled 'x'") as output_text:
        select(store, ["made-*"], "x")
    assert "labels only" in output_text.value.hint


def test_a_comparison_recorded_on_an_h200_reads_as_recorded(golden, tmp_path: Path) -> None:
    data = json.loads(gzip.decompress((RECORDED / "h200-demo.json.gz").read_bytes()))
    records = [RunRecord.model_validate(record) for record in data["records"]]
    group = GroupRecord.model_validate(data["group"])
    golden("comparison-h200.txt", render_text(comparison_view(compare(group, records, tmp_path)), 100))


def test_the_command_prints_text_json_and_forms_for_papers(store: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(
            app,
            ["compare", "made-labels-*", "made-response-KD-*", "--runs-dir", str(store), *words],
            env={"COLUMNS": "120"},
        )
        assert done.exit_code == 0, done.output
        return done.output

    assert "6.48x [5.77, 7.28]" in run() and "Settings that differ" not in run()
    assert "Settings that differ" in run("-v")
    data = json.loads(run("--json"))
    assert data["pareto_front"] == ["labels only", "response KD"]
    assert data["break_even"][0]["breaks_even"] is False
    assert run("--format", "latex").startswith("% Quality\n\\begin{tabular}{llrrrrl}\n\\toprule\n")
    labels, response = (
        next(
            line
            for line in csv.DictReader(run("--format", "csv", "--students", "10").splitlines())
            if line["label"] == name
        )
        for name in ("labels only", "response KD")
    )
    shown = next(row for row in data["methods"] if row["label"] == "response KD")
    assert response["runs"] == "2" and float(response["quality"]) == shown["quality"]
    assert float(response["with_teacher_energy_j"]) == shown["with_teacher"]["energy_j"]
    assert float(response["with_teacher_ratio_interval_value"]) == shown["with_teacher_ratio"]["interval"]["value"]
    assert float(response["shared_by_10_energy_j"]) < float(response["with_teacher_energy_j"])
    assert labels["difference_p_value"] == ""  # the baseline has none
