"""`joulelab runs`, `show` and `query`: list, display and query the runs of a store."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from joulelab.cli.options import AsJson, RunsDir, complete_runs, detail, existing_store
from joulelab.errors import JoulelabError, UsageError
from joulelab.units import plural

if TYPE_CHECKING:
    from joulelab.report.compare.comparison import Comparison
    from joulelab.report.tables.grid import Grid
    from joulelab.report.tables.sweep_table import Sweep
    from joulelab.runs.index import IndexReporter, QueryResult
    from joulelab.runs.record import RunRecord


# Reading more new runs than this takes seconds, so it is announced.
_ANNOUNCED_FROM = 300


def runs(
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", min=1, metavar="N", help="List only the newest N runs and their groups.", show_default=False
        ),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Convert traces of finished runs to Parquet instead of listing.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="List files that crashes left in the store, and remove them after confirmation."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove without confirmation.")] = False,
) -> None:
    """List the runs of the store, oldest first, with quality, energy and time; the newest that fit on a screen.

    -v lists all runs and the groups, -q only the ids.

    The list is read from index.sqlite in the store, which is updated first and can be deleted at any time.
    For anything beyond a list use `joulelab query`.
    """
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    if store.exists() and not store.is_dir():
        raise UsageError(f"{store} is a file, not a store of runs", "set --runs-dir or JOULELAB_RUNS to a directory")
    if runs_dir is not None and not store.exists():
        raise UsageError(f"there is no folder {store}", "check --runs-dir")
    if compact and prune:
        raise UsageError("--compact and --prune were both given", "choose one of them")
    if last is not None and (compact or prune):
        option = "--compact" if compact else "--prune"
        raise UsageError(f"--last has no effect with {option}, which applies to the whole store", "leave it out")
    if yes and not prune:
        raise UsageError("--yes has no effect without --prune", "joulelab runs --prune --yes")
    if compact:
        compact_store(store, as_json)
    elif prune:
        prune_store(store, yes, as_json)
    elif as_json:
        summaries = [text for (text,) in _listed(store, ["summary"])]
        indented = [summary.replace("\n", "\n  ") for summary in (summaries[-last:] if last else summaries)]
        print("[\n  " + ",\n  ".join(indented) + "\n]" if indented else "[]")
    else:
        list_runs(store, last)


def list_runs(store: Path, last: int | None) -> None:
    from joulelab.cli.console import SCREEN_LINES, print_answer
    from joulelab.report.tables.comparison_tables import groups_grid, runs_grid
    from joulelab.report.tables.grid import without_empty_columns
    from joulelab.runs.groups import load_group
    from joulelab.runs.index import LISTING, listed_run
    from joulelab.runs.store import group_folders

    texts = [text for (text,) in _listed(store, [LISTING])]
    if not texts:
        hint = "`joulelab measure -- COMMAND` or `joulelab demo` creates some"
        print(f"no runs under {store.absolute()}; {hint}", file=sys.stderr)
        return
    chosen = texts[-last:] if last else texts
    # more runs than a screen has lines are not parsed for it
    shown = [listed_run(text) for text in (chosen[-SCREEN_LINES:] if detail() == "normal" else chosen)]
    groups = []
    for folder in group_folders(store):
        try:
            groups.append(load_group(folder))
        except JoulelabError as error:  # still list the others
            print(f"unreadable: {error.message}", file=sys.stderr)
    if last:
        ids = {run.run_id for run in shown}
        groups = [group for group in groups if any(member.run_id in ids for member in group.members)]
    records = cast("list[RunRecord]", shown)  # they have every field that the table shows
    counts = [plural(len(chosen), "run")] + ([plural(len(groups), "group")] if groups else [])
    newest = f"; newest group: {groups[-1].group_id}" if groups else ""
    result = f"{' and '.join(counts)} in {store}{newest}"
    if detail() == "verbose":
        print_answer(result, [runs_grid(records), *([groups_grid(groups)] if groups else [])])
        return
    hidden = len(chosen) - len(shown)
    print_answer(
        result,
        [without_empty_columns(runs_grid(records, brief=True))],
        brief=[run.run_id for run in shown],
        more=", ".join(filter(None, [plural(hidden, "older run") if hidden else "", "groups" if groups else ""])),
        newest_last=True,
    )


def _listed(store: Path, columns: list[str]) -> list[tuple[str, ...]]:
    from joulelab.runs.index import listed

    return listed(store, progress_messages(), columns)


def progress_messages() -> IndexReporter:
    """Messages on stderr: unreadable runs, and why the first listing takes a while."""
    from joulelab.runs.index import IndexReporter

    def reading(count: int) -> None:
        if count > _ANNOUNCED_FROM:
            print(f"reading {count} new or changed runs (indexed for next time)", file=sys.stderr)

    return IndexReporter(lambda text: print(f"unreadable: {text}", file=sys.stderr), reading)


def compact_store(store: Path, as_json: bool) -> None:
    """Convert traces of finished runs to Parquet; print which traces were skipped and why."""
    import json
    from dataclasses import asdict

    from joulelab.lookup import require_packages
    from joulelab.runs.store import compact_ended
    from joulelab.units import size_text

    require_packages("joulelab runs --compact", "pyarrow")
    result = compact_ended(store)
    for text in result.kept:
        print(f"not converted: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        sizes = f", {size_text(result.bytes_before)} to {size_text(result.bytes_after)}" if result.traces else ""
        print(f"converted {result.traces} trace{'' if result.traces == 1 else 's'} to Parquet{sizes}")


def prune_store(store: Path, yes: bool, as_json: bool) -> None:
    """Without --yes, a person at a terminal is asked; without a terminal nothing is removed."""
    from joulelab.runs.store import find_leftovers, remove_leftover
    from joulelab.units import size_text

    found = find_leftovers(store)
    total = plural(len(found), "leftover") + (f", {size_text(sum(one.size_bytes for one in found))}" if found else "")
    if not as_json:
        for one in found:
            print(
                f"{one.path.relative_to(store)}: {one.reason}"
                + (f", {size_text(one.size_bytes)}" if one.size_bytes else "")
            )
        print(f"{total} in {store}")
    asked = bool(found) and not yes and not as_json and sys.stdin.isatty()
    remove = bool(found) and (yes or (asked and typer.confirm("Remove them?", default=False, err=True)))
    for one in found if remove else ():
        remove_leftover(one)
    if as_json:
        import json

        rows = [{"path": str(one.path), "reason": one.reason, "size_bytes": one.size_bytes} for one in found]
        print(json.dumps({"leftovers": rows, "removed": remove}, indent=2))
    elif found:
        print("removed" if remove else "nothing was removed" + ("" if asked else "; --yes removes them"))


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="Run or group: id (or its start or end), directory, quoted pattern, or `last`.",
            autocompletion=complete_runs,
        ),
    ],
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the stages and energy of a run, or the comparison of a group. Also works for running and killed runs.

    A pattern such as 'demo-kd-*' prints a line for every matching run, oldest first; with --json a list.
    """
    from joulelab.runs.groups import folders_named, is_pattern
    from joulelab.runs.store import load_readable, store_root

    folders = folders_named(store_root(runs_dir), name)
    if (folders[0] / "group.json").exists():
        show_group(folders[0], as_json)
        return
    records = [record for _, record in load_readable(folders)]
    if as_json:
        texts = [record.model_dump_json(indent=2) for record in records]
        print("[" + ",\n".join(texts) + "]" if is_pattern(name) else texts[0])
        return
    if len(records) > 1 and detail() != "verbose":
        from joulelab.cli.console import print_lines
        from joulelab.report.tables.run_tables import run_result

        print_lines([f"{record.run_id}  {run_result(record)}" for record in records])
        return
    for record in records:
        print_run(record, with_id=True)


