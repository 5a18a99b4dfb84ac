"""`joulelab measure -- CMD`: the program is untouched, and its run folder is like any other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import joulelab_here
from programs import BUSY, measure, only_folder, record, stages

from joulelab.meter.trace import read_header
from joulelab.units import energy_text


@pytest.fixture
def store(tmp_path):
    return tmp_path / "runs"


def devices(store):
    return read_header(next((only_folder(store) / "trace").glob("*.parquet")))["devices"]


def test_streams_and_secrets_reach_the_program_and_we_speak_on_stderr_only(store):
    program = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1]); sys.stderr.write(sys.argv[2])"
    secrets = ["--api-key", "s3cr3t-one", "--token=s3cr3t-two", "-H", "Authorization: Bearer s3cr3t-three"]
    given = bytes(range(256)) * 100
    words = ["--", sys.executable, "-c", program, *secrets, "--max-tokens", "128"]
    done = measure(store, *words, input=given, text=False)
    assert (done.returncode, done.stdout) == (0, given[::-1])
    assert done.stderr.startswith(b"s3cr3t-one") and b"joulelab: run directory: " in done.stderr
    assert done.stderr.count(b"s3cr3t") == 1
    texts = [path.read_bytes() for path in only_folder(store).rglob("*") if path.is_file() and path.suffix != ".ring"]
    assert texts and not any(b"s3cr3t" in text for text in texts)
    assert record(store)["spec"]["command"][-2:] == ["--max-tokens", "128"]


def test_it_makes_a_run_folder_that_the_other_verbs_read(store, joulelab):
    measure(store, "--name", "my program", "--estimate-cpu", "--", sys.executable, "-c", BUSY.format(s=0.3))
    folder = only_folder(store)
    assert folder.name.startswith("my-program-")
    for name in ("run.json", "config.yaml", "environment.json", "experiment_summary.json"):
        assert (folder / name).exists()
    found = record(store)
    assert (found["status"], found["spec"]["pipeline"]) == ("done", "measure")
    assert stages(store) == ["program.run"]
    for words in (["show", "last"], ["runs"], ["report", "last"]):
        code, out, _ = joulelab(*words, "--runs-dir", store)
        assert code == 0
        assert "my-program" in out


# Its grandchild works after the parent in between has gone, and it ends when the grandchild has worked.
ADOPTS = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        end = time.process_time() + 2.4
        while time.process_time() < end: sum(range(500))
        open(sys.argv[1], "w").close()
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
"""


def test_the_cpu_estimate_follows_the_program_its_children_and_their_orphans(store):
    words = ["--estimate-cpu", "--interval", "0.1", "--", sys.executable, "-c", ADOPTS, store.parent / "sign"]
    measure(store, *words)
    (stage,) = [stage for stage in record(store)["stages"] if stage["name"] == "program.run"]
    header = read_header(next((only_folder(store) / "trace").glob("*.parquet")))
    (device,) = [row for row in header["devices"] if row["component"] == "cpu_estimate"]
    assert stage["best"]["method"] == "estimated"
    assert stage["best"]["energy_j"] == pytest.approx(2.4 * device["facts"]["w_per_thread"], rel=0.2)


def test_rapl_joules_are_measured_from_another_tree(store, rapl_tree):
    counter = rapl_tree / "intel-rapl:0" / "energy_uj"
    program = (
        "import pathlib, sys, time\n"
        "for joule in range(1, 11): pathlib.Path(sys.argv[1]).write_text(str(joule * 1000000)); time.sleep(0.1)"
    )
    words = ["--require", "measured", "--rapl-root", rapl_tree, "--interval", "0.05", "--json"]
    done = measure(store, *words, "--", sys.executable, "-c", program, counter)
    result = json.loads(done.stderr.splitlines()[-1])
    assert result["energy"]["method"] == "counter"
    assert result["energy_j"] == pytest.approx(10, abs=1.5)


