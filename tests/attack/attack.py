"""The whole attack: `make attack` prints how many tries of each fault were survived, and what was lost.

It can be stopped and continued: finished tries are in the file of `--state`, and a second call does the others.
`--tries settings=3000` sets the number of tries of one kind.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))
import environments
import mutated_inputs
import other_meters
from finished_run import make_finished_run
from kills import kill_try

ENVIRONMENTS = (*environments.QUICK, *environments.THOROUGH)
TRIES = {
    "environments": len(ENVIRONMENTS),
    "settings": 3500,
    "logs": 3500,
    "records": 2000,
    "arguments": 1000,
    "kills": 500,
}
TITLES = {
    "environments": "environments that lack something (memory, descriptors, streams, folders, ...)",
    "settings": "mutated settings files and overrides",
    "logs": "mutated logs of other tools",
    "records": "mutated files of a finished run",
    "arguments": "random arguments",
    "kills": "measure killed at a random moment",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--state", type=Path, default=Path(".attack.json"), help="File with finished tries.")
    parser.add_argument("--tries", action="append", default=[], metavar="KIND=N", help="Tries of one kind.")
    options = parser.parse_args()
    tries = TRIES | {kind: int(number) for kind, number in (text.split("=") for text in options.tries)}
    os.environ["JOULELAB_CONFIG"] = os.devnull
    state = json.loads(options.state.read_text()) if options.state.exists() else {}
    with tempfile.TemporaryDirectory(prefix="joulelab-attack-") as work:
        finished = make_finished_run(Path(work) / "finished")
        for kind, number in tries.items():
            found = state.setdefault(kind, {"done": 0, "faults": {}})
            saved = time.monotonic()
            for seed in range(found["done"], number):
                folder = Path(work) / f"{kind}-{seed}"
                if kind == "environments":
                    words, fault = [ENVIRONMENTS[seed].__name__], environment_fault(ENVIRONMENTS[seed], folder)
                elif kind == "kills":
                    words, fault = ["measure"], kill_try(seed, folder)
                else:
                    words, fault = mutated_inputs.attack(kind, seed, folder, finished)
                if fault:
                    found["faults"][str(seed)] = {
                        "command": [str(word)[:200] for word in words],
                        "fault": fault[-3000:],
                    }
                    print(f"{kind} {seed}: {fault.strip().splitlines()[-1][:200]}", file=sys.stderr)
                found["done"] = seed + 1
                if time.monotonic() - saved > 5 or seed + 1 == number:
                    options.state.write_text(json.dumps(state, indent=1))
                    saved = time.monotonic()
    print("\n".join([table(state), *other_meters.codecarbon_rows()]))
    return 1 if any(found["faults"] for found in state.values()) else 0


def environment_fault(environment, folder):
    folder.mkdir()
    try:
        return environment(folder)
    except environments.NotHere as reason:
        print(f"{environment.__name__}: not tried: {reason}", file=sys.stderr)
        return None


def table(state):
    rows = ["| fault | tries | survived | lost |", "| --- | --- | --- | --- |"]
    for kind, found in state.items():
        lost = len(found["faults"])
        what = "nothing" if not lost else f"{lost}: seeds {', '.join(list(found['faults'])[:5])}"
        rows.append(f"| {TITLES[kind]} | {found['done']:,} | {found['done'] - lost:,} | {what} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
