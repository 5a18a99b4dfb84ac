"""`with joulelab.measure("name") as m:` and what it says afterwards."""

import asyncio
import json
import subprocess
import sys
import textwrap
import time

import pytest

import joulelab
from joulelab.errors import ConfigError, InvalidMeasurement, JoulelabError
from joulelab.meter.figures import figure_text
from joulelab.runs.store import load_record

FAST = {"sample_interval_s": 0.05, "gpus": "none"}


@pytest.fixture
def measure(tmp_path):
    def start(name="block", **options):
        return joulelab.measure(name, **{"runs_dir": tmp_path / "runs", "energy": FAST, **options})

    return start


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(500))


def test_a_block_is_a_run_with_joules(measure):
    with measure("training", estimate_cpu=True) as m:
        busy(0.4)
        assert m.so_far().method in ("estimated", "missing")
    assert m.energy_j == pytest.approx(m.figure.energy_j)
    assert m.figure.method == "estimated"
    record = load_record(m.folder)
    assert (record.status, record.name) == ("done", "training")
    assert record.stage("program.run").duration_s == pytest.approx(m.duration_s)
    answer, *more = str(m).splitlines()
    assert answer.startswith(f"training: {figure_text(m.figure)}; ") and answer.endswith("grade C")
    assert "kWh; mean " in answer
    assert [line for line in more if "ESTIMATED, not measured" in line] and more[-1] == f"  run directory: {m.folder}"
    assert record.best_energy == m.figure


def test_a_missing_sensor_is_a_figure_that_reports_it_and_never_an_exception(measure, tmp_path):
    with measure(energy={**FAST, "rapl_root": str(tmp_path), "estimate_cpu": False}) as m:
        pass
    assert m.energy_j is None
    assert str(m).startswith("block: energy missing: ")
    assert (m.figure.method, m.windows) == ("missing", {})
    assert "RAPL" in m.figure.reason


def test_rapl_joules_are_measured(measure, rapl_tree):
    counter = rapl_tree / "intel-rapl:0" / "energy_uj"
    with measure(energy={**FAST, "rapl_root": str(rapl_tree)}) as m:
        for joule in range(1, 11):
            counter.write_text(str(joule * 1_000_000))
            time.sleep(0.05)
    assert m.figure.method == "counter"
    assert m.energy_j == pytest.approx(10, abs=1.5)


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("mine"), "failed"), (KeyboardInterrupt(), "truncated"), (SystemExit(0), "done")]
)
def test_an_exception_inside_leaves_a_record_and_propagates(measure, error, status):
    with pytest.raises(type(error)) as caught, measure() as m:
        raise error
    assert caught.value is error
    record = load_record(m.folder)
    assert (record.status, record.stage("program.run").status) == (status, status)
    if status == "failed":
        assert record.error.message == "mine"


def test_asking_too_early_is_answered_with_the_way_out(measure):
    m = measure()
    with pytest.raises(JoulelabError, match="needs an open measurement"):
        m.window("step")
    with m, pytest.raises(JoulelabError, match="is not finished"):
        m.energy_j  # noqa: B018
    with pytest.raises(JoulelabError, match="started twice"):
        m.start()


def test_a_wrong_setting_is_answered_before_anything_starts(measure, tmp_path):
    with pytest.raises(ConfigError, match="did you mean"):
        measure(energy={"sample_intervall_s": 1})
    assert not (tmp_path / "runs").exists()


def test_start_and_stop_serve_notebooks(measure):
    m = measure().start()
    m.stop()
    assert m.stop() is m.record
    assert m.record.status == "done"


def test_a_decorated_function_is_a_run_of_its_own_or_a_window_of_the_open_one(measure, tmp_path):
    @joulelab.measured("work", runs_dir=tmp_path / "runs", energy=FAST)
    def work(n):
        return n + 1

    assert (work(1), work.last.record.name) == (2, "work")
    with measure() as m:
        assert [work(n) for n in range(3)] == [1, 2, 3]
    assert m.windows["work"].count == 3


def test_a_generator_function_is_refused_because_its_code_runs_after_the_call():
    with pytest.raises(JoulelabError, match="batches is a generator function"):

        @joulelab.measured()
        def batches():
            yield 1

    with pytest.raises(JoulelabError, match="rows is a generator function"):

        @joulelab.measured("rows")
        async def of_rows():
            yield 1


def test_a_coroutine_function_can_be_decorated(measure):
    @joulelab.measured("waiting")
    async def wait():
        await asyncio.sleep(0.01)
        return 5

    async def both():
        return await asyncio.gather(wait(), wait())

    with measure() as m:
        assert asyncio.run(both()) == [5, 5]
    assert m.windows["waiting"].count == 2
    assert m.windows["waiting"].total_s >= 0.018


def test_a_measurement_that_no_one_closes_is_closed_when_the_program_ends(tmp_path):
    code = textwrap.dedent(
        """
        import sys, joulelab
        m = joulelab.measure("open", runs_dir=sys.argv[1], energy={"gpus": "none"}).start()
        raise ValueError("nobody caught this")
        """
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    (path,) = tmp_path.glob("open-*/run.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["error"]["message"]) == ("failed", "nobody caught this")


def test_importing_the_package_is_light():
    code = "import sys, joulelab; joulelab.measure; print('x')"
    light = "import sys, joulelab; print({'numpy', 'pydantic', 'psutil'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", light], capture_output=True, text=True).stdout.strip() == "set()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "x"
    with pytest.raises(AttributeError, match="has no attribute 'mesure'"):
        joulelab.mesure  # noqa: B018


def test_an_idle_baseline_requested_is_recorded_around_the_block(measure):
    with measure(energy={"idle_before_s": 0.5, "idle_after_s": 0.5, "gpus": "none"}) as m:
        pass
    assert m.record.stage("idle.before").outside_totals
    assert m.record.stage("idle.after").duration_s == pytest.approx(0.5, abs=0.3)


def test_a_block_below_the_required_grade_raises_after_it_is_recorded(measure, tmp_path):
    settings = {"require_grade": "A", "gpus": "none", "rapl_root": str(tmp_path)}
    with pytest.raises(InvalidMeasurement, match="A is required"), measure("m", energy=settings):
        pass
    assert len(list((tmp_path / "runs").glob("m-*/run.json"))) == 1


def test_a_measured_block_does_not_import_the_report_package(tmp_path):
    """It makes no artifacts, so there are no model cards to write."""
    code = (
        "import sys, joulelab\n"
        f"with joulelab.measure('block', runs_dir={str(tmp_path)!r}, energy={FAST!r}): pass\n"
        "print([name for name in sys.modules if name.startswith('joulelab.report')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


FORKS = """
import os, sys, time, joulelab
with joulelab.measure("forked", runs_dir={store!r}) as m:
    pid = os.fork()
    if pid == 0:
        with m.window("child"):
            pass
        {ending}
    os.waitpid(pid, 0)
    time.sleep(0.5)
    with m.window("parent"):
        time.sleep(0.1)
print(m.record.status, m.record.stage("program.run").duration_s > 0.55, sorted(m.windows))
"""


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(3)", "raise RuntimeError('child')", "os._exit(0)", "os.kill(os.getpid(), 9)", "m.stop(); os._exit(0)"],
)
def test_a_forked_child_that_ends_neither_ends_nor_changes_the_measurement(tmp_path, ending):
    program = FORKS.format(store=str(tmp_path / "runs"), ending=ending)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1] == "done True ['parent']", done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").glob("forked-*")
    assert not list(folder.glob("events/*.ring"))
