"""Measure what an installation costs: download, disk and time of the base and of each extra, in fresh environments.

    python scripts/install_sizes.py --extra "" --extra report --tool pip --tool uv

Every row is a new virtual environment and an empty cache, so that all packages are downloaded. The download is the size
of the wheels, the size on disk that of what was added to the environment. `pip check` follows each installation.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MB = 1e6


@dataclass(frozen=True)
class Installation:
    extra: str
    tool: str
    download_mb: float
    disk_mb: float
    seconds: float
    packages: int
    consistent: bool

    def row(self) -> str:
        name, check = self.extra or "base", "clean" if self.consistent else "CONFLICTS"
        sizes = f"{self.download_mb:.0f} | {self.disk_mb:.0f} | {self.seconds:.0f} | {self.packages}"
        return f"| {name} | {self.tool} | {sizes} | {check} |"


def main() -> None:
    arguments = parse()
    print("| extra | tool | download, MB | on disk, MB | seconds | packages | pip check |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for extra in arguments.extra or ["", *sorted(extras(arguments.source))]:
        for tool in arguments.tool or ["pip"]:
            print(install(arguments.source, extra, tool, arguments.constraint).row(), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", help="an extra, or '' for the base (default: all)")
    parser.add_argument("--tool", action="append", choices=["pip", "uv"], help="(default: pip)")
    parser.add_argument("--source", type=Path, default=REPOSITORY, help="the clone to install")
    parser.add_argument("--constraint", default="torch<2.14", help="a requirement that limits versions")
    arguments = parser.parse_args()
    if "uv" in (arguments.tool or []) and shutil.which("uv") is None:
        parser.error("uv is not on the PATH; install it, or leave --tool uv out")
    return arguments


def extras(source: Path) -> list[str]:
    settings = tomllib.loads((source / "pyproject.toml").read_text())
    return list(settings["project"]["optional-dependencies"])


def install(source: Path, extra: str, tool: str, constraint: str) -> Installation:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "constraints.txt").write_text(constraint + "\n")
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv" / "bin" / "python"
        target = f"{source}[{extra}]" if extra else str(source)
        requirements: list[str | Path] = ["--constraint", folder / "constraints.txt", target]
        # The sizes are those of pip's wheels; uv downloads the same files.
        download: list[str | Path] = [
            python,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--dest",
            folder / "wheels",
            *requirements,
        ]
        subprocess.run(download, check=True)
        wheels = [path for path in (folder / "wheels").iterdir() if not path.name.startswith("joulelab-")]
        before = disk_bytes(folder / "venv")
        begin = time.monotonic()
        subprocess.run(install_command(tool, python, folder, requirements), check=True)
        seconds = time.monotonic() - begin
        check = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True)
        if check.returncode:
            print(re.sub(r"^", "  ", check.stdout, flags=re.M), file=sys.stderr)
        return Installation(
            extra=extra,
            tool=tool,
            download_mb=sum(path.stat().st_size for path in wheels) / MB,
            disk_mb=(disk_bytes(folder / "venv") - before) / MB,
            seconds=seconds,
            packages=len(wheels),
            consistent=check.returncode == 0,
        )


def install_command(tool: str, python: Path, folder: Path, requirements: list[str | Path]) -> list[str]:
    cache = folder / "cache"
    if tool == "pip":
        command = [python, "-m", "pip", "install", "--quiet", "--cache-dir", cache, *requirements]
    else:
        command = ["uv", "pip", "install", "--quiet", "--python", python, "--cache-dir", cache, *requirements]
    return [str(word) for word in command]


def disk_bytes(folder: Path) -> int:
    """Allocated bytes, as `du` counts them."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_dir())


if __name__ == "__main__":
    main()
