"""Mutated settings, logs of other tools, records and arguments, each given to the command line in this process.

A try is a seed: the same seed gives the same input, so a failure can be repeated alone. A command may succeed or refuse
the input with an exit code and a message; an exception, a hang or an impossible energy is a fault.
"""

import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import traceback
from pathlib import Path

import yaml

LIMIT_S = 60  # drawing the first chart of a process takes 20 s on a busy machine
ODD_TEXTS = (
    "",
    " ",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "Infinity",
    "-1",
    "0",
    "1e309",
    "-1e309",
    "1e-400",
    "9" * 400,
    "0x10",
    "1_000",
    "1,5",
    "null",
    "~",
    "true",
    "yes",
    "[]",
    "{}",
    "[[[[",
    "}}",
    ":",
    "- -",
    "*a",
    "&a [*a]",
    "!!python/object:os.system x",
    "<<: *x",
    "2026-02-31T25:61:61",
    "0000-00-00",
    "99999-01-01T00:00:00Z",
    "2026-03-02T12:00:00+99:99",
    "\x00",
    "\x1b[31mred\x1b[0m",
    "\x07",
    "\r\n",
    "\u202e",
    "\ud800",
    "é" * 300,
    "../../etc/passwd",
    "/dev/null",
    "/",
    ".",
    "~",
    "a" * 5000,
    "%s%n",
    "{0}",
    "'; drop table runs;--",
    "[N/A]",
    "[Not Supported]",
    "-",
    "N/A",
    "ERR!",
)
ODD_VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    -(2**63),
    2**64,
    10**400,
    1e308,
    -1e308,
    1e-320,
    math.nan,
    math.inf,
    -math.inf,
    "",
    [],
    {},
    [[]],
    {"": None},
    [None],
    ["a", 1],
    {"a": {"b": {"c": 1}}},
    *ODD_TEXTS,
)


class Hang(Exception):
    pass


def call(words, limit_s=LIMIT_S):
    """(exit code, stdout, stderr) of a command in this process; raises what the command does not handle."""
    from joulelab.cli.main import main

    def ring(*_):
        raise Hang(f"longer than {limit_s} s")

    before = sys.argv, signal.signal(signal.SIGALRM, ring)
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["joulelab", *map(str, words)]
    signal.alarm(limit_s)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        signal.alarm(0)
        sys.argv = before[0]
        signal.signal(signal.SIGALRM, before[1])
    return code, out.getvalue(), err.getvalue()


def fault_of(words):
    """What went wrong, or None."""
    try:
        code, out, err = call(words)
    except Hang as hang:
        return f"hang: {hang}"
    except BaseException:
        return traceback.format_exc()
    if "Traceback (most recent call last)" in err:
        return err
    if code != 0 and "error:" not in err and "Usage:" not in err:
        return f"exit code {code} without a message: {err[:300]!r}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", (out + err).replace("\r\n", "\n")):
        return f"control characters reach the terminal: {(out + err)[:2000]!r}"
    return impossible_energy(out) if code == 0 else None


def impossible_energy(text):
    """A negative, infinite or undefined energy or power in printed JSON, or in the text itself."""
    try:
        parsed = json.loads(text)
    except ValueError:
        found = re.search(r"(?<![\w.])(?:nan|-?inf|-[\d.,]+) (?:m|k|M)?(?:J|Wh|W)\b", text)
        return f"impossible energy: {found.group()} in {text[:400]!r}" if found else None
    for name, value in leaves(parsed):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
        last = name.rpartition(".")[2]
        is_energy = last.endswith(("_j", "_w", "watts")) and not last.startswith(("difference", "above_idle"))
        if is_energy and isinstance(value, (int, float)) and value < 0:
            return f"{name} is {value}"
    return None


def leaves(value, name=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{place}]")
    else:
        yield name, value


def mutate_tree(drawn, value):
    """One change somewhere in nested dicts and lists."""
    if isinstance(value, (dict, list)) and value and drawn.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = drawn.choice(keys)
        choice = drawn.random()
        if choice < 0.1:
            del value[key]
        elif choice < 0.15 and isinstance(value, dict):
            value[drawn.choice([*ODD_TEXTS, 3, None, True, (1, 2)])] = value.pop(key)
        elif choice < 0.2 and isinstance(value, dict):
            value[drawn.choice(["extra", "schema_version", "kind", "pipeline", "members"])] = drawn.choice(ODD_VALUES)
        else:
            value[key] = mutate_tree(drawn, value[key])
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and abs(value) < 1e308 and drawn.random() < 0.4:
        return drawn.choice(
            [-value, value * 1e300, value + 0.5, str(value), [value], int(value) if abs(value) < 1e9 else 0]
        )
    return drawn.choice(ODD_VALUES)


