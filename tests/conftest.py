"""What needs the sample wheels or a GPU says so when it is skipped; what a fake RAPL tree is made of is made here."""

import os
import re
import signal

import pytest
from browser import browser  # noqa: F401 (a fixture)
from commands import joulelab_here
from hypothesis import HealthCheck, settings
from rapl_tree import domain

from joulelab.data.sources import SAMPLES, installed_version
from joulelab.lookup import EXTRAS, absent_packages

# Several workers with several threads each would spend the cores on waiting for each other. Also without workers: sums
# depend on the number of threads in their last digit, and torchrun's ranks have one. Children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["JOULELAB_CONFIG"] = os.devnull  # the user's own grid and price

# On a busy machine drawing an example can take a second, which says nothing about the code.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")

# A shell starts its background jobs with these ignored (nohup the last one), and children inherit that; tests of
# signals need them as usual.
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for signum, usual in _USUAL.items():
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, usual)


@pytest.fixture
def joulelab():
    """The command in this process: (exit code, stdout, stderr)."""

    def call(*words):
        done = joulelab_here(*words)
        return done.returncode, done.stdout, done.stderr

    return call


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
    if absent_packages("torch"):
        return False
    import torch

    return torch.cuda.is_available()


# Without torch (the other Python versions of CI, a login node) tests that turn out to need it are skipped, with the
# packages as the reason: at their import, in their own process, or in a command that they start.
ABSENT = absent_packages(*EXTRAS["train"])
_ABSENCE = re.compile(r"No module named '(%s)\b|needs .*\b(%s)\b.* not installed" % (("|".join(ABSENT),) * 2))


def _skip(report, where):
    report.outcome, report.longrepr = "skipped", (*where, f"Skipped: needs {', '.join(ABSENT)}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if ABSENT and report.failed and _ABSENCE.search(str(report.longrepr)):
        _skip(report, (str(collector.path), 0))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if ABSENT and report.failed and _ABSENCE.search(str(report.longrepr)):
        _skip(report, item.location[:2])
    return report
