"""What needs the sample wheels or a GPU says so when it is skipped; what a fake RAPL tree is made of is made here."""

import os
import signal

import pytest
from rapl_tree import domain

from joulelab.data.sources import SAMPLES, installed_version

# Several workers with several threads each would spend the cores on waiting for each other. Also without workers: sums
# depend on the number of threads in their last digit, and torchrun's ranks have one. Children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["JOULELAB_CONFIG"] = os.devnull  # the user's own grid and price

# A shell starts its background jobs with these ignored (nohup the last one), and children inherit that; tests of
# signals need them as usual.
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for signum, usual in _USUAL.items():
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, usual)


@pytest.fixture
def rapl_tree(tmp_path):
    """The root of a tree with one package, which stands at 0 J until a test moves it."""
    domain(tmp_path / "powercap")
    return tmp_path / "powercap"


def pytest_collection_modifyitems(items):
    absent = [name for name, sample in SAMPLES.items() if installed_version(name) != sample.version]
    for item in items:
        if absent and item.get_closest_marker("samples"):
            item.add_marker(pytest.mark.skip(reason=f"samples {', '.join(absent)} missing: joulelab samples fetch"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def _has_gpu():
    import torch

    return torch.cuda.is_available()