def mutate_text(drawn, text):
    """Some changes of lines, fields and characters."""
    for _ in range(drawn.randint(1, 4)):
        lines = text.split("\n")
        place = drawn.randrange(len(lines))
        choice = drawn.randrange(10)
        if choice == 0:
            del lines[place]
        elif choice == 1:
            lines.insert(place, drawn.choice(lines))
        elif choice == 2:
            drawn.shuffle(lines)
        elif choice == 3:
            lines[place] = drawn.choice(ODD_TEXTS)
        elif choice in (4, 5, 6):
            fields = re.split(r"([,\s:]+)", lines[place])
            fields[drawn.randrange(len(fields))] = drawn.choice(ODD_TEXTS)
            lines[place] = "".join(fields)
        elif choice == 7:
            lines = lines[: place + 1]
            lines[-1] = lines[-1][: drawn.randrange(len(lines[-1]) + 1)]
        elif choice == 8:
            cut = drawn.randrange(len(lines[place]) + 1)
            lines[place] = lines[place][:cut] + drawn.choice(ODD_TEXTS) + lines[place][cut:]
        else:
            lines = lines * drawn.choice([1, 2, 5])  # every row may become a run
        text = "\n".join(lines)[:200_000]
    return text


def write_text(drawn, path, text):
    raw = text.encode("utf-8", errors="surrogatepass")
    if drawn.random() < 0.1:
        content = bytearray(raw or b"x")
        for _ in range(drawn.randint(1, 8)):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        raw = bytes(content)
    path.write_bytes(raw)


# Settings


def nested(drawn):
    """YAML that is deep, circular, or grows by aliases."""
    depth = drawn.choice([50, 500, 5000])
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, drawn.choice([3, 6, 9, 30]))
    )
    return drawn.choice(
        [
            "data: " + "[" * depth + "]" * depth,
            "data: " + "{a: " * depth + "1" + "}" * depth,
            "data: &x\n  source: *x\n",
            "data: &x [*x]\n",
            "training: &x\n  more: *x\n",
            bomb,
            bomb + "data: *a2\n",
            "\n".join(" " * n + "a:" for n in range(drawn.choice([100, 1000]))),
            "? " * drawn.choice([10, 1000]) + "a",
            "<<: [*a, *b]",
            "a: &a {<<: *a}",
        ]
    )


def settings_try(seed, folder):
    from joulelab.runs.spec import EXPERIMENTS, experiment_names

    drawn = random.Random(f"settings-{seed}")
    name = drawn.choice(experiment_names())
    text = (EXPERIMENTS / f"{name}.yaml").read_text()
    path = folder / "mine.yaml"
    kind = drawn.randrange(10)
    if kind == 0:
        text = nested(drawn) if drawn.random() < 0.5 else f"extends: {name}\n{nested(drawn)}"
    elif kind < 6:
        tree = yaml.safe_load(text)
        for _ in range(drawn.randint(1, 3)):
            tree = mutate_tree(drawn, tree)
        with contextlib.suppress(Exception):
            text = yaml.safe_dump(tree)
    else:
        text = mutate_text(drawn, text)
    write_text(drawn, path, text)
    overrides = []
    if drawn.random() < 0.3:
        key = drawn.choice(
            ["seed", "training.learning_rate", "data.source", "energy.gpus", "a.b.c", "", "=", "name", "[x]"]
        )
        overrides = [f"{key}={clean(drawn.choice(ODD_TEXTS))}"]
    verb = drawn.choice([["run"], ["run"], ["sweep"], ["submit", "run"], ["compare"], ["explain"]])
    dry = ["--dry-run"] if verb[0] in ("run", "sweep", "submit") else []
    if verb == ["submit", "run"]:
        return ["submit", *dry, "run", path, *overrides]
    return [*verb, path, *dry, *(overrides if verb[0] in ("run", "sweep") else [])]


def clean(word):
    return word.replace("\x00", "").encode("utf-8", errors="ignore").decode()


# Logs of other tools


