"""The sample package of examples/plugin, installed without network: one of each kind of extension, each in use."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "distill" / "causal"))  # its tiny teacher
pytest.importorskip("setuptools")
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from joulelab.cli.main import app
for line in sys.stdin:
    done = CliRunner().invoke(app, line.split())
    sys.__stdout__.write(json.dumps([done.exit_code, str(done.exception), done.stdout]) + "\\n")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed package."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # setuptools builds next to it
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", str(folder / "site"), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def invoke(site, folder, commands, **environment):
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(commands),
        env={**os.environ, "PYTHONPATH": str(site), "JOULELAB_RUNS": "runs", **environment},
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def run_in(folder, pattern):
    (run,) = (folder / "runs").glob(pattern)
    return run


def test_sensor_importer_tracker_and_pipeline_of_an_installed_package_are_used(site, tmp_path):
    counter, stopped = tmp_path / "joules", threading.Event()
    counter.write_text("0")

    def count():  # 50 W
        began = time.monotonic()
        while not stopped.wait(0.02):
            new = counter.with_suffix(".new")
            new.write_text(f"{50 * (time.monotonic() - began):.3f}")
            new.replace(counter)

    thread = threading.Thread(target=count)
    thread.start()
    (tmp_path / "sleep.yaml").write_text("pipeline: example-sleep\nname: sleep\ntrackers: [example-lines]\n")
    (tmp_path / "log.txt").write_text("# example meter\n" + "".join(f"{second} 40\n" for second in range(11)))
    try:
        slept, again, wrong, imported = invoke(
            site, tmp_path,
            ["run sleep.yaml seconds=1.5", "run sleep.yaml seconds=1.5", "run sleep.yaml seconds=-1", "import log.txt"],
            EXAMPLE_METER=str(counter),
        )  # fmt: skip
    finally:
        stopped.set()
        thread.join()
    assert (slept[0], again[0]) == (0, 0), (slept, again)
    assert wrong[0] != 0 and "seconds" in wrong[1]
    first, second = sorted(
        (tmp_path / "runs").glob("sleep-*"), key=lambda run: (run / "config.yaml").stat().st_mtime_ns
    )
    record = json.loads((first / "run.json").read_text())
    (stage,) = [stage for stage in record["stages"] if stage["name"] == "program.sleep"]
    assert stage["energy"]["gpu"]["method"] == "counter"
    assert stage["energy"]["gpu"]["energy_j"] == pytest.approx(75, rel=0.2)
    assert json.loads((first / "example.jsonl").read_text().splitlines()[-1]) == {"status": "done"}
    assert not (second / "artifacts" / "sleep").exists()  # found by its key, which has the version of the package
    bill = json.loads((first / "artifacts" / "sleep" / "bill.json").read_text())
    assert imported[0] == 0
    assert "400" in imported[2]  # 40 W for 10 s
    assert bill["artifact"]["key"]


def test_model_and_trainer_of_an_installed_package_are_used(site, tmp_path):
    listed, trained = invoke(
        site, tmp_path,
        ["zoo example-mlp --json",
         "train example-mlp --size tiny --max_steps 3 --train_stats example-steps --trainer example-signs"],
    )  # fmt: skip
    assert listed[0] == 0 and "example-mlp" in listed[2], listed
    assert trained[0] == 0, trained
    record = json.loads((run_in(tmp_path, "*") / "run.json").read_text())
    assert record["findings"]["model.train"]["example-steps"]["steps"] == 3
    assert record["spec"]["trainer"] == "example-signs"


@pytest.mark.slow
def test_judge_engine_and_evaluator_of_an_installed_package_are_used(site, tmp_path):
    import tiny_llama

    teacher = tiny_llama.write_teacher(tmp_path / "teacher")
    chats = tiny_llama.write_chats(tmp_path / "chats.jsonl")
    common = f"data.source={chats} teacher.model={teacher} data.tokenizer=null student.size=nano data.held_out=8"
    common += " quality.answers=null data.max_tokens=32 data.row_length=64 generation.prompts=10 generation.answer.n=2"
    common += " budget.tokens=400 generation.answer.max_new_tokens=12 generation.engine=example-echo"
    common += " preferences.candidates_from=teacher"
    made, unknown = invoke(
        site, tmp_path,
        [
            f"run dpo-tiny {common} preferences.judge=example-longest evaluators=[example-norm]",
            f"run dpo-tiny {common} preferences.judge=example-longes",
        ],
    )  # fmt: skip
    assert made[0] == 0, made
    assert "did you mean 'example-longest'" in unknown[1]
    run = run_in(tmp_path, "dpo-*")
    bills = {path.parent.name: json.loads(path.read_text()) for path in run.glob("artifacts/*/bill.json")}
    package = "joulelab-example-plugin 0.1.0"
    assert bills["answers"]["inputs"]["engine"] == f"example-echo of {package}"
    assert bills["scores"]["inputs"]["package"] == package
    scores = [json.loads(line) for line in (run / "artifacts" / "scores" / "scores.jsonl").read_text().splitlines()]
    assert all(row["scores"][1] > row["scores"][0] for row in scores)
    assert "## How to reproduce" in (run / "artifacts" / "final_policy" / "README.md").read_text()
    record = json.loads((run / "run.json").read_text())
    assert record["results"]["student.example-norm.norm"]["value"] > 0


def test_a_plugin_that_cannot_be_imported_is_named_with_its_package(site, tmp_path):
    broken = shutil.copytree(site, tmp_path / "site")
    (broken / "joulelab_example" / "learning.py").write_text("import not_here\n")
    (done,) = invoke(broken, tmp_path, ["train example-mlp --size tiny --max_steps 1"])
    assert done[0] != 0
    assert "the model 'example-mlp' of joulelab-example-plugin 0.1.0 cannot be loaded" in done[1]
    assert not (tmp_path / "runs").exists()
