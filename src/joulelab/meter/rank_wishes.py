"""What the ranks of one host want metered, so that the one recorder among them meters it all.

With a GPU bound to each rank (`--gpus-per-task`, a `CUDA_VISIBLE_DEVICES` of its own), the recorder that was elected
knows its own rank's card and no other. Each of the others leaves the UUIDs of its cards in a file beside the trace,
resolved in its own view, and the elected one takes them in within half a second. One that takes over from another finds
that one's cards in the trace.
"""

from __future__ import annotations

from pathlib import Path

from joulelab.meter.trace import LineFile, read_lines

_GPU = "gpu:"


class RankWishes:
    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._file = trace.with_suffix(".wishes")
        self._seen: set[str] = set()

    def leave(self, pid: int, uuids: list[str]) -> None:
        file = LineFile(self._file)
        file.append({"pid": pid, "uuids": uuids}, sync=True)
        file.close()

    def new(self) -> list[str]:
        """What was asked for since the last look."""
        asked = [uuid for line in read_lines(self._file) for uuid in line["uuids"]] if self._file.exists() else []
        found = asked if self._seen else [*self._recorded(), *asked]
        fresh = [uuid for uuid in dict.fromkeys(found) if uuid not in self._seen]
        self._seen.update(fresh)
        return fresh

    def _recorded(self) -> list[str]:
        """The cards of whoever recorded before."""
        devices = [device for line in read_lines(self._trace) for device in line.get("devices", ())]
        return [name.removeprefix(_GPU) for device in devices if (name := device["device"]).startswith(_GPU)]
