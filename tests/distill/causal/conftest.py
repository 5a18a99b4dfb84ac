"""Short runs of the language-model pipelines on one teacher and one set of conversations."""

import sys
from pathlib import Path

import pytest
from tiny_llama import write_chats, write_teacher

from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check, merge

sys.path.append(str(Path(__file__).parents[2] / "infer" / "generation"))  # its small OpenAI server
ANSWER = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0, "n": 2}


class Listening(SilentProgress):
    def __init__(self):
        self.messages = []

    def write(self, text):
        self.messages.append(text)


class Lab:
    """Runs pipelines on the same data and teacher; every test has a store of its own unless it names one."""

    def __init__(self, folder):
        self.teacher = write_teacher(folder / "teacher")
        self.chats = write_chats(folder / "chats.jsonl")
        self.listening = Listening()

    def settings(self, pipeline, **changes):
        plain = {
            "pipeline": pipeline,
            "name": "tiny",
            "seed": 1,
            "data": {"source": str(self.chats), "held_out": 16, "max_tokens": 32, "row_length": 64},
            "teacher": {"model": str(self.teacher), "batch_size": 4},
            "student": {"size": "nano"},
            "budget": {"tokens": 2400},
            "training": {"batch_size": 4, "learning_rate": 1e-2, "log_every_steps": 2},
            "generation": {
                "prompts": 12,
                "batch_size": 4,
                "answer": {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0, "n": 2},
            },
            "chunk": 64,
            "eval_batch_size": 4,
            "energy": {"estimate_cpu": True, "sample_interval_s": 0.1},
        }
        return merge(plain, changes)

    def paths(self, store, pipeline, **changes):
        return create_run(store, check(self.settings(pipeline, **changes)))

    def run(self, store, pipeline, **changes):
        paths = self.paths(store, pipeline, **changes)
        return execute(paths, self.listening), paths


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="session")
def finished(lab, tmp_path_factory):
    """All six pipelines in one store, in the order of a comparison: later ones find what earlier ones made."""
    store = tmp_path_factory.mktemp("runs")
    evaluations = {"training": {"evaluate_every_steps": 4}}
    own = {
        "synthetic": {"generation": {"held_out": 0.3}},
        "on-policy": {"on_policy": {"sync_every": 2}, "generation": {"prompt_tokens": 18}},
    }
    names = ("sft", "kd", "synthetic", "dpo", "on-policy", "self")
    return {name: lab.run(store, name, label=name, **evaluations, **own.get(name, {})) for name in names}
