"""Logs as the tools write them, with known power."""

import json
from datetime import datetime, timedelta

DMON_NAMES = "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk"
DMON_UNITS = "# Idx      W      C      C      %      %      %      %    MHz    MHz"


def dmon(path, watts_by_gpu, header_every=25):
    """`nvidia-smi dmon -s puc`: GPUs take turns, and the header comes again and again."""
    lines = []
    for tick, watts in enumerate(zip(*watts_by_gpu, strict=True)):
        if tick % header_every == 0:
            lines += [DMON_NAMES, DMON_UNITS]
        for gpu, power in enumerate(watts):
            lines.append(f"{gpu:5d}{power:>7}     35      -     {50:2d}      7      0      0   1215   1410")
    path.write_text("\n".join(lines) + "\n")
    return path


def old_monitor(path, rows):
    """JSONL of the first document's monitor: naive local stamps, no header. Rows: (stamp, gpu, watts)."""
    path.write_text("".join(json.dumps(old_record(*row)) + "\n" for row in rows))
    return path


def old_record(stamp, gpu, watts):
    return {
        "timestamp": stamp,
        "gpu_index": gpu,
        "power_watts": watts,
        "memory_used_MB": 1000.0,
        "gpu_utilization_percent": 50,
        "memory_utilization_percent": 5,
        "cpu_utilization_percent": 12.5,
    }


def every(seconds, count, start="2026-03-02T12:00:00"):
    first = datetime.fromisoformat(start)
    return [(first + timedelta(seconds=seconds * number)).isoformat() for number in range(count)]
