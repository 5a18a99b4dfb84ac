"""What other meters keep of a measurement when the measured program is killed, for the table of `make attack`.

CodeCarbon is tried where it can be imported, by this interpreter or by the one in `JOULELAB_CODECARBON_PYTHON`. Zeus
needs a GPU or RAPL, so it is not tried here.
"""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TRIES = 3
SECONDS = 6.0
PROGRAM = """
import sys, time
from codecarbon import OfflineEmissionsTracker
options = {"country_iso_code": "CAN", "measure_power_secs": 1, "output_dir": sys.argv[1], "log_level": "error"}
tracker = OfflineEmissionsTracker(**options)
tracker.start()
print("started", flush=True)
end = time.time() + float(sys.argv[2])
while time.time() < end: sum(range(100_000)); time.sleep(0.003)
tracker.stop()
"""


def codecarbon_rows():
    """Rows of the attack's table."""
    python = os.environ.get("JOULELAB_CODECARBON_PYTHON", sys.executable)
    asked = subprocess.run(
        [python, "-c", "import codecarbon; print(codecarbon.__version__)"], capture_output=True, text=True, check=False
    )
    name = "CodeCarbon: measured program killed"
    if asked.returncode != 0:
        return [f"| {name} | 0 | not run: codecarbon cannot be imported | |"]
    version = asked.stdout.strip().splitlines()[-1]
    kept = sum(_energy_after(python, signum) for signum in SIGNALS for _ in range(TRIES))
    tries = len(SIGNALS) * TRIES
    lost = "nothing" if kept == tries else f"the energy of {tries - kept} measurements"
    whole = "with" if _energy_after(python, None) else "also without"
    names = ", ".join(signum.name for signum in SIGNALS)
    how = f"after {SECONDS:g} s ({names}; version {version}, {whole} a result if not killed)"
    return [f"| {name} {how} | {tries} | {kept} | {lost} |"]


def _energy_after(python, signum):
    """Whether a file with an energy above 0 is left."""
    with tempfile.TemporaryDirectory(prefix="joulelab-codecarbon-") as folder:
        seconds = SECONDS if signum is None else 60.0
        process = subprocess.Popen(
            [python, "-c", PROGRAM, folder, str(seconds)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        process.stdout.readline()
        if signum is not None:
            time.sleep(SECONDS)
            process.send_signal(signum)
        process.communicate(timeout=120)
        for file in Path(folder).rglob("*.csv"):
            with file.open(newline="") as lines:
                if any(float(row.get("energy_consumed") or 0) > 0 for row in csv.DictReader(lines)):
                    return True
        return False


if __name__ == "__main__":
    print("\n".join(codecarbon_rows()))
