"""`joulelab pack`, `unpack` and `export`: runs as a self-contained archive, its verification, and other trackers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir, SeveralRuns, detail, note
from joulelab.errors import InvalidMeasurement, JoulelabError, UsageError
from joulelab.units import plural, size_text

if TYPE_CHECKING:
    from joulelab.runs.verification import FigureCheck


def pack(
    names: SeveralRuns,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Output file, .tar.gz or .zip.")],
    ancestors: Annotated[
        bool, typer.Option("--ancestors", help="Include the runs these depend on (e.g. teachers).")
    ] = False,
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Include the artifacts of the runs (weights are large).")
    ] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Redact text that looks like a secret instead of refusing to pack it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing archive.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Pack runs into an archive: records, traces, marks, settings, environment, report, and SHA256SUMS.

    The archive is reproducible byte for byte. If a file contains text that looks like a secret, nothing is packed and
    its location is printed; with --redact the text is replaced in the archive, and the redactions are listed.
    `joulelab unpack --verify` opens the archive and recomputes every figure from traces and marks.

    Example: joulelab pack demo-20260101T120000Z-ab12 -o demo.tar.gz
    """
    from joulelab.runs.groups import group_folders_of, run_folders_of, with_ancestors
    from joulelab.runs.pack import pack as write_archive
    from joulelab.runs.pack import require_archive_name
    from joulelab.runs.store import store_root

    require_archive_name(out)
    if out.exists() and not force:
        raise UsageError(f"{out} already exists", "use --force to overwrite it")
    store = store_root(runs_dir)
    runs, groups = run_folders_of(store, names), group_folders_of(store, names)
    if ancestors:
        runs = with_ancestors(runs)
    write_missing_reports([*groups, *(() if groups else runs)])
    archive = write_archive(runs, groups, out, artifacts, redact)
    for name, count in archive.redacted.items():
        note(f"redacted in {name}: {count}")
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps({**asdict(archive), "archive": str(archive.archive)}, indent=2))
        return
    packed = plural(len(archive.runs), "run")
    print(f"{archive.archive}: {packed}, {archive.files} files, {size_text(archive.size_bytes)}")
    note(f"verify it: joulelab unpack --verify {archive.archive}")


def write_missing_reports(folders: list[Path]) -> None:
    """Write report.html where a run or group has none, for example because it was interrupted."""
    from joulelab import lookup

    lacking = [folder for folder in folders if not (folder / "report.html").exists()]
    if lacking and lookup.absent_packages(*lookup.EXTRAS["report"]):
        note(
            f"packed without report.html for {plural(len(lacking), 'run')}; to add it: {lookup.install_hint('report')}"
        )
        return
    for folder in lacking:
        from joulelab.report.page import write_report

        try:
            write_report(folder)
        except JoulelabError as error:
            print(f"no report for {folder.name}: {error.message}", file=sys.stderr)