def test_a_program_killed_by_a_signal_gives_the_shell_s_code(store):
    done = measure(store, "--", "sh", "-c", "kill -9 $$")
    assert (done.returncode, done.stdout, record(store)["status"]) == (137, "", "failed")


# Works for 0.2 s, and three times as long from its third call on.
UNEVEN = """
import os, pathlib, time
calls = pathlib.Path(os.environ["CALLS"])
number = int(calls.read_text()) + 1 if calls.exists() else 1
calls.write_text(str(number))
end = time.process_time() + (0.6 if number > 2 else 0.2)
while time.process_time() < end: sum(range(500))
"""


def test_a_signal_is_reported_by_its_name_also_where_a_shell_stood_between(store):
    killed = measure(store, "--", "sh", "-c", "kill -SEGV $$")
    assert killed.returncode == 139
    assert "failed: the program was killed by signal SIGSEGV (exit code 139)" in killed.stderr
    between = measure(store, "--", "sh", "-c", "sh -c 'kill -SEGV $$'; exit $?")
    assert between.returncode == 139
    assert "exit code 139 (SIGSEGV, as reported by the shell)" in between.stderr
    plain = measure(store, "--", "sh", "-c", "exit 7")
    assert "failed: the program ended with exit code 7; " in plain.stderr


def test_repeats_have_a_mean_an_interval_warm_ups_outside_it_and_a_warning_where_they_spread(store):
    target = store.parent / "result.json"
    words = ["--repeat", "3", "--warmup", "1", "--estimate-cpu", "--interval", "0.05", "--json-to", target]
    env = {**os.environ, "CALLS": str(store.parent / "calls")}
    done = measure(store, *words, "--", sys.executable, "-c", UNEVEN, env=env)
    assert done.returncode == 0, done.stderr
    assert stages(store) == ["program.warmup.1", "program.run.1", "program.run.2", "program.run.3"]
    summary = json.loads(target.read_text())["summary"]
    assert (summary["count"], summary["spread_rel"] > 0.05) == (3, True)
    assert summary["low_j"] < summary["mean_j"] < summary["high_j"]
    gain_error_rel = json.loads(target.read_text())["energy"]["gain_error_rel"]
    assert summary["gain_error_rel"] == pytest.approx(gain_error_rel) and gain_error_rel >= 0.5
    flat = json.loads((Path(json.loads(target.read_text())["folder"]) / "experiment_summary.json").read_text())
    expected = pytest.approx((summary["mean_j"], summary["gain_error_rel"]))
    assert (flat["energy_j"], flat["gain_error_rel"]) == expected
    assert flat["half_width_j"] == pytest.approx((summary["high_j"] - summary["low_j"]) / 2)
    assert record(store)["results"]["program.run.mean_j"]["value"] == pytest.approx(summary["mean_j"])
    assert "mean_low" not in str(record(store)["results"]), "one uncertainty per figure"
    watched, billed = (joulelab_here(verb, "last", "--runs-dir", store).stdout for verb in ("watch", "bill"))
    amount = energy_text(summary["mean_j"])
    assert amount in done.stderr and amount in watched, "one energy per run in every command"
    assert f"Everything in the run is billed; one run of the program used {amount} ±" in billed
    assert "mean of 3 repeats, standard deviation" in done.stderr, "±70 % is not the interval of the repeats"
    assert "the standard deviation over repeats is" in done.stderr
    assert any("the standard deviation over repeats is" in note["text"] for note in record(store)["validity"]["notes"])


def test_the_first_repeat_that_fails_is_the_last_and_resuming_is_refused_with_the_way_out(store, joulelab):
    done = measure(store, "--repeat", "3", "--", "sh", "-c", "exit 7")
    assert (done.returncode, stages(store), record(store)["status"]) == (7, ["program.run.1"], "failed")
    code, _, reported = joulelab("run", "--resume", "last", "--runs-dir", store)
    assert code == 2
    assert "joulelab measure -- COMMAND" in reported


