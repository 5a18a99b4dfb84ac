"""One HTML file that opens anywhere: no server, no network, figures and library inside it."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import joulelab
from joulelab.errors import NotFoundError, UsageError
from joulelab.report.chart_library import chart_library
from joulelab.report.page_builders import selection_page
from joulelab.report.page_model import Page
from joulelab.report.selection import select
from joulelab.runs.paths import GroupPaths, RunPaths
from joulelab.stats import t_quantile

TEMPLATES = Path(__file__).parent / "templates"
REPORT = "report.html"
_STEPS = 200


def write_report(folder: Path, out: Path | None = None) -> Path:
    """The report of a group folder or of a single run's folder; returns the file it wrote."""
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
            f"the page cannot be written to {target}: {error.strerror}", "--out names another file"
        ) from None
    return target


def render(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # the library reads a chart's description aloud, in place of the label the page gave its box
    specs = {
        name: {"spec": {**figure.spec, "description": figure.description}, "log_axis": figure.log_axis}
        for name, figure in page.all_figures.items()
    }
    template = environment.get_template("page.html.j2")
    return template.render(
        page=page, specs=specs, data=page_data(page), library=chart_library(), version=joulelab.__version__
    )


def page_data(page: Page) -> dict[str, Any]:
    """What the page's scripts work with."""
    return {
        "datasets": page.datasets,
        "scopes": list(page.scopes),
        "pue": page.pue,
        "baseline": page.baseline,
        "sign": page.sign,
        "no_front": page.no_front,
        "stages": list(page.overview.stages) if page.overview else [],
        "no_ratio": list(page.no_ratio),
        "crowded": list(page.crowded),
        "t_by_inverse_degrees": _t_by_inverse_degrees(),
        "data": page.plain,
    }


@cache
def _t_by_inverse_degrees() -> list[float]:
    """The normal's 97.5 % quantile, then Student's at `_STEPS`, `_STEPS` / 2, `_STEPS` / 3 ... 1 degrees of freedom."""
    degrees = [math.inf, *(_STEPS / step for step in range(1, _STEPS + 1))]
    return [round(t_quantile(0.975, one), 6) for one in degrees]
