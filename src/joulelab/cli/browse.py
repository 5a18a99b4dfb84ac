"""`joulelab runs`: what lies in the store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import JoulelabError, UsageError

if TYPE_CHECKING:
    from joulelab.report.tables.sweep_table import Sweep
    from joulelab.runs.index import Answer, Told
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
    from joulelab.report.tables.comparison_tables import groups_table, runs_grid
    from joulelab.runs.groups import load_group
    from joulelab.runs.index import LISTING, listed_run
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

    from joulelab.runs.store import compact_ended
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


# `joulelab show`: one run, or the comparison of a group, in the terminal.


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="Run or group: its id, the beginning or end of it, its folder, a quoted pattern, or `last`."
        ),
    ],
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Print one run's stages and joules, or a group's comparison. Works on running and killed runs too.

    A pattern such as 'demo-kd-*' shows every run that it fits, oldest first; with --json as a list.
    """
    from joulelab.runs.groups import folders_named, is_pattern
    from joulelab.runs.store import load_record, store_root

    folders = folders_named(store_root(runs_dir), name)
    if (folders[0] / "group.json").exists():
        show_group(folders[0], as_json)
        return
    records = [load_record(folder) for folder in folders]
    if as_json:
        texts = [record.model_dump_json(indent=2) for record in records]
        print("[" + ",\n".join(texts) + "]" if is_pattern(name) else texts[0])
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables.comparison_tables import run_view

    print_result(*(run_view(record) for record in records))


def show_group(folder: Path, as_json: bool) -> None:
    from joulelab.report.compare.method_rows import compare
    from joulelab.report.tables.sweep_table import read_sweep
    from joulelab.runs.groups import group_records
    from joulelab.runs.paths import GroupPaths

    store = GroupPaths(folder).store
    group, records = group_records(folder)
    if group.sweep:
        show_sweep(read_sweep(group, records, store), as_json)
        return
    comparison = compare(group, records, store)
    if as_json:
        import json

        from joulelab.report.export import comparison_data

        print(json.dumps(comparison_data(comparison), indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables.comparison_tables import comparison_view

    print_result(comparison_view(comparison))


def show_sweep(sweep: Sweep, as_json: bool) -> None:
    from joulelab.report.tables.sweep_table import sweep_data, sweep_view

    if as_json:
        import json

        print(json.dumps(sweep_data(sweep), indent=2))
        return
    from joulelab.cli.console import print_result

    print_result(sweep_view(sweep))


# `joulelab query`: SQL over the runs, stages and samples of a store.


def query(
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="One SELECT, as DuckDB understands it.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the tables and columns, and what each is.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the answer as CSV on stdout.")] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
) -> None:
    """Ask the store in SQL: the tables runs, stages and samples, read-only.

    Examples:

      joulelab query "select label, avg(energy_j) from runs where status = 'done' group by label"

      joulelab query "select stage, sum(gpu_j) / 3.6e6 as kwh from stages group by stage order by kwh desc"

      joulelab query "select settings->>'$.training.learning_rate' as lr, results['student.accuracy'] from runs"

      joulelab query "select date_trunc('minute', time) as minute, max(power_watts) from samples group by minute" --csv
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json at once", "choose one of them")
    if schema:
        print_schema(as_json)
        return
    if sql is None or not sql.strip():
        raise UsageError("no question was asked", 'joulelab query "select * from runs", or --schema for the columns')
    from joulelab.runs.index import ask
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    if not store.is_dir():
        raise UsageError(f"there is no store at {store.absolute()}", "--runs-dir or JOULELAB_RUNS names the folder")
    answer = ask(store, sql, telling())
    if as_csv:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows([["" if value is None else plain(value) for value in row] for row in answer.rows])
    elif as_json:
        import json

        rows = [dict(zip(answer.columns, map(plain, row), strict=True)) for row in answer.rows]
        print(json.dumps(rows, indent=2, default=str))
    else:
        print_answer(answer)


def print_answer(answer: Answer) -> None:
    from joulelab.cli.console import fits, print_grid, print_records
    from joulelab.report.tables.grid import Column, Grid

    numeric = [
        any(isinstance(row[number], int | float) for row in answer.rows) for number in range(len(answer.columns))
    ]
    columns = tuple(
        Column(name, "right" if right else "left", whole=True)
        for name, right in zip(answer.columns, numeric, strict=True)
    )
    count = f"{len(answer.rows)} row" + ("" if len(answer.rows) == 1 else "s")
    grid = Grid(count, columns, tuple(tuple(map(cell, row)) for row in answer.rows))
    if fits(grid):
        print_grid(grid)
    else:
        print_records(grid)


def cell(value: Any) -> str:
    """As a person reads it: six digits are enough here, --csv and --json have them all."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(plain(value))


def plain(value: Any) -> Any:
    """Times as ISO 8601; everything else as it is."""
    return value.isoformat() if hasattr(value, "isoformat") else value


def print_schema(as_json: bool) -> None:
    from joulelab.runs.index import schema

    tables = schema()
    if as_json:
        import json

        listed = {
            table: [dict(zip(("column", "kind", "about"), row, strict=True)) for row in rows]
            for table, rows in tables.items()
        }
        print(json.dumps(listed, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables.grid import make_grid, to_rich

    for table, rows in tables.items():
        print_result(to_rich(make_grid(table, "Column!|Kind!|What it is", rows)))
