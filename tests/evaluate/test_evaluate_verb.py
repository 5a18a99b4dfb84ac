"""`joulelab evaluate`: a metered run for any language model, a stage for each task, items kept for paired tests."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distill" / "causal"))  # for tiny_llama.py
from tiny_llama import WORDS, make_model, make_tokenizer, write_teacher

from joulelab import lookup
from joulelab.evaluate import evaluate_pipeline, harness, judged_answers
from joulelab.evaluate.config import EvaluateSpec
from joulelab.meter.figures import EnergyFigure
from joulelab.runs.store import load_record

METER = ["--estimate-cpu", "energy.gpus=none", "energy.sample_interval_s=0.1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model that can count, one with random weights, and questions about counting."""
    folder = tmp_path_factory.mktemp("models")
    write_teacher(folder / "counts")
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    rows = [
        {
            "prompt": " ".join(WORDS[(start + k) % 24] for k in range(3)),
            "answer": WORDS[(start + 3) % 24],
            "choices": [WORDS[(start + 3) % 24], WORDS[(start + 11) % 24]],
        }
        for start in range(24)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def runs(tmp_path):
    return [load_record(path.parent) for path in sorted((tmp_path / "store").glob("*/run.json"))]


def test_questions_are_a_metered_stage_with_items_and_the_chat_template(models, joulelab, tmp_path):
    code, _, err = joulelab("evaluate", models / "counts", "--data", models / "questions.jsonl", *METER)
    assert code == 0, err
    (record,) = runs(tmp_path)
    stage = record.stage("evaluate.data")
    assert (stage.role, stage.activity, stage.samples) == ("evaluation", "evaluate", 24)
    assert stage.best.energy_j is not None and stage.tokens > 0
    result = record.results["model.exact_answers"]
    assert (result.trials, result.value) == (24, result.successes / 24)
    kept = json.loads((tmp_path / "store" / record.run_id / "artifacts/model-quality/answers.json").read_text())
    assert len(kept["items"]) == 24 and kept["chance"] == 0.5
    assert sum(item["given"] == item["expected"] for item in kept["items"]) == result.successes
    assert kept["items"][0]["prompt"][0]["role"] == "user"
    assert any("chat template (SHA-256" in note.text for note in record.validity.notes)


def test_two_models_are_compared_item_by_item(models, joulelab, tmp_path):
    for name in ("counts", "random"):
        words = ["--data", models / "questions.jsonl", "--chat-template", "off"]
        assert joulelab("evaluate", models / name, *words, *METER)[0] == 0
    records = {record.label: record for record in runs(tmp_path)}
    assert (
        records["counts"].results["model.exact_answers"].value > records["random"].results["model.exact_answers"].value
    )
    code, out, err = joulelab("compare", "evaluate-random*", "evaluate-counts*", "-v")
    assert code == 0, err
    assert "exact answers" in out


def test_an_evaluation_is_measured_in_every_run_and_verifies(models, joulelab, tmp_path):
    words = ["evaluate", models / "random", "--data", models / "questions.jsonl", "--limit", 4, *METER]
    assert joulelab(*words)[0] == joulelab(*words)[0] == 0
    assert [record.stage("evaluate.data").samples for record in runs(tmp_path)] == [4, 4]
    code, _, err = joulelab("pack", "last", "--out", tmp_path / "x.tar.gz")
    assert code == 0, err
    code, out, err = joulelab("unpack", "--verify", tmp_path / "x.tar.gz")
    assert code == 0, out + err


def test_each_harness_task_is_a_stage(models, joulelab, tmp_path, monkeypatch):
    asked = []

    def simple_evaluate(**how):
        asked.append((how["tasks"], how["apply_chat_template"], how["limit"]))
        (task,) = how["tasks"]
        samples = [{"doc_id": k, "filter": "none", "acc": float(k % 2)} for k in range(4)]
        return {
            "results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.29}},
            "n-samples": {task: {"effective": 4}},
            "higher_is_better": {task: {"acc": True}},
            "samples": {task: samples},
        }

    kinds = {"manager": lambda **how: SimpleNamespace(all_tasks=["one", "two"]), "model": lambda **how: None}
    found = lambda: (SimpleNamespace(simple_evaluate=simple_evaluate), kinds)  # noqa: E731
    monkeypatch.setattr(harness, "import_harness", found)
    monkeypatch.setattr(evaluate_pipeline, "import_harness", found)
    monkeypatch.setattr("joulelab.evaluate.config.EvaluateSpec.require_packages", lambda self: None)
    code, _, err = joulelab("evaluate", models / "random", "--tasks", "one,two", "--limit", 4, *METER)
    assert code == 0, err
    assert asked == [(["one"], True, 4), (["two"], True, 4)]
    (record,) = runs(tmp_path)
    assert [stage.name for stage in record.stages if stage.role == "evaluation"] == ["evaluate.one", "evaluate.two"]
    result = record.results["model.harness.two.acc.value"]
    assert (result.value, result.standard_error, result.trials, result.successes) == (0.5, 0.29, 4, 2)


@pytest.mark.parametrize(
    ("precision", "capability", "expected"),
    [
        ("auto", (9, 0), "bf16"),
        ("auto", (7, 5), "fp32"),  # a T4, on which bf16 is emulated
        ("auto", None, "fp32"),
        ("fp32", (9, 0), "fp32"),
        ("fp16", (7, 5), "fp16"),
        ("nf4", (9, 0), "nf4"),
    ],
)
def test_a_gpu_with_bf16_tensor_cores_evaluates_in_bf16_unless_another_precision_is_named(
    models, monkeypatch, precision, capability, expected
):
    driver = SimpleNamespace(nvmlDeviceGetCudaComputeCapability=lambda handle: capability, NVMLError=RuntimeError)
    monkeypatch.setattr("joulelab.runs.environment.opened_cards", lambda: nullcontext((driver, {"card": 0})))
    monkeypatch.setattr("joulelab.runs.environment.uses_gpu", lambda device: capability is not None)
    spec = EvaluateSpec(model=str(models / "random"), data="sample:reviews", precision=precision)
    assert spec.precision_here == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate"),
        (["--data", "nowhere.jsonl"], "is not a file"),
        (["--task-folder", "."], "nothing to evaluate"),
        (["--data", "bad.jsonl"], "bad.jsonl"),
        (["--data", "questions.jsonl", "--precision", "int3"], "precision"),
        (["--data", "questions.jsonl", "--max-new-tokens", "100000"], "100000 new ones do not fit into the model's"),
        (["--data", "questions.jsonl", "rubric=hello"], "rubric has no effect without judge"),
        (["--data", "questions.jsonl", "--grader", "math-verify", "--judge", "sample:smollm2"], "grader has no effect"),
        (["--data", "bench.jsonl", "--judge", "nosuch"], "unknown model 'nosuch'"),
        (["--data", "bench.jsonl", "--judge", "x", "--judge-server", "http://127.0.0.1:9/v1"], "no server answers"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(models, joulelab, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"question": "no prompt"}\n')
    Path("questions.jsonl").write_text('{"prompt": "w1", "answer": "w2"}\n')
    Path("bench.jsonl").write_text('{"prompt": "w1"}\n')
    code, out, err = joulelab("evaluate", models / "random", *words, *METER)
    assert code == 2, out + err
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "store").exists()


def _cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])


