"""The pages of a single run, of a comparison and of a sweep, put together from their tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from joulelab.meter.figure_text import labeled_text
from joulelab.report.attempt_traces import attempt_traces
from joulelab.report.checklist import checklist_grid
from joulelab.report.compare import compare, seed_of
from joulelab.report.comparison import Comparison
from joulelab.report.comparison_figures import quality_against_energy, repeats, stages_by_method
from joulelab.report.facts import (
    difference_grid,
    environment_grid,
    note_grid,
    reproduce_command,
    sensor_grid,
    trace_headers,
)
from joulelab.report.figures import Figure, stages_of_run
from joulelab.report.grid import Grid
from joulelab.report.hardware import environment_differences, hardware_warning
from joulelab.report.inference_figure import joules_against_latency
from joulelab.report.joules import run_joules
from joulelab.report.overview import overview
from joulelab.report.page_model import Page, RunSection
from joulelab.report.pareto import why_no_front
from joulelab.report.parts import datasets, scope_choices, stated_pue
from joulelab.report.payback_figure import payback_curve
from joulelab.report.phase_figure import phase_figures
from joulelab.report.plain import comparison_data
from joulelab.report.power_figure import power_over_time
from joulelab.report.quality import quality_of
from joulelab.report.quality_curves import curve_points, quality_over_joules
from joulelab.report.run_tables import run_grids
from joulelab.report.selection import Selection
from joulelab.report.served_figure import joules_against_time
from joulelab.report.sweep import read_sweep
from joulelab.report.sweep_figures import sweep_figures
from joulelab.report.sweep_table import sweep_data, sweep_grids, sweep_headline
from joulelab.report.tables import comparison_grids
from joulelab.report.verdict import provenance, verdict
from joulelab.runs.groups import GroupRecord
from joulelab.runs.measure_result import repeat_mean
from joulelab.runs.paths import GroupPaths, RunPaths
from joulelab.runs.record import RunRecord

_MOST_INFERENCE_FIGURES = 12


def selection_page(
    selection: Selection, store: Path, wanted: str | None = None, include_repeated: bool = False
) -> Page:
    """A single run's page for one run, a sweep's for a sweep; else a comparison."""
    if selection.group.sweep:
        return sweep_page(selection)
    if len(selection.records) == 1 and selection.group.group_id == "comparison":
        record = selection.records[0]
        return run_page(record, selection.folders[record.run_id])
    return comparison_page(selection, selection.comparison(store, wanted, include_repeated))


def comparison_page(selection: Selection, comparison: Comparison) -> Page:
    group, records, folders = selection.group, selection.records, selection.folders
    found, stages = verdict(comparison), stage_names(records)
    sections = tuple(run_section(record, folders[record.run_id], stages) for record in records)
    warning = hardware_warning(records, folders)
    return Page(
        title=group.name,
        about=group.about,
        identity=_identity(group, records),
        provenance=found.provenance,
        headline=found.headline,
        sentences=(*([warning] if warning else []), *found.sentences),
        grids=comparison_grids(comparison),
        figures=comparison_figures(comparison, stages, sections),
        measured=_measured(records, folders),
        differs=_differs(group, records, folders),
        environment=environment_grid([folders[record.run_id] for record in records]),
        runs=sections,
        overview=overview(comparison, stages) if comparison.rows else None,
        scopes=tuple(scope_choices(comparison)),
        pue=stated_pue(records),
        baseline=comparison.baseline,
        no_ratio=tuple(row.label for row in comparison.rows if row.full_ratio and not row.full_ratio.ratio),
        crowded=tuple(row.label for row in comparison.rows if row.full_ratio and row.full_ratio.crowded),
        shares_teacher=any(row.teacher_share for row in comparison.rows),
        sign=comparison.measure.sign if comparison.measure else 0,
        no_front=why_no_front(comparison),
        datasets=datasets(comparison),
        plain=comparison_data(comparison),
    )


def comparison_figures(
    comparison: Comparison, stages: Sequence[str], sections: Sequence[RunSection]
) -> tuple[Figure, ...]:
    points = [point for section in sections for point in section.curve]
    figures = (
        quality_against_energy(comparison),
        stages_by_method(comparison, stages),
        payback_curve(comparison),
        joules_against_time(comparison),
        quality_over_joules(comparison, points),
        repeats(comparison),
        *phase_figures(comparison),
        *_inference_figures(comparison),
    )
    return tuple(figure for figure in figures if figure)


def _inference_figures(comparison: Comparison) -> list[Figure]:
    """One for each inference run, under its own label."""
    found = [(record, joules_against_latency(record)) for record in comparison.records[:_MOST_INFERENCE_FIGURES]]
    return [
        replace(figure, title=f"{figure.title}: {record.label}", name=f"{figure.name}-{record.run_id}")
        for record, figure in found
        if figure
    ]


def _measured(records: Sequence[RunRecord], folders: Mapping[str, Path]) -> tuple[Grid, ...]:
    ticks = checklist_grid(records)
    places = [folders[record.run_id] for record in records]
    return (*([ticks] if ticks else []), sensor_grid(trace_headers(places)), note_grid(records))


def _differs(group: GroupRecord, records: Sequence[RunRecord], folders: Mapping[str, Path]) -> tuple[Grid, ...]:
    return tuple(grid for grid in (difference_grid(group), environment_differences(records, folders)) if grid.rows)


def _identity(group: GroupRecord, records: Sequence[RunRecord]) -> tuple[str, ...]:
    done = sum(record.status == "done" for record in records)
    count = f"{len(records)} runs" if done == len(records) else f"{len(records)} runs, {done} of them done"
    return group.group_id, group.created_at[:16].replace("T", " "), count


def sweep_page(selection: Selection) -> Page:
    group, records, folders = selection.group, selection.records, selection.folders
    store = GroupPaths(selection.place).store if selection.place else Path()
    sweep = read_sweep(group, records, store)
    stages = stage_names(records)
    return Page(
        title=group.name,
        about=group.about,
        identity=_identity(group, records),
        provenance=provenance(records),
        headline=sweep_headline(sweep),
        sentences=(),
        grids=sweep_grids(sweep),
        figures=sweep_figures(sweep),
        measured=_measured(records, folders),
        differs=_differs(group, records, folders),
        environment=environment_grid([folders[record.run_id] for record in records]),
        runs=tuple(run_section(record, folders[record.run_id], stages) for record in records),
        plain=sweep_data(sweep),
    )


def run_page(record: RunRecord, folder: Path) -> Page:
    stages = stage_names([record])
    section = run_section(record, folder, stages)
    alone = GroupRecord(
        group_id=record.run_id, name=record.label, about="", created_at=record.created_at, members=(), varying={}
    )
    comparison = compare(alone, [record], folder.parent, {record.run_id: folder})
    figures = (
        joules_against_latency(record),
        stages_of_run(record, stages),
        quality_over_joules(comparison, section.curve),
        *phase_figures(comparison),
    )
    return Page(
        title=record.label,
        about=str(record.spec.get("about", "")),
        identity=(record.run_id, record.created_at[:16].replace("T", " "), f"seed {seed_of(record)}"),
        provenance=provenance([record]),
        headline=run_headline(record),
        sentences=(),
        grids=section.grids,
        figures=tuple(figure for figure in figures if figure),
        measured=_measured([record], {record.run_id: folder}),
        differs=(),
        environment=environment_grid([folder]),
        runs=(section,),
        plain=record.model_dump(mode="json"),
    )


def run_headline(record: RunRecord) -> str:
    found, quality = run_joules(record), quality_of(record)
    own = f"{labeled_text(found.own)}, for its own stages" if found.own.energy_j is not None else "energy missing"
    if repeats := repeat_mean(record):
        own = f"{labeled_text(repeats.energy)}, mean of {repeats.count} repeats"
    parts = [f"{record.label}: {record.status}", own]
    if quality is not None:
        parts.insert(1, f"{quality.measure.title} {quality.text()}")
    if found.inherited is not None and found.inherited.energy_j is not None:
        parts.append(f"{labeled_text(found.whole, found.mixed_whole)}, with what it inherited")
    return ", ".join(parts) + "."


def run_section(record: RunRecord, folder: Path, stages: Sequence[str]) -> RunSection:
    """The trace is read once and let go: a page may be about hundreds of runs."""
    found, quality = run_joules(record), quality_of(record)
    facts = [labeled_text(found.own)]
    if quality is not None:
        facts.insert(0, quality.text())
    if found.inherited is not None and found.inherited.energy_j is not None:
        facts.append(f"{labeled_text(found.whole, found.mixed_whole)}, with what it inherited")
    traces = attempt_traces(RunPaths(folder))
    return RunSection(
        run_id=record.run_id,
        title=f"{record.label}, seed {seed_of(record)}",
        status=record.status,
        facts=tuple(facts),
        grids=run_grids(record),
        command=reproduce_command(record, folder),
        power=power_over_time(record, traces, stages),
        curve=tuple(curve_points(record, folder, traces)),
    )


def stage_names(records: Sequence[RunRecord]) -> list[str]:
    """All stages of the page in order of appearance, so that each keeps its colour from figure to figure."""
    return list(dict.fromkeys(stage.name for record in records for stage in record.stages))