def unpack(
    archive: Annotated[Path, typer.Argument(help="Archive written by `joulelab pack`.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="New directory (default: the archive's name).", show_default=False
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Recompute every figure from traces and marks; exit code 4 if one differs."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Unpack an archive and check the SHA-256 of every file; a corrupted archive leaves nothing behind (exit code 2).

    Its directory `runs` is a store: joulelab runs --runs-dir FOLDER/runs

    Example: joulelab unpack --verify demo.tar.gz
    """
    from joulelab.runs.pack import STORE
    from joulelab.runs.pack import unpack as open_archive
    from joulelab.runs.store import run_folders

    folder = open_archive(archive, out or Path(archive.name.removesuffix(".gz")).with_suffix(""))
    runs = run_folders(folder / STORE)
    checks: list[FigureCheck] | None = None
    if verify:
        from joulelab.runs.verification import verify_runs

        if not runs:
            raise UsageError(f"{archive} contains no run to verify", f"its contents: {folder}")
        checks = verify_runs(runs)
    if as_json:
        print_json(folder, runs, checks)
    else:
        unpacked = f"{folder}: {plural(len(runs), 'run')}, all checksums match"
        if checks is None:
            print(unpacked)
        else:
            print_checks(checks, unpacked)
    if checks is not None and (wrong := _main_figures_first([check for check in checks if not check.good])):
        names = ", ".join(f"{check.run_id}: {check.figure}" for check in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InvalidMeasurement(
            f"{len(wrong)} of {len(checks)} figures do not match the traces and marks ({names}{more})",
            f"the archive was unpacked to {folder}",
        )


def print_json(folder: Path, runs: list[Path], checks: list[FigureCheck] | None) -> None:
    import json
    from dataclasses import asdict

    data: dict[str, object] = {"folder": str(folder), "runs": [run.name for run in runs]}
    print(json.dumps({**data, "figures": None if checks is None else [asdict(check) for check in checks]}, indent=2))


def print_checks(checks: list[FigureCheck], unpacked: str) -> None:
    """Counts by run and the figures that do not match; with -v by kind of figure, and what else was found."""
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import make_grid

    unchecked = sum(check.verdict in UNCHECKED for check in checks)
    good = sum(check.verdict == "matches" for check in checks)
    newer = sum(check.verdict == "newer method" for check in checks)
    verdict = f"{good} of {len(checks) - unchecked} recomputed figures match"
    verdict += f"; {newer} differ because this version uses a newer method" if newer else ""
    if detail() == "verbose":
        print(f"{unpacked}; {verdict}")
        print_all_checks(checks)
        return
    rows = [
        (run_id, *_counts([check for check in checks if check.run_id == run_id]))
        for run_id in dict.fromkeys(check.run_id for check in checks)
    ]
    wrong = _main_figures_first([check for check in checks if not check.good])
    grids = [make_grid("", "Run!|Match>|Newer method>|Wrong>|Not checked>", rows)]
    if wrong:
        grids.append(make_grid("Figures that do not match the traces and marks", CHECK_TITLES, _check_rows(wrong)))
    changed = [check for check in checks if check.verdict == "newer method" and check.figure in MAIN_FIGURES]
    if changed:
        grids.append(make_grid("Changed by a newer method", CHECK_TITLES, _check_rows(changed)))
    print_answer(f"{unpacked}; {verdict}", grids, more="counts by kind of figure, what was not checked")


def _counts(checks: list[FigureCheck]) -> tuple[str, ...]:
    found = [check.verdict for check in checks]
    counts = [found.count("matches"), found.count("newer method"), sum(verdict in WRONG for verdict in found)]
    return tuple(str(count or "-") for count in (*counts, len(found) - sum(counts)))


def print_all_checks(checks: list[FigureCheck]) -> None:
    """Per run, counts by kind of figure, then every figure that does not match."""
    from joulelab.cli.console import print_grid
    from joulelab.report.tables.grid import make_grid

    for run_id in dict.fromkeys(check.run_id for check in checks):
        mine = [check for check in checks if check.run_id == run_id]
        rows = [
            (subject, *_counts([check for check in mine if check.subject == subject]))
            for subject in dict.fromkeys(check.subject for check in mine)
        ]
        print_grid(make_grid(run_id, "Figures|Match>|Newer method>|Wrong>|Not checked>", rows))
        print_rows(
            "Figures that do not match the traces and marks",
            _main_figures_first([check for check in mine if not check.good]),
        )
        energy = [check for check in mine if check.verdict == "newer method" and check.figure in MAIN_FIGURES]
        print_rows("Changed by a newer method", energy)
        print_rows("Not checked", [check for check in mine if check.verdict in UNCHECKED])


UNCHECKED = ("redacted", "no evidence", "not in the archive")
CHECK_TITLES = "Figure|Recorded>|Recomputed>|Verdict"
WRONG = ("differs", "cannot be recomputed")
MAIN_FIGURES = ("totals.best.energy_j", "totals.best.half_width_j", "totals.duration_s", "validity.grade")
MOST_ROWS = 12


def _main_figures_first(checks: list[FigureCheck]) -> list[FigureCheck]:
    return sorted(checks, key=lambda check: check.figure not in MAIN_FIGURES)


def print_rows(caption: str, checks: list[FigureCheck]) -> None:
    from joulelab.cli.console import print_grid
    from joulelab.report.tables.grid import make_grid

    if not checks:
        return
    rows = _check_rows(checks)
    print_grid(make_grid(caption, CHECK_TITLES, rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        print(f"and {len(rows) - MOST_ROWS} more (--json has all)")


def _check_rows(checks: list[FigureCheck]) -> list[tuple[str, ...]]:
    return [(check.figure, _value(check.recorded), _value(check.recomputed), _verdict(check)) for check in checks]


def _verdict(check: FigureCheck) -> str:
    text: str = check.verdict
    if check.verdict == "newer method":
        text = f"newer method: {_value(check.recorded)} to {_value(check.recomputed)}"
    return text + (f" ({check.reason})" if check.reason else "")


def _value(value: float | str | bool | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]


def export(
    names: SeveralRuns,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="tensorboard, wandb, mlflow or trackio.")],
    runs_dir: RunsDir = None,
) -> None:
    """Export finished runs to another tracker: metrics by step, settings, and the energy summary.

    tensorboard and wandb (offline) write to the run directory, mlflow and trackio to a database in the store. To log
    during a run: joulelab run NAME trackers=[tensorboard]

    Examples:

      joulelab export last --to tensorboard && tensorboard --logdir runs

      joulelab export 'demo-kd-*' --to wandb

      joulelab export last --to mlflow && mlflow ui --backend-store-uri sqlite:///runs/mlflow.db
    """
    from contextlib import redirect_stdout

    from joulelab.runs.groups import run_folders_of
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.store import load_record, store_root
    from joulelab.trackers.tracker import export_run, require_installed

    require_installed([to])
    found = [(folder, load_record(folder)) for folder in run_folders_of(store_root(runs_dir), names)]
    for folder, record in found:
        if record.status in ("queued", "running"):
            raise UsageError(
                f"{folder.name} is not finished (status {record.status})",
                f"wait until it is finished; to log to {to} during a run: joulelab run ... trackers=[{to}]",
            )
    for folder, record in found:
        with redirect_stdout(sys.stderr):  # trackers print to stdout
            steps = export_run(RunPaths(folder), record, to)
        print(f"{folder.name}: {steps} {'step' if steps == 1 else 'steps'} and the summary exported to {to}")
