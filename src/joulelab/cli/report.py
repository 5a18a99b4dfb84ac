"""`joulelab report`: the offline HTML page of a run or group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from joulelab.cli.options import RunsDir


def report(
    name: Annotated[
        str, typer.Argument(help="Run or group: its id, the beginning or end of it, its folder, or `last`.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Where to write it (default: into the folder).")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write one HTML file that opens offline: verdict, tables, figures, how it was measured."""
    from joulelab.report.page import write_report
    from joulelab.runs.store import find_folder, store_root

    page = write_report(find_folder(store_root(runs_dir), name), out)
    print(page)
    if open_page:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())
