"""One HTML file that opens anywhere: no server, no network, figures and library inside it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import joulelab
from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.figures import labeled_text
from joulelab.report.compare.comparison import Comparison
from joulelab.report.compare.method_rows import AD_HOC, Selection, compare, is_about_inference, seed_of, select
from joulelab.report.compare.pareto import why_no_front
from joulelab.report.compare.quality import quality_of
from joulelab.report.compare.scopes import (
    all_energies,
    datasets,
    page_views,
    pue_choices,
    scope_choices,
    shares_teacher,
    stated_pue,
)
from joulelab.report.compare.verdict import provenance, short_verdict, verdict
from joulelab.report.energy_sums import run_energy
from joulelab.report.export import comparison_data
from joulelab.report.figures.chart_base import Figure, Spec, chart_converter, stage_colors, stages_of_run
from joulelab.report.figures.comparison_figures import (
    break_even_curve,
    quality_against_energy,
    repeats,
    stages_by_method,
)
from joulelab.report.figures.power_figures import attempt_traces, power_over_time
from joulelab.report.figures.serving_figures import (
    joules_against_latency,
    joules_against_time,
    models_against_latency,
)
from joulelab.report.figures.training_figures import (
    Point,
    curve_points,
    phase_figures,
    quality_over_joules,
    sweep_figures,
)
from joulelab.report.opening import Tile, group_tiles, run_sentences, run_tiles
from joulelab.report.tables.comparison_tables import comparison_grids
from joulelab.report.tables.grid import Cell, Grid, latex_text, to_latex
from joulelab.report.tables.inference_pair import models_data, models_grids, models_sentences
from joulelab.report.tables.overview_table import brief_grid, overview_grid
from joulelab.report.tables.provenance import (
    PATH,
    checklist_grid,
    difference_grid,
    environment_differences,
    environment_grid,
    hardware_warning,
    note_grid,
    reproduce_command,
    sensor_grid,
    trace_headers,
)
from joulelab.report.tables.run_tables import run_grids, stages_grid
from joulelab.report.tables.sweep_table import read_sweep, sweep_data, sweep_grids, sweep_headline
from joulelab.runs.groups import GroupRecord
from joulelab.runs.paths import REPORT, GroupPaths, RunPaths, cache_folder
from joulelab.runs.record import RunRecord


@dataclass(frozen=True)
class RunSection:
    """One run on the page: a summary line that opens to all its tables."""

    run_id: str
    title: str
    status: str
    facts: tuple[str, ...]
    grids: tuple[Grid, ...]
    command: str
    power: Figure | None
    curve: tuple[Point, ...] = ()


@dataclass(frozen=True)
class ListedLine:
    """A run in the list of a store's page."""

    cells: tuple[Cell, ...]
    link: str
    """Relative address of its page; empty if it has none."""


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    identity: tuple[str, ...]
    tiles: tuple[Tile, ...]
    verdict: tuple[str, ...]
    """At most three sentences."""
    figures: tuple[Figure, ...]
    """The first one opens the page."""
    table: Grid | None
    """The main table, for a paper."""
    provenance: tuple[str, ...] = ()
    """How estimated energies were obtained."""
    findings: tuple[str, ...] = ()
    """Everything that the comparison found, in sentences."""
    grids: tuple[Grid, ...] = ()
    measured: tuple[Grid, ...] = ()
    differs: tuple[Grid, ...] = ()
    environment: Grid | None = None
    runs: tuple[RunSection, ...] = ()
    listing: tuple[Grid, tuple[ListedLine, ...]] | None = None
    """The runs of a store: columns, and one line per run."""
    overview: Grid | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    """Method -> its role in the comparison."""
    legend: tuple[tuple[str, str], ...] = ()
    """Stage and color of the bars in the overview."""
    scopes: tuple[dict[str, Any], ...] = ()
    pue: float | None = None
    """As the runs state it; a reader can select another one of `pues`."""
    pues: tuple[float, ...] = ()
    shares_teacher: bool = False
    no_front: str = ""
    """Why no method is marked as being on the Pareto front."""
    views: dict[str, Any] = field(default_factory=dict)
    """What the overview shows for each state of the page's controls."""
    datasets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Datasets that the figures of a comparison read by name."""
    plain: dict[str, Any] = field(default_factory=dict)
    """The same as plain data, for the JSON download."""

    @property
    def uses_paths(self) -> bool:
        return any(f"{PATH}/" in run.command for run in self.runs)

    @property
    def all_figures(self) -> dict[str, Figure]:
        """By the id of their element on the page."""
        figures = {f"figure-{number}": figure for number, figure in enumerate(self.figures)}
        return figures | {f"power-{number}": run.power for number, run in enumerate(self.runs) if run.power}


_MOST_INFERENCE_FIGURES = 12


def selection_page(
    selection: Selection, store: Path, wanted: str | None = None, include_repeated: bool = False
) -> Page:
    """The page of a single run, of a sweep, or of a comparison."""
    alone = len(selection.records) == 1 and selection.group.group_id == AD_HOC
    about_inference = is_about_inference(selection.group)
    if (wanted is not None or include_repeated) and (alone or about_inference or selection.group.sweep):
        option = "--quality" if wanted is not None else "--include-repeated"
        raise UsageError(f"{option} has no effect: this is no comparison of methods", "leave it out")
    if about_inference:
        return _models_page(selection)
    if selection.group.sweep:
        return sweep_page(selection)
    if alone:
        record = selection.records[0]
        return run_page(record, selection.folders[record.run_id])
    return comparison_page(selection, selection.comparison(store, wanted, include_repeated))


def comparison_page(selection: Selection, comparison: Comparison) -> Page:
    group, records, folders = selection.group, selection.records, selection.folders
    found, colors = verdict(comparison), stage_colors(records)
    sections = tuple(run_section(record, folders[record.run_id], colors) for record in records)
    warning = hardware_warning(records, folders)
    energies = all_energies(comparison)
    parts = [part for row in comparison.rows for run in row.runs for part in run.parts]
    used = {part.stage for part in parts if part.figure.energy_j is not None}
    return Page(
        title=group.name,
        about=group.about,
        identity=_identity(group, records),
        tiles=group_tiles(group, records, comparison),
        verdict=short_verdict(comparison, warning),
        table=brief_grid(comparison) if comparison.rows else None,
        provenance=found.provenance,
        findings=(*([warning] if warning else []), *found.sentences),
        grids=comparison_grids(comparison),
        figures=comparison_figures(comparison, sections),
        measured=_measured(records, folders),
        differs=_differs(group, records, folders),
        environment=environment_grid([folders[record.run_id] for record in records]),
        runs=sections,
        overview=overview_grid(comparison) if comparison.rows else None,
        roles={row.label: row.role for row in comparison.rows},
        legend=tuple((stage, color) for stage, color in colors.items() if stage in used),
        scopes=tuple(scope_choices(comparison)),
        pue=stated_pue(records),
        pues=tuple(pue_choices(comparison)),
        shares_teacher=shares_teacher(comparison),
        no_front=why_no_front(comparison),
        views=page_views(comparison, energies),
        datasets=datasets(comparison, energies),
        plain=comparison_data(comparison),
    )


def comparison_figures(comparison: Comparison, sections: Sequence[RunSection]) -> tuple[Figure, ...]:
    points = [point for section in sections for point in section.curve]
    figures = (
        quality_against_energy(comparison),
        stages_by_method(comparison),
        break_even_curve(comparison),
        joules_against_time(comparison),
        quality_over_joules(comparison, points),
        repeats(comparison),
        *phase_figures(comparison),
        *_inference_figures(comparison),
    )
    return tuple(figure for figure in figures if figure)


def _inference_figures(comparison: Comparison) -> list[Figure]:
    """One per inference run, titled with its label."""
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
    colors = stage_colors(records)
    return Page(
        title=group.name,
        about=group.about,
        identity=_identity(group, records),
        tiles=group_tiles(group, records, None),
        verdict=(sweep_headline(sweep),),
        table=sweep_grids(sweep)[0],
        provenance=provenance(records),
        grids=sweep_grids(sweep),
        figures=sweep_figures(sweep),
        measured=_measured(records, folders),
        differs=_differs(group, records, folders),
        environment=environment_grid([folders[record.run_id] for record in records]),
        runs=tuple(run_section(record, folders[record.run_id], colors) for record in records),
        plain=sweep_data(sweep),
    )


def _models_page(selection: Selection) -> Page:
    """The page of several inference runs, as of `joulelab infer` with several models."""
    group, records, folders = selection.group, selection.records, selection.folders
    colors = stage_colors(records)
    figure = models_against_latency(records)
    return Page(
        title=group.name,
        about=group.about,
        identity=_identity(group, records),
        tiles=group_tiles(group, records, None),
        verdict=models_sentences(records),
        table=next(iter(models_grids(records)), None),
        provenance=provenance(records),
        grids=tuple(models_grids(records)),
        figures=(figure,) if figure else (),
        measured=_measured(records, folders),
        differs=_differs(group, records, folders),
        environment=environment_grid([folders[record.run_id] for record in records]),
        runs=tuple(run_section(record, folders[record.run_id], colors) for record in records),
        plain={"group": group.group_id, "models": models_data(records)},
    )


def run_page(record: RunRecord, folder: Path) -> Page:
    section = run_section(record, folder)
    alone = GroupRecord(
        group_id=record.run_id, name=record.label, about="", created_at=record.created_at, members=(), varying={}
    )
    comparison = compare(alone, [record], folder.parent, {record.run_id: folder})
    figures = (
        stages_of_run(record),
        joules_against_latency(record),
        quality_over_joules(comparison, section.curve),
        *phase_figures(comparison),
    )
    return Page(
        title=record.label,
        about=str(record.spec.get("about", "")),
        identity=(record.run_id, record.created_at[:16].replace("T", " "), *_seed(record)),
        tiles=run_tiles(record),
        verdict=run_sentences(record),
        table=stages_grid(record) if record.stages else None,
        provenance=provenance([record]),
        grids=section.grids,
        figures=tuple(figure for figure in figures if figure),
        measured=_measured([record], {record.run_id: folder}),
        differs=(),
        environment=environment_grid([folder]),
        runs=(section,),
        plain=record.model_dump(mode="json"),
    )


def _seed(record: RunRecord) -> list[str]:
    """Programs have no seed."""
    return [] if record.spec.get("pipeline") == "measure" else [f"seed {seed_of(record)}"]


def run_section(record: RunRecord, folder: Path, colors: Mapping[str, str] | None = None) -> RunSection:
    """Reads the trace once and drops it: a page may have hundreds of runs."""
    found, quality = run_energy(record), quality_of(record)
    facts = [labeled_text(record.best_energy)]
    if quality is not None:
        facts.insert(0, quality.text())
    if found.inherited is not None and found.inherited.energy_j is not None:
        facts.append(f"{labeled_text(found.whole, found.mixed_whole)}, inherited energy included")
    traces = attempt_traces(RunPaths(folder))
    return RunSection(
        run_id=record.run_id,
        title=", ".join([record.label, *_seed(record)]),
        status=record.status,
        facts=tuple(facts),
        grids=run_grids(record),
        command=reproduce_command(record),
        power=power_over_time(record, traces, colors),
        curve=tuple(curve_points(record, folder, traces)),
    )


@cache
def chart_library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, bundled by vl-convert.

    Bundling takes a second, so the script is cached in the user's cache directory under the package's version and the
    script's hash; a file that does not match its hash is replaced.
    """
    cached = _cached()
    if cached is not None:
        return cached
    script: str = chart_converter().javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if "</script" in script.lower():  # would end the script element of the page
        script = script.replace("</script", "<\\/script")
    with suppress(OSError, RuntimeError):  # without a writable cache the next call bundles again
        _write_cache(script)
    return script


