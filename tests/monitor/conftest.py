import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for monitor_process.py, shared by the tests of this folder
sys.path.insert(0, str(Path(__file__).parent.parent))  # for nvml_sim

from nvml_sim.fixtures import nvml_here, nvml_library, nvml_sim  # noqa: F401
