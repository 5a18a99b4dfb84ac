"""`joulelab unpack`: an archive of `joulelab pack`, opened, checked, and recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson
from joulelab.errors import InvalidMeasurement

if TYPE_CHECKING:
    from joulelab.runs.verification import FigureCheck


def unpack(
    archive: Annotated[Path, typer.Argument(help="What `joulelab pack` has written.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="A new folder (default: the archive's name).", show_default=False
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute every joule again from the traces; exit code 4 if one differs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Unpack an archive and check every file by its SHA-256 sum; a damaged one leaves nothing behind (exit code 1).

    The folder `runs` in it is a store: joulelab runs --runs-dir FOLDER/runs

    Example: joulelab unpack --verify demo.tar.gz
    """
    from joulelab.runs.packing import STORE
    from joulelab.runs.store import run_folders
    from joulelab.runs.unpacking import unpack as open_archive

    folder = open_archive(archive, out or Path(archive.name.removesuffix(".gz")).with_suffix(""))
    runs = run_folders(folder / STORE)
    checks: list[FigureCheck] | None = None
    if verify:
        from joulelab.runs.verification import verify_runs

        checks = verify_runs(runs)
    if as_json:
        print_json(folder, runs, checks)
    else:
        print(f"{folder}: {len(runs)} run{'' if len(runs) == 1 else 's'}, every file is what its sum says")
        if checks is not None:
            print_checks(checks)
    if checks is not None and (wrong := [check for check in checks if not check.good]):
        names = ", ".join(f"{check.run_id}: {check.figure}" for check in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InvalidMeasurement(
            f"{len(wrong)} of {len(checks)} figures do not follow from the traces ({names}{more})",
            f"the archive was opened all the same: {folder}",
        )


def print_json(folder: Path, runs: list[Path], checks: list[FigureCheck] | None) -> None:
    import json
    from dataclasses import asdict

    said = {"folder": str(folder), "runs": [run.name for run in runs]}
    print(json.dumps({**said, "figures": None if checks is None else [asdict(check) for check in checks]}, indent=2))


def print_checks(checks: list[FigureCheck]) -> None:
    from joulelab.cli.console import print_grid
    from joulelab.report.grid import make_grid

    for run_id in dict.fromkeys(check.run_id for check in checks):
        mine = [check for check in checks if check.run_id == run_id]
        rows = [(check.figure, _joules(check.recorded), _joules(check.recomputed), _verdict(check)) for check in mine]
        print_grid(make_grid(run_id, "Figure|Recorded, J>|Recomputed, J>|Verdict", rows))
    good = sum(check.verdict == "matches" for check in checks)
    beyond = sum(check.verdict == "not in the archive" for check in checks)
    elsewhere = f"; {beyond} were inherited from runs that are not in the archive" if beyond else ""
    print(f"{good} of {len(checks) - beyond} figures were computed again from the traces and match{elsewhere}")


def _verdict(check: FigureCheck) -> str:
    return check.verdict + (f" ({check.reason})" if check.reason else "")


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
