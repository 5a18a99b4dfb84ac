"""vLLM and SGLang as child processes, with a stand-in that speaks their protocol: started, used, stopped, and explained
where they fail."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import engine_stand_in
import psutil
import pytest
from tiny_lm import make_model, make_tokenizer

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.completions import closing_generator, end_ids
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.engine_process import (
    EngineGenerator,
    EngineInstallation,
    GenerationShape,
    start_engine,
    vllm_uses_less_energy,
)
from joulelab.infer.generation.settings import GenerationSettings

GREEDY = GenerationSettings(max_new_tokens=12)
PROMPTS = ["w1 w2 w3", "w7 w8 w9 w1 w2", [{"role": "user", "content": "w5 w6"}], "w4"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return str(engine_stand_in.write(tmp_path_factory.mktemp("environment")))


def started(python, model_folder, log, *arguments, name="vllm", **options):
    installation = EngineInstallation.find(name, python, arguments)
    return start_engine(
        installation, str(model_folder), tokenizer=str(model_folder), dtype="float32", context_length=64, log=log,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_an_engine_generates_what_the_builtin_one_does_and_leaves_nothing(tmp_path, model_folder, name):
    python = str(engine_stand_in.write(tmp_path / "environment", name))
    model, tokenizer, lines = make_model(), make_tokenizer(), []
    engine = started(python, model_folder, tmp_path / "engine.log", name=name, report=lines.append)
    group = os.getpgid(engine.pid)
    generator = EngineGenerator(
        engine, tokenizer, end_ids(model, tokenizer), GREEDY, identity="tiny", concurrency=3, log_probabilities=True
    )
    assert generator.identity == f'tiny by "{name} 0.99.0"'
    assert generator.energy_gap is None
    with closing_generator(generator):
        generator.warm_up(PROMPTS)
        found = [answer for answers in generator.generate(PROMPTS) for answer in answers]
    here = TransformersGenerator(
        model, tokenizer, GREEDY, identity="tiny", batch_size=4, log_probabilities=True, cache="fixed"
    )
    expected = [answer for answers in here.generate(PROMPTS) for answer in answers]
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.ids, one.finish_reason, one.tokens) == (
            other.text, other.ids, other.finish_reason, other.tokens,
        )  # fmt: skip
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-4)
        assert one.log_probability_sum == pytest.approx(sum(one.log_probabilities))
    assert any("loading" in line for line in lines)
    assert not [process for process in psutil.process_iter() if belongs(process, group)]
    generator.close()  # a second time


def belongs(process, group):
    try:
        return os.getpgid(process.pid) == group
    except (ProcessLookupError, PermissionError):
        return False


def test_an_engine_that_ends_early_is_explained_by_its_log(tmp_path, model_folder, python):
    with pytest.raises(JoulelabError, match=r"exit code 3; .*\n(?s:.*)no kernel image is available"):
        started(python, model_folder, tmp_path / "engine.log", "--behave", "die")


@pytest.mark.slow
def test_an_engine_that_ends_while_it_generates_is_explained_by_its_log(tmp_path, model_folder, python):
    engine = started(python, model_folder, tmp_path / "engine.log", "--behave", "die-later")
    generator = EngineGenerator(engine, make_tokenizer(), (3,), GREEDY, identity="tiny", concurrency=2)
    with closing_generator(generator), pytest.raises(JoulelabError, match="illegal memory access"):
        list(generator.generate([f"w{number % 40}" for number in range(60)]))


def test_a_reset_connection_is_retried(tmp_path, model_folder, python):
    engine = started(python, model_folder, tmp_path / "engine.log", "--behave", "reset-once")
    generator = EngineGenerator(engine, make_tokenizer(), (3,), GREEDY, identity="tiny", concurrency=2)
    with closing_generator(generator):
        assert len(list(generator.generate(PROMPTS))) == len(PROMPTS)


def test_an_engine_that_is_never_ready_is_stopped_with_its_workers(tmp_path, model_folder, python):
    log = tmp_path / "engine.log"
    with pytest.raises(JoulelabError, match="was not ready after"):
        started(python, model_folder, log, "--behave", "hang", timeout_s=1.5)
    worker = int(log.read_text().split("worker ")[1].split()[0])
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_stop_request_ends_the_wait_for_an_answer(tmp_path, model_folder, python):
    engine = started(python, model_folder, tmp_path / "engine.log", "--sleep", "30")
    begin_s = time.monotonic()

    def stop():
        if time.monotonic() - begin_s > 0.5:
            raise KeyboardInterrupt

    generator = EngineGenerator(engine, make_tokenizer(), (3,), GREEDY, identity="tiny", check=stop)
    with pytest.raises(KeyboardInterrupt), closing_generator(generator):
        list(generator.generate(PROMPTS))
    assert time.monotonic() - begin_s < 15


KILLED = """
import sys, time
from pathlib import Path
from joulelab.infer.generation.engine_process import EngineInstallation, EngineProcess
installation = EngineInstallation.find("vllm", sys.argv[1], ("--behave", "hang"))
engine = EngineProcess(installation, installation.command("m", "t", 9, "float32", 64), 9, Path(sys.argv[2]))
while "worker" not in engine.log.read_text():
    time.sleep(0.05)
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_does_not_outlive_a_killed_joulelab(tmp_path, python):
    source = str(Path(__file__).parents[3] / "src")
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED, python, str(tmp_path / "engine.log")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    engine = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until_s = time.monotonic() + 20
    while psutil.pid_exists(engine) and psutil.Process(engine).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until_s
        time.sleep(0.1)
    worker = int((tmp_path / "engine.log").read_text().split("worker ")[1].split()[0])
    if psutil.pid_exists(worker):  # it left the group; vLLM's own workers end with their parent
        psutil.Process(worker).kill()


