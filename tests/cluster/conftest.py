import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for what the tests of this folder share
for neighbour in ("", "distill", "cli"):  # for nvml_sim, rapl_tree, tiny_reviews and commands
    sys.path.insert(0, str(Path(__file__).parent.parent / neighbour))

from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: E402, F401
