import pytest


@pytest.fixture(autouse=True)
def _few_packages(monkeypatch):
    """Listing this environment's packages takes a quarter of a second; tests of the snapshot are elsewhere."""
    monkeypatch.setattr("joulelab.runs.environment.packages", dict)
