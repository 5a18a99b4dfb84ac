"""`joulelab prepare`: the steps before a distillation, each a measured run, with the flags of the scripts of old."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joulelab.cli.options import AsJson, RunsDir

app = typer.Typer(
    no_args_is_help=True,
    help="The steps before a distillation: text, tokens, counts, and a student out of its teacher's layers.",
)

Force = Annotated[bool, typer.Option("--force", help="Replace what is there already under the same name.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and print the settings; do nothing.")]
EstimateCpu = Annotated[
    bool, typer.Option("--estimate-cpu", help="Estimate CPU energy from CPU time, labelled as an estimate.")
]
TokenizerType = Annotated[
    str | None,
    typer.Option("--tokenizer_type", "--tokenizer-type", metavar="bert|roberta|gpt2", help="Checked where given."),
]


@app.command("dump")
def dump(
    source: Annotated[
        str, typer.Argument(help="A file or folder (txt, jsonl, csv, parquet), sample:reviews, or a hub dataset.")
    ],
    dump_file: Annotated[str, typer.Option("--dump_file", "--dump-file", help="The file to write.")] = "data/dump.txt",
    split: Annotated[str, typer.Option("--split", help='Which documents: train, "train[:1000]", ...')] = "train",
    min_chars: Annotated[int, typer.Option("--min_chars", "--min-chars", help="Drop shorter documents.")] = 1,
    max_chars: Annotated[
        int | None, typer.Option("--max_chars", "--max-chars", help="Drop longer documents.", show_default=False)
    ] = None,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a corpus to one file, one document per line.

    Whitespace inside a document becomes single spaces; how many documents were kept and dropped is told.

    Examples:

      joulelab prepare dump sample:reviews --dump_file data/dump.txt --min_chars 200 --max_chars 5000

      joulelab prepare dump my_texts/ --split validation --dump_file data/validation.txt

      joulelab prepare dump allenai/c4 --split "train[:100000]"
    """
    asked = {"source": source, "dump_file": dump_file, "split": split, "min_chars": min_chars, "max_chars": max_chars}
    _start("prepare-dump", asked, force, estimate_cpu, dry_run, runs_dir, as_json)


@app.command("binarize", short_help="Tokenise a dump into a flat, memory-mapped store.")
def binarize(
    file_path: Annotated[
        str, typer.Option("--file_path", "--file-path", help="Text with one document per line.")
    ] = "data/dump.txt",
    tokenizer_type: TokenizerType = None,
    tokenizer_name: Annotated[
        str,
        typer.Option("--tokenizer_name", "--tokenizer-name", help="A hub id, a folder, sample:minilm, sample:smollm2."),
    ] = "bert-base-uncased",
    dump_file: Annotated[
        str, typer.Option("--dump_file", "--dump-file", help="The store to write is this, a dot and the tokenizer.")
    ] = "data/binarized_text",
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes (default: one per core).", show_default=False)
    ] = None,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise a dump into a flat, memory-mapped store of ids, with the special tokens of the tokenizer's family.

    The bytes are the same whatever the number of workers. NAME.pickle of the old scripts is here the folder NAME.

    Examples:

      joulelab prepare binarize --file_path data/dump.txt --tokenizer_name sample:minilm --dump_file data/text

      joulelab prepare binarize --file_path data/dump.txt --tokenizer_type bert --tokenizer_name bert-base-uncased
      --dump_file data/binarized_text
    """
    asked = {
        "file_path": file_path,
        "tokenizer_type": tokenizer_type,
        "tokenizer_name": tokenizer_name,
        "dump_file": dump_file,
        "workers": workers,
    }
    _start("prepare-binarize", asked, force, estimate_cpu, dry_run, runs_dir, as_json)


@app.command("token-counts", short_help="Count how often each id occurs, for masking rare words.")
def token_counts(
    data_file: Annotated[str, typer.Option("--data_file", "--data-file", help="A store that `binarize` has made.")],
    token_counts_dump: Annotated[
        str, typer.Option("--token_counts_dump", "--token-counts-dump", help="The file to write, .npy or .json.")
    ],
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab_size", "--vocab-size", help="Ids of the model (default: the tokenizer's)."),
    ] = None,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Count how often each id occurs, for masking rare words more often than frequent ones.

    Examples:

      joulelab prepare token-counts --data_file data/text.sample-minilm --token_counts_dump data/counts.npy

      joulelab prepare token-counts --data_file data/binarized_text.bert-base-uncased.pickle
      --token_counts_dump data/token_counts.bert-base-uncased.pickle --vocab_size 30522
    """
    asked = {"data_file": data_file, "token_counts_dump": token_counts_dump, "vocab_size": vocab_size}
    _start("prepare-token-counts", asked, force, estimate_cpu, dry_run, runs_dir, as_json)


