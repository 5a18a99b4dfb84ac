"""Figures and tables for papers: every figure in every form, its words still words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.errors import UsageError
from joulelab.report.compare.method_rows import select
from joulelab.report.page import TEMPLATES, figure_names, selection_page
from joulelab.report.tables.grid import LATEX, make_grid, to_latex


def test_figures_and_tables_are_written_next_to_the_page(made, tmp_path: Path, monkeypatch) -> None:
    made.write_run(tmp_path / "runs", made.distilled("KD", 0, 826, 131.0, True), True)
    monkeypatch.chdir(tmp_path)
    words = ["report", "last", "--out", "kd.html", "--svg", "--png", "--pdf", "--latex"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "kd-figures"
    assert [Path(line).name for line in done.output.splitlines()] == [
        *("kd.html", "stages.svg", "stages.png", "stages.pdf", "power.svg", "power.png", "power.pdf"),
        *("tables.tex", "figures.tex"),
    ]
    assert "Energy (J)</text>" in (folder / "stages.svg").read_text()  # words, not outlines
    pdf = (folder / "power.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/FontFile" in pdf
    assert (folder / "stages.png").read_bytes().startswith(b"\x89PNG")
    latex = (folder / "figures.tex").read_text()
    assert "\\includegraphics[width=\\linewidth]{stages.pdf}" in latex
    assert (folder / "tables.tex").read_text().count("\\toprule") >= 3


def test_every_figure_of_a_comparison_has_a_file_name_of_its_own(made, tmp_path: Path) -> None:
    made.write_group(tmp_path, made.demo_records(True), True)
    page = selection_page(select(tmp_path, ["made-labels-*", "made-response-KD-*"]), tmp_path)
    names = list(figure_names(page))
    assert names[:4] == ["quality-against-energy", "stages", "break-even", "repeats"]
    assert sum(name.startswith("power-made-") for name in names) == 4 and len(names) == 8


def test_latex_keeps_special_characters_inside_its_cells() -> None:
    grid = make_grid("t", "a_b|x>", [["50 % & {more}", "1 ± 2"], ["<0.1", ">"]])
    assert r"50 \% \& \{more\} & 1 $\pm$ 2 \\" in to_latex(grid) and r"a\_b & x \\" in to_latex(grid)
    assert r"$<$0.1 & $>$ \\" in to_latex(grid)
    bound = to_latex(make_grid("t", "a|x>", [["[0.9, 0.95]", "≥ 512 J"]]))
    assert "\n{}[0.9, 0.95] & $\\geq$ 512 J" in bound, "a bracket after a line end would be an argument of it"


def test_the_page_writes_special_characters_in_latex_as_the_command_does() -> None:
    script = (TEMPLATES / "tables.js").read_text(encoding="utf-8")
    table = script[script.index("const named = {") : script.index("};")]
    pairs = re.findall(r'("(?:[^"\\]|\\.)*"): ("(?:[^"\\]|\\.)*")', table)
    assert {json.loads(mark): json.loads(text) for mark, text in pairs} == LATEX


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.pdf", b"%PDF"), ("a.png", b"\x89PNG"), ("a.svg", b"<svg"), ("a.tex", b"% "), ("a.html", b"<!doctype html>")],
)
def test_the_suffix_of_the_file_decides_the_format(made, tmp_path: Path, monkeypatch, name: str, start: bytes) -> None:
    made.write_run(tmp_path / "runs", made.distilled("KD", 0, 826, 131.0, True), True)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "last", "--out", name])
    assert done.exit_code == 0, done.output
    content = (tmp_path / name).read_bytes().lstrip()
    assert content.startswith(start)
    if name == "a.svg":
        assert b"student.train" in content
    if name == "a.tex":
        assert b"student.train & 131 J" in content


def test_another_suffix_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["report", "no-such-run", "--out", "a.docx"])
    assert isinstance(refused.exception, UsageError)
    assert "expected .html, .svg, .png, .pdf, .tex" in refused.exception.message


def test_a_run_without_energy_has_no_chart_to_write(made, tmp_path: Path, monkeypatch) -> None:
    made.write_run(tmp_path / "runs", made.make_record("KD", 0, (), status="truncated"))
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["report", "last", "--out", "a.pdf"])
    assert isinstance(refused.exception, UsageError) and "has no chart" in refused.exception.message


def test_the_tables_of_a_store_as_latex_are_those_of_its_page(made, tmp_path: Path) -> None:
    made.write_run(tmp_path / "runs", made.distilled("KD", 0, 826, 131.0, True), True)
    words = ["report", "--store", "--latex", "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "s.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "All runs, newest first" in (tmp_path / "s-figures" / "tables.tex").read_text()


@pytest.mark.parametrize("option", [["--quality", "accuracy"], ["--include-repeated"]])
def test_options_of_a_comparison_are_refused_for_a_single_run(made, tmp_path: Path, option: list[str]) -> None:
    made.write_run(tmp_path / "runs", made.distilled("KD", 0, 826, 131.0, True), True)
    refused = CliRunner().invoke(app, ["report", "last", *option, "--runs-dir", str(tmp_path / "runs")]).exception
    assert isinstance(refused, UsageError) and f"{option[0]} has no effect" in refused.message