def _stem() -> str:
    return f"charts-{version('vl-convert-python')}"


def _cached() -> str | None:
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # no home, no permission, or not a text file
        for path in cache_folder().glob(f"{_stem()}-*.js"):
            script = path.read_text(encoding="utf-8")
            if path.stem == f"{_stem()}-{_hash(script)}":
                return script
    return None


def _write_cache(script: str) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_stem()}.{os.getpid()}.tmp"
    temporary.write_text(script, encoding="utf-8")
    temporary.replace(folder / f"{_stem()}-{_hash(script)}.js")


def _hash(script: str) -> str:
    return hashlib.sha256(script.encode()).hexdigest()[:16]


TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a group's or a run's directory; returns the file."""
    is_group = GroupPaths(folder).record.exists()
    if not is_group and not RunPaths(folder).record.exists():
        raise NotFoundError(f"{folder} is neither a run nor a group", "`joulelab runs` lists both")
    store = GroupPaths(folder).store if is_group else folder.parent
    page = selection_page(select(store, [str(folder)]), store)
    return write_page(page, out / REPORT if out is not None and out.is_dir() else out or folder / REPORT)


def write_page(page: Page, target: Path) -> Path:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(render(page), encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(
            f"cannot write the page to {target}: {error.strerror}", "choose another file with --out"
        ) from None
    return target


SCRIPTS = ("state.js", "tables.js", "overview.js", "charts.js", "parts.js")
"""In this order: later ones use what earlier ones define."""


def template_environment(*folders: Path) -> Environment:
    """Finds templates in these folders, then among those of the report."""
    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["units"] = _with_units
    return environment


def render(page: Page) -> str:
    template = template_environment().get_template("page.html.j2")
    return template.render(**page_context(page), library=chart_library(), scripts=SCRIPTS)


def page_context(page: Page) -> dict[str, Any]:
    """What the template of a page reads."""
    return {
        "page": page,
        "specs": {name: figure_data(figure) for name, figure in page.all_figures.items()},
        "data": page_data(page),
        "version": joulelab.__version__,
    }


def figure_data(figure: Figure) -> dict[str, Any]:
    """A figure as the page's script draws it."""
    # the library replaces the aria-label of a chart's element by the description in the spec
    return {"spec": {**figure.spec, "description": figure.description}, "log_axis": figure.log_axis}


