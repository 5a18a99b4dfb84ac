"""Where preference training gets its parts from: pairs of a dataset, an existing SFT student, a separate judge."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from openai_server import serving
from tiny_llama import WORDS, conversation, make_model, make_tokenizer

from joulelab.distill.preferences.pairs import PairStore
from joulelab.errors import ConfigError
from joulelab.infer.generation.server import ServerGenerator
from joulelab.report.export import bill_data
from joulelab.report.tables.bill_tables import run_bill, sentences
from joulelab.runs.spec import check


def write_preferences(file, rows=140):
    """TRL's preference type with a prompt: the better answer counts on, the worse one repeats a word."""
    lines = []
    for row in range(rows):
        question, answer = conversation(row)
        worse = {"role": "assistant", "content": " ".join([WORDS[row % len(WORDS)]] * (2 + row % 5))}
        lines.append({"prompt": [question], "chosen": [answer], "rejected": [worse]})
    lines[0]["rejected"] = [{"role": "assistant", "content": ""}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_pairs_of_a_dataset_train_an_existing_policy_without_any_teacher(lab, finished, tmp_path):
    _, paths = finished["sft"]
    policy = paths.artifacts / "final_model"
    record, made = lab.run(
        paths.folder.parent, "dpo", label="own pairs", start="none",
        data={"source": str(write_preferences(tmp_path / "prefs.jsonl"))},
        student={"size": None, "model": str(policy)},
        preferences={"candidates_from": "data", "min_tokens": 2},
    )  # fmt: skip
    assert record.status == "done", record.error
    names = [stage.name for stage in record.stages if stage.is_method_work]
    assert names == [
        "data.preprocess", "data.preferences", "student.reference", "student.train", "student.evaluate",
        "student.start-evaluate", "student.preferences-evaluate",
    ]  # fmt: skip
    assert {one.name for one in record.inherited} >= {"final_model"}, "the policy's own training is on the bill"
    assert record.results["budget.start_tokens"].value == 0
    folder = made.artifacts / "preferences"
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if row["split"] == "held_out"]
    assert len(held_out) == len(PairStore.open(folder / "held_out")) == record.results["preferences.held_out"].value
    assert all(row["chosen"][0]["content"] and row["rejected"][0]["content"] for row in rows)
    assert "score_chosen" not in rows[0], "the data states no scores"
    accuracy = record.results["student.preference_accuracy"]
    assert accuracy.trials == len(held_out) and accuracy.value > 0.8, accuracy
    assert record.results["student.preference_margin"].value > 0


def test_a_judge_of_its_own_scores_the_answers_and_is_on_the_bill(lab, finished, tmp_path):
    judge = tmp_path / "judge"
    tokenizer = make_tokenizer()
    make_model(tokenizer, width=32, seed=5).save_pretrained(judge)
    tokenizer.save_pretrained(judge)
    store = finished["dpo"][1].folder.parent
    record, paths = lab.run(store, "dpo", until="preferences", preferences={"judge": {"model": str(judge)}})
    assert record.status == "done", record.error
    assert str(judge) in {one.name for one in record.inherited}
    own, other = (
        (found.artifacts / "preferences" / "pairs.jsonl").read_text().splitlines()
        for found in (paths, finished["dpo"][1])
    )
    scores = [
        {json.dumps(row["prompt"]): row["score_chosen"] for row in map(json.loads, some)} for some in (own, other)
    ]
    shared = scores[0].keys() & scores[1].keys()
    assert shared and all(scores[0][key] != scores[1][key] for key in shared), "another model, other likelihoods"


@pytest.mark.slow
def test_a_server_judges_by_comparisons(lab, finished, tmp_path):
    store = finished["dpo"][1].folder.parent
    # the counting model never says A or B: no answer is judged, and that is stated instead of guessed
    with serving(lab.teacher) as (address, _), pytest.raises(ConfigError, match="unjudged 12"):
        judge = {"kind": "pairwise", "server": address, "model": "tiny"}
        lab.run(store, "dpo", until="preferences", preferences={"judge": judge})


@contextmanager
def grading_server():
    """A server of the OpenAI protocol whose grade depends on the length of what it reads; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "grader"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
            grade = str(1 + len(json.dumps(body.get("messages", body.get("prompt")))) % 5)
            choice |= {"message": {"role": "assistant", "content": grade}, "text": grade}
            self.reply({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})

        def reply(self, value):
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_the_work_of_a_judge_on_another_machine_is_noted_as_not_metered(lab, finished, monkeypatch):
    monkeypatch.setattr(ServerGenerator, "energy_gap", property(lambda self: "it runs on another node"))
    store = finished["dpo"][1].folder.parent
    with grading_server() as address:
        judge = {"kind": "rubric", "server": address, "model": "grader"}
        record, _ = lab.run(store, "dpo", until="preferences", preferences={"judge": judge})
        assert record.results["preferences.pairs"].value > 0
        assert "warning: teacher.judge: it runs on another node" in lab.listening.messages
        judged = record.stage("teacher.judge")
        assert judged.samples > 0 and judged.j_per_sample is None, "the energy is that of the client"
        bill = run_bill(record)
        (unseen,) = (line for line in bill.inherited if line.name.startswith("teacher.judge on "))
        assert address in unseen.name and unseen.figure.energy_j is None
        assert bill_data(bill, None)["lower_bound"]
        assert "not metered: teacher.judge" in " ".join(sentences(bill))
        # a run that reuses the judgments inherits the note, and a budget that counts the teacher needs its energy
        again, _ = lab.run(store, "dpo", until="preferences", preferences={"judge": judge}, label="again")
        assert again.stage("teacher.judge") is None
        assert any(line.name.startswith("teacher.judge on ") for line in run_bill(again).inherited)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": "dpo", "start": "none"}, "student.model is not set"),
        ({"pipeline": "kd", "start": "none"}, "trains no SFT student"),
        ({"pipeline": "dpo", "preferences": {"judge": {"server": "http://x/v1"}}}, "does not ask for text"),
        ({"pipeline": "dpo", "preferences": {"judge": {"kind": "rule", "model": "m"}}}, "uses no model"),
        ({"pipeline": "dpo", "preferences": {"judge": "rubrik"}}, "rubrik"),
        ({"pipeline": "dpo", "preferences": {"judge": "rule", "keep_truncated": False}}, "rule=ends"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(lab, changes, message):
    changes = dict(changes)
    with pytest.raises(ConfigError, match=message):
        check(lab.settings(changes.pop("pipeline"), **changes))


def test_rows_without_pairs_are_refused_before_the_first_stage(lab, tmp_path):
    with pytest.raises(ConfigError, match="no preference pairs"):
        lab.run(tmp_path, "dpo", preferences={"candidates_from": "data"})
