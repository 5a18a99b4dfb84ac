"""A run as a following rank sees it: it works along, and keeps nothing that the first rank keeps."""

from __future__ import annotations

from pathlib import Path

from joulelab.meter.session import Meter
from joulelab.meter.trace import LineFile
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.runs.listeners import Silent
from joulelab.runs.paths import RunPaths
from joulelab.runs.spec import RunSpec
from joulelab.runs.stopping import StopRequest


class FollowingContext(RunContext):
    def __init__(
        self, paths: RunPaths, spec: RunSpec, meter: Meter, stop: StopRequest, attempt: int, scratch: Path
    ) -> None:
        self._scratch = scratch
        super().__init__(paths, spec, meter, stop, attempt, Silent())

    def _open_metrics(self, path: Path) -> LineFile:
        return LineFile(self._scratch / path.name)

    def _artifact_place(self, name: str) -> Path:
        return self._scratch / name

    def _pass_over(self, artifact: Artifact, found: str) -> None:
        """The first rank sees the same harm, says so and sets it aside; by now it may lie there made anew."""
