"""`make demo` takes torch from the index of CPU builds where there is no GPU and it answers, and prints the size."""

import re
import socket
import threading
import time
import tomllib
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import set_up

METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path):
    """A stand-in of the index with one small wheel; returns its address and the wheel."""
    folder = tmp_path / "whl" / "torch"
    folder.mkdir(parents=True)
    wheel = folder / "torch-2.13.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "#" * 1_500_000)
        archive.writestr("torch-2.13.0+cpu.dist-info/METADATA", METADATA)
        archive.writestr("torch-2.13.0+cpu.dist-info/WHEEL", WHEEL)
        archive.writestr("torch-2.13.0+cpu.dist-info/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/whl", wheel
    server.shutdown()


@pytest.fixture
def commands(monkeypatch):
    """What would be installed in an environment without torch, on a machine without GPU, uv or own indexes."""
    found = []
    monkeypatch.setattr(set_up, "run", found.append)
    monkeypatch.setattr(set_up, "find_spec", lambda name: None)
    monkeypatch.setattr(set_up, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(set_up, "pip_has_own_indexes", lambda: False)
    monkeypatch.setattr(set_up.shutil, "which", lambda name: None)
    monkeypatch.setattr(set_up, "download_text", lambda requirement, source: f"size of {requirement} {source}")
    return found


def test_without_a_gpu_torch_comes_first_and_from_the_cpu_index(index, commands, monkeypatch, capsys):
    address, _ = index
    monkeypatch.setenv("TORCH_INDEX", address)
    set_up.main(["train", "report"])
    first, second = commands
    assert first[-3:] == ["--index-url", address, "torch<2.14"]
    assert second[-1].endswith("[train,report]") and "--index-url" not in second
    assert capsys.readouterr().out == f"size of torch<2.14 ['--index-url', '{address}']\n"


def test_an_index_that_is_not_there_is_skipped_quickly(commands, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_INDEX", "http://127.0.0.1:9/whl")
    set_up.main(["train"])
    assert len(commands) == 1 and "--index-url" not in commands[0]
    printed = capsys.readouterr().out
    assert "does not answer" in printed and "size of torch<2.14 []" in printed


def test_an_index_that_never_answers_costs_seconds():
    with socket.create_server(("127.0.0.1", 0)) as server:
        begin = time.monotonic()
        assert not set_up.answers(f"http://127.0.0.1:{server.getsockname()[1]}/torch/", patience_s=0.5)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("change", ["gpu", "installed", "no torch needed"])
def test_the_index_is_not_asked_where_it_has_no_use(index, commands, monkeypatch, change, capsys):
    monkeypatch.setenv("TORCH_INDEX", index[0])
    if change == "gpu":
        monkeypatch.setattr(set_up, "has_nvidia_gpu", lambda: True)
    if change == "installed":
        monkeypatch.setattr(set_up, "find_spec", lambda name: object())
    set_up.main(["test"] if change == "no torch needed" else ["train"])
    assert len(commands) == 1 and "--index-url" not in commands[0]
    assert bool(capsys.readouterr().out) == (change == "gpu")


def test_every_extra_that_brings_torch_is_known():
    extras = tomllib.loads((set_up.REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with_torch = re.compile(r"torch\b|joulelab\[train\]|accelerate|peft|lightning")
    found = {name for name, packages in extras.items() if any(with_torch.match(package) for package in packages)}
    assert found == set_up.TORCH_EXTRAS


def test_uv_is_used_unless_pip_has_indexes_of_its_own(commands, monkeypatch):
    monkeypatch.setattr(set_up.shutil, "which", lambda name: f"/bin/{name}")
    set_up.main(["test"])
    monkeypatch.setattr(set_up, "pip_has_own_indexes", lambda: True)
    set_up.main(["test"])
    assert [command[0] for command in commands] == ["/bin/uv", set_up.sys.executable]


@pytest.mark.parametrize(("variable", "own"), [("PIP_FIND_LINKS", True), ("PIP_TIMEOUT", False)])
def test_own_indexes_are_those_that_pip_is_configured_with(monkeypatch, variable, own):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "60")
    assert set_up.pip_has_own_indexes() == own


def test_the_size_is_that_of_the_files_that_would_be_downloaded(index, monkeypatch):
    address, wheel = index
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    text = set_up.download_text("torch<2.14", ["--index-url", address])
    size = f"{wheel.stat().st_size / 1e6:,.0f} MB"
    assert text == f"torch 2.13.0+cpu and 0 packages that it needs: {size}" and size == "2 MB"


def test_an_unknown_size_is_reported_as_unknown(monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    text = set_up.download_text("torch<2.14", ["--index-url", "http://127.0.0.1:9", "--retries", "0"])
    assert text == "torch<2.14: the size of the download is unknown (CalledProcessError)"
