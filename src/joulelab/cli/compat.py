"""`joulelab compat`: commands of the five original systems and what they are here, flag by flag.

The tables are data: a script's name, the command that replaces it, and for each flag the words that replace it, with
`{}` for its value. A flag without words states why it is not needed.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from joulelab.cli.options import AsJson, detail, detail_level
from joulelab.errors import UsageError


@dataclass(frozen=True)
class OldScript:
    document: str
    names: tuple[str, ...]
    """File names of the script."""
    command: str
    """What replaces it, without its flags; `{}` for its argument."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flag with a value -> words."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Flag without a value -> words."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Flag -> why it has no counterpart; those in `valueless` take no value."""
    valueless: tuple[str, ...] = ()
    note: str = ""


def _same(*flags: str) -> dict[str, str]:
    return {flag: f"{flag} {{}}" for flag in flags}


def _settings(**keys: str) -> dict[str, str]:
    return {f"--{flag}": f"{key}={{}}" for flag, key in keys.items()}


_RUN_FOLDER = "a run has its own directory; two runs never share one"
_MONITOR = _same("--gpu", "--interval", "--log_path", "--outfile", "--pid")
_DISTILBERT = {
    **_settings(
        student_type="student.type",
        student_config="student.config",
        student_pretrained_weights="student.model",
        teacher_type="teacher.type",
        teacher_name="teacher.model",
        n_epoch="training.epochs",
        batch_size="training.batch_size",
        gradient_accumulation_steps="training.accumulate",
        warmup_prop="training.warmup_share",
        weight_decay="training.weight_decay",
        learning_rate="training.learning_rate",
        adam_epsilon="training.eps",
        max_grad_norm="training.clip_norm",
        checkpoint_interval="training.checkpoint_every_steps",
        log_interval="training.log_every_steps",
        seed="seed",
        data_file="data.source",
        token_counts="data.token_counts",
    ),
    **{
        f"--{name}": f"distill.{name}={{}}"
        for name in (
            *("temperature", "alpha_ce", "alpha_mlm", "alpha_clm", "alpha_mse", "alpha_cos", "mlm_mask_prop"),
            *("word_mask", "word_keep", "word_rand", "mlm_smoothing"),
        )
    },
    "--dump_path": "--run-dir {}",
}
_SQUAD = {
    **_settings(
        model_name_or_path="student.model",
        teacher_name_or_path="teacher.model",
        alpha_ce="distill.alpha_ce",
        alpha_squad="distill.alpha_squad",
        temperature="distill.temperature",
        train_file="data.train_file",
        predict_file="data.validation_file",
        null_score_diff_threshold="evaluation.null_score_diff_threshold",
        n_best_size="evaluation.n_best_size",
        max_answer_length="evaluation.max_answer_length",
        max_seq_length="data.max_seq_length",
        doc_stride="data.doc_stride",
        max_query_length="data.max_query_length",
        per_gpu_train_batch_size="training.batch_size",
        per_gpu_eval_batch_size="eval_batch_size",
        learning_rate="training.learning_rate",
        gradient_accumulation_steps="training.accumulate",
        weight_decay="training.weight_decay",
        adam_epsilon="training.eps",
        max_grad_norm="training.clip_norm",
        num_train_epochs="training.epochs",
        max_steps="training.max_steps",
        warmup_steps="training.warmup_steps",
        logging_steps="training.log_every_steps",
        save_steps="training.checkpoint_every_steps",
        seed="seed",
    ),
    "--output_dir": "--run-dir {}",
}
_FITNETS = {
    "--data-dir": "data.source={}",
    "--output-dir": "--run-dir {}",
    "--teacher-name": "teacher.model={}",
    "--student-name": "student.model={}",
    "--batch-size": "training.batch_size={}",
    "--epochs": "training.epochs={}",
    "--lr": "training.learning_rate={}",
    "--num-workers": "training.prefetch={}",
    "--seed": "seed={}",
    "--telemetry-every": "telemetry_every={}",
    "--kd-T": "distill.temperature={}",
    "--kd-alpha": "distill.alpha={}",
    **{
        f"--{name.replace('_', '-')}": f"distill.{name}={{}}"
        for name in ("feat_beta", "t_layer", "s_layer", "feat_pool")
    },
}
_COURSE = (
    *("--model", "--trainer", "--batch_size", "--learning_rate", "--dataset", "--dataset_split", "--train_stats"),
    *("--trainer_stats", "--max_time_minutes", "--max_steps"),
)
SCRIPTS = (
    OldScript("000", ("monitor.py", "power_monitor.py"), "joulelab monitor", _MONITOR),
    OldScript(
        "000",
        ("generate_dataset.py",),
        'joulelab prepare dump oscar:unshuffled_deduplicated_en --split "train[:10%]" --dump_file data/dump.txt',
        note="the original uses a tenth of OSCAR; a local file or folder of text also works, without the hub",
    ),
    OldScript(
        "000",
        ("binarized_data.py",),
        "joulelab prepare binarize",
        _same("--file_path", "--tokenizer_type", "--tokenizer_name", "--dump_file"),
        note="writes a folder NAME instead of NAME.pickle; if --file_path is such a pickle, it is converted",
    ),
    OldScript(
        "000",
        ("token_counts.py",),
        "joulelab prepare token-counts",
        _same("--data_file", "--token_counts_dump", "--vocab_size"),
        note="reads the folder NAME for NAME.pickle, and writes the counts to NAME.npy",
    ),
    OldScript(
        "000",
        ("extract.py", "extract_distilbert.py"),
        "joulelab prepare extract-student",
        _same("--model_type", "--model_name", "--dump_checkpoint"),
        {"--vocab_transform": "--vocab_transform"},
        note="writes the folder NAME, in Hugging Face format, in place of NAME.pth",
    ),
    OldScript(
        "000",
        ("train.py",),
        "joulelab run distilbert-seed",
        _DISTILBERT,
        {
            "--mlm": "distill.mlm=true",
            "--restrict_ce_to_mask": "distill.restrict_ce_to_mask=true",
            "--freeze_pos_embs": "distill.freeze_pos_embs=true",
            "--freeze_token_type_embds": "distill.freeze_token_type_embds=true",
            "--group_by_size": "data.group_by_size=true",
            "--fp16": "training.precision=fp16",
        },
        {
            "--force": _RUN_FOLDER,
            "--initializer_range": "the range of random weights comes from the student's configuration",
            "--fp16_opt_level": "an option of NVIDIA Apex; training.precision uses PyTorch's mixed precision",
            "--n_gpu": "several GPUs: torchrun --nproc-per-node N -m joulelab run ...",
            "--local_rank": "torchrun sets it",
        },
        ("--force",),
    ),
    OldScript(
        "000",
        ("run_squad_w_distillation.py",),
        "joulelab run squad",
        _SQUAD,
        {"--version_2_with_negative": "data.version_2=true", "--fp16": "training.precision=fp16"},
        {
            "--model_type": "determined by the model's folder or hub id",
            "--teacher_type": "determined by the model's folder or hub id",
            "--do_train": "training and evaluation are stages of every run",
            "--do_eval": "training and evaluation are stages of every run",
            "--do_lower_case": "determined by the tokenizer",
            "--overwrite_output_dir": _RUN_FOLDER,
            "--overwrite_cache": "artifacts are reused only if their inputs are the same",
            "--evaluate_during_training": "quality is measured after training; training.evaluate_every_steps adds more",
            "--threads": "tokenization uses all cores",
        },
        (
            *("--do_train", "--do_eval", "--do_lower_case", "--overwrite_output_dir", "--overwrite_cache"),
            "--evaluate_during_training",
        ),
    ),
    OldScript("000", ("submit_both.sh",), "joulelab submit distilbert --both"),
    OldScript(
        "000",
        ("preprocess.sh",),
        "joulelab submit distilbert until=data",
        note="`joulelab submit distilbert --both` preprocesses in a CPU job and then distills",
    ),
    OldScript("000", ("distill_experiment.sh",), "joulelab submit distilbert --array 0-3"),
    OldScript(
        "001",
        ("amazon_polarity_loader.py",),
        "joulelab prepare reviews",
        _same(
            *("--model-name", "--dataset", "--batch-size", "--max-length", "--limit-train", "--limit-eval"),
            *("--out-dir", "--save-format"),
        ),
    ),
    OldScript("001", ("stream_monitor.py",), "joulelab monitor", _MONITOR),
    OldScript(
        "001",
        ("run_amazon_polarity_feature_kd.py", "run_distill.py"),
        "joulelab run fitnets-amazon",
        _FITNETS,
        {"--feat-normalize": "distill.feat_normalize=true", "--feat-ln": "distill.feat_ln=true"},
        note="the loss is multiplied by T^2 as in the original script; distill.kd_T2=false omits it",
    ),
    OldScript("001", ("fitnets_distill.sh",), "joulelab submit fitnets-amazon --array 0-3"),
    OldScript(
        "002",
        ("run_experiment.py",),
        "joulelab run",
        {"--config": "{experiment}", **_same("--data-script", "--run-dir")},
        note="the published configurations are experiments: configs/experiments/kd_32b_to_1b.yaml is kd-32b-to-1b; "
        "an sft_* whose synthetic_dataset_path contains the teacher's answers is synthetic-32b-to-*; "
        "for --data-script olmo_benchmark use `joulelab evaluate MODEL --tasks ...`",
    ),
    OldScript(
        "002",
        (
            "run_pipeline.sh",
            *(f"run_{kind}_32b_to_{size}.sh" for kind in ("kd", "sft") for size in ("1b", "7b", "13b")),
        ),
        "joulelab submit {experiment}",
        _same("--data-script", "--run-dir"),
        note="name your partition and GPUs with --partition and --gpus, or --preset h100",
    ),
    OldScript("003", ("launch.py",), "joulelab train", _same(*_COURSE)),
    OldScript("004", ("vit_infer.py",), "joulelab infer", _same("-m")),
    OldScript("004", ("bert_infer.py",), "joulelab infer", _same("-m", "-s")),
    OldScript(
        "004",
        ("power_monitor.sh",),
        "joulelab monitor --gpu 0 --interval 1 --plain --outfile power_results/power_usage.jsonl",
        note="logs of nvidia-smi dmon need no conversion: joulelab infer --from-log FILE --latency-ms L",
    ),
)
_LAUNCHERS = ("python", "python3", "sbatch", "bash", "sh", "srun", "-u", "-m")
DOCUMENTS = {
    "000": "DistilBERT with power monitoring",
    "001": "FitNets on Amazon Polarity",
    "002": "Distillation energy benchmark",
    "003": "Training course",
    "004": "Profiling inference",
}


