"""`joulelab runs`: what lies in the store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import JoulelabError, UsageError

if TYPE_CHECKING:
    from joulelab.runs.index import Told
    from joulelab.runs.record import RunRecord

# So many runs take a while to read; whoever waits is told why.
_TELLING = 300


def runs(
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", min=1, metavar="N", help="Only the newest N runs, and their groups.", show_default=False
        ),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Turn the traces of runs that have ended into Parquet, and list nothing.")
    ] = False,
) -> None:
    """List the runs and groups of the store, oldest first, with status, quality and joules.

    The list comes from index.parquet in the store, which is brought up to date first; it can be deleted at any time.
    For questions beyond a list: joulelab query --schema
    """
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    if store.exists() and not store.is_dir():
        raise UsageError(f"{store} is a file, not a store of runs", "--runs-dir or JOULELAB_RUNS names the folder")
    if compact:
        compact_store(store, as_json)
    elif as_json:
        summaries = [text for (text,) in _listed(store, ["summary"])]
        indented = [summary.replace("\n", "\n  ") for summary in (summaries[-last:] if last else summaries)]
        print("[\n  " + ",\n  ".join(indented) + "\n]" if indented else "[]")
    else:
        list_runs(store, last)


def list_runs(store: Path, last: int | None) -> None:
    from joulelab.cli.console import print_grid, print_result
    from joulelab.report.tables import groups_table, runs_grid
    from joulelab.runs.groups import load_group
    from joulelab.runs.index_rows import LISTING, listed_run
    from joulelab.runs.store import group_folders

    texts = [text for (text,) in _listed(store, [LISTING])]
    if not texts:
        print(f"no runs under {store.absolute()}; `joulelab demo` makes some", file=sys.stderr)
        return
    shown = [listed_run(text) for text in (texts[-last:] if last else texts)]
    print_grid(runs_grid(cast("list[RunRecord]", shown)))  # they have all of a record that the table shows
    groups = []
    for folder in group_folders(store):
        try:
            groups.append(load_group(folder))
        except JoulelabError as error:  # one that cannot be read does not hide the others
            print(f"unreadable: {error.message}", file=sys.stderr)
    if last:
        ids = {run.run_id for run in shown}
        groups = [group for group in groups if any(member.run_id in ids for member in group.members)]
    if groups:
        print_result(groups_table(groups))


def _listed(store: Path, columns: list[str]) -> list[tuple[str, ...]]:
    from joulelab.runs.index import listed

    return listed(store, telling(), columns)


def telling() -> Told:
    """On stderr: what cannot be read, and why the first time takes a while."""
    from joulelab.runs.index import Told

    def reading(count: int) -> None:
        if count > _TELLING:
            print(f"reading {count} runs that are new or changed; the next time is quicker", file=sys.stderr)

    return Told(lambda text: print(f"unreadable: {text}", file=sys.stderr), reading)


def compact_store(store: Path, as_json: bool) -> None:
    """Traces of ended runs as Parquet; what must stay as it is, is told with the reason."""
    import json
    from dataclasses import asdict

    from joulelab.runs.compaction import compact_ended
    from joulelab.units import size_text

    done = compact_ended(store)
    for text in done.kept:
        print(f"stays JSONL: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(done), indent=2))
    else:
        saved = f"{size_text(done.bytes_before)} became {size_text(done.bytes_after)}"
        count = "1 trace was" if done.traces == 1 else f"{done.traces} traces were"
        print(f"{count} turned into Parquet" + (f": {saved}" if done.traces else ""))
