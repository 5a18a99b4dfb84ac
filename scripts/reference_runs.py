"""Record what five commands compute, and compare two recordings: a refactoring must not change a single bit.

    python scripts/reference_runs.py before.json                     # record
    python scripts/reference_runs.py after.json --against before.json   # record and compare

The commands run on one thread with fixed seeds. Recorded are the stages (name, role, activity, items), logged losses,
every result and a hash of every file of predictions: all that must not depend on the machine's speed. Joules and times
are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMANDS = {
    "demo": ["demo"],
    "kd-tiny": ["run", "kd-tiny"],
    "distilbert-tiny-quick-kd": ["run", "distilbert-tiny-quick-kd"],
    "infer deit-t": ["infer", "deit-t", "--device", "cpu", "--min-run-time", "1"],
    "train gpt2 --size tiny": ["train", "gpt2", "--size", "tiny", "--device", "cpu", "--max_steps", "20"],
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"), "1")
# Names of values that depend on the machine's speed, memory or sensors. A logit cache begins a new file, which has a
# footer of 28 bytes, after some seconds, so its bytes per token do, too.
MEASURED = re.compile(
    r"(_s|_ms|_us|_ns|_j|_w|_bytes|_rel)\b|per_s|memory|energy|joule|power|latency|timestamp|mfu|bytes_per_token|share_of_peak|flops_per_s"
)

STAGE_FIELDS = ("name", "role", "activity", "repeat", "part_of", "status")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where to write the recording")
    parser.add_argument("--against", type=Path, help="an earlier recording to compare with")
    parser.add_argument("--only", action="append", choices=COMMANDS, help="only this command (may be repeated)")
    options = parser.parse_args()
    recorded = {name: record(COMMANDS[name]) for name in options.only or COMMANDS}
    options.out.write_text(json.dumps(recorded, indent=1, sort_keys=True))
    if options.against is None:
        return 0
    earlier = json.loads(options.against.read_text())
    different = [line for name, found in recorded.items() for line in differences(name, earlier.get(name), found)]
    print("\n".join(different) or "no difference")
    return bool(different)


def record(command: list[str]) -> list[dict[str, Any]]:
    """What the runs of a command computed, in the order they were made."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **ONE_THREAD, "JOULELAB_RUNS": folder}
        subprocess.run([sys.executable, "-m", "joulelab", *command], env=environment, check=True, stdout=sys.stderr)
        runs = sorted(Path(folder).glob("*/run.json"), key=lambda path: json.loads(path.read_text())["created_at"])
        return [recorded_run(path.parent) for path in runs]


def recorded_run(folder: Path) -> dict[str, Any]:
    run = json.loads((folder / "run.json").read_text())
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    files = sorted(path for path in folder.glob("artifacts/**/*predictions*") if path.is_file())
    return {
        "name": run["name"],
        "label": run["label"],
        "seed": run["spec"].get("seed"),
        "stages": [recorded_stage(stage) for stage in run["stages"]],
        "metrics": [without_measurements(line) for line in lines],
        "results": without_measurements({name: result["value"] for name, result in run["results"].items()}),
        "predictions": {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }


def recorded_stage(stage: dict[str, Any]) -> dict[str, Any]:
    """How many items an inference stage processes depends on the machine's speed; other counts do not."""
    counts = () if stage.get("role") == "inference" else ("tokens", "samples")
    return {key: stage.get(key) for key in (*STAGE_FIELDS, *counts)}


def without_measurements(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not MEASURED.search(name)}


def differences(where: str, earlier: Any, later: Any) -> list[str]:
    if isinstance(earlier, dict) and isinstance(later, dict):
        keys = sorted(earlier.keys() | later.keys())
        return [line for key in keys for line in differences(f"{where}.{key}", earlier.get(key), later.get(key))]
    if isinstance(earlier, list) and isinstance(later, list) and len(earlier) == len(later):
        pairs = enumerate(zip(earlier, later, strict=True))
        return [line for number, (a, b) in pairs for line in differences(f"{where}[{number}]", a, b)]
    return [] if earlier == later else [f"{where}: {json.dumps(earlier)[:120]} became {json.dumps(later)[:120]}"]


if __name__ == "__main__":
    sys.exit(main())