def compat(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OLD COMMAND]", help="A command of one of the original systems, with its flags."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the joulelab command that replaces a command of an original system; without an argument, list all.

    Examples:

      joulelab compat

      joulelab compat python train.py

      joulelab compat python vit_infer.py -m deit-b
    """
    if not words:
        _list_scripts(as_json)
        return
    script, rest = find_script(words)
    if script.flags and rest in ([], ["-v"]):
        with detail_level("verbose" if rest else detail()):
            _print_flags(script, as_json)
        return
    command, notes = translate(script, rest)
    if as_json:
        import json

        print(json.dumps({"command": command, "notes": notes}, indent=2))
        return
    print(command)
    from joulelab.cli.options import note

    for text in notes:
        note(text)


def find_script(words: Sequence[str]) -> tuple[OldScript, list[str]]:
    """The script that a command line starts, and the words after it."""
    left = list(words)
    while left and (left[0] in _LAUNCHERS or left[0].startswith(("python3.", "--gres", "--time"))):
        left.pop(0)
    name = Path(left[0]).name if left else ""
    for script in SCRIPTS:
        if name in script.names:
            return script, left[1:]
    from joulelab.lookup import unknown

    raise unknown("original script", name or " ".join(words), [one for script in SCRIPTS for one in script.names])


def translate(script: OldScript, words: Sequence[str]) -> tuple[str, list[str]]:
    """The new command line, and remarks on flags without a counterpart."""
    result, notes = shlex.split(script.command), [script.note] if script.note else []
    left = [word for given in words for word in _split_equals(given)]
    while left:
        flag = left.pop(0)
        if flag in script.switches:
            result += shlex.split(script.switches[flag])
        elif flag in script.flags:
            value = _value(flag, left)
            if script.flags[flag] == "{experiment}":
                result.insert(2, experiment_of(value))
            else:
                result += [part.replace("{}", value) for part in script.flags[flag].split(" ")]
        elif flag in script.dropped:
            if flag not in script.valueless:
                _value(flag, left)
            notes.append(f"{flag}: {script.dropped[flag]}")
        elif "{experiment}" in result and not flag.startswith("-"):
            result[result.index("{experiment}")] = experiment_of(flag)
        else:
            known = ", ".join([*script.flags, *script.switches, *script.dropped]) or "none"
            raise UsageError(f"{script.names[0]} has no flag {flag}", f"its flags: {known}")
    if "{experiment}" in result:
        raise UsageError(f"{script.names[0]} needs a configuration", "add configs/experiments/NAME.yaml")
    return " ".join(_quoted(word) for word in result), notes


def _split_equals(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") and "=" in word else [word]


def _value(flag: str, left: list[str]) -> str:
    if not left:
        raise UsageError(f"{flag} has no value", "write it after the flag, as in the original command")
    return left.pop(0)


def _quoted(word: str) -> str:
    """Readable in a shell: brackets and spaces are quoted, `=` and `:` are not."""
    return shlex.quote(word) if shlex.quote(word.replace("=", "").replace("<", "")) != word else word


def experiment_of(config: str) -> str:
    """`configs/experiments/kd_32b_to_1b.yaml` -> `kd-32b-to-1b`; another file stays a file."""
    from joulelab.runs.spec import experiment_names

    name = Path(config).stem.replace("_", "-")
    return name if name in experiment_names() else config


def _list_scripts(as_json: bool) -> None:
    if as_json:
        import json

        rows = [{"document": s.document, "scripts": list(s.names), "command": s.command} for s in SCRIPTS]
        print(json.dumps(rows, indent=2))
        return
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import make_grid

    cells = [(DOCUMENTS[script.document], script.names[0], script.command) for script in SCRIPTS]
    print_answer(
        f"{len(SCRIPTS)} commands of the original systems",
        [make_grid("", "System!|Script!|Command", cells)],
        ["joulelab compat SCRIPT lists its flags; with its flags, the new command is printed."],
    )


def _print_flags(script: OldScript, as_json: bool) -> None:
    rows = [*script.flags.items(), *script.switches.items()]
    rows += [(flag, f"not needed: {why}") for flag, why in script.dropped.items()]
    if as_json:
        import json

        print(json.dumps({"command": script.command, "flags": dict(rows), "note": script.note}, indent=2))
        return
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import make_grid

    grid = make_grid("", "Flag!|Here", [(flag, here.replace("{}", "VALUE")) for flag, here in rows])
    print_answer(f"{script.names[0]}: {script.command}", [grid], [script.note] if script.note else [])