def test_a_measurement_below_the_required_grade_ends_with_4_and_keeps_the_run(store, tmp_path):
    words = ["--require-grade", "B", "--rapl-root", tmp_path, "--gpus", "none", "--estimate-cpu"]
    done = measure(store, *words, "--", "true")
    assert done.returncode == 4
    assert "grade C, but B is required" in done.stderr
    assert len(list(store.glob("*/run.json"))) == 1


def test_no_sensor_where_one_is_required_runs_nothing(store, tmp_path, joulelab):
    sign = tmp_path / "ran"
    words = ["--require", "measured", "--rapl-root", tmp_path, "--gpus", "none", "--estimate-cpu"]
    code, out, reported = joulelab("measure", "--runs-dir", store, *words, "--", "touch", sign)
    assert (code, out) == (3, "")
    assert "no sensor works on this machine" in reported and "RAPL" in reported
    assert not sign.exists() and not store.exists()


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (["--", "no-such-program-here"], 127, "joulelab: no-such-program-here: command not found ("),
        (["--", "./nowhere/prog"], 127, "no such file (the path is relative to the current directory)"),
        (["--", "/nowhere/prog"], 127, "no such file (check the path)"),
        (["--", "/etc/passwd"], 126, "is not executable"),
        (["--", "/"], 126, "is a directory"),
        (["--"], 2, "no program was named"),
        (["--repeat", "0", "--", "true"], 2, "repeat"),
        (["--interval", "-1", "--", "true"], 2, "--interval: expected"),
        (["--require", "joules", "--", "true"], 2, "--require: expected 'nothing' or 'measured'"),
    ],
)
def test_what_cannot_be_run_is_answered_like_a_shell_and_leaves_no_folder(store, joulelab, words, code, reported):
    ended, out, err = joulelab("measure", "--runs-dir", store, *words)
    assert (ended, out) == (code, "")
    assert reported in err
    assert not store.exists()


def test_options_after_the_program_are_its_own_and_an_unwritable_result_file_does_not_fail_it(store):
    done = measure(store, "--json-to", "/nowhere/at/all.json", "echo", "--name", "x", "--", "--json")
    assert (done.returncode, done.stdout) == (0, "--name x -- --json\n")
    assert "cannot write /nowhere/at/all.json" in done.stderr


def test_inherited_descriptors_and_scripts_without_a_first_line_work_as_in_a_shell(store, tmp_path):
    script = tmp_path / "script"
    script.write_text("cat /dev/fd/$1\n")
    script.chmod(0o755)
    read, write = os.pipe()
    os.write(write, b"by descriptor")
    os.close(write)
    done = measure(store, "--", script, read, pass_fds=[read])
    os.close(read)
    assert (done.returncode, done.stdout) == (0, "by descriptor"), done.stderr


def test_processes_left_behind_are_reported_and_not_touched(store):
    done = measure(store, "--", "sh", "-c", "sleep 3 >/dev/null 2>&1 & echo $!")
    pid = int(done.stdout)
    assert done.stderr.count("processes of the program are still running: pid") == 1
    os.kill(pid, 0)  # still there, as it would be without us
    os.kill(pid, 15)


