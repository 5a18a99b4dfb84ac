"""`joulelab pack`: runs as one archive for somebody who has nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir, SeveralRuns
from joulelab.errors import JoulelabError, UsageError


def pack(
    names: SeveralRuns,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="x.tar.gz or x.zip.")],
    ancestors: Annotated[
        bool, typer.Option("--ancestors", help="Also the runs that made what these runs reused, teachers say.")
    ] = False,
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Also all that the runs made; weights are large.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the archive if it is there.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Pack runs into an archive: records, traces, marks, settings, environment, report, and SHA256SUMS.

    The same runs give the same bytes. What looks like a secret is replaced, and told. `joulelab unpack --verify` opens
    it and recomputes every figure from traces and marks.

    Example: joulelab pack demo-20260101T120000Z-ab12 -o demo.tar.gz
    """
    from joulelab.runs.packing import pack as write_archive
    from joulelab.runs.selection import group_folders_of, run_folders_of, with_ancestors
    from joulelab.runs.store import store_root
    from joulelab.units import size_text

    if out.exists() and not force:
        raise UsageError(f"{out} is there already", "--force replaces it")
    store = store_root(runs_dir)
    runs, groups = run_folders_of(store, names), group_folders_of(store, names)
    if ancestors:
        runs = with_ancestors(runs)
    write_missing_reports([*groups, *(() if groups else runs)])
    done = write_archive(runs, groups, out, artifacts)
    for name, count in done.redacted.items():
        print(f"redacted in {name}: {count}", file=sys.stderr)
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps({**asdict(done), "archive": str(done.archive)}, indent=2))
        return
    packed = f"{len(done.runs)} run" + ("" if len(done.runs) == 1 else "s")
    print(f"{done.archive}: {packed}, {done.files} files, {size_text(done.size_bytes)}")
    print(f"to check it: joulelab unpack --verify {done.archive}")


def write_missing_reports(folders: list[Path]) -> None:
    """The page that a run or group writes at its end; one that has none gets it now."""
    from joulelab.report.page import write_report

    for folder in folders:
        if not (folder / "report.html").exists():
            try:
                write_report(folder)
            except JoulelabError as error:
                print(f"{folder.name} goes without a report: {error.message}", file=sys.stderr)
