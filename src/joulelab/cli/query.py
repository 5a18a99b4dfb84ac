"""`joulelab query`: SQL over the runs, stages and samples of a store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.runs.query import Answer


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
    from joulelab.cli.runs import telling
    from joulelab.runs.query import ask
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
    from joulelab.report.grid import Column, Grid

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
    from joulelab.runs.query import schema

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
    from joulelab.report.grid import make_grid, to_rich

    for table, rows in tables.items():
        print_result(to_rich(make_grid(table, "Column!|Kind!|What it is", rows)))
