"""Usage errors of `train`, `zoo` and `sweep`: message, exit code 2, nothing created."""

import pytest
from commands import joulelab_here

MISTAKES = [
    (["train"], "no model was named"),
    (["train", "gtp2"], "did you mean 'gpt2'?"),
    (["train", "gpt2", "--model", "bert"], "two models were named"),
    (["train", "./nothing.py"], "there is no file"),
    (["train", "./broken.py"], "broken.py, line 2: NameError: name 'nothing' is not defined"),
    (["train", "gpt2", "--size", "tinny"], "did you mean 'tiny'?"),
    (
        ["train", "gpt2", "--batch_size", "0"],
        "--batch_size: expected a number greater than or equal to 1, found 0",
    ),
    (
        ["train", "gpt2", "--size", "tiny", "--batch_size", "8,16"],
        "joulelab sweep train gpt2 ... with the same options",
    ),
    (["train", "gpt2", "--precision", "fp32,bf16", "training.clip_norm=1,2"], "joulelab sweep train gpt2"),
    (["train", "gpt2", "--batch_size", "8,x"], "`joulelab train --help` describes the options"),
    (["train", "gpt2", "--batch_size", "8,16", "--precision", "fp9"], "`joulelab train --help` describes the options"),
    (["run", "demo-kd", "training.batch_size=8,16"], "joulelab sweep run demo-kd ... with the same options"),
    (["run", "demo-kd", "training.batch_size=8,none"], "`joulelab explain training.batch_size` describes it"),
    (["train", "gpt2", "--batch_size", "four"], "--batch_size: expected a whole number, found the text 'four'"),
    (["train", "gpt2", "--learning_rate", "-1"], "--learning_rate: expected a number greater than 0"),
    (["train", "gpt2", "--train_stats", "simpel,energy"], "did you mean 'simple'?"),
    (["train", "gpt2", "--dataset_split", "trian[:10]"], "did you mean 'train'?"),
    (["train", "gpt2", "--dataset_split", "train[:"], "is not a split"),
    (["train", "gpt2", "--dataset", "./nothing"], "there is no file or folder"),
    (["train", "gpt2", "--trainer", "fdsp"], "did you mean 'fsdp'?"),
    (["train", "gpt2", "--precision", "fp8"], "--precision: expected 'fp32', 'tf32', 'bf16', 'fp16' or 'auto'"),
    (["train", "gpt2", "--learnig_rate", "1"], "has no option --learnig_rate; did you mean --learning_rate?"),
    (["train", "gpt2", "learning_rate=1"], "did you mean training.learning_rate?"),
    (["train", "gpt2", "--set", "nonsense"], "'nonsense' is not a setting"),
    (["train", "./needy.py"], "needy needs no_such_package"),
    (["zoo", "gtp2"], "did you mean 'gpt2'?"),
    (["zoo", "gpt2", "--size", "tinny"], "did you mean 'tiny'?"),
    (["sweep"], "expected `train` or `run` to sweep, found nothing"),
    (["sweep", "trian", "gpt2"], "expected `train` or `run` to sweep, found 'trian'"),
    (["sweep", "train", "gpt2", "--batch_size", "8,8"], "--batch_size: the value 8 is given twice"),
    (
        ["sweep", "train", "gpt2", "--batch_size", "8,0"],
        "--batch_size: expected a number greater than or equal to 1",
    ),
    (["sweep", "train", "gpt2", "--seed", "1,2"], "use --repeats N"),
    (["sweep", "run", "sft-tiny", "distill.codec=hidden,rs50"], "distill.codec has no effect in this run"),
    (["train", "gpt2", "--max-time-minutes", "-1"], "--max-time-minutes: expected minutes above 0, found -1"),
    (["train", "gpt2", "--max-steps", "5", "training.max_steps=7"], "--max-steps 5 and training.max_steps=7 both set"),
    (["sweep", "train", "gpt2", "--batch_sise", "8"], "has no option --batch_sise; did you mean --batch_size?"),
    (["sweep", "train", "gpt2", "--repeats", "0"], "expected at least 1"),
    (["sweep", "run", "demo", "seed=1"], "demo is a group already"),
    (["sweep", "--resume", "nothing"], "no runs under"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_usage_errors_exit_with_2_and_create_nothing(tmp_path, words, message):
    (tmp_path / "broken.py").write_text("x = 1\ny = nothing\n")
    (tmp_path / "needy.py").write_text(
        "from joulelab.zoo.registry import Size, ZooEntry\n"
        "SIZES = {'tiny': Size(1, {}, {}, 1)}\n"
        "MODEL = ZooEntry('needy', 'f', 't', 'i', 'a', SIZES, 'x:y', needs=('no_such_package',))\n"
    )
    store = [] if words[0] == "zoo" else ["--runs-dir", tmp_path / "runs"]
    done = joulelab_here(*words, *store, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["train", "zoo", "sweep"])
def test_the_help_teaches_by_examples(verb):
    done = joulelab_here(verb, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout


def test_a_sweep_takes_several_models(tmp_path):
    words = ("sweep", "train", "gpt2", "model=gpt2,bert", "--size", "tiny", "--dry-run")
    done = joulelab_here(*words, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["model=gpt2, seed 0", "model=bert, seed 0"]
