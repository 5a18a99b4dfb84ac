"""A run around work that no pipeline describes: opened before foreign code starts, closed after it ended.

`execute` tells a pipeline's story from begin to end; here the story belongs to somebody else (a program, a `with`
block, another framework's loop), so begin and end are two calls. Folder, record and summary are those of any run.
"""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path

from joulelab.errors import EndedBySignal
from joulelab.runs.attempt import RunAttempt, create_run
from joulelab.runs.context import Stage
from joulelab.runs.json_file import write_json
from joulelab.runs.listeners import Progress, Silent
from joulelab.runs.lock import holding
from joulelab.runs.measure_spec import MeasureSpec
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.stopping import StopRequest
from joulelab.runs.summary import flat_summary


class MeasuredRun:
    """An attempt at a new run whose work is foreign code: begin, stages, end, and what the figures add afterwards."""

    def __init__(
        self, store: Path, spec: MeasureSpec, stop: StopRequest | None = None, progress: Progress | None = None
    ) -> None:
        self.spec = spec
        self.paths = create_run(store, spec)
        self._attempt = RunAttempt(self.paths, spec, stop or StopRequest(), progress or Silent())
        self.begin = self._attempt.begin
        self.end = self._attempt.end

    def amend(self, record: RunRecord) -> RunRecord:
        """Write the record again with what only the finished figures could tell (a mean over repeats, its spread)."""
        with holding(self.paths.folder):
            write_json(self.paths.record, record)
            write_json(self.paths.summary, flat_summary(record))
        return record


def how_it_ended(error: BaseException | None) -> tuple[Status, BaseException | None]:
    """Status and recorded reason for what foreign code raised: Ctrl-C cuts a run off, `sys.exit(0)` is a good end."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "done", None
    if isinstance(error, KeyboardInterrupt):
        return "truncated", EndedBySignal(signal.SIGINT)
    return ("truncated" if isinstance(error, EndedBySignal) else "failed"), error


def leave(stage: AbstractContextManager[Stage], error: BaseException | None) -> None:
    """Close a stage by hand; it raises the error again, which whoever let it through does already."""
    if error is None:
        stage.__exit__(None, None, None)
        return
    try:
        stage.__exit__(type(error), error, error.__traceback__)
    except BaseException as raised:
        if raised is not error:
            raise