def print_run(record: RunRecord, with_id: bool = False, written: Container[str] = ()) -> None:
    """`written`: remarks that were printed while the run was executed; they are not printed again."""
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.comparison_tables import run_view
    from joulelab.report.tables.run_tables import run_remarks, run_result, summary_grids

    print_answer(
        run_result(record),
        summary_grids(record),
        [
            *(text for text in run_remarks(record) if text not in written),
            *([f"run {record.run_id}{_resume_text(record)}"] if with_id else []),
        ],
        full=lambda: [run_view(record)],
        more="all tables, checks and notes",
    )


def _resume_text(record: RunRecord) -> str:
    """How to resume the run; after `kill -9` no other message states this. A member is resumed with its group; measured
    programs and imported logs cannot be resumed."""
    resumable = record.status == "truncated" and record.spec.get("pipeline") not in ("measure", "import")
    return f"; resume it: joulelab run --resume {record.group or record.run_id}" if resumable else ""


def print_comparison(
    comparison: Comparison, warning: str = "", differing: Sequence[Grid] = (), group: Path | None = None
) -> None:
    """`warning` and `differing`: what differs between the runs besides the method."""
    from joulelab.cli.console import print_answer
    from joulelab.report.compare.verdict import chance_sentences, short_verdict, verdict
    from joulelab.report.tables.comparison_tables import comparison_view, incomplete_grid
    from joulelab.report.tables.grid import to_rich
    from joulelab.report.tables.overview_table import brief_grid

    headline, *sentences = short_verdict(comparison, warning)
    grids = [brief_grid(comparison)] if comparison.rows else []
    if comparison.incomplete:
        grids.append(incomplete_grid(comparison))
    print_answer(
        headline,
        grids,
        [
            *sentences,
            *chance_sentences(comparison),
            *(f"! {text}" for text in verdict(comparison).provenance),
            *group_lines(group),
        ],
        full=lambda: [
            *([f"! {warning}"] if warning else []),
            comparison_view(comparison),
            *map(to_rich, differing),
            *group_lines(group),
        ],
        more="differences with intervals, stages, break-even",
    )


