"""One HTML file that opens anywhere: no server, no network, figures and library inside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import joulelab
from joulelab.errors import NotFoundError, UsageError
from joulelab.report.compare import compare, quality, seed_of
from joulelab.report.facts import (
    difference_grid,
    environment_grid,
    note_grid,
    reproduce_command,
    sensor_grid,
    trace_headers,
)
from joulelab.report.figures import Figure, quality_against_energy, stages_by_method, stages_of_run
from joulelab.report.grid import Grid
from joulelab.report.joules import run_joules
from joulelab.report.losses import quality_text
from joulelab.report.power_figure import power_over_time
from joulelab.report.run_tables import run_grids
from joulelab.report.sweep import read_sweep
from joulelab.report.sweep_figures import sweep_figures
from joulelab.report.sweep_table import sweep_grids, sweep_headline
from joulelab.report.tables import comparison_grids
from joulelab.report.verdict import provenance, verdict
from joulelab.report.wording import joules_and_method
from joulelab.runs.groups import GroupRecord, group_records
from joulelab.runs.paths import GroupPaths, RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.store import load_record

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class RunSection:
    """One run, as the page shows it: a line to open, and behind it everything."""

    title: str
    status: str
    facts: tuple[str, ...]
    grids: tuple[Grid, ...]
    command: str
    power: Figure | None


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    identity: tuple[str, ...]
    provenance: tuple[str, ...]
    headline: str
    sentences: tuple[str, ...]
    grids: tuple[Grid, ...]
    figures: tuple[Figure, ...]
    measured: tuple[Grid, ...]
    differs: Grid | None
    environment: Grid
    runs: tuple[RunSection, ...]


def write_report(folder: Path, out: Path | None = None) -> Path:
    """The report of a group folder or of a single run's folder; returns the file it wrote."""
    if GroupPaths(folder).record.exists():
        page, default = group_page(folder), GroupPaths(folder).report
    elif RunPaths(folder).record.exists():
        page, default = run_page(folder), RunPaths(folder).report
    else:
        raise NotFoundError(f"{folder} is neither a run nor a group", "`joulelab runs` lists both")
    target = out / default.name if out is not None and out.is_dir() else out or default
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(render(page), encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"the page cannot be written to {target}: {error.strerror}", "--out names another file"
        ) from None
    return target


def group_page(folder: Path) -> Page:
    group, records = group_records(folder)
    if group.sweep:
        return sweep_page(folder, group, records)
    store = folder.parent.parent
    folders = [store / record.run_id for record in records]
    comparison = compare(group, records, store)
    found = verdict(comparison)
    stages = stage_names(records)
    figures = (quality_against_energy(comparison), stages_by_method(comparison, stages))
    return Page(
        title=group.name,
        about=group.about,
        identity=(group.group_id, group.created_at[:16].replace("T", " "), _count_text(records)),
        provenance=found.provenance,
        headline=found.headline,
        sentences=found.sentences,
        grids=comparison_grids(comparison),
        figures=tuple(figure for figure in figures if figure),
        measured=(sensor_grid(trace_headers(folders)), note_grid(records)),
        differs=difference_grid(group),
        environment=environment_grid(folders),
        runs=tuple(run_section(record, store / record.run_id, stages) for record in records),
    )


def sweep_page(folder: Path, group: GroupRecord, records: Sequence[RunRecord]) -> Page:
    store = folder.parent.parent
    folders = [store / record.run_id for record in records]
    sweep = read_sweep(group, records, store)
    stages = stage_names(records)
    return Page(
        title=group.name,
        about=group.about,
        identity=(group.group_id, group.created_at[:16].replace("T", " "), _count_text(records)),
        provenance=provenance(records),
        headline=sweep_headline(sweep),
        sentences=(),
        grids=sweep_grids(sweep),
        figures=sweep_figures(sweep),
        measured=(sensor_grid(trace_headers(folders)), note_grid(records)),
        differs=difference_grid(group),
        environment=environment_grid(folders),
        runs=tuple(run_section(record, store / record.run_id, stages) for record in records),
    )


def run_page(folder: Path) -> Page:
    record = load_record(folder)
    stages = stage_names([record])
    bars = stages_of_run(record, stages)
    section = run_section(record, folder, stages)
    return Page(
        title=record.label,
        about=str(record.spec.get("about", "")),
        identity=(record.run_id, record.created_at[:16].replace("T", " "), f"seed {seed_of(record)}"),
        provenance=provenance([record]),
        headline=run_headline(record),
        sentences=(),
        grids=section.grids,
        figures=(bars,) if bars else (),
        measured=(sensor_grid(trace_headers([folder])), note_grid([record])),
        differs=None,
        environment=environment_grid([folder]),
        runs=(section,),
    )


def run_headline(record: RunRecord) -> str:
    found = run_joules(record)
    parts = [f"{record.label}: {record.status}", f"{joules_and_method(found.own)} for its own stages"]
    result = quality(record)
    if result is not None:
        parts.insert(1, f"{'loss' if result.lower_is_better else 'accuracy'} {quality_text(result)}")
    if found.inherited is not None and found.inherited.energy_j is not None:
        parts.append(f"{joules_and_method(found.with_teacher, found.mixed)} with what it inherited")
    return ", ".join(parts) + "."


def run_section(record: RunRecord, folder: Path, stages: Sequence[str]) -> RunSection:
    found, result = run_joules(record), quality(record)
    facts = [joules_and_method(found.own)]
    if result is not None:
        facts.insert(0, quality_text(result))
    if found.inherited is not None and found.inherited.energy_j is not None:
        facts.append(f"{joules_and_method(found.with_teacher, found.mixed)} with what it inherited")
    return RunSection(
        title=f"{record.label}, seed {seed_of(record)}",
        status=record.status,
        facts=tuple(facts),
        grids=run_grids(record),
        command=reproduce_command(record, folder),
        power=power_over_time(record, folder, stages),
    )


def stage_names(records: Sequence[RunRecord]) -> list[str]:
    """All stages of the page in order of appearance, so that each keeps its colour from figure to figure."""
    return list(dict.fromkeys(stage.name for record in records for stage in record.stages))


def _count_text(records: Sequence[RunRecord]) -> str:
    done = sum(record.status == "done" for record in records)
    return f"{len(records)} runs" if done == len(records) else f"{len(records)} runs, {done} of them done"


def render(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {f"figure-{number}": figure for number, figure in enumerate(page.figures)}
    figures |= {f"power-{number}": run.power for number, run in enumerate(page.runs) if run.power}
    # the library reads a chart's description aloud, in place of the label the page gave its box
    specs = {name: {**figure.spec, "description": figure.description} for name, figure in figures.items()}
    template = environment.get_template("page.html.j2")
    return template.render(page=page, specs=specs, library=chart_library(), version=joulelab.__version__)


@cache
def chart_library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, out of the package that is installed anyway."""
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if "</script" in script.lower():  # would end the element it is put into
        script = script.replace("</script", "<\\/script")
    return script
