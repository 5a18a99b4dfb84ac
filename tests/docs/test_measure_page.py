"""The quick examples of docs/measure.md run as they stand, each in a folder of its own.

Those with a training framework take ten seconds to import it; they are only compiled here, and the same calls are run
in `tests/integrations`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import document

BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", document("docs/measure.md"), re.MULTILINE | re.DOTALL)
SLOW = [text for _, text in BLOCKS if "import torch" in text]
QUICK = [(language, text) for language, text in BLOCKS if text not in SLOW]
WAYS = ("joulelab measure", "joulelab.measure(", "joulelab.measured(", "joulelab.telemetry(")


@pytest.mark.parametrize(("language", "text"), QUICK, ids=[f"{n}-{block[0]}" for n, block in enumerate(QUICK)])
def test_every_quick_example_runs(language: str, text: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "JOULELAB_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout or (tmp_path / "distill_power.csv").exists()


@pytest.mark.parametrize("text", SLOW, ids=["hugging-face", "lightning"])
def test_every_slow_example_is_python(text: str) -> None:
    compile(text, "docs/measure.md", "exec")


def test_the_page_shows_every_way() -> None:
    quick, slow = "".join(text for _, text in QUICK), "".join(SLOW)
    assert not [way for way in WAYS if way not in quick]
    assert not [name for name in ("JoulelabCallback(", "JoulelabLightningCallback(") if name not in slow]
