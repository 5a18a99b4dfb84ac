"""`joulelab.live()`: the current run in a notebook, drawn while a cell is busy.

    joulelab.live()
    trainer.train()

A thread of the kernel polls the run directory as `joulelab watch` does and replaces one output. It needs no server, so
it also works in a notebook on a remote machine. When the run ends, the output is its result, which stays in the
notebook.
"""

from __future__ import annotations

import os
import threading
import time
from html import escape
from pathlib import Path
from typing import Any

from joulelab.cluster.watch import RunWatcher, live_rows
from joulelab.errors import DependencyMissing, JoulelabError, UsageError
from joulelab.runs.lock import is_held, newest_lease
from joulelab.runs.store import find_folder, load_record, run_folders, store_root
from joulelab.units import duration_text, power_text

WIDTH, HEIGHT = 640, 160
_MOST_POINTS = 600
_NEWEST = 20
# Okabe and Ito's hues, as in the report's figures, whose module needs the extra `report`.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")


def live(run: str | None = None, runs_dir: str | Path | None = None, interval_s: float = 1.0) -> LiveView:
    """Show a run live in a notebook: power with stages, energy so far, speed, loss, what is left; then its result.

    Without `run`, the run of this notebook is shown, or the newest one that is running; if there is none, the next one
    that starts. `stop()` of the answer ends the updates.
    """
    try:
        from IPython import get_ipython
        from IPython.display import HTML, display
    except ImportError as error:
        raise DependencyMissing(f"IPython cannot be imported ({error})", "pip install ipython") from None
    if not hasattr(get_ipython(), "kernel"):
        raise UsageError("joulelab.live() draws in a notebook", "in a terminal use `joulelab watch last`")
    if not interval_s > 0:
        raise UsageError(f"interval_s: expected a number above 0, found {interval_s}")
    store = store_root(Path(runs_dir) if runs_dir is not None else None)
    folder = find_folder(store, run) if run is not None else None
    view = LiveView(store, folder, interval_s)
    handle: Any = display(HTML(view.html()), display_id=True)
    view.start(lambda html: handle.update(HTML(html)))
    return view


def current_run(store: Path) -> Path | None:
    """The newest running run of this process, else of any."""
    running = [folder for folder in reversed(run_folders(store)[-_NEWEST:]) if is_held(folder)]
    own = [folder for folder in running if (lease := newest_lease(folder)[1]) and lease.pid == os.getpid()]
    return next(iter([*own, *running]), None)


class LiveView:
    """One output of a notebook, updated until its run ends."""

    def __init__(self, store: Path, folder: Path | None, interval_s: float = 1.0) -> None:
        self._store = store
        self._folder = folder
        self._interval_s = interval_s
        self._watcher: RunWatcher | None = None
        self._points: list[tuple[float, float, str]] = []
        """Seconds, watts and stage of every poll."""
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def _ipython_display_(self) -> None:
        """Nothing: `live()` has displayed it, and as the last line of a cell it would be displayed again."""

    def start(self, show: Any) -> None:
        self._thread = threading.Thread(target=self._follow, args=(show,), daemon=True, name="joulelab-live")
        self._thread.start()

    def stop(self) -> None:
        """End the updates; the output stays as it is."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _follow(self, show: Any) -> None:
        shown = ""
        while not self._ended.wait(self._interval_s):
            try:
                html = self.html()
            except (JoulelabError, OSError, ValueError):  # a file that is being replaced: the next poll reads it
                continue
            if html != shown:
                show(html)
                shown = html

    def html(self) -> str:
        """The view at this moment; after the end of the run its result."""
        if self._folder is None:
            self._folder = current_run(self._store)
        if self._folder is None:
            return "<p>joulelab: waiting for a run to start</p>"
        self._watcher = self._watcher or RunWatcher(self._folder)
        now = self._watcher.poll()
        if now.over:
            self._ended.set()
            from joulelab.integrations.notebook import CellResult

            return CellResult(load_record(self._folder), self._folder)._repr_html_()
        if now.power_w is not None:
            self._points.append((time.monotonic() - self._began_s, now.power_w, now.stage))
            if len(self._points) > _MOST_POINTS:
                self._points = self._points[::2]  # an output of bounded size, however long the run is
        rows = "".join(
            f'<tr><th style="text-align:left">{escape(title)}</th><td style="text-align:left">{escape(text)}</td></tr>'
            for title, text in live_rows(now)
        )
        return f"<div><table>{rows}</table>{power_svg(self._points)}</div>"


def power_svg(points: list[tuple[float, float, str]]) -> str:
    """Power over time from 0 to its highest value, stages as bands; empty for fewer than two points."""
    if len(points) < 2 or not max(watts for _, watts, _ in points) > 0:
        return ""
    first_s, last_s = points[0][0], points[-1][0]
    span_s, highest_w = (last_s - first_s) or 1.0, max(watts for _, watts, _ in points)

    def x(seconds: float) -> float:
        return WIDTH * (seconds - first_s) / span_s

    stages = list(dict.fromkeys(stage for _, _, stage in points))
    colors = {stage: _HUES[place % len(_HUES)] for place, stage in enumerate(stages)}
    bands = ""
    begin_s, current = first_s, points[0][2]
    for seconds, _, stage in [*points, (last_s, 0.0, "")]:
        if stage != current:
            color = colors.get(current, _HUES[0])
            bands += f'<rect x="{x(begin_s):.1f}" y="0" width="{x(seconds) - x(begin_s):.1f}" height="{HEIGHT}" '
            bands += f'fill="{color}" opacity="0.25"/>'
            begin_s, current = seconds, stage
    line = " ".join(f"{x(s):.1f},{HEIGHT - (HEIGHT - 4) * max(watts, 0.0) / highest_w:.1f}" for s, watts, _ in points)
    label = f"power over the last {duration_text(span_s)}, highest {power_text(highest_w)}"
    square = '<span style="background:{};opacity:0.5">&emsp;</span>'
    legend = " ".join(
        f'<span style="margin-right:1em">{square.format(color)} {escape(stage)}</span>'
        for stage, color in colors.items()
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;max-width:{WIDTH}px" role="img" aria-label="{label}">'
        f'<title>{label}</title>{bands}<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f"</svg><div>{label}</div><div>{legend}</div>"
    )