def group_lines(group: Path | None) -> list[str]:
    """The id of a group and its page, if one is written."""
    from joulelab.runs.paths import REPORT

    if group is None:
        return []
    page = group / REPORT
    return [f"group {group.name}", *([f"report {page}"] if page.exists() else [])]


def show_group(folder: Path, as_json: bool) -> None:
    from joulelab.report.compare.method_rows import compare, is_about_inference
    from joulelab.report.tables.sweep_table import read_sweep
    from joulelab.runs.groups import group_records
    from joulelab.runs.paths import GroupPaths

    store = GroupPaths(folder).store
    group, records = group_records(folder)
    if is_about_inference(group):
        show_inference_group(folder, as_json)
        return
    if group.sweep:
        show_sweep(read_sweep(group, records, store), folder, as_json)
        return
    comparison = compare(group, records, store)
    if as_json:
        import json

        from joulelab.report.export import comparison_data

        print(json.dumps(comparison_data(comparison), indent=2))
        return
    print_comparison(comparison, group=folder)


def show_inference_group(folder: Path, as_json: bool, sort: str = "") -> None:
    from joulelab.report.tables.inference_pair import models_data, models_grids, models_headline
    from joulelab.runs.groups import group_records

    group, records = group_records(folder)
    if as_json:
        import json

        print(json.dumps({"group": group.group_id, "models": models_data(records, sort)}, indent=2))
        return
    from joulelab.cli.console import print_answer

    print_answer(models_headline(records), models_grids(records, sort), group_lines(folder))


def show_sweep(sweep: Sweep, folder: Path, as_json: bool) -> None:
    from joulelab.report.tables.sweep_table import (
        configuration_grid,
        failed_grid,
        sweep_data,
        sweep_headline,
        sweep_view,
    )

    if as_json:
        import json

        print(json.dumps(sweep_data(sweep), indent=2))
        return
    from joulelab.cli.console import print_answer

    grids = [configuration_grid(sweep), *([failed_grid(sweep)] if sweep.failed else [])]
    identity = group_lines(folder)
    print_answer(
        sweep_headline(sweep), grids, identity, full=lambda: [sweep_view(sweep), *identity], more="further results"
    )


def query(
    sql: Annotated[
        str | None, typer.Argument(metavar="SQL", help="One SELECT statement in DuckDB's SQL dialect.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the tables and their columns.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the result as CSV on stdout.")] = False,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.01, metavar="S", help="Stop the query after S seconds.")
    ] = 300.0,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
) -> None:
    """Query the store in SQL (read-only; tables runs, stages and samples).

    Examples:

      joulelab query "select label, avg(shown_energy_j) from runs where status = 'done' group by label"

      joulelab query "select stage, sum(shown_energy_j) / 3.6e6 as kwh from stages group by stage order by kwh desc"

      joulelab query "select settings->>'$.training.learning_rate' as lr, results['student.accuracy'] from runs"

      joulelab query "select date_trunc('minute', time) as minute, max(power_watts) from samples group by minute" --csv
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json were both given", "choose one of them")
    if schema:
        print_schema(as_json)
        return
    if sql is None or not sql.strip():
        raise UsageError("no SQL was given", 'joulelab query "select * from runs", or --schema for the columns')
    from joulelab.lookup import require_extra
    from joulelab.runs.index import run_query

    require_extra("joulelab query", "query")
    store = existing_store(runs_dir)
    answer = run_query(store, sql, progress_messages(), time_limit)
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
        print_query_result(answer)


def print_query_result(answer: QueryResult) -> None:
    from joulelab.cli.console import fits, print_answer, print_records
    from joulelab.report.tables.grid import Column, Grid

    numeric = [
        any(isinstance(row[number], int | float) for row in answer.rows) for number in range(len(answer.columns))
    ]
    columns = tuple(
        Column(name, "right" if right else "left", whole=True)
        for name, right in zip(answer.columns, numeric, strict=True)
    )
    count = plural(len(answer.rows), "row")
    grid = Grid("", columns, tuple(tuple(map(cell, row)) for row in answer.rows))
    if detail() == "quiet" or fits(grid):
        print_answer(count, [grid], brief=["\t".join(row) for row in grid.rows])
    else:
        print_records(replace(grid, caption=count))


def cell(value: Any) -> str:
    """A value with six digits; --csv and --json print all of them."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(plain(value))


def plain(value: Any) -> Any:
    """Times as ISO 8601, other values unchanged."""
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
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import make_grid

    grids = [make_grid(table, "Column!|Type!|Description", rows) for table, rows in tables.items()]
    names = [(table, ", ".join(row[0] for row in rows)) for table, rows in tables.items()]
    if detail() == "verbose":
        print_answer("", grids)
        return
    print_answer(
        f"Tables: {', '.join(tables)}",
        [make_grid("", "Table!|Columns", names)],
        more="type and description of every column",
    )