def test_the_verb_starts_without_numpy_and_pydantic():
    code = "import sys; import joulelab.cli.measure; print({'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_last_line_answers_energy_kwh_power_duration_co2e_and_cost_and_show_prints_the_same(store, joulelab):
    """Without a sensor the estimate is the default; `measure` printed `energy missing` and `show` another energy."""
    words = ["--grid", "FR", "--price", "0.20-0.30 EUR", "--gpus", "none", "--rapl-root", store.parent]
    done = measure(store, *words, "--", sys.executable, "-c", BUSY.format(s=0.4))
    last = done.stderr.splitlines()[-1]
    number = r"[\d.e-]+"
    expected = (
        rf"joulelab: python3?[\d.]*: {number} m?J ±(\d+ %|{number} m?J), estimated; {number} kWh; "
        rf"mean {number} W; {number} s; "
        rf"{number} (µ?gCO2e )?to {number} (µ|m)gCO2e \(grid France\); {number} to {number} EUR; grade C"
    )
    assert re.fullmatch(expected, last), last
    answer = last.partition(": ")[2].partition(": ")[2].removesuffix("; grade C")
    _, out, _ = joulelab("show", "last", "--runs-dir", store)
    assert answer in " ".join(out.split())
    _, out, _ = joulelab("runs", "--runs-dir", store)
    assert " ".join(answer.split()[:2]) in " ".join(out.split())
    assert "tools that add constants for memory or count the whole machine report much more" in done.stderr
    summary = json.loads((only_folder(store) / "experiment_summary.json").read_text())
    assert summary["program_energy_j"] == record(store)["stages"][0]["best"]["energy_j"]
    assert summary["total_cost_high"] > summary["total_cost_low"] >= 0


def test_with_repeats_the_answer_is_their_mean_everywhere(store, joulelab):
    words = ["--repeat", "3", "--warmup", "1", "--interval", "0.05", "--gpus", "none", "-q"]
    done = measure(store, *words, "--", sys.executable, "-c", BUSY.format(s=0.2))
    (line,) = done.stderr.splitlines()
    energy = line.partition(": ")[2].partition(": ")[2].partition(";")[0]
    assert "; mean of 3 repeats, standard deviation " in line
    show, verbose, runs = (
        " ".join(joulelab(*w, "--runs-dir", store)[1].split())
        for w in (["show", "last"], ["show", "last", "-v"], ["runs"])
    )
    assert energy in show and energy in verbose and energy.removesuffix(", estimated") in runs
    assert "mean of 3 repeats" in show and "C, mean of 3" in runs
    assert "with warm-ups and start-up" in verbose


def test_a_program_that_fails_prints_its_own_error_first_and_one_line_of_ours(store, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import no_such_module\n")
    done = measure(store, "--", sys.executable, script)
    *its_own, ours = done.stderr.splitlines()
    assert its_own[0].startswith("Traceback") and its_own[-1].startswith("ModuleNotFoundError")
    assert ours.startswith("joulelab: train: failed: the program ended with exit code 1; ")
    assert f"; run directory: {only_folder(store)}" in ours


def test_a_script_whose_interpreter_is_missing_is_refused_in_one_line_without_a_run(store, joulelab, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter -x\n")
    script.chmod(0o755)
    code, _, err = joulelab("measure", "--runs-dir", store, "--", script)
    assert (code, len(err.splitlines())) == (127, 1)
    assert "its interpreter /no/such/interpreter does not exist" in err
    assert not store.exists()


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ("price: -1\n", "price: expected an amount per kWh that is not negative"),
        ("gird: FR\n", "unknown setting gird"),
        ("grid: Frankreich\n", "no grid 'Frankreich'"),
        ("- FR\n", "expected `key: value` lines"),
    ],
)
def test_a_wrong_user_file_is_refused_with_its_path(store, joulelab, tmp_path, monkeypatch, config, reported):
    file = tmp_path / "config.yaml"
    file.write_text(config)
    monkeypatch.setenv("JOULELAB_CONFIG", str(file))
    code, _, err = joulelab("measure", "--runs-dir", store, "--", "true")
    assert code == 2 and reported in err and str(file) in err
    assert not store.exists()


