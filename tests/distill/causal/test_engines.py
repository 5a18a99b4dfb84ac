"""`generation.engine`: engines as child processes of a run, and which one is chosen."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import engine_stand_in
import psutil
import pytest
from pydantic import ValidationError

from joulelab.distill.causal import generators
from joulelab.distill.causal.config import Generation
from joulelab.distill.causal.generators import choose_engine
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import read_bill
from joulelab.runs.spec import check

GREEDY = {"prompts": 6, "answer": {"n": 1, "do_sample": False, "temperature": 1.0}}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return str(engine_stand_in.write(tmp_path_factory.mktemp("environment")))


def answers_in(paths):
    lines = (paths.artifacts / "answers" / "answers.jsonl").read_text().splitlines()
    found = [(line["prompt"], line["answers"][0]["text"], line["answers"][0]["ids"]) for line in map(json.loads, lines)]
    return sorted(found, key=str)  # the order of a file is that of its keys, which name the engine


@pytest.mark.slow
def test_a_run_starts_bills_and_stops_an_engine(lab, tmp_path, python):
    record, paths = lab.run(
        tmp_path, "synthetic", until="generation",
        generation={**GREEDY, "engine": "vllm", "engine_python": python},
    )  # fmt: skip
    _, own = lab.run(tmp_path, "synthetic", until="generation", generation=GREEDY)
    assert answers_in(paths) == answers_in(own)
    load, warm_up = record.stage("teacher.generate.load"), record.stage("teacher.generate.warm-up")
    assert [(one.role, one.activity) for one in (load, warm_up)] == [("setup", "load"), ("setup", "warm-up")]
    stop = record.stage("teacher.generate.stop")
    assert (stop.role, stop.activity) == ("setup", "stop") and not stop.is_method_work
    assert not load.is_method_work and record.stage("teacher.generate").tokens > 0
    bill = read_bill(paths.artifacts / "answers")
    assert bill.inputs["engine"] == "vllm 0.99.0"
    assert any(figure.energy_j for figure in bill.artifact.setup.values())
    assert "INFO ready" in (paths.folder / "teacher.generate-vllm.log").read_text()
    assert not [one for one in psutil.process_iter(["cmdline"]) if python in (one.info["cmdline"] or [])]
    assert read_bill(own.artifacts / "answers").key != bill.key


def test_an_engine_that_fails_fails_the_run_with_its_log(lab, tmp_path, python):
    from joulelab.errors import JoulelabError

    settings = {"engine": "vllm", "engine_python": python, "engine_args": ["--behave", "die"]}
    with pytest.raises(JoulelabError, match="no kernel image is available"):
        lab.run(tmp_path, "synthetic", until="generation", generation={**GREEDY, **settings})


@pytest.mark.slow
def test_a_signal_stops_the_engine_and_a_resume_continues(lab, tmp_path, python):
    from joulelab.runs.execute import execute

    settings = {**GREEDY, "prompts": 40, "engine": "vllm", "engine_python": python, "engine_concurrency": 1}
    paths = lab.paths(
        tmp_path, "synthetic", until="generation", generation={**settings, "engine_args": ["--sleep", "1"]}
    )
    code = "import sys; from pathlib import Path; from joulelab.runs.execute import execute; "
    code += "from joulelab.runs.paths import RunPaths; from joulelab.runs.context import SilentProgress; "
    code += "execute(RunPaths(Path(sys.argv[1])), SilentProgress())"
    source = str(Path(__file__).parents[3] / "src")
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.folder)],
        env={**os.environ, "PYTHONPATH": source},
        stderr=subprocess.DEVNULL,
    )
    until_s = time.monotonic() + 120
    logs = lambda: list(paths.checkpoints.glob("teacher.generate/answers-*.jsonl"))  # noqa: E731
    while not any(path.stat().st_size for path in logs()):  # a first answer
        assert run.poll() is None and time.monotonic() < until_s
        time.sleep(0.2)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    run.wait(60)
    assert not [one for one in children if one.is_running() and "api_server" in " ".join(one.cmdline())]
    kept = sum(
        len(path.read_text().splitlines()) for path in paths.checkpoints.glob("teacher.generate/answers-*.jsonl")
    )
    assert 0 < kept < 40
    record = execute(paths, lab.listening)
    assert record.status == "done" and len(answers_in(paths)) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm"}, "needs generation.engine_python"),
        ({"engine": "builtin", "engine_python": "python"}, "has no effect with the engine builtin"),
        ({"engine_args": ("--x",)}, "has no effect without generation.engine_python"),
        ({"engine": "vlm"}, "unknown engine 'vlm'"),
        ({"engine_seeds": False, "answer": {"do_sample": True}}, "engine_seeds=false has no effect without"),
        ({"engine": "vllm", "engine_python": "p", "engine_seeds": False}, "engine_seeds=false has no effect without"),
        ({"engine": "sglang", "engine_python": "p", "answer": {"num_beams": 2}}, "no beam search"),
        ({"engine": "vllm", "engine_python": "p", "cache": "fixed"}, "generation.cache has no effect"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Generation(**settings)


def test_an_environment_without_the_engine_is_refused_before_a_run(lab, tmp_path):
    spec = check(lab.settings("synthetic", generation={"engine": "vllm", "engine_python": sys.executable}))
    with pytest.raises(ConfigError, match="vllm is not installed in the environment"):
        for one in spec.checks():
            one()


def test_the_server_engine_needs_an_address(lab):
    with pytest.raises(ConfigError, match="engine=server needs"):
        check(lab.settings("synthetic", generation={"engine": "server"}))


def test_the_earlier_name_of_the_builtin_engine_is_accepted(lab):
    assert check(lab.settings("synthetic", generation={"engine": "transformers"})).generation.engine == "builtin"


@pytest.mark.parametrize(
    ("device", "wins", "chosen", "note"),
    [
        ("cuda", True, "vllm", "auto: vllm 0.99.0, which uses less energy for this work"),
        ("cuda", False, "builtin", "auto: builtin, because it uses less energy for this work than vLLM"),
        ("cpu", True, "builtin", "auto: builtin, because vllm needs a GPU"),
    ],
)
def test_auto_chooses_vllm_where_it_is_configured_and_uses_less_energy(
    lab, monkeypatch, python, device, wins, chosen, note
):
    spec = check(lab.settings("synthetic", generation={"engine_python": python}))
    shapes, notes = [], []
    monkeypatch.setattr(generators, "vllm_uses_less_energy", lambda shape: shapes.append(shape) or wins)
    context = SimpleNamespace(
        spec=spec, device=SimpleNamespace(type=device), run=SimpleNamespace(note=notes.append)
    )  # fmt: skip
    teacher = SimpleNamespace(name=spec.teacher.model, weights=spec.teacher.model)
    assert choose_engine(context, teacher).name == chosen
    assert len(notes) == 1 and note in notes[0]
    if device == "cuda":
        assert (shapes[0].answers, shapes[0].rows, shapes[0].new_tokens) == (24, 8, 12)
        assert 10_000 < shapes[0].parameters < 100_000


def test_auto_does_not_choose_an_engine_that_was_not_measured(lab, tmp_path):
    found = str(engine_stand_in.write(tmp_path, "sglang"))
    spec, notes = check(lab.settings("synthetic", generation={"engine_python": found})), []
    for one in spec.checks():
        one()
    context = SimpleNamespace(
        spec=spec, device=SimpleNamespace(type="cuda"), run=SimpleNamespace(note=notes.append)
    )  # fmt: skip
    teacher = SimpleNamespace(name=spec.teacher.model, weights=spec.teacher.model)
    assert choose_engine(context, teacher).name == "builtin" and "sglang was not measured" in notes[0]


def test_answers_without_seeds_are_other_answers(lab, python):
    for seeds, identity in ((True, "vllm 0.99.0"), (False, "vllm 0.99.0 unseeded")):
        settings = {"engine": "vllm", "engine_python": python, "engine_seeds": seeds}
        assert check(lab.settings("synthetic", generation=settings)).engine_installation().identity == identity


def test_one_engine_per_job_and_not_per_rank(lab, python):
    spec = check(lab.settings("synthetic", generation={"engine": "vllm", "engine_python": python}))
    context = SimpleNamespace(spec=spec, runner=SimpleNamespace(ranks=SimpleNamespace(world=4)))
    with pytest.raises(ConfigError, match="was started by 4 ranks"):
        generators.refuse_ranks(context)