def _change_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut_weights, "model.safetensors is corrupted"),
        (lambda folder: (folder / "config.json").write_text("{bad"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (_change_config(model_type="nosuch"), "model type `nosuch`"),
        (_change_config(architectures=["BertModel"]), "is not a causal language model (BertModel)"),
    ],
)
@pytest.mark.parametrize("role", ["model", "judge"])
def test_a_model_that_cannot_be_evaluated_is_refused_without_a_run(models, joulelab, tmp_path, spoil, message, role):
    spoiled = shutil.copytree(models / "random", tmp_path / "spoiled")
    spoil(spoiled)
    (tmp_path / "bench.jsonl").write_text('{"prompt": "w1"}\n')
    model, judge = (spoiled, models / "counts") if role == "model" else (models / "counts", spoiled)
    code, _, err = joulelab("evaluate", model, "--data", tmp_path / "bench.jsonl", "--judge", judge, *METER)
    assert code == 2 and message in err and "problems were found" not in err, err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "has no config.json"),
        ("log.csv", "is not a model"),
        ("nosuch", "unknown model 'nosuch'; known: sample:minilm, sample:smollm2\n"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_starts(joulelab, tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.csv").write_text("a,b\n")
    path = name if name == "nosuch" else tmp_path / name
    code, _, err = joulelab("evaluate", path, "--data", "sample:reviews", "--runs-dir", tmp_path / "runs")
    assert code == 2 and message in err and "problems were found" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.samples
def test_an_encoder_is_not_evaluated_with_a_random_head(joulelab, tmp_path):
    code, _, err = joulelab("evaluate", "sample:minilm", "--data", "sample:reviews", *METER)
    assert code == 2 and "sample:minilm is not a causal language model (BertModel)" in err, err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("words", [["--tasks", "gsm8k"], ["--data", "nofile.jsonl"]])
def test_a_problem_that_two_checks_find_is_reported_once(models, joulelab, words):
    if words[0] == "--tasks" and not lookup.absent_packages("lm_eval"):
        pytest.skip("lm_eval is installed")
    code, _, err = joulelab("evaluate", models / "random", *words, *METER)
    assert code == 2 and "problems were found" not in err, err


def test_a_quantized_model_is_evaluated(models, joulelab, tmp_path):
    pytest.importorskip("bitsandbytes")
    tokenizer = make_tokenizer()
    make_model(tokenizer, width=64).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    words = ("--data", models / "questions.jsonl", "--precision", "nf4")
    code, _, err = joulelab("evaluate", tmp_path / "wide", *words, *METER)
    assert code == 0, err
    (record,) = runs(tmp_path)
    assert record.results["model.exact_answers"].trials == 24
    assert record.stage("evaluate.data").best.energy_j is not None


def test_a_format_for_gpus_is_refused_on_a_cpu(models, joulelab, tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.lookup.absent_packages", lambda *names: [])
    words = ("--data", models / "questions.jsonl", "--precision", "int4", "--device", "cpu")
    code, _, err = joulelab("evaluate", models / "counts", *words)
    assert code == 2 and "int4 weights need an NVIDIA GPU" in err and not runs(tmp_path)


@pytest.fixture
def scripted_judge(monkeypatch):
    """A judge that says what it is told to; everything else is the product's."""
    from joulelab.evaluate import judged_answers
    from joulelab.infer.generation.completions import Completion

    class Scripted:
        def __init__(self, *replies):
            self.replies, self.prompts = list(replies), []

        def generate(self, prompts):
            self.prompts += prompts
            for _ in prompts:
                yield [Completion(self.replies.pop(0), (), "stop", 1)]

    def install(*replies):
        judge = Scripted(*replies)
        monkeypatch.setattr(judged_answers, "_load_judge", lambda run, spec, device: (judge, True))
        return judge

    return install


def test_a_judge_grades_every_turn_as_in_mt_bench(models, joulelab, tmp_path, scripted_judge):
    judge = scripted_judge("7", "Rating: 9", "no idea", "3")
    rows = [{"question_id": 1, "turns": ["w1 w2", "w5 w6"]}, {"question_id": 2, "turns": ["w3", "w4"]}]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", tmp_path / "bench.jsonl", "--judge", models / "random", "--max-new-tokens", 4]
    code, _, err = joulelab("evaluate", models / "counts", *words, *METER)
    assert code == 0, err
    (record,) = runs(tmp_path)
    stages = {stage.name: stage.activity for stage in record.stages if stage.role == "evaluation"}
    assert stages == {"evaluate.answers": "generate", "evaluate.judge": "judge"}
    assert next(iter(record.results)) == "model.judge.grade", "the first result is the headline"
    grade = record.results["model.judge.grade"]
    assert (grade.value, grade.standard_error) == (pytest.approx(5.5), pytest.approx(2.5)), "8 and 3, item by item"
    assert any("mean of 2 of 2 items" in note.text for note in record.validity.notes)
    assert record.results["model.judge.unjudged"].value == 1
    kept = json.loads((tmp_path / "store" / record.run_id / "artifacts/model-quality/judged.json").read_text())
    assert [item["verdicts"] for item in kept["items"]] == [[7.0, 9.0], [None, 3.0]]
    second = judge.prompts[1][0]["content"]
    assert "w1 w2" in second and kept["items"][0]["given"][0] in second, "the judge reads the conversation so far"


def test_a_judge_compares_with_references_in_both_orders_as_in_alpaca_eval(models, joulelab, tmp_path, scripted_judge):
    scripted_judge("A", "B", "A", "A", "B", "A")  # wins in both orders, depends on the order, loses in both
    rows = [{"instruction": f"w{k} w{k + 1}", "output": "w9"} for k in range(3)]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", tmp_path / "bench.jsonl", "--judge", models / "random", "--max-new-tokens", 4]
    code, _, err = joulelab("evaluate", models / "counts", *words, *METER)
    assert code == 0, err
    (record,) = runs(tmp_path)
    kept = json.loads((tmp_path / "store" / record.run_id / "artifacts/model-quality/judged.json").read_text())
    assert [item["verdicts"] for item in kept["items"]] == [[1.0], [0.5], [0.0]]
    assert record.results["model.judge.win_rate"].value == 0.5


def test_a_local_judge_without_a_verdict_is_reported_not_guessed(models, joulelab, tmp_path):
    (tmp_path / "bench.jsonl").write_text(json.dumps({"prompt": "w1 w2"}) + "\n")
    words = ["--data", tmp_path / "bench.jsonl", "--judge", models / "random", "--max-new-tokens", 4]
    code, _, err = joulelab("evaluate", models / "counts", *words, *METER)
    assert code == 0, err
    (record,) = runs(tmp_path)
    assert record.results["model.judge.unjudged"].value == 1 and "model.judge.grade" not in record.results


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1}], "no prompt"),
        ([{"prompt": "a", "reference": "b"}, {"prompt": "c"}], "1 of 2 rows have a reference"),
        ([{"turns": ["a", "b"], "reference": "c"}], "several turns"),
    ],
)
def test_files_that_cannot_be_judged_are_refused_without_a_run(models, joulelab, tmp_path, rows, message):
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data", tmp_path / "bench.jsonl", "--judge", models / "random"]
    code, _, err = joulelab("evaluate", models / "counts", *words, *METER)
    assert code == 2 and message in err, err
    assert not runs(tmp_path)


