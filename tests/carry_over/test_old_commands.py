"""The commands of the five documents, typed as written: `joulelab compat` prints the command, and it works."""

import json
import pickle
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "data"))  # for small_tokenizers.py
import small_tokenizers

from joulelab.cli.compat import SCRIPTS, find_script, translate
from joulelab.data.token_store import open_store
from joulelab.data.tokenize import read_token_pickle
from joulelab.errors import ConfigError, UsageError
from joulelab.runs.spec import check, load_spec, parse_overrides


@pytest.fixture
def old(joulelab):
    """Type an old command; the new one, as words without `joulelab`."""

    def call(command):
        code, out, err = joulelab("compat", *shlex.split(command.replace("\\\n", " ")))
        assert code == 0, err
        words = shlex.split(out.strip())
        assert words[0] == "joulelab"
        return words[1:]

    return call


@pytest.fixture
def bert_here():
    """A small BERT in the folder `bert-base-uncased` of the current directory, texts, and a student's configuration."""
    import torch
    import transformers

    tokenizer = small_tokenizers.bert()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained("bert-base-uncased")
    tokenizer.save_pretrained("bert-base-uncased")
    Path("data").mkdir()
    lines = [f"{text} {number}" for number, text in enumerate(small_tokenizers.SENTENCES * 40)]
    Path("data/dump.txt").write_text("\n".join(lines) + "\n")
    Path("training_configs").mkdir()
    student = {"vocab_size": len(tokenizer), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    Path("training_configs/distilbert-base-uncased.json").write_text(json.dumps(student))
    return len(tokenizer)


def test_document_000_from_the_dump_to_the_distillation(old, joulelab, bert_here):
    binarize = old(
        """python scripts/binarized_data.py \\
        --file_path data/dump.txt \\
        --tokenizer_type bert \\
        --tokenizer_name bert-base-uncased \\
        --dump_file data/binarized_text"""
    )
    assert joulelab(*binarize)[0] == 0
    count = old(
        f"""python scripts/token_counts.py \\
        --data_file data/binarized_text.bert-base-uncased.pickle \\
        --token_counts_dump data/token_counts.bert-base-uncased.pickle \\
        --vocab_size {bert_here}"""
    )
    assert joulelab(*count)[0] == 0
    train = old(
        """python train.py \\
      --student_type distilbert \\
      --student_config training_configs/distilbert-base-uncased.json \\
      --teacher_type bert \\
      --teacher_name bert-base-uncased \\
      --mlm \\
      --alpha_ce 0.5 \\
      --alpha_mlm 0.5 \\
      --alpha_clm 0.0 \\
      --mlm_mask_prop 0.15 \\
      --batch_size 5 \\
      --n_epoch 3 \\
      --data_file data/binarized_text.bert-base-uncased.pickle \\
      --token_counts data/token_counts.bert-base-uncased.pickle \\
      --dump_path serialization_dir/exp_1 \\
      --force"""
    )
    assert train[:2] == ["run", "distilbert-seed"]
    code, out, err = joulelab(*train, "data.validation_size=20", "--dry-run", "--json")
    assert code == 0, err
    settings = json.loads(out)
    settings = settings.get("settings", settings)
    assert settings["student"]["config"] == "training_configs/distilbert-base-uncased.json"
    assert settings["student"]["size"] is None
    assert (settings["training"]["batch_size"], settings["training"]["epochs"]) == (5, 3)


def test_document_000_extract_makes_a_folder_without_pth(old, joulelab, bert_here):
    words = old(
        "python scripts/extract_distilbert.py --model_name bert-base-uncased --dump_checkpoint data/student.pth"
    )
    assert joulelab(*words, "--layers", "0,2")[0] == 0
    assert Path("data/student/config.json").is_file()
    assert not Path("data/student.pth").exists()


def test_document_000_question_answering(old):
    words = old(
        """python run_squad_w_distillation.py --model_type distilbert --model_name_or_path distilbert-base-uncased
        --teacher_type bert --teacher_name_or_path bert-base-uncased --do_train --do_eval --do_lower_case
        --train_file train-v1.1.json --predict_file dev-v1.1.json --per_gpu_train_batch_size 12 --learning_rate 3e-5
        --num_train_epochs 2 --warmup_steps 100 --max_seq_length 384 --doc_stride 128
        --output_dir out""".replace("\n", " ")
    )
    assert words[:2] == ["run", "squad"] and words[words.index("--run-dir") + 1] == "out"
    files = ("data.train_file", "data.validation_file")  # files, which are checked elsewhere
    spec = load_spec("squad", parse_overrides(word for word in words if "=" in word and not word.startswith(files)))
    assert (spec.training.warmup_steps, spec.training.batch_size, spec.data.doc_stride) == (100, 12, 128)


def test_document_000_monitor_and_dump(old):
    assert old("python monitor.py --gpu 0 --interval 5 --log_path logs/power_log.jsonl --pid 7") == shlex.split(
        "monitor --gpu 0 --interval 5 --log_path logs/power_log.jsonl --pid 7"
    )
    assert old("python generate_dataset.py")[:2] == ["prepare", "dump"]


def test_document_001_loader_and_distillation(old, joulelab, bert_here):
    rows = ['"2","Great","I loved this film and the music"', '"1","Bad","I hated this film and the sound"'] * 40
    lines = [row.replace("film", f"film {number}") for number, row in enumerate(rows)]
    Path("amazon_polarity").mkdir()
    Path("amazon_polarity/train.csv").write_text("\n".join(lines) + "\n")  # as published: no header, labels 1 and 2
    Path("amazon_polarity/test.csv").write_text("\n".join(lines[:20]).replace("film", "book") + "\n")
    loader = old(
        """python dataset/amazon_polarity_loader.py \\
      --model-name bert-base-uncased \\
      --dataset ./amazon_polarity \\
      --batch-size 32 \\
      --max-length 256 \\
      --out-dir data/amazon_polarity_tok --save-format pt"""
    )
    code, _, err = joulelab(*loader)
    assert code == 0, err
    import torch

    made = torch.load("data/amazon_polarity_tok/train.pt", weights_only=True)
    assert made["class_names"] == ["negative", "positive"]
    assert made["labels"].sum() == 40 or len(made["labels"]) < 80  # a validation split may be held out
    assert made["input_ids"].shape == made["attention_mask"].shape
    test = torch.load("data/amazon_polarity_tok/test.pt", weights_only=True)
    assert len(test["labels"]) == 20
    train = old(
        """srun -u python run_amazon_polarity_feature_kd.py   --data-dir data/tok   --output-dir out
        --teacher-name bert-base-uncased   --student-name distilbert-base-uncased   --batch-size 32 --num-workers 4
        --epochs 3   --kd-T 2.0 --kd-alpha 0.5   --feat-beta 1.0 --t-layer -2 --s-layer -2   --feat-pool cls
        --feat-normalize   --telemetry-every 50""".replace("\n", " ")
    )
    assert train[:2] == ["run", "fitnets-amazon"]
    spec = load_spec("fitnets-amazon", parse_overrides(word for word in train[2:] if "=" in word))
    assert (spec.distill.temperature, spec.distill.alpha, spec.distill.feat_beta) == (2.0, 0.5, 1.0)
    assert (spec.distill.t_layer, spec.distill.s_layer, spec.distill.feat_pool) == (-2, -2, "cls")
    assert spec.distill.kd_T2, "the original multiplies by T^2"
    assert train[train.index("--run-dir") + 1] == "out"


@pytest.mark.parametrize(("name", "text"), [("a.csv", "body,label\nx,1\n"), ("a.txt", "x")])
def test_document_001_data_without_columns_is_refused_before_the_run(joulelab, tmp_path, name, text):
    Path("raw").mkdir()
    Path("raw", name).write_text(text)
    code, _, err = joulelab("prepare", "reviews", "./raw", "--tokenizer", "bert-base-uncased")
    assert code == 2 and ("no text column" in err or "0 data files" in err)
    assert not (tmp_path / "store").exists()


def test_document_002_configs_are_experiments(old, joulelab):
    assert old("sbatch run_pipeline.sh configs/experiments/kd_32b_to_1b.yaml --data-script logit_caching") == [
        *("submit", "kd-32b-to-1b", "--data-script", "logit_caching")
    ]
    assert old(
        "python run_experiment.py --config configs/experiments/sft_32b_to_7b.yaml --data-script synthetic_generation "
        "--run-dir /scratch/you/run123"
    ) == shlex.split("run sft-32b-to-7b --data-script synthetic_generation --run-dir /scratch/you/run123")


def test_document_002_submit_takes_a_data_script(joulelab):
    code, out, err = joulelab("submit", "kd-tiny", "--data-script", "logit_caching", "--dry-run", "--partition", "x")
    assert code == 0, err
    assert "sbatch" in (out + err).lower()


@pytest.mark.parametrize(
    "script",
    [
        *("logit_caching", "tulu_preprocess_dataset", "codeforces_preprocess_dataset"),
        *("openr1_math_preprocess_dataset", "synthetic_generation", "preference_dataset", "prerun"),
    ],
)
def test_document_002_every_data_script_can_be_submitted(old, joulelab, script):
    """`sbatch run_pipeline.sh CONFIG --data-script NAME`, with the experiment that uses its output."""
    kind = {"synthetic_generation": "synthetic", "preference_dataset": "dpo"}.get(script, "kd")
    words = old(f"sbatch run_pipeline.sh {kind}_tiny --data-script {script} --run-dir made")
    assert words == ["submit", f"{kind}-tiny", "--data-script", script, "--run-dir", "made"]
    code, out, err = joulelab(*words, "--dry-run", "--partition", "x")
    assert code == 0, err
    assert f"run={Path('made').absolute()}" in out
    started = [line for line in out.splitlines() if line.startswith("exec ")]
    assert started and ("joulelab prerun kd-tiny" in started[-1]) == (script == "prerun")


def test_document_002_a_prerun_in_a_chosen_folder_is_in_the_store(joulelab, monkeypatch, tmp_path):
    from joulelab.runs import prerun
    from joulelab.runs.store import find_folder

    usual = prerun.prerun
    monkeypatch.setattr(prerun, "prerun", lambda *settings: usual(*settings[:3], 0.3, *settings[4:]))
    code, out, err = joulelab("run", "kd-tiny", "--data-script", "prerun", "--run-dir", "scratch/run123", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert json.loads(Path("scratch/run123/prerun.json").read_text()) == report
    assert find_folder(tmp_path / "store", report["run_id"]).resolve() == Path("scratch/run123").resolve()
    code, _, err = joulelab("run", "kd-tiny", "--data-script", "prerun", "--run-dir", "scratch/run123")
    assert code == 2 and "run123" in err  # a run is never written over another


def test_document_003_launch(old, joulelab):
    words = old(
        "python energy_efficiency/launch.py --model gpt2 --trainer simple --batch_size 4 --learning_rate 1e-6 "
        '--dataset_split "train[:100]" --trainer_stats simple'
    )
    assert words[0] == "train"
    code, _, err = joulelab(*words, "--size", "tiny", "--dry-run")
    assert code == 0, err


@pytest.mark.parametrize(
    ("command", "model"),
    [("python vit_infer.py -m deit-t", "deit-t"), ("python bert_infer.py -m bert-b -s 128", "bert-b")],
)
def test_document_004_inference(old, joulelab, command, model):
    words = old(command)
    assert words[:3] == ["infer", "-m", model]
    code, out, err = joulelab(*words, "--dry-run", "--json")
    assert code == 0, err
    assert f'"{model}"' in out


def test_the_words_of_every_table_are_settings_and_options():
    """Each flag of each script leads to a setting or option that exists."""
    values = {"precision": "fp16", "type": "bert", "model": "x", "pool": "cls", "layer": "-2", "mlm": "true"}
    for script in SCRIPTS:
        if not script.command.startswith("joulelab run "):
            continue
        experiment = script.command.split()[2] if len(script.command.split()) > 2 else None
        for template in (*script.flags.values(), *script.switches.values()):
            if experiment is None or "=" not in template:
                continue
            key = template.split("=")[0]
            if key in ("student.config", "data.source", "data.train_file", "data.validation_file", "data.token_counts"):
                continue  # files, which are checked elsewhere
            number = next((value for name, value in values.items() if name in key), "1")
            override = template.replace("{}", number)
            try:
                load_spec(experiment, parse_overrides([override]))
            except ConfigError as error:
                assert "unknown" not in error.message and "no setting" not in error.message, error.message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python nothing.py", "nothing.py"),
        ("python train.py --no_such_flag 3", "has no flag --no_such_flag"),
        ("python train.py --alpha_ce", "has no value"),
        ("sbatch run_pipeline.sh --data-script prerun", "needs a configuration"),
    ],
)
def test_what_cannot_be_translated_is_an_error(joulelab, command, message):
    code, out, err = joulelab("compat", *shlex.split(command))
    assert (code, out) == (2, "")
    assert message in err


