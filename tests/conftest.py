"""What needs the sample wheels or a GPU says so when it is skipped."""

import pytest

from joulelab.data.samples import SAMPLES, installed_version


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
