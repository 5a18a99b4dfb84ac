"""Install joulelab of this clone into the running environment: what `make demo`, `make test` and `make test-base` call.

    .venv/bin/python scripts/set_up.py train report

On a machine without an NVIDIA GPU, torch comes from PyTorch's index of CPU builds, because the build on PyPI brings 3
GB of CUDA libraries. If that index does not answer within seconds, pip chooses from the indexes that it is configured
with. The size is printed before torch is downloaded. uv is used if it is installed, unless pip has its own
indexes configured, which uv does not read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

REPOSITORY = Path(__file__).parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_EXTRAS = {"train", "vision", "graphs", "peft", "lm-eval", "math", "bitsandbytes", "torchao", "lightning", "dev"}
PATIENCE_S = 4.0
SIZE_PATIENCE_S = 90.0


def main(extras: list[str]) -> None:
    constraint = REPOSITORY / "constraints.txt"
    tool = installer()
    if needs_torch(extras) and find_spec("torch") is None:
        requirement = torch_requirement(constraint.read_text())
        index = cpu_index()
        source = ["--index-url", index] if index else []
        print(download_text(requirement, source), flush=True)
        if index:
            run([*tool, "--quiet", *source, requirement])
    target = f"{REPOSITORY}[{','.join(extras)}]" if extras else str(REPOSITORY)
    run([*tool, "--quiet", "--constraint", str(constraint), "--editable", target])


def needs_torch(extras: list[str]) -> bool:
    return bool(TORCH_EXTRAS & set(extras))


def torch_requirement(constraints: str) -> str:
    return next(line.strip() for line in constraints.splitlines() if line.startswith("torch"))


def installer() -> list[str]:
    uv = shutil.which("uv")
    if uv is not None and not pip_has_own_indexes():
        return [uv, "pip", "install", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--no-compile"]


def pip_has_own_indexes() -> bool:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    options = ("index-url", "extra-index-url", "find-links", "no-index")
    return any(line.partition("=")[0].endswith(options) for line in listed.stdout.splitlines())


def cpu_index() -> str | None:
    """PyTorch's index of CPU builds, if this machine has no NVIDIA GPU and the index answers."""
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    if not index or has_nvidia_gpu():
        return None
    if not answers(f"{index.rstrip('/')}/torch/"):
        print(f"{index} does not answer; torch comes from the configured package index", flush=True)
        return None
    return index


def has_nvidia_gpu() -> bool:
    # WSL has no /dev/nvidia0; its driver library is in another folder
    places = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(Path(place).exists() for place in places)


def answers(url: str, patience_s: float = PATIENCE_S) -> bool:
    """In a thread, because the lookup of a name has no time limit."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=patience_s) as answer:
                found.append(answer.status == 200)
        except (OSError, ValueError):
            found.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience_s)
    return found == [True]


def download_text(requirement: str, source: list[str]) -> str:
    """What installing torch downloads, by resolving it without installing."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        *source,
        requirement,
    ]
    try:
        resolved = subprocess.run(command, capture_output=True, text=True, timeout=SIZE_PATIENCE_S, check=True)
        packages: list[Any] = json.loads(resolved.stdout)["install"]
        sizes = [size_bytes(package["download_info"]["url"]) for package in packages]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return f"{requirement}: the size of the download is unknown ({type(error).__name__})"
    torch = next(package["metadata"]["version"] for package in packages if package["metadata"]["name"] == "torch")
    size = f"{sum(filter(None, sizes)) / 1e6:,.0f} MB"
    return f"torch {torch} and {len(packages) - 1} packages that it needs: {size}{' or more' if None in sizes else ''}"


def size_bytes(url: str) -> int | None:
    if url.startswith("file:"):
        return Path(unquote(urlparse(url).path)).stat().st_size
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
