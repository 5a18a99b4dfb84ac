"""Made records and golden texts for the report's tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
REGENERATE = "JOULELAB_GOLDEN"


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The builders of made_records.py; loaded by path, since the test folders are no packages."""
    spec = importlib.util.spec_from_file_location("made_records", HERE / "made_records.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["made_records"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare with the recorded text. After looking at the difference: JOULELAB_GOLDEN=1 pytest tests/report"""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get(REGENERATE):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} changed; {REGENERATE}=1 records it anew"

    return check
