"""Make the pictures of the web view in docs/images, from trainings next to simulated sensors.

    python scripts/ui_pictures.py [--keep FOLDER] [PICTURE ...]

Small models are trained on the CPU; four simulated H200 (tests/nvml_sim) and two simulated packages with memory report
power, temperature and throttling. The live pages are taken while the charts are less than a minute old. Needs Chromium,
playwright, a C compiler and the sample models. `--keep` uses the runs of a previous call.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import BROWSERS, FLAGS  # type: ignore[import-not-found]  # noqa: E402
from nvml_sim.driver import NvmlSim, Points, SimGpu, build  # type: ignore[import-not-found]  # noqa: E402
from rapl_tree import domain  # type: ignore[import-not-found]  # noqa: E402
from ui_server import Server  # type: ignore[import-not-found]  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PICTURES = ("ui-light", "ui-dark", "ui-phone", "ui-store")
HOT = 0x40
"""NVML's bit of a thermal slowdown by the hardware."""
SMALL = (
    "data.train_size=240",
    "data.test_size=400",
    "data.validation_size=60",
    "teacher.training.max_steps=12",
    "training.max_steps=30",
)
LIVE = ("--size", "tiny", "--max_steps", "20000", "name=student", "label=student, lr 5e-5", "tags=[paper]")


def simulated_gpus(folder: Path, mean_w: float = 590.0) -> NvmlSim:
    """Four cards around this power; the third one is hot."""
    drawn = random.Random(0)
    cards = []
    for number in range(4):
        points = [
            (float(second), mean_w + 40 * math.sin(second / 9 + number / 5) + drawn.uniform(-20, 20))
            for second in range(1200)
        ]
        settings = {"utilization": f"{94 + number} 40", "temperature_c": 61 + 3 * number, "clocks": "1965 3201"}
        if number == 2:
            settings |= {"temperature_c": 84, "clocks": "1605 3201", "throttle": HOT}
        cards.append(SimGpu(uuid=f"GPU-{number:08x}-0000", wave=Points(tuple(points)), settings=settings))
    library = folder / "libnvidia-ml.so.1"
    sim = NvmlSim(library if library.exists() else build(folder), folder / "control")
    sim.gpus = cards
    sim.write()
    return sim


@contextmanager
def simulated_packages(folder: Path) -> Iterator[Path]:
    """Two packages and the memory of one, counting until the block ends."""
    root = folder / "rapl"
    shutil.rmtree(root, ignore_errors=True)
    watts = {domain(root, f"intel-rapl:{n}", f"package-{n}"): 125.0 for n in (0, 1)}
    watts[domain(root, "intel-rapl:0:0", "dram")] = 22.0
    ended = threading.Event()

    def count() -> None:
        begin_s = time.monotonic()
        while not ended.wait(0.02):
            for file, power_w in watts.items():
                descriptor = os.open(file, os.O_WRONLY)
                os.pwrite(descriptor, f"{int(1e6 * power_w * (time.monotonic() - begin_s)):015d}\n".encode(), 0)
                os.close(descriptor)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    yield root
    ended.set()
    thread.join()


class Lab:
    def __init__(self, folder: Path, rapl: Path) -> None:
        self.folder, self.store = folder, folder / "runs"
        self._rapl = rapl

    def command(self, verb: str, *words: str, mean_w: float = 590.0) -> tuple[list[str], dict[str, str]]:
        energy = (f"energy.rapl_root={self._rapl}", "energy.grid=FR", "energy.counter_interval_s=0.2", "device=cpu")
        command = [sys.executable, "-m", "joulelab", verb, *words, *energy, "--runs-dir", str(self.store)]
        sim = simulated_gpus(self.folder, mean_w)
        return command, {**os.environ, **sim.env(), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str, mean_w: float = 590.0) -> None:
        command, env = self.command(*words, mean_w=mean_w)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        print(" ".join(words), done.returncode, (done.stderr if done.returncode else done.stdout)[-300:])


def finished_runs(lab: Lab) -> None:
    gpt2 = ("train", "gpt2", "--size", "tiny", "--max_steps", "8", "tags=[nightly]")
    for mean_w in (560.0, 580.0, 570.0, 690.0):
        lab.run(*gpt2, mean_w=mean_w)
    lab.run("train", "bert", "--size", "tiny", "--max_steps", "8")
    lab.run("train", "resnet50", "--size", "tiny", "--max_steps", "8")
    for name in ("demo-labels", "demo-kd"):
        lab.run("run", name, *SMALL, "tags=[paper]")


@contextmanager
def live_run(lab: Lab) -> Iterator[str]:
    """The id of a training that has run for more than a minute."""
    budgets = ("training.max_energy_j=2e6",)
    command, env = lab.command("train", "gpt2", *LIVE, *budgets)
    known = {path.name for path in lab.store.iterdir()}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in itertools.repeat(None, 600):
        found = [path.name for path in lab.store.glob("student-*") if path.name not in known]
        if found and (lab.store / found[0] / "metrics.jsonl").exists():
            break
        time.sleep(0.2)
    time.sleep(75)
    try:
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def take(server: Server, run_id: str, browser: Any, wanted: list[str]) -> None:
    looks: dict[str, dict[str, Any]] = {
        "ui-light": {"viewport": {"width": 1280, "height": 1120}},
        "ui-dark": {"viewport": {"width": 1280, "height": 1120}, "color_scheme": "dark"},
        "ui-phone": {"viewport": {"width": 390, "height": 1000}, "color_scheme": "light"},
        "ui-store": {"viewport": {"width": 1280, "height": 1300}},
    }
    for name in wanted:
        context = browser.new_context(**looks[name])
        context.set_default_timeout(180_000)
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]")
        if name == "ui-store":
            page.click("#trend summary")
            page.wait_for_selector("#figure-trend svg")
            page.evaluate("document.querySelector('.identity span').textContent = '/home/me/project/runs'")
        else:
            page.goto(f"{server.address}/runs/{run_id}")
            page.wait_for_selector("#live-power svg .mark-line path", state="attached")
            page.wait_for_function("!/min|Computing/.test(document.querySelector('#part-age').textContent)")
        page.screenshot(path=IMAGES / f"{name}.png")
        context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=[*PICTURES, []], default=[])
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    folder = given.keep or Path(tempfile.mkdtemp(prefix="joulelab-pictures-"))
    folder.mkdir(parents=True, exist_ok=True)
    with simulated_packages(folder) as rapl:
        lab = Lab(folder, rapl)
        if not lab.store.exists():
            finished_runs(lab)
        with live_run(lab) as run_id, sync_playwright() as driver:
            server = Server(lab.store)
            path = next(path for name in BROWSERS if (path := shutil.which(name)))
            browser = driver.chromium.launch(executable_path=path, args=FLAGS)
            take(server, run_id, browser, given.pictures or list(PICTURES))
            browser.close()
            server.end()


if __name__ == "__main__":
    main()
