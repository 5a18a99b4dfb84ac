"""The base installation measures and lists; every verb that needs more names its extra before anything else happens."""

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from joulelab.errors import ConfigError, DependencyMissing, find_problems
from joulelab.lookup import EXTRAS

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
OPTIONAL = sorted({name for names in EXTRAS.values() for name in names} | {"pandas", "tensorboard", "lightning"})


@pytest.fixture
def base(tmp_path):
    """Runs joulelab in a folder as if none of the optional packages were installed, in its child processes too."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({OPTIONAL})\n")
    (tmp_path / "work").mkdir()

    def run(*words, cwd=tmp_path / "work"):
        path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "JOULELAB_RUNS": str(tmp_path / "runs")}
        command = [sys.executable, "-m", "joulelab", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)

    return run


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("infer", "deit-t"), "train"),
        (("infer", "deit-t", "deit-s"), "train"),
        (("infer", "gpt2", "bert"), "train"),
        (("infer", "sample:smollm2", "--generate"), "train"),
        (("train", "gpt2", "--size", "tiny"), "train"),
        (("train", "pna"), "train,graphs"),
        (("run", "demo-kd"), "train"),
        (("run", "compare-tiny"), "train"),
        (("run", "kd-tiny", "student.lora.rank=4"), "train,peft"),
        (("demo",), "train"),
        (("serve", "sample:smollm2"), "train"),
        (("evaluate", "sample:smollm2", "--tasks", "gsm8k"), "train,lm-eval"),
        (("sweep", "train", "gpt2", "--size", "tiny"), "train"),
        (("prepare", "reviews", "sample:reviews"), "train"),
        (("prepare", "dump", "sample:reviews"), "train"),
        (("new", "compare", "my.yaml", "--data", "my.csv"), "train"),
        (("report", "last"), "report"),
        (("report", "--store"), "report"),
        (("plot", "last"), "report"),
        (("runs", "--compact"), "report"),
        (("query", "select 1"), "query"),
        (("ui",), "ui"),
        (("infer", "sample:smollm2", "--generate", "--dtype", "int8"), "train,bitsandbytes"),
        (("serve", "sample:smollm2", "--dtype", "fp8"), "train,torchao"),
        (("evaluate", "sample:smollm2", "--data", "my.jsonl", "--precision", "nf4"), "train,bitsandbytes"),
        (("run", "kd-tiny", "teacher.precision=nf4"), "train,bitsandbytes"),
        (("train", "gpt2", "--train_stats", "codecarbon"), "train,codecarbon"),
        (("measure", "--set", "energy.codecarbon=true", "--", "true"), "codecarbon"),
        (("measure", "--prometheus", "0", "--", "true"), "prometheus"),
        (("monitor", "--prometheus", "0"), "prometheus"),
        (("export", "last", "--to", "mlflow"), "trackers"),
        (("export", "last", "--to", "trackio"), "trackio"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_verb_names_its_extra_and_leaves_nothing(base, tmp_path, words, extra):
    done = base(*words)
    assert done.returncode == 2, done.stderr
    error, hint = done.stderr.splitlines()
    assert re.fullmatch(r"error: .+ needs .+, which (is|are) not installed", error)
    assert hint == f'hint: pip install "joulelab[{extra}]"'
    assert not (tmp_path / "runs").exists() and not any((tmp_path / "work").iterdir())


@pytest.mark.slow
def test_the_base_measures_lists_shows_packs_and_keeps_a_readable_trace(base, tmp_path):
    assert base("measure", "--", sys.executable, "-c", "sum(range(10**6))").returncode == 0
    (trace,) = tmp_path.glob("runs/*/trace/*")
    assert trace.suffix == ".jsonl"
    for words in (("show", "last"), ("bill", "last"), ("doctor",), ("experiments",), ("zoo",)):
        assert base(*words).returncode == 0, words
    (row,) = json.loads(base("runs", "--json").stdout)
    assert row["run_id"] == trace.parents[1].name
    packed = base("pack", "last", "-o", "runs.tar.gz")
    assert packed.returncode == 0 and 'pip install "joulelab[report]"' in packed.stderr
    verified = base("unpack", "--verify", "runs.tar.gz")
    assert verified.returncode == 0, verified.stderr


def test_a_trace_that_was_converted_elsewhere_names_what_reads_it(base, tmp_path):
    assert base("measure", "--", sys.executable, "-c", "pass").returncode == 0
    (trace,) = tmp_path.glob("runs/*/trace/*.jsonl")
    subprocess.run([sys.executable, "-m", "joulelab", "runs", "--compact", "--runs-dir", tmp_path / "runs"], check=True)
    assert not trace.exists()
    done = base("import", str(trace.parents[1]))
    assert done.returncode == 2, done.stdout
    assert 'pip install "joulelab[report]"' in done.stderr and "Traceback" not in done.stderr


def test_the_table_of_extras_is_what_the_extras_install():
    """By the distribution that a package comes from, for those that are installed here."""
    extras = PROJECT["optional-dependencies"]
    distributions = packages_distributions()
    for extra, packages in EXTRAS.items():
        required = {re.split(r"[<>=\[]", text)[0].lower() for text in extras[extra]}
        for package in packages:
            names = {name.lower().replace("_", "-") for name in distributions.get(package, ())}
            assert not names or names & required, f"{package} is not installed by the extra {extra}"


def test_the_base_has_no_package_of_an_extra():
    base = {re.split(r"[<>=\[]", text)[0] for text in PROJECT["dependencies"]}
    assert not base & {"pyarrow", "altair", "vl-convert-python", "jinja2", "duckdb", "torch", "codecarbon", "pandas"}


def test_two_models_that_need_different_packages_have_one_command(base):
    done = base("infer", "pna", "gpt2")
    text = " ".join(done.stderr.split())
    assert done.returncode == 2 and 'pip install "joulelab[train,graphs]"' in text
    assert text.count("torch,") == 1 and text.count("not installed") == 1


def test_packages_that_two_models_need_are_named_once():
    problems = [
        DependencyMissing("a needs torch", 'pip install "joulelab[train]"', ["torch", "transformers"]),
        ConfigError("another problem"),
        DependencyMissing("b needs torch", 'pip install "joulelab[train,graphs]"', ["torch", "torch_geometric"]),
    ]

    def refuse(problem):
        raise problem

    missing, other = find_problems([partial(refuse, problem) for problem in problems])
    assert missing.message == "this needs torch, transformers and torch_geometric, which are not installed"
    assert missing.hint == 'pip install "joulelab[train,graphs]"' and other is problems[1]
    alone = DependencyMissing("c needs d", "pip install d", ["d"])
    assert find_problems([partial(refuse, alone)]) == [alone]