def test_the_list_and_the_flags_of_a_script_are_printed(joulelab):
    code, out, _ = joulelab("compat", "-v")
    assert code == 0 and "vit_infer.py" in out and "joulelab infer" in out
    code, out, _ = joulelab("compat", "python", "train.py", "-v")
    assert code == 0 and "--mlm_mask_prop" in out and "distill.mlm_mask_prop=VALUE" in out


def test_every_script_that_submits_a_job_has_a_command_that_plans_one(joulelab):
    for script in SCRIPTS:
        if script.command.startswith("joulelab submit") and "{" not in script.command:
            words = shlex.split(script.command)[1:]
            code, out, err = joulelab(*words, "--dry-run", "--partition", "x")
            assert code == 0 and "#SBATCH" in out, (script.command, err)


def test_a_dropped_flag_is_explained(joulelab):
    _, _, err = joulelab("compat", "python", "train.py", "--alpha_ce", "1", "--n_gpu", "2")
    assert "torchrun" in err


def test_naming_one_start_of_a_student_replaces_that_of_the_experiment():
    assert load_spec("distilbert-seed", parse_overrides(["student.student_config=x.json"])).student.size is None
    both = {"student": {"config": "x.json", "size": "base"}}
    with pytest.raises(ConfigError, match="exactly one of"):
        check(load_spec("distilbert-seed").model_dump(mode="json") | both)


