"""The page as a file: complete, offline, and harmless whatever a run is called."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from joulelab.errors import NotFoundError
from joulelab.report.compare.method_rows import select
from joulelab.report.opening import run_sentences
from joulelab.report.page import chart_library, selection_page, write_page, write_report
from joulelab.report.tables import provenance

EVIL = "</script><script>alert(1)</script>"


def without_library(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace(chart_library(), "")


def test_a_group_report_is_one_file_below_its_size_limit(made, tmp_path: Path) -> None:
    path = write_report(made.write_group(tmp_path, made.demo_records()))
    assert path.name == "report.html" and path.parent.parent.name == "groups"
    assert path.stat().st_size < 1_500_000
    text = without_library(path)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    for heading in ("Verdict", "Numbers", "More charts", "How it was measured", "What differs", "How to reproduce"):
        assert f">{heading}</h2>" in text


def test_a_page_opens_with_tiles_a_chart_and_three_sentences_and_details_are_closed(made, tmp_path: Path) -> None:
    text = without_library(write_report(made.write_group(tmp_path, made.demo_records())))
    body = text[text.index("<body>") : text.index("<footer>")]
    opening, _, rest = body.partition("<details")
    tiles = re.findall(r"<dt>(.*?)</dt>", opening)
    assert tiles == ["Energy", "Electricity", "CO2e", "Time", "Best accuracy", "Grade"]
    assert opening.count('class="chart"') == 1 and "Quality against energy" in opening
    verdict = opening[opening.index('id="verdict"') :].partition("</section>")[0]
    assert 1 <= verdict.count("<p") <= 3 and "Compared with labels only" in verdict
    assert rest and "<details open" not in body and body.count("<details id=") >= 8


def test_estimated_energy_is_labeled_in_the_first_tile(made, tmp_path: Path) -> None:
    text = without_library(write_report(made.write_group(tmp_path, made.demo_records())))
    tile = re.search(r"<dt>Energy</dt><dd>(.*?)</dd>", text)
    assert tile and "±70\u00a0%" in tile.group(1) and "estimated" in tile.group(1)
    assert "Joules are ESTIMATED" in text[text.index('id="measured"') :]


def test_measured_joules_bring_no_banner(made, tmp_path: Path) -> None:
    text = without_library(write_report(made.write_group(tmp_path, made.demo_records(True), True)))
    assert 'class="banner"' not in text and "ESTIMATED" not in text


def test_a_script_in_a_run_name_is_shown_as_text(made, tmp_path: Path) -> None:
    records = [*made.demo_records(), made.distilled(EVIL, 0, 810, 140.0)]
    text = without_library(write_report(made.write_group(tmp_path, records)))
    assert EVIL not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text
    specs = re.search(r'<script type="application/json" id="chart-specs">(.*?)</script>', text, re.S)
    assert specs and EVIL in json.dumps(json.loads(specs.group(1)))


def test_a_single_run_has_a_page_of_its_own(made, tmp_path: Path) -> None:
    record = made.distilled("response KD", 0, 826, 131.0)
    out = write_report(made.write_run(tmp_path, record), tmp_path / "mail" / "run.html")
    text = without_library(out)
    assert out == tmp_path / "mail" / "run.html"
    assert "response KD: done, accuracy 82.6\u00a0% [80.1, 84.8], 144\u00a0J ±70\u00a0%, estimated, for its own" in text
    opening = text[text.index("<main>") : text.index("<details")]
    assert "Energy by stage" in opening and opening.count('class="chart"') == 1


def test_a_run_killed_before_its_first_reading_still_has_a_page(made, tmp_path: Path) -> None:
    record = made.make_record("response KD", 0, (), status="truncated")
    text = without_library(write_report(made.write_run(tmp_path, record)))
    assert "response KD: truncated, energy missing" in text


def test_a_folder_that_is_neither_run_nor_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="neither a run nor a group"):
        write_report(tmp_path)


def test_sensors_that_were_missing_are_named_with_the_way_out(made, tmp_path: Path) -> None:
    folder = made.write_run(tmp_path, made.teacher_run())
    grid = provenance.sensor_grid(provenance.trace_headers([folder]))
    assert ("gpu", "missing", "-", "no NVIDIA driver was found; install it") in grid.rows
    assert grid.rows[0][:3] == ("cpu estimate", "AMD EPYC (estimate:cpu)", "±70 %")


def test_what_differs_between_machines_is_reported(made, tmp_path: Path) -> None:
    folders = [made.write_run(tmp_path, record) for record in made.demo_records()[:2]]
    other = {**made.ENVIRONMENT, "python": "3.12.1"}
    (folders[1] / "environment.json").write_text(json.dumps(other))
    cells = dict(provenance.environment_grid(folders).rows)
    assert cells["Python"] == "differs between runs: 3.11.9 | 3.12.1"
    assert cells["host"] == "laptop" and "left-pad" not in cells


def test_joulelabs_commit_is_the_packages_and_the_folders_is_reported_as_the_users(made, tmp_path: Path) -> None:
    folder = made.write_run(tmp_path, made.demo_records()[0])
    older = provenance.environment_cells(folder)
    assert (older["joulelab"], older["your folder"][:19]) == ("0.1.0, commit not recorded", "commit 0123456789ab")
    for package, output_text in (
        ({"commit": "f" * 40, "dirty": False}, f"commit {'f' * 12}"),
        ({}, "installed package"),
    ):
        known = {**made.ENVIRONMENT, "joulelab_code": package, "code": {"commit": None}}
        (folder / "environment.json").write_text(json.dumps(known))
        cells = provenance.environment_cells(folder)
        assert (cells["joulelab"], cells["your folder"]) == (f"0.1.0, {output_text}", "not in a git checkout")


def test_a_run_is_reproduced_from_its_config_where_its_experiment_is_unknown(made, tmp_path: Path) -> None:
    record = made.teacher_run()
    assert provenance.reproduce_command(record) == f"joulelab run {record.run_id}/config.yaml"


def measured_program(made, label: str, command: tuple[str, ...], joules: float = 120.0):
    record = made.make_record(label, 0, [made.Part("program.run", 10.0, joules)], measured=True)
    spec = {"pipeline": "measure", "name": label, "command": list(command), "repeat": 1, "warmup": 2}
    return record.model_copy(update={"spec": spec, "results": {}, "lineage": (), "made": ()})


def test_no_absolute_path_is_in_a_command_to_reproduce(made) -> None:
    program = measured_program(made, "train", ("python", "/data/programs/train.py", "--data=/data/texts/reviews.csv"))
    command = provenance.reproduce_command(program)
    assert command == "joulelab measure --warmup=2 -- python PATH/train.py --data=PATH/reviews.csv"
    energy = {"total_energy_policy": "machine", "grid": "FR", "gpus": "none", "sample_interval_s": 0.5, "later": 1}
    changed = program.model_copy(update={"spec": {**program.spec, "energy": energy}})
    flags = "--warmup=2 --scope=machine --grid=FR --set=energy.gpus=none"
    assert provenance.reproduce_command(changed).startswith(f"joulelab measure {flags} -- python"), "what is counted"
    assert provenance.portable('"~/data/a.csv"') == '"PATH/a.csv"'
    assert provenance.portable("in /sys/class/powercap") == "in /sys/class/powercap"
    assert provenance.portable("https://host/a/b") == "https://host/a/b"
    assert provenance.portable("org/model") == "org/model" and provenance.portable("./my.py") == "./my.py"


def test_zoo_runs_are_reproduced_by_their_verb(made) -> None:
    record = made.teacher_run()
    spec = {"pipeline": "train", "name": "gpt2", "model": "gpt2", "size": "tiny", "training": {"max_steps": 20}}
    command = provenance.reproduce_command(record.model_copy(update={"name": "gpt2", "spec": spec}))
    assert command == "joulelab train gpt2 size='\"tiny\"' training.max_steps=20".replace(
        "size='\"tiny\"'", "'size=\"tiny\"'"
    )


WORDS = ("student", "teacher", "distill")


def test_pages_of_measured_programs_never_mention_students(made, tmp_path: Path) -> None:
    one, other = (
        measured_program(made, name, ("python", f"{name}.py"), joules) for name, joules in (("a", 120.0), ("b", 90.0))
    )
    pages = [write_report(made.write_run(tmp_path, one, True))]
    made.write_run(tmp_path, other, True)
    selection = select(tmp_path, [one.run_id, other.run_id])
    pages.append(write_page(selection_page(selection, tmp_path), tmp_path / "both.html"))
    for page in pages:
        text = without_library(page)
        body = text[text.index("<body>") : text.index("<script")].lower()
        assert not [word for word in WORDS if word in body]
        assert page != pages[0] or "seed" not in body


def test_a_known_experiment_is_reproduced_by_name_and_changed_settings(made, monkeypatch, tmp_path: Path) -> None:
    record = made.labels_only(3, 790)

    class Shipped:
        def model_dump(self, mode: str) -> dict:
            return {**record.spec, "seed": 0, "label": "labels only", "training": {"learning_rate": 0.1}}

    monkeypatch.setattr(provenance, "load_spec", lambda name: Shipped())
    command = provenance.reproduce_command(record)
    assert command == "joulelab run made-labels-only seed=3 training.learning_rate=0.001"


def test_the_chart_library_is_kept_and_made_anew_where_the_copy_was_changed(tmp_path: Path, monkeypatch) -> None:
    made: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda text: made.append(text) or f"{text} // </script>")
    for builds in (1, 1):
        chart_library.cache_clear()
        assert "<\\/script>" in chart_library() and len(made) == builds
    (kept,) = (tmp_path / "joulelab").glob("charts-*.js")
    kept.write_text("alert(1)")
    chart_library.cache_clear()
    assert "vegaEmbed" in chart_library() and len(made) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    chart_library.cache_clear()
    assert "vegaEmbed" in chart_library() and len(made) == 3
    chart_library.cache_clear()


def test_tiles_name_no_single_best_method_of_equals_and_how_a_grid_is_set(made, tmp_path: Path) -> None:
    records = [made.labels_only(0, 1000), made.distilled("response KD", 0, 1000, 131.0)]
    text = without_library(write_report(made.write_group(tmp_path, records)))
    assert "<span>all methods are equal</span>" in text and "sum of 2 runs" in text
    assert "no grid was given; for France, set energy.grid=FR" in text


def test_a_page_of_one_run_mentions_no_ratios_and_one_point_no_front(made, tmp_path: Path) -> None:
    record = made.labels_only(0, 790)
    assert not any("cancels in ratios" in text for text in run_sentences(record))
    assert "CPU contention: timings and CPU estimates are unreliable" in run_sentences(made.with_contention(record))[1]
    group = made.write_group(tmp_path, [record])
    assert "Dashed: Pareto front" not in without_library(write_report(group))


def test_a_short_value_of_a_tile_is_on_one_line(made, tmp_path: Path) -> None:
    text = without_library(write_report(made.write_group(tmp_path, [made.labels_only(0, 790)])))
    assert re.search(r'<dt>Electricity</dt><dd><strong class="whole">', text)
    assert ".tile strong.whole { white-space: nowrap; }" in text


def test_an_edited_environment_is_shown_as_far_as_it_has_its_types(tmp_path):
    sections = {"cpu": [1], "packages": 3, "gpus": {"a": 1}, "code": {"commit": 1.5}, "joulelab_code": "x"}
    (tmp_path / "environment.json").write_text(json.dumps(sections))
    cells = provenance.environment_cells(tmp_path)
    assert (cells["memory"], cells["GPUs"], cells["your folder"]) == ("-", "none", "commit 1.5")