def test_grid_and_price_of_the_user_hold_for_every_run_and_options_override_them(store, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("grid: FR\nprice: 0.25 EUR\n")
    env = {**os.environ, "JOULELAB_CONFIG": str(file)}
    done = measure(store, "--grid", "100", "-q", "--", sys.executable, "-c", BUSY.format(s=0.1), env=env)
    energy = record(store)["spec"]["energy"]
    assert (energy["grid"], energy["price"]) == ("100", "0.25 EUR")
    assert "gCO2e (grid given by the user)" in done.stderr and " EUR; grade C" in done.stderr


def test_energy_j_is_the_printed_energy_in_every_json(store, joulelab, tmp_path):
    """`energy_j` was null next to `total_energy_j`: 35 J, and `runs --json` had null for both."""
    words = ["--gpus", "none", "--rapl-root", tmp_path, "--repeat", "2", "--json"]
    done = measure(store, *words, "--", sys.executable, "-c", BUSY.format(s=0.2))
    result = json.loads(done.stderr.splitlines()[-1])
    _, out, _ = joulelab("runs", "--json", "--runs-dir", store)
    (listed,) = json.loads(out)
    for found in (result, listed):
        assert (found["energy_j"], found["method"]) == (result["energy"]["energy_j"], "estimated")
        assert found["total_energy_j"] == record(store)["totals"]["best"]["energy_j"] > found["energy_j"] > 0


def test_scope_machine_is_a_labeled_estimate_of_all_processes_memory_and_idle_power(store, tmp_path):
    words = ["--scope", "machine", "--gpus", "none", "--rapl-root", tmp_path, "--json"]
    result = json.loads(measure(store, *words, "--", "sleep", "1").stderr.splitlines()[-1])
    (model,) = [row for row in devices(store) if row["device"] == "estimate:machine"]
    constant_w = model["facts"]["base_w"] + model["facts"]["memory_w"]
    assert result["mean_power_w"] > constant_w > 0.74 * (os.cpu_count() or 1)
    assert (result["energy_j"], result["method"]) == (result["energy"]["energy_j"], "estimated")
    assert set(result["energy"]["sources"]) == {"estimate:machine", "constant:base", "constant:memory"}
    assert 0.5 < result["energy"]["gain_error_rel"] < 2
    found = record(store)["totals"]
    assert (found["policy"], found["best"]["energy_j"]) == ("machine", found["machine"]["energy_j"])
    assert found["cpu_estimate"]["energy_j"] < found["machine"]["energy_j"]
    assert any("ESTIMATED for the whole machine" in text for text in result["warnings"])


def test_scope_machine_uses_sensors_where_they_work(store, rapl_tree):
    words = ["--scope", "machine", "--gpus", "none", "--rapl-root", rapl_tree, "-q"]
    done = measure(store, *words, "--", "sleep", "0.5")
    sources = record(store)["totals"]["best"]["sources"]
    assert "rapl:package-0" in sources and "estimate:machine" not in sources
    assert ", whole machine, measured + estimated; " in done.stderr


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--scope", "planet"], "unknown scope 'planet'; known: machine, program"),
        (["--scope", "machine", "--require", "measured"], "--scope machine (energy.total_energy_policy=machine) is an"),
        (["--price", "-3"], "--price: expected an amount per kWh that is not negative"),
        (["--grid", "XX"], "--grid: no grid 'XX'"),
        (["--interval", "-1"], "--interval: expected a number greater than or equal to 0.02, found -1.0"),
        (["--set", "energy.sample_interval_s=-1"], "error: energy.sample_interval_s: expected a number"),
        (["--interval", "-1", "--repeat", "0"], "  - --repeat: expected a number greater than or equal to 1"),
        (["--name", ""], "--name: expected a text of at least 1 character, found the text ''"),
    ],
)
def test_wrong_values_are_refused_before_the_program_starts(store, joulelab, words, reported):
    code, out, err = joulelab("measure", "--runs-dir", store, *words, "--", "true")
    assert (code, out) == (2, "") and reported in err
    assert not store.exists()


def test_a_working_sensor_leaves_the_automatic_estimate_out(store, rapl_tree):
    measure(store, "--gpus", "none", "--rapl-root", rapl_tree, "--", "sleep", "0.2")
    assert [row["component"] for row in devices(store) if row["counted"]] == ["cpu"]
