import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for traces.py, shared by the tests of this folder

from nvml_sim.fixtures import nvml_here, nvml_library, nvml_sim  # noqa: F401
