"""A run around work that no pipeline describes: opened before foreign code starts, closed after it ended.

`execute` tells a pipeline's story from begin to end; here the story belongs to somebody else (a program, a `with`
block, another framework's loop), so begin and end are two calls. Folder, record and summary are those of any run.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from joulelab.errors import EndedBySignal
from joulelab.meter.session import Meter
from joulelab.runs import environment
from joulelab.runs.context import Progress, RunContext, Silent, Stage
from joulelab.runs.execute import close_run, create_run
from joulelab.runs.json_file import write_json
from joulelab.runs.measure_spec import MeasureSpec
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.stopping import StopRequest
from joulelab.runs.summary import flat_summary


class MeasuredRun:
    """`begin()`, then stages through the context it gives, then `end()`: the joules are in the record either way."""

    def __init__(
        self, store: Path, spec: MeasureSpec, stop: StopRequest | None = None, progress: Progress | None = None
    ) -> None:
        self.spec = spec
        self.paths = create_run(store, spec)
        self._stop = stop or StopRequest()
        self._progress = progress or Silent()
        self._context: RunContext | None = None

    def begin(self, command: Sequence[str] | None = None) -> RunContext:
        """Snapshot the environment and start the meter. `command` replaces our own command line in the snapshot."""
        facts = environment.snapshot()
        if command is not None:
            facts["command"] = list(command)
        write_json(self.paths.environment, facts)
        attempt, host = self.paths.next_attempt(), facts["host"]
        meter = Meter(self.paths.trace(host, attempt), self.paths.events(host, 0, attempt), self.spec.energy)
        meter.start()
        meter.event("run", edge="begin")
        self._context = RunContext(self.paths, self.spec, meter, self._stop, attempt, self._progress)
        return self._context

    def end(self, status: Status, error: BaseException | None = None) -> RunRecord:
        """Stop the meter and write the record; works after a `begin()` that failed too."""
        context, self._context = self._context, None
        if context is not None:
            context.meter.event("run", edge="end", status=status)
            context.close()
            context.meter.stop()
        return close_run(self.paths, status, error)

    def amend(self, record: RunRecord) -> RunRecord:
        """Write the record again with what only the finished figures could tell (a mean over repeats, its spread)."""
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