@app.command("extract-student", short_help="Make a student out of some of a teacher's layers.")
def extract_student(
    model_name: Annotated[
        str, typer.Option("--model_name", "--model-name", help="The teacher: a hub id, a folder or a sample.")
    ],
    dump_checkpoint: Annotated[
        str, typer.Option("--dump_checkpoint", "--dump-checkpoint", help="The folder to write.")
    ],
    model_type: Annotated[
        str | None,
        typer.Option("--model_type", "--model-type", metavar="bert|roberta|gpt2", help="Checked where given."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Such as 0,2,4,7,9,11 (default: half of them, evenly).", show_default=False),
    ] = None,
    vocab_transform: Annotated[
        bool,
        typer.Option(
            "--vocab_transform/--no_vocab_transform", help="Take the dense layer before the vocabulary as well."
        ),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Of what is not taken from the teacher.")] = 0,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a student out of some of a teacher's layers: BERT to DistilBERT, RoBERTa and GPT-2 to shorter ones.

    Examples:

      joulelab prepare extract-student --model_type bert --model_name bert-base-uncased --dump_checkpoint data/student

      joulelab prepare extract-student --model_name sample:minilm --layers 0,2,5 --dump_checkpoint data/student
    """
    asked = {
        "model_type": model_type,
        "model_name": model_name,
        "dump_checkpoint": dump_checkpoint,
        "layers": _numbers(layers),
        "vocab_transform": vocab_transform,
        "seed": seed,
    }
    _start("prepare-extract-student", asked, force, estimate_cpu, dry_run, runs_dir, as_json)


@app.command("reviews", short_help="Tokenise labelled reviews into a store.")
def reviews(
    source: Annotated[
        str, typer.Argument(help="A hub dataset, a CSV, JSONL or Parquet file, a folder, or sample:reviews.")
    ] = "fancyzhx/amazon_polarity",
    subset: Annotated[
        str, typer.Option("--subset", help="Of sample:reviews: short, long or all; of a hub dataset: its config.")
    ] = "all",
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "--model-name", help="Whose tokens: a hub id, a folder or sample:minilm.")
    ] = "bert-base-uncased",
    max_length: Annotated[int, typer.Option("--max-length", help="Cut longer reviews here, in tokens.")] = 256,
    limit_train: Annotated[
        int | None, typer.Option("--limit-train", help="At most so many to train on.", show_default=False)
    ] = None,
    limit_eval: Annotated[
        int | None,
        typer.Option("--limit-eval", help="At most so many for validation, and for test.", show_default=False),
    ] = None,
    class_names: Annotated[
        str | None,
        typer.Option(
            "--class-names", help="What the labels mean, lowest first: negative,positive.", show_default=False
        ),
    ] = None,
    save_format: Annotated[
        str, typer.Option("--save-format", metavar="hf|parquet|jsonl", help="How the parts are saved.")
    ] = "hf",
    out_dir: Annotated[str, typer.Option("--out-dir", help="The folder to write.")] = "data/reviews",
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise labelled reviews, title and content together, into train, validation and test parts.

    Labels are saved as `labels` and checked to be 0, 1, ... or named classes. `joulelab run` reads the folder again.

    Examples:

      joulelab prepare reviews fancyzhx/amazon_polarity --max-length 256 --out-dir data/amazon_polarity_tok

      joulelab prepare reviews sample:reviews --subset short --tokenizer sample:minilm --save-format parquet

      joulelab prepare reviews my_reviews.csv --class-names negative,positive --limit-train 10000 --limit-eval 1000
    """
    asked = {
        "source": source,
        "subset": subset,
        "tokenizer": tokenizer,
        "max_length": max_length,
        "limit_train": limit_train,
        "limit_eval": limit_eval,
        "class_names": [name.strip() for name in class_names.split(",")] if class_names else None,
        "save_format": save_format,
        "out_dir": out_dir,
    }
    _start("prepare-reviews", asked, force, estimate_cpu, dry_run, runs_dir, as_json)


def _start(
    pipeline: str,
    asked: dict[str, Any],
    force: bool,
    estimate_cpu: bool,
    dry_run: bool,
    runs_dir: Path | None,
    as_json: bool,
) -> None:
    from joulelab.cli.run import start_run
    from joulelab.runs.spec import BASE, EXPERIMENTS, check, merge, read_mapping
    from joulelab.runs.store import store_root

    settings = {
        "pipeline": pipeline,
        "force": force,
        **{key: value for key, value in asked.items() if value is not None},
    }
    if estimate_cpu:
        settings["energy"] = {"estimate_cpu": True}
    spec = check(merge(read_mapping(EXPERIMENTS / f"{BASE}.yaml"), settings))
    start_run(store_root(runs_dir), spec, dry_run, as_json)


def _numbers(text: str | None) -> list[int] | None:
    from joulelab.errors import UsageError

    if text is None:
        return None
    try:
        return [int(number) for number in text.strip("[] ").split(",")]
    except ValueError:
        raise UsageError(f"--layers {text} is not a list of numbers", "write for example 0,2,4,7,9,11") from None
