"""`joulelab infer A B C`: one table, each model in its own process; mistakes are refused before the first joule."""

import json
from pathlib import Path

import pytest
from commands import joulelab_here

MODEL = Path(__file__).with_name("perceptron.py").read_text()
QUICK = ["--min-run-time", "0.05", "--estimate-cpu", "energy.idle_before_s=0", "energy.idle_after_s=0", "rounds=1"]
# fails while the model is prepared, which no check can know
BROKEN = MODEL + "\nimport dataclasses\n\n\ndef fail(request):\n    raise RuntimeError('no luck')\n"
BROKEN += "\n\nMODEL = dataclasses.replace(MODEL, prepare=fail)\n"


@pytest.mark.slow
def test_three_models_in_one_table_where_one_fails_and_the_others_are_measured(tmp_path):
    for name, text in (("one", MODEL), ("two", BROKEN), ("three", MODEL)):
        (tmp_path / f"{name}.py").write_text(text)
    store = tmp_path / "runs"
    done = joulelab_here(
        "infer", "./one.py", "./two.py", "./three.py", *QUICK, "--json", "--runs-dir", store, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "1 of 3 models failed: ./two.py" in done.stderr
    found = json.loads(done.stdout)
    assert [(one["model"], one["status"]) for one in found["models"]] == [
        ("./one.py", "done"),
        ("./two.py", "failed"),
        ("./three.py", "done"),
    ]
    assert "no luck" in found["models"][1]["error"]
    assert found["models"][0]["rows"][0]["energy"]["gross_j"] > 0
    shown = joulelab_here("show", found["group"], "--runs-dir", store, cwd=tmp_path)
    heading = next(line for line in shown.stdout.splitlines() if "Model" in line)
    assert heading.split()[:3] == ["Model", "gross", "ms"]
    assert ("failed: " in shown.stdout or "table 'Not measured'" in shown.stdout) and "./three.py" in shown.stdout
    compared = joulelab_here("compare", found["group"], "--runs-dir", store, cwd=tmp_path)
    assert (compared.returncode, compared.stdout) == (0, shown.stdout), compared.stderr
    refused = joulelab_here("compare", found["group"], "--format", "markdown", "--runs-dir", store, cwd=tmp_path)
    assert refused.returncode == 2 and "several models" in refused.stderr and "joulelab show" in refused.stderr
    one = joulelab_here("show", found["models"][0]["run_id"], "-q", "--runs-dir", store, cwd=tmp_path).stdout
    assert " per row, estimated; median latency " in one and one.index(" per row") < one.index("whole run: ")
    page = (store / "groups" / found["group"] / "report.html").read_text()
    assert "Inference of models" in page and "Lowest energy per row" in page


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["./one.py", "./gone.py", "nosuch"], ["2 problems were found", "there is no file", "unknown model 'nosuch'"]),
        (["./one.py", "./one.py"], ["./one.py was named twice"]),
        (["./one.py", "--batch-size", "0"], ["--batch-size: expected a number greater than or equal to 1"]),
        (["./one.py", "--sort", "energy"], ["--sort orders several models"]),
        (["./one.py", "deit-t", "--sort", "size"], ["--sort size: expected energy or latency"]),
        (["deit-t", "--batch-size", "99999999"], ["deit-t with batch size 99999999 needs at least", "is free"]),
        (["deit-t", "deit-s", "--batch-size", "99999999"], ["deit-t with batch", "deit-s with batch"]),
        (["smollm2", "--prompts", "gone.txt"], ["there is no prompt file"]),
        (["smollm2", "--prompts", "empty.txt"], ["empty.txt has no prompts"]),
        (["smollm2", "--prompts", "binary.txt"], ["is not UTF-8 text"]),
        (["smollm2", "--prompts", "q.txt", "--prompt-tokens", "9"], ["--prompt-tokens has no effect with --prompts"]),
        (["deit-t", "--new-tokens", "9"], ["--new-tokens applies to generated text", "add --generate"]),
        (["smollm2", "--generate", "--seq-length", "9"], ["--seq-length has no effect on generated text"]),
        (["smollm2", "--generate", "--norm", "none"], ["--norm has no effect on generated text"]),
        (["deit-t", "--latency-ms", "9"], ["--latency-ms applies to a power log"]),
        (["deit-t", "--distilled-by", "x"], ["--distilled-by applies to a comparison"]),
        (["--from-log", "q.txt", "--batch-size", "8"], ["--batch-size has no effect with --from-log"]),
        (["--from-log", "q.txt", "deit-t"], ["a model or setting has no effect with --from-log"]),
        (["x", "--against", "y", "--generate"], ["--generate has no effect with --against"]),
        (["--generate"], ["no model was named"]),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once_and_leaves_no_run(tmp_path, words, error):
    (tmp_path / "one.py").write_text(MODEL)
    (tmp_path / "q.txt").write_text("one")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\x89PNG\xff\xfe")
    done = joulelab_here("infer", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    for text in error:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