def _with_units(text: str) -> str:
    """With a no-break space between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|[kmµMGn]?(?:J|Wh|W|s|gCO2e)\b)", "\u00a0", text)


def page_data(page: Page) -> dict[str, Any]:
    """Data of the page's scripts."""
    return {
        "datasets": page.datasets,
        "scopes": list(page.scopes),
        "pue": page.pue,
        "pues": list(page.pues),
        "stages": list(page.legend),
        "views": page.views,
        "data": page.plain,
    }


WIDTH = 620
_CONFIG: Spec = {
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "background": "white",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12.5, "titleFontWeight": "normal", "labelLimit": 200},
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 240},
}


def _svg(spec: Spec) -> bytes:
    return str(chart_converter().vegalite_to_svg(spec)).encode()


def _png(spec: Spec) -> bytes:
    return bytes(chart_converter().vegalite_to_png(spec, scale=2.0))


def _pdf(spec: Spec) -> bytes:
    return bytes(chart_converter().vegalite_to_pdf(spec))


FORMATS: dict[str, Callable[[Spec], bytes]] = {"svg": _svg, "png": _png, "pdf": _pdf}


DOCUMENTS = (".html", *(f".{name}" for name in FORMATS), ".tex")


def check_document(out: Path) -> None:
    """Refuse a file name whose format cannot be written, before anything is computed."""
    if out.suffix.lower() not in DOCUMENTS:
        raise UsageError(
            f"--out {out}: cannot write {out.suffix or 'a file without suffix'}; expected {', '.join(DOCUMENTS)}",
            ".html is the page; .pdf, .png and .svg its first chart; .tex its main table",
        )


