"""`joulelab runs`: what lies in the store."""

from __future__ import annotations

import sys

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import UsageError


def runs(runs_dir: RunsDir = None, as_json: AsJson = False) -> None:
    """List the runs and groups of the store, oldest first, with status, quality and joules."""
    from joulelab.runs.store import group_folders, load_records, store_root

    store = store_root(runs_dir)
    if store.exists() and not store.is_dir():
        raise UsageError(f"{store} is a file, not a store of runs", "--runs-dir or JOULELAB_RUNS names the folder")
    records = list(load_records(store, lambda text: print(f"unreadable: {text}", file=sys.stderr)))
    if as_json:
        import json

        from joulelab.runs.summary import flat_summary

        print(json.dumps([flat_summary(record) for record in records], indent=2))
        return
    if not records:
        print(f"no runs under {store.absolute()}; `joulelab demo` makes some", file=sys.stderr)
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables import groups_table, runs_table
    from joulelab.runs.groups import load_group

    print_result(runs_table(records))
    if groups := [load_group(folder) for folder in group_folders(store)]:
        print_result(groups_table(groups))
