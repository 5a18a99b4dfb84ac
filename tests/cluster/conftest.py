import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what the tests of this folder share
for neighbor in ("", "distill", "cli"):  # for nvml_sim, rapl_tree, commands and tiny_reviews
    sys.path.insert(0, str(Path(__file__).parent.parent / neighbor))

from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: E402, F401
from slurm_cluster import running_cluster  # noqa: E402
from slurm_lab import Lab  # noqa: E402


@pytest.fixture(scope="session")
def lab(tmp_path_factory, nvml_library):  # noqa: F811
    """One cluster for all files, with two nodes of two make-believe GPUs each."""
    with running_cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield Lab(tmp_path_factory.mktemp("lab"), cluster, nvml_library)


SITE = """\
defaults:
  account: physics
  environment: {modules: [cuda/12.6], venv: /shared/venv}
  hf_home: /scratch/hf
presets:
  h100: {partition: hopper, cpu_partition: cpu}
"""


@pytest.fixture
def site(tmp_path):
    """A site file with defaults and one preset."""
    path = tmp_path / "slurm.yaml"
    path.write_text(SITE)
    return path
