"""The monitor on a machine without a GPU: it records the CPU, says so, and ends as its operators expect."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from monitor_process import Running, count, monitor, monitor_here, read_log, records
from rapl_tree import domain

from joulelab.clock import wall_seconds


@pytest.fixture(autouse=True)
def no_driver(monkeypatch, tmp_path):
    """Also on a machine that has one: an empty file where the driver's library would be."""
    folder = tmp_path / "no-driver"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


def test_by_default_it_records_the_cpu_and_states_why_there_is_no_gpu(tmp_path):
    done = monitor("--duration", 0.5, "--interval", 0.2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "logging only the CPU" in done.stderr
    assert "stopped (the requested 0.5 s have passed)" in done.stderr
    assert done.stdout == ""
    log = read_log(tmp_path / "logs" / "power_log.jsonl")
    assert [line["kind"] for line in log] == ["header", *["host"] * 4, "end"]
    assert log[1]["cpu_utilization_percent"] >= 0
    assert log[0]["missing"][0]["component"] == "cpu"
    assert {"host", "boot_id", "units", "clocks", "interval_s", "joulelab"} <= log[0].keys()


@pytest.mark.parametrize("wanted", ["0", "auto"])
def test_a_gpu_that_was_requested_and_is_not_there_is_exit_code_3(tmp_path, wanted):
    done = monitor("--gpu", wanted, "--duration", 1, cwd=tmp_path)
    assert done.returncode == 3
    assert "no GPU can be read" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_missing_binding_is_exit_code_2_only_where_a_gpu_was_requested(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('not installed')\n")
    without = {"PYTHONPATH": str(tmp_path)}
    done = monitor("--gpu", 0, cwd=tmp_path, env=without)
    assert done.returncode == 2
    assert "nvidia-ml-py is missing" in done.stderr
    assert "pip install nvidia-ml-py" in done.stderr
    assert monitor("--duration", 0.2, "--interval", 0.1, cwd=tmp_path, env=without).returncode == 0


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_it_at_once_with_a_last_record_a_closing_line_and_0(tmp_path, signum, name):
    with Running("--interval", 60, cwd=tmp_path) as running:
        running.until(count("host", 1))
        printed_at = time.time()
        code, reported = running.end(signum)
    assert code == 0
    assert f"stopped ({name}) after 2 records" in reported
    *_, last, end = read_log(running.log)
    assert last["kind"] == "host"
    assert 0 <= wall_seconds(last["timestamp"]) - printed_at < 1
    assert (end["kind"], end["reason"], end["ticks"]) == ("end", name, 2)


def test_the_cadence_does_not_drift(tmp_path):
    """Deadlines are multiples of the interval after the first; on a busy machine some are recorded as missed."""
    monitor("--duration", 1.2, "--interval", 0.1, "--out", "log.jsonl", cwd=tmp_path)
    ticks = records(tmp_path / "log.jsonl", "host")
    missed = sum(gap["missed_ticks"] for gap in records(tmp_path / "log.jsonl", "gap"))
    assert 11 <= len(ticks) + missed <= 13
    deadlines = [line["mono_ns"] / 1e9 - line["late_s"] for line in ticks]
    passed = [(deadline - deadlines[0]) / 0.1 for deadline in deadlines]
    assert passed == pytest.approx([round(number) for number in passed], abs=0.02)
    assert round(passed[-1]) >= len(ticks) - 1
    assert all(line["late_s"] >= 0 for line in ticks)


def test_a_monitor_that_was_stopped_for_a_while_states_the_ticks_it_missed(tmp_path):
    with Running("--interval", 0.1, cwd=tmp_path) as running:
        running.until(count("host", 2))
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        running.process.send_signal(signal.SIGCONT)
        running.until(count("gap", 1))
        running.end()
    (gap,) = records(running.log, "gap")
    assert gap["missed_ticks"] >= 4


def test_an_existing_log_is_appended_to_after_its_truncated_line(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"old": 1}\n{"cut": ')
    monitor("--outfile", log, "--duration", 0.1, "--interval", 0.1, cwd=tmp_path)
    lines = log.read_text().splitlines()
    assert lines[:2] == ['{"old": 1}', '{"cut": ']
    assert lines[2].startswith('{"kind":"header"')


@pytest.mark.parametrize("option", ["--log_path", "--log-path", "--outfile", "--out"])
def test_all_names_of_the_log_option_are_one_option(tmp_path, monkeypatch, option):
    log = tmp_path / "deep" / "er" / "x.jsonl"
    assert monitor_here(monkeypatch, option, log, "--duration", 0.05, "--interval", 0.05) == 0
    assert log.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--interval", 0], "--interval 0 is not between"),
        (["--interval", "nan"], "--interval nan is not between"),
        (["--interval", "fast"], "--interval: expected a number, found the text 'fast'"),
        (["--duration", -1], "--duration -1: expected seconds above 0"),
        (["--out", "/proc/nowhere/log.jsonl"], "cannot write the log /proc/nowhere/log.jsonl"),
        (["--out", "."], "cannot write the log"),
        (["--prometheus", 99999999], "'99999999' is not an address for metrics"),
        (["--interva", 1], "did you mean --interval?"),
    ],
)
def test_what_cannot_be_done_is_reported_with_exit_code_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert monitor_here(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_a_port_in_use_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert monitor_here(monkeypatch, "--prometheus", taken.getsockname()[1]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_a_full_disk_is_reported_and_the_monitor_continues(tmp_path):
    """/dev/full takes no byte, as a full disk does."""
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    done = monitor("--out", "log.jsonl", "--duration", 0.3, "--interval", 0.1, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("No space left on device") == 1
    assert "trying again at each tick" in done.stderr


def test_rapl_joules_are_recorded_per_domain_and_a_failing_counter_is_a_gap_that_ends(tmp_path):
    counter = domain(tmp_path / "powercap", energy_uj=5_000_000)
    domain(tmp_path / "powercap", "intel-rapl:0:0", "core", energy_uj=3_000_000)
    with Running("--interval", 0.1, "--rapl-root", tmp_path / "powercap", cwd=tmp_path) as running:
        running.until(count("rapl", 2))
        counter.rename(counter.with_name("hidden"))
        running.until(count("gap", 3))
        counter.with_name("hidden").rename(counter)
        seen = sum(line["kind"] == "rapl" for line in read_log(running.log))
        running.until(count("rapl", seen + 2))
        code, reported = running.end()
    assert code == 0
    assert reported.count("rapl cannot be read") == 1
    assert "rapl answers again after" in reported
    line = records(running.log, "rapl")[-1]
    assert line["rapl"] == {"package-0": 5.0, "package-0/core": 3.0}
    assert line["cpu_utilization_percent"] is not None
    assert "FileNotFoundError" in records(running.log, "gap")[0]["reason"]
    assert len(records(running.log, "host")) >= 3  # the CPU's use goes on while its joules fail


def test_a_counter_that_wraps_twice_between_two_ticks_loses_nothing(tmp_path):
    """The log has a line for each wrap: 20 J at the start, wraps at 40 J, 10 J at the end after two of them."""
    counter = domain(tmp_path / "powercap", energy_uj=20_000_000, wrap_uj=40_000_000)
    with Running("--interval", 60, "--rapl-root", tmp_path / "powercap", cwd=tmp_path) as running:
        running.until(count("rapl", 1))
        counter.write_text("5000000\n")
        running.until(count("rapl", 2))
        counter.write_text("39000000\n")
        time.sleep(1.2)
        counter.write_text("10000000\n")
        running.until(count("rapl", 3))
        running.end()
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.log_energy import device_energy
    from joulelab.meter.importers.power_log import TimeRule

    log = read_power_log(running.log, TimeRule(), "this test")
    energies = {device.source.device: device_energy(device) for device in log.devices if device.source.wrap_j}
    assert energies["rapl:package-0"].counter_j == pytest.approx(2 * 40 - 20 + 10)


class TestTrackedProcess:
    def test_it_is_recorded_with_its_children(self, tmp_path):
        busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
        with subprocess.Popen([sys.executable, "-c", busy], start_new_session=True) as parent:
            done = monitor("--pid", parent.pid, "--interval", 0.4, "--duration", 1, "--out", "l.jsonl", cwd=tmp_path)
            os.killpg(parent.pid, signal.SIGKILL)
        assert done.returncode == 0
        block = records(tmp_path / "l.jsonl", "host")[-1]["process"]
        assert list(block)[:4] == ["pid", "cpu_utilization_percent", "memory_rss_MB", "gpu_memory_used_MB"]
        assert block["pid"] == parent.pid
        assert block["children"]["count"] == 1
        assert block["cpu_utilization_percent"] > 10
        assert block["cpu_utilization_percent"] < 150
        assert block["memory_rss_MB"] > block["children"]["memory_rss_MB"] > 1
        assert block["gpu_memory_used_MB"] is None

    def test_its_end_is_reported_and_devices_are_still_recorded(self, tmp_path):
        short = subprocess.Popen(["sleep", "60"])
        with short, Running("--interval", 0.1, "--pid", short.pid, cwd=tmp_path) as running:
            running.until(count("host", 2))
            short.kill()
            running.until(count("process", 1))
            seen = sum(line["kind"] == "host" for line in read_log(running.log))
            running.until(count("host", seen + 3))
            code, reported = running.end()
        assert code == 0
        assert reported.count(f"process {short.pid} exited") == 1
        assert records(running.log, "host")[-1]["process"] == {
            "pid": short.pid,
            "cpu_utilization_percent": None,
            "memory_rss_MB": None,
            "gpu_memory_used_MB": None,
        }

    def test_a_process_that_does_not_exist_is_an_error_message_and_no_more(self, tmp_path):
        done = monitor("--pid", 2**22 + 1, "--interval", 0.1, "--duration", 0.2, "--out", "l.jsonl", cwd=tmp_path)
        assert done.returncode == 0
        assert "error: there is no process" in done.stderr
        ticks = records(tmp_path / "l.jsonl", "host")
        assert len(ticks) == 3
        assert "process" not in ticks[0]