def log_seeds():
    """Logs as their tools write them."""
    stamps = [f"2026-03-02T12:00:{second:02d}" for second in range(12)]
    old = [
        json.dumps(
            {
                "timestamp": at,
                "gpu_index": gpu,
                "power_watts": 100.0 + gpu,
                "memory_used_MB": 1000.0,
                "gpu_utilization_percent": 50,
                "memory_utilization_percent": 5,
                "cpu_utilization_percent": 12.5,
            }
        )
        for at in stamps
        for gpu in (0, 1)
    ]
    dmon = ["# gpu    pwr  gtemp  mtemp     sm    mem", "# Idx      W      C      C      %      %"]
    dmon += [f"    {gpu}    {100 + second}     35      -     50      7" for second in range(8) for gpu in (0, 1)]
    smi = ["timestamp, index, power.draw [W], utilization.gpu [%], memory.used [MiB]"]
    smi += [f"2026/03/02 12:00:{second:02d}.123, 0, {100 + second}.50 W, 40 %, 512 MiB" for second in range(10)]
    table = ["timestamp,gpu_0_power_w,gpu_1_power_w,cpu_power_w"]
    table += [f"{1772452800 + second},{100 + second},90,35.5" for second in range(10)]
    emissions = [
        "timestamp,project_name,run_id,duration,emissions,cpu_power,gpu_power,ram_power,cpu_energy,gpu_energy,ram_energy,"
        "energy_consumed,country_name",
        "2026-03-02T12:00:00,codecarbon,1-2,60.0,0.01,42.5,250.0,3.0,0.0007,0.0041,0.00005,0.00485,Germany",
        "2026-03-02T12:05:00,codecarbon,1-3,30.0,0.005,42.5,240.0,3.0,0.0003,0.0020,0.00002,0.00232,Germany",
    ]
    stage = {
        "experiment_name": "kd",
        "stage_name": "student_train",
        "start_time": "2026-03-02T12:00:00",
        "end_time": "2026-03-02T12:10:00",
        "duration_seconds": 600.0,
        "gpu_energy_joules": 120000.0,
        "cpu_energy_joules": 30000.0,
        "total_energy_joules": 150000.0,
        "tokens_processed": 100000,
        "gpu_avg_power_watts": 200.0,
        "gpu_peak_power_watts": 300.0,
        "codecarbon_emissions_kg": 0.01,
        "total_energy_kwh": 0.0417,
    }
    summary = {
        "experiment_name": "kd",
        "stages": {"teacher": stage, "student": dict(stage, stage_name="teacher_train")},
    }
    trace = [
        json.dumps({"kind": "header", "schema_version": 1, "host": "a", "boot_id": "b", "pid": 1, "mono_ns": 1}),
        *(
            json.dumps(
                {
                    "kind": "gpu",
                    "timestamp": at,
                    "gpu_index": 0,
                    "power_watts": 100.0,
                    "mono_ns": 10**9 * n,
                    "energy_mj": 100000 * n,
                    "uuid": "GPU-1",
                }
            )
            for n, at in enumerate(stamps, 1)
        ),
    ]
    return {
        "old.jsonl": "\n".join(old),
        "dmon.txt": "\n".join(dmon),
        "smi.csv": "\n".join(smi),
        "table.csv": "\n".join(table),
        "emissions.csv": "\n".join(emissions),
        "stage.json": json.dumps(stage, indent=1),
        "summary.json": json.dumps(summary),
        "trace.jsonl": "\n".join(trace),
    }


def logs_try(seed, folder):
    drawn = random.Random(f"logs-{seed}")
    name, text = drawn.choice(sorted(log_seeds().items()))
    path = folder / name
    if name.endswith(".json") and drawn.random() < 0.6:
        tree = json.loads(text)
        for _ in range(drawn.randint(1, 3)):
            tree = mutate_tree(drawn, tree)
        with contextlib.suppress(Exception):
            text = json.dumps(tree)
    elif name.endswith(".jsonl") and drawn.random() < 0.5:
        lines = text.split("\n")
        for _ in range(drawn.randint(1, 4)):
            place = drawn.randrange(len(lines))
            with contextlib.suppress(Exception):
                lines[place] = json.dumps(mutate_tree(drawn, json.loads(lines[place])))
        text = "\n".join(lines)
    else:
        text = mutate_text(drawn, text)
    write_text(drawn, path, text)
    options = drawn.choice(
        [
            [],
            ["--no-run"],
            ["--no-run", "--json"],
            ["--json"],
            ["--interpolate-gaps"],
            ["--one-run"],
            ["--out", folder / "out.jsonl"],
            ["--idle-watts", "20"],
            ["--latency-ms", "3"],
            ["--period", "1"],
            ["--no-run", "--idle", "0..2"],
            ["--time-zone", "Europe/Berlin"],
        ]
    )
    if drawn.random() < 0.05:
        options = [
            *options,
            drawn.choice(["--period", "--idle", "--latency-ms", "--time-zone"]),
            clean(drawn.choice(ODD_TEXTS)),
        ]
    return ["import", path if drawn.random() < 0.9 else folder, *options, "--runs-dir", folder / "store"]


