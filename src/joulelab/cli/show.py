"""`joulelab show`: one run, or the comparison of a group, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir

if TYPE_CHECKING:
    from joulelab.report.sweep import Sweep


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
    from joulelab.runs.selection import folders_named, is_pattern
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
    from joulelab.report.tables import run_view

    print_result(*(run_view(record) for record in records))


def show_group(folder: Path, as_json: bool) -> None:
    from joulelab.report.compare import compare
    from joulelab.report.sweep import read_sweep
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

        from joulelab.report.plain import comparison_data

        print(json.dumps(comparison_data(comparison), indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables import comparison_view

    print_result(comparison_view(comparison))


def show_sweep(sweep: Sweep, as_json: bool) -> None:
    from joulelab.report.sweep_table import sweep_data, sweep_view

    if as_json:
        import json

        print(json.dumps(sweep_data(sweep), indent=2))
        return
    from joulelab.cli.console import print_result

    print_result(sweep_view(sweep))