def write_document(page: Page, target: Path) -> Path:
    """The page as .html, its first chart as .pdf, .png or .svg, its main table as .tex."""
    check_document(target)
    kind = target.suffix.lower().removeprefix(".")
    if kind == "html":
        return write_page(page, target)
    if kind == "tex" and page.table is not None:
        content = ("% \\usepackage{booktabs,amssymb}\n\n" + to_latex(page.table)).encode()
    elif kind in FORMATS and page.figures:
        content = FORMATS[kind](standalone_spec(page.figures[0], page))
    else:
        what = "table" if kind == "tex" else "chart"
        raise UsageError(f"--out {target}: the page of {page.title} has no {what}", "use .html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return _write(target, content)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}", "choose another file with --out") from None


def write_files(page: Page, folder: Path, formats: Sequence[str], latex: bool = False) -> list[Path]:
    """Write every figure of the page in these formats and its tables as LaTeX; returns the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [
            _write(folder / f"{name}.{kind}", FORMATS[kind](standalone_spec(figure, page)))
            for name, figure in figure_names(page).items()
            for kind in formats
        ]
        return written + (_write_latex(page, folder, "pdf" in formats) if latex else [])
    except OSError as error:
        raise UsageError(
            f"cannot write into {folder}: {error.strerror or error}", "choose another directory with --out"
        ) from None


def figure_names(page: Page) -> dict[str, Figure]:
    """Figures by file name without spaces; the power figure of a single run has no run id in it."""
    powers = [run.power for run in page.runs if run.power]
    names = {"-".join((figure.name or f"figure {place}").split()): figure for place, figure in enumerate(page.figures)}
    return names | ({"power": powers[0]} if len(powers) == 1 else {power.name: power for power in powers})


def standalone_spec(figure: Figure, page: Page) -> dict[str, Any]:
    """The spec with its data, a fixed width and the colors of a white page."""
    return {**figure.complete(page.datasets), "width": WIDTH, "config": _CONFIG}


def _write_latex(page: Page, folder: Path, figures: bool) -> list[Path]:
    main = (page.table,) if page.table else ()  # of a store, the only one
    tables = "\n".join(to_latex(grid) for grid in page.grids or main)
    note = "% \\usepackage{booktabs,amssymb}\n\n"
    written = [_write(folder / "tables.tex", (note + tables).encode())]
    if figures:
        blocks = [_include(name, figure) for name, figure in figure_names(page).items()]
        written.append(_write(folder / "figures.tex", ("% \\usepackage{graphicx}\n\n" + "\n".join(blocks)).encode()))
    return written


def _include(name: str, figure: Figure) -> str:
    caption = latex_text(" ".join(filter(None, [f"{figure.title}.", figure.caption])))
    return (
        "\\begin{figure}\n\\centering\n"
        f"\\includegraphics[width=\\linewidth]{{{name}.pdf}}\n\\caption{{{caption}}}\n\\label{{fig:{name}}}\n"
        "\\end{figure}\n"
    )


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