# Records


def records_try(seed, folder, finished):
    """One file of a finished run is changed; then a command reads the run."""
    drawn = random.Random(f"records-{seed}")
    store = folder / "store"
    shutil.copytree(finished, store)
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml"))
    path = drawn.choice([file for file in files if file.name == "run.json"] if drawn.random() < 0.4 else files)
    text = path.read_text()
    if drawn.random() < 0.6:
        with contextlib.suppress(Exception):
            if path.suffix == ".jsonl":
                lines = text.splitlines()
                place = drawn.randrange(len(lines))
                lines[place] = json.dumps(mutate_tree(drawn, json.loads(lines[place])))
                text = "\n".join(lines) + "\n"
            elif path.suffix == ".yaml":
                text = yaml.safe_dump(mutate_tree(drawn, yaml.safe_load(text)))
            else:
                text = json.dumps(mutate_tree(drawn, json.loads(text)))
    else:
        text = mutate_text(drawn, text)
    write_text(drawn, path, text)
    verbs = [
        ["show", "last"],
        ["show", "last", "--json"],
        ["runs"],
        ["runs", "--json"],
        ["bill", "last"],
        ["compare", "made-*"],
        ["report", "last"],
        ["query", "select * from runs"],
        ["watch", "--once"],
        ["show", "last", "-v"],
        ["run", "--resume", "last"],
        ["pack", "last", "-o", folder / "x.zip"],
    ]
    return [*drawn.choice(verbs), "--runs-dir", store]


# Arguments


def known_commands():
    import typer

    from joulelab.cli.main import app

    root = typer.main.get_command(app)
    skipped = {"measure", "monitor", "prerun", "demo", "watch", "samples", "train", "infer", "doctor"}
    return {name: command for name, command in root.commands.items() if name not in skipped}


def arguments_try(seed, folder, finished):
    drawn = random.Random(f"arguments-{seed}")
    commands = known_commands()
    name = drawn.choice(sorted(commands))
    words = [name]
    command = commands[name]
    if getattr(command, "commands", None) and drawn.random() < 0.9:
        step = drawn.choice(sorted(set(command.commands) - {"reviews"}))  # it needs no arguments and works for minutes
        words.append(step)
        command = command.commands[step]
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
    for _ in range(drawn.randint(0, 4)):
        kind = drawn.random()
        if kind < 0.5 and options:
            words.append(drawn.choice(options))
        elif kind < 0.6:
            words.append(
                drawn.choice(
                    ["last", "made-*", "demo-kd", "seed=1", str(folder), "*", "[", "a=b=c", "=", "--", "-", "@x"]
                )
            )
        else:
            words.append(clean(drawn.choice(ODD_TEXTS)))
    # Nothing may start: whatever the words mean, they are only checked.
    dry = {"run", "sweep", "submit"} & {name}
    return [
        *words[:1],
        *(["--dry-run"] if dry else []),
        *words[1:],
        *(["--runs-dir", finished] if name in ("runs", "show") else []),
    ]


KINDS = {"settings": settings_try, "logs": logs_try, "records": records_try, "arguments": arguments_try}


def attack(kind, seed, folder, finished):
    """(the command, what went wrong or None) of one try in an empty folder."""
    folder.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    os.environ["JOULELAB_RUNS"] = str(folder / "runs")
    try:
        arguments = (seed, folder) if kind in ("settings", "logs") else (seed, folder, finished)
        words = KINDS[kind](*arguments)
        return words, fault_of(words)
    finally:
        os.environ.pop("JOULELAB_RUNS", None)
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
