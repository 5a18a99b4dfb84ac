"""A real browser for tests of pages, one per module; skipped where none is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]
PATIENCE_MS = 180_000  # a busy machine renders slowly


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to look at the page with: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()
