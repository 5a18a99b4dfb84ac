"""Two processor packages, one of which wraps in the middle: 1,030 J, where one wrap range for both had given 30 J."""

import json
import subprocess
import sys

import pytest
from rapl_tree import WRAP_UJ, domain

PROGRAM = """
import sys, time
from pathlib import Path
root = Path(sys.argv[1])
time.sleep(0.6)
(root / "intel-rapl:0" / "energy_uj").write_text("510000000")
(root / "intel-rapl:1" / "energy_uj").write_text("600000000")
time.sleep(0.6)
"""


@pytest.fixture
def two_packages(tmp_path):
    root = tmp_path / "powercap"
    domain(root, "intel-rapl:0", "package-0", WRAP_UJ - 20_000_000)
    domain(root, "intel-rapl:1", "package-1", 100_000_000, wrap_uj=65_712_999_613)
    return root


def test_the_joules_of_two_packages_come_out_right_from_the_command_line(tmp_path, two_packages):
    options = ["--rapl-root", two_packages, "--runs-dir", tmp_path / "runs", "--json-to", tmp_path / "cost.json"]
    words = ["measure", *options, "--gpus", "none", "--", sys.executable, "-c", PROGRAM, two_packages]
    done = subprocess.run(
        [sys.executable, "-m", "joulelab", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    cost = json.loads((tmp_path / "cost.json").read_text())
    assert cost["energy_j"] == pytest.approx(1030, abs=0.5)
    assert cost["energy"]["method"] == "counter"