def test_an_environment_without_the_engine_is_refused(tmp_path, python):
    with pytest.raises(ConfigError, match="sglang is not installed in the environment of"):
        EngineInstallation.find("sglang", python)
    with pytest.raises(ConfigError, match="is not an executable file"):
        EngineInstallation.find("vllm", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the Python of the environment"):
        EngineInstallation.find("vllm", None)
    with pytest.raises(ConfigError, match="did not report its version of vllm") as refused:
        EngineInstallation.find("vllm", "/bin/ls")
    assert "pip install" not in refused.value.hint


@pytest.mark.parametrize(
    ("answers", "rows", "wins"),
    [(3072, 1536, False), (8, 8, False), (1, 1, False), (100, 8, False), (3072, 8, False), (100_000, 8, True)],
)
def test_vllm_is_chosen_only_where_it_was_measured_to_save_more_than_its_start(answers, rows, wins):
    """With few rows at a time and many answers, its larger batches do."""
    shape = GenerationShape(parameters=135_000_000, answers=answers, rows=rows, prompt_tokens=24, new_tokens=96)
    assert vllm_uses_less_energy(shape) is wins


@pytest.mark.parametrize(
    ("parameters", "rows", "answers", "wins"),
    [
        (1_700_000_000, 8, 500, False),  # 77 mJ less per token: 4.9 kJ, less than its start
        (1_700_000_000, 8, 1_000, True),
        (8_000_000_000, 8, 500, True),  # 4.7 times as much
        (1_700_000_000, 1, 1, False),
        (1_700_000_000, 1024, 200_000, False),
        (135_000_000, 128, 200_000, False),
    ],
)
def test_few_rows_of_long_prompts_pay_for_the_start_of_vllm_if_there_are_enough_of_them(
    parameters, rows, answers, wins
):
    shape = GenerationShape(parameters, answers=answers, rows=rows, prompt_tokens=1024, new_tokens=128)
    assert vllm_uses_less_energy(shape) is wins


def test_a_warm_up_has_batches_of_both_kinds_that_vllm_compiles_a_kernel_for(tmp_path, model_folder, python):
    sizes = []
    engine = started(python, model_folder, tmp_path / "engine.log")
    settings = GenerationSettings(do_sample=True, top_p=0.9, n=2, stop=("w1",), max_new_tokens=2)
    generator = EngineGenerator(engine, make_tokenizer(), (3,), settings, identity="tiny", concurrency=64)

    def generate(prompts):
        sizes.append((len(prompts), generator.settings.n, generator.settings.stop))
        return iter(())

    with closing_generator(generator):
        generator.generate = generate
        generator.warm_up(PROMPTS)
        generator.warm_up([])
        generator.prompts_at_once = 2
        generator.warm_up(PROMPTS)
    assert sizes[:2] == [(32, 1, ()), (23, 1, ())]
    assert [count for count, _, _ in sizes[2:]] == [0, 0, 2, 2]
    assert generator.settings == settings


def test_answers_without_seeds_have_another_identity(python):
    installation = EngineInstallation.find("vllm", python)
    assert installation.identity == "vllm 0.99.0"
    assert replace(installation, with_seeds=False).identity == "vllm 0.99.0 unseeded"


def test_the_command_passes_what_decides_the_answers(python):
    installation = EngineInstallation.find("vllm", python, ("--max-num-seqs", "512"))
    command = installation.command("folder", "tokens", 8123, "bfloat16", 320, "abc")
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options == {
        "--model": "folder", "--tokenizer": "tokens", "--max-model-len": "320", "--generation-config": "vllm",
        "--served-model-name": "teacher", "--host": "127.0.0.1", "--port": "8123", "--dtype": "bfloat16",
        "--revision": "abc", "--max-num-seqs": "512",
    }  # fmt: skip
    assert installation.identity == "vllm 0.99.0 --max-num-seqs 512"
