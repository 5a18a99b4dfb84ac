"""`joulelab watch`: a run, a group or a Slurm job while it runs, from the shared folder."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import JoulelabError

if TYPE_CHECKING:
    from joulelab.cluster.watching import Watched, Watcher


def watch(
    name: Annotated[str, typer.Argument(help="Run or group by id, part of it, folder or `last`; or a job's number.")],
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between looks.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Show state, stage, watts, joules so far, speed, and what time and energy are left, until the run is over.

    It reads the run's folder and asks Slurm for its jobs where there is a Slurm; it needs no GPU and no torch, and
    works on any machine that sees the folder. Ends with 1 where a run did not end well.

    Examples:

      joulelab watch last

      joulelab watch 4711 --once --json
    """
    from joulelab.cluster.watching import Watcher
    from joulelab.runs.store import store_root

    watcher = Watcher(store_root(runs_dir), name)
    watched = _look(watcher, as_json) if once else _follow(watcher, interval_s, as_json)
    if watched.over and not as_json:
        for row in watcher.accounts():
            print(row.text)
    if watched.over and not watched.well:
        first = next(run for run in watched.runs if run.status != "done")
        if first.status == "queued":
            raise JoulelabError(
                f"{first.run_id} waits, and no job is left to begin it", f"joulelab submit --resume {watched.name}"
            )
        why = f"{first.run_id}: {first.why or first.status}"
        raise JoulelabError(f"not all of {watched.name} ended well ({why})", f"joulelab show {watched.name}")


def _look(watcher: Watcher, as_json: bool) -> Watched:
    import json

    from joulelab.cli.console import print_result
    from joulelab.cluster.watching import watch_grids
    from joulelab.report.grid import to_rich

    watched = watcher.look()
    if as_json:
        print(json.dumps(watched.data()), flush=True)
    else:
        print_result(*(to_rich(grid) for grid in watch_grids(watched)))
    return watched


def _follow(watcher: Watcher, interval_s: float, as_json: bool) -> Watched:
    """In place on a terminal; one table, or one line of JSON, after the other elsewhere."""
    if as_json or not sys.stdout.isatty():
        while not (watched := _look(watcher, as_json)).over:
            time.sleep(interval_s)
        return watched
    from rich.console import Group
    from rich.live import Live

    from joulelab.cluster.watching import watch_grids
    from joulelab.report.grid import to_rich

    with Live(auto_refresh=False) as live:
        while True:
            watched = watcher.look()
            live.update(Group(*(to_rich(grid) for grid in watch_grids(watched))), refresh=True)
            if watched.over:
                return watched
            time.sleep(interval_s)
