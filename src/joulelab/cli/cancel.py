"""`joulelab cancel`: end what was submitted, with its record and joules kept."""

from __future__ import annotations

from typing import Annotated

import typer

from joulelab.cli.options import RunsDir


def cancel(
    name: Annotated[str, typer.Argument(help="Run or group by id, part of it, folder or `last`; or a job's number.")],
    runs_dir: RunsDir = None,
) -> None:
    """Cancel the Slurm jobs of a run or group.

    A run that is under way saves a checkpoint and writes its record with the joules spent; one that waits is closed.
    `joulelab submit --resume RUN` takes it up again.

    Examples:

      joulelab cancel last

      joulelab cancel 4711
    """
    from joulelab.cluster.cancelling import cancel_jobs
    from joulelab.cluster.watching import find_watched
    from joulelab.runs.store import store_root

    found = cancel_jobs(find_watched(store_root(runs_dir), name))
    print(f"cancelled jobs: {', '.join(found.job_ids) or 'none were left'}")
    if found.runs:
        print(f"not begun: {', '.join(found.runs)}")