class TestPickledTokens:
    ROWS = [[2, 7, 9, 3], [2, 5, 3], [2, 6, 8, 7, 3]]

    @pytest.mark.parametrize("protocol", [4, 5])
    def test_arrays_of_integers_are_read(self, tmp_path, protocol):
        for number, kind in enumerate((np.uint16, np.int32, np.int64)):
            path = tmp_path / f"{number}.pickle"
            path.write_bytes(pickle.dumps([kind(row) for row in self.ROWS], protocol=protocol))
            assert [row.tolist() for row in read_token_pickle(path)] == self.ROWS

    def test_a_pickle_of_the_old_script_becomes_a_store(self, joulelab, bert_here):
        Path("old.pickle").write_bytes(pickle.dumps([np.uint16(row) for row in self.ROWS], protocol=5))
        words = ["--tokenizer_name", "bert-base-uncased", "--dump_file", "data/text"]
        code, _, err = joulelab("prepare", "binarize", "--file_path", "old.pickle", *words)
        assert code == 0, err
        store = open_store(Path("data/text.bert-base-uncased"))
        assert [store.row(number).tolist() for number in range(len(store))] == self.ROWS

    def test_nothing_in_it_is_executed(self, tmp_path):
        class Harmful:
            def __reduce__(self):
                return Path.touch, (tmp_path / "touched",)

        (tmp_path / "bad.pickle").write_bytes(pickle.dumps([Harmful()]))
        with pytest.raises(ConfigError, match="refers to pathlib"):
            read_token_pickle(tmp_path / "bad.pickle")
        assert not (tmp_path / "touched").exists()

    @pytest.mark.parametrize(
        "content", [{"a": 1}, [np.array([1.5])], ["text"], [np.zeros((2, 2), dtype=np.int64)], [{"ids": [1]}], 7]
    )
    def test_other_content_is_refused(self, tmp_path, content):
        (tmp_path / "x.pickle").write_bytes(pickle.dumps(content))
        with pytest.raises(ConfigError, match="not a pickle of token ids"):
            read_token_pickle(tmp_path / "x.pickle")

    def test_ids_of_another_vocabulary_are_refused(self, joulelab, bert_here):
        Path("old.pickle").write_bytes(pickle.dumps([np.uint16([1, 60_000])]))
        words = ["--tokenizer_name", "bert-base-uncased", "--dump_file", "data/text"]
        code, _, err = joulelab("prepare", "binarize", "--file_path", "old.pickle", *words)
        assert code != 0 and "token ids from 1 to 60000" in err


def test_every_script_has_one_owner():
    names = [name for script in SCRIPTS for name in script.names]
    assert len(names) == len(set(names))
    script, rest = find_script(["python3", "x/vit_infer.py", "-m", "deit-s"])
    assert translate(script, rest)[0] == "joulelab infer -m deit-s"
    with pytest.raises(UsageError):
        find_script([])