def test_math_answers_are_compared_as_expressions():
    pytest.importorskip("math_verify")
    from joulelab.evaluate.exact_answers import same_answer, same_expression

    assert same_expression(r"We get $x = 2$, so the result is $\boxed{\frac{1}{2}}$.", "0.5")
    assert same_expression(r"The answer is \boxed{\{2, 1\}}", r"\{1, 2\}")
    assert not same_expression(r"\boxed{\frac{1}{3}}", "0.5")
    assert not same_answer(r"\boxed{\frac{1}{2}}", "0.5"), "what the plain comparison cannot see"


@pytest.mark.parametrize(("method", "unmetered"), [("counter", 0), ("estimated", 1)])
def test_a_judge_on_a_server_is_unmetered_where_only_cpu_time_is_estimated(monkeypatch, method, unmetered):
    """An estimate is made from the CPU time of this program."""
    server = SimpleNamespace(energy_gap=None, identity="judge at a server")
    monkeypatch.setattr(judged_answers, "ServerGenerator", lambda *settings, **more: server)
    found, calls = {"cpu": EnergyFigure(energy_j=1.0, method=method)}, []
    run = SimpleNamespace(
        meter=SimpleNamespace(so_far=lambda: found),
        warn=calls.append, unmetered_work=lambda stage, name, gap: calls.append((stage, name)),
    )  # fmt: skip
    spec = SimpleNamespace(judge_server="http://127.0.0.1:9/v1", judge="m", energy=SimpleNamespace(gpus="all"))
    judged_answers._load_judge(run, spec, None)
    assert calls[1:] == [("evaluate.judge", "judge at a server")] * unmetered and len(calls) == 2 * unmetered
