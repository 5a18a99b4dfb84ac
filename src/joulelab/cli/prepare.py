"""`joulelab prepare`: the steps before a distillation, each a measured run with the original scripts' options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, DryRun, EstimateCpu, Flag, RunsDir, checked_spec
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.runs.spec import RunSpec

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare a distillation: dump text, tokenize it, count tokens, extract a student from a teacher's layers.",
)

Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]
TokenizerType = Annotated[
    str | None,
    typer.Option("--tokenizer_type", "--tokenizer-type", metavar="bert|roberta|gpt2", help="Expected model family."),
]


@app.command("dump")
def dump(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A file or folder (txt, jsonl, csv, parquet), sample:reviews, or a hub dataset.")
    ],
    dump_file: Annotated[str, typer.Option("--dump_file", "--dump-file", help="Output file.")] = "data/dump.txt",
    split: Annotated[str, typer.Option("--split", help='Split or slice: train, "train[:1000]", ...')] = "train",
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

    Whitespace inside a document is collapsed to single spaces. Counts of kept and dropped documents are reported.

    Examples:

      joulelab prepare dump sample:reviews --dump_file data/dump.txt --min_chars 200 --max_chars 5000

      joulelab prepare dump my_texts/ --split validation --dump_file data/validation.txt

      joulelab prepare dump allenai/c4 --split "train[:100000]"
    """
    _start("dump", context.params)


@app.command("binarize", short_help="Tokenize a dump into a flat, memory-mapped store.")
def binarize(
    context: typer.Context,
    file_path: Annotated[
        str,
        typer.Option(
            "--file_path", "--file-path", help="Text file with one document per line, or tokens of the original script."
        ),
    ] = "data/dump.txt",
    tokenizer_type: TokenizerType = None,
    tokenizer_name: Annotated[
        str,
        typer.Option("--tokenizer_name", "--tokenizer-name", help="Tokenizer: a hub id, a folder or a sample."),
    ] = "bert-base-uncased",
    dump_file: Annotated[
        str,
        typer.Option("--dump_file", "--dump-file", help="Output store, without `.TOKENIZER`."),
    ] = "data/binarized_text",
    workers: Annotated[
        int | None, typer.Option("--workers", help="Worker processes (default: one per core).", show_default=False)
    ] = None,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a dump into a flat, memory-mapped store of token ids, with the special tokens of the model family.

    The output is a folder NAME instead of the original script's NAME.pickle; it does not depend on the number of
    workers. A pickle of the original script is converted: only lists of integer arrays are read, and no code is run.

    Examples:

      joulelab prepare binarize --file_path data/dump.txt --tokenizer_name sample:minilm --dump_file data/text

      joulelab prepare binarize --file_path data/dump.txt --tokenizer_type bert --tokenizer_name bert-base-uncased
      --dump_file data/binarized_text
    """
    _start("binarize", context.params)


@app.command("token-counts", short_help="Count token ids, to mask rare words more often.")
def token_counts(
    context: typer.Context,
    data_file: Annotated[str, typer.Option("--data_file", "--data-file", help="Store written by `binarize`.")],
    token_counts_dump: Annotated[
        str, typer.Option("--token_counts_dump", "--token-counts-dump", help="Output file, .npy or .json.")
    ],
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab_size", "--vocab-size", help="Vocabulary size (default: the tokenizer's)."),
    ] = None,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Count how often each token id occurs, so that rare words can be masked more often than frequent ones.

    Examples:

      joulelab prepare token-counts --data_file data/text.sample-minilm --token_counts_dump data/counts.npy

      joulelab prepare token-counts --data_file data/binarized_text.bert-base-uncased.pickle
      --token_counts_dump data/token_counts.bert-base-uncased.pickle --vocab_size 30522
    """
    _start("token-counts", context.params)


@app.command("extract-student", short_help="Initialize a student from some of a teacher's layers.")
def extract_student(
    context: typer.Context,
    model_name: Annotated[
        str, typer.Option("--model_name", "--model-name", help="Teacher: a hub id, a folder or a sample.")
    ],
    dump_checkpoint: Annotated[str, typer.Option("--dump_checkpoint", "--dump-checkpoint", help="Output folder.")],
    model_type: Annotated[
        str | None,
        typer.Option("--model_type", "--model-type", metavar="bert|roberta|gpt2", help="Expected model family."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", help="Layers to copy: 0,2,4,7,9,11 (default: half, evenly spaced).", show_default=False
        ),
    ] = None,
    vocab_transform: Annotated[
        bool,
        typer.Option("--vocab_transform/--no_vocab_transform", help="Also copy the dense layer of the language head."),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights not copied from the teacher.")] = 0,
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Initialize a student from some of a teacher's layers: BERT to DistilBERT, RoBERTa and GPT-2 to shorter models.

    Examples:

      joulelab prepare extract-student --model_type bert --model_name bert-base-uncased --dump_checkpoint data/student

      joulelab prepare extract-student --model_name sample:minilm --layers 0,2,5 --dump_checkpoint data/student
    """
    _start("extract-student", context.params)


@app.command("reviews", short_help="Tokenize labeled reviews into a store.")
def reviews(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            help="A hub dataset, a CSV, JSONL or Parquet file, a folder, or sample:reviews "
            "(default: fancyzhx/amazon_polarity).",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Same as SOURCE.", show_default=False)] = None,
    subset: Annotated[
        str, typer.Option("--subset", help="For sample:reviews: short, long or all; for a hub dataset: its config.")
    ] = "all",
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "--model-name", help="Tokenizer: a hub id, a folder or sample:minilm.")
    ] = "bert-base-uncased",
    max_length: Annotated[int, typer.Option("--max-length", help="Truncate reviews to this many tokens.")] = 256,
    limit_train: Annotated[
        int | None, typer.Option("--limit-train", help="Maximum number of training reviews.", show_default=False)
    ] = None,
    limit_eval: Annotated[
        int | None,
        typer.Option("--limit-eval", help="Maximum number of reviews per evaluation split.", show_default=False),
    ] = None,
    class_names: Annotated[
        str | None,
        typer.Option("--class-names", help="Class names in label order: negative,positive.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Reviews per call of the tokenizer.")] = 1000,
    save_format: Annotated[
        str, typer.Option("--save-format", metavar="hf|parquet|jsonl|pt", help="File format of the splits.")
    ] = "hf",
    out_dir: Annotated[str, typer.Option("--out-dir", help="Output folder.")] = "data/reviews",
    force: Force = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize labeled reviews (title and content joined) into train, validation and test splits.

    Labels are saved as `labels` and must be 0, 1, ... or class names. `joulelab run` reads the output folder.

    Examples:

      joulelab prepare reviews fancyzhx/amazon_polarity --max-length 256 --out-dir data/amazon_polarity_tok

      joulelab prepare reviews sample:reviews --subset short --tokenizer sample:minilm --save-format parquet

      joulelab prepare reviews my_reviews.csv --class-names negative,positive --limit-train 10000 --limit-eval 1000
    """
    named = [name for name in (source, dataset) if name is not None]
    if len(named) > 1:
        raise UsageError(f"two sources were named: {source} and --dataset {dataset}", "leave one of them out")
    # the hub moved the dataset of this name to its publisher
    aliases = {"amazon_polarity": "fancyzhx/amazon_polarity"}
    chosen = named[0] if named else "fancyzhx/amazon_polarity"
    params = {key: value for key, value in context.params.items() if key != "dataset"}
    _start("reviews", {**params, "source": aliases.get(chosen, chosen)})


def _layers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.strip("[] ").split(",")]
    except ValueError:
        raise UsageError(f"--layers {text} is not a list of numbers", "write for example 0,2,4,7,9,11") from None


def _class_names(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


_SAME_NAME = (
    *("source", "dump_file", "split", "min_chars", "max_chars", "file_path", "tokenizer_type", "tokenizer_name"),
    *("workers", "data_file", "token_counts_dump", "vocab_size", "model_type", "model_name", "dump_checkpoint"),
    *("vocab_transform", "seed", "subset", "tokenizer", "max_length", "limit_train", "limit_eval", "save_format"),
    *("out_dir", "force", "batch_size"),
)
FLAGS: Mapping[str, Flag] = {
    **{name: Flag(name) for name in _SAME_NAME},
    "layers": Flag("layers", _layers),
    "class_names": Flag("class_names", _class_names),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
}


def prepare_spec(step: str, params: Mapping[str, Any]) -> RunSpec:
    """The checked settings of `joulelab prepare STEP`."""
    return checked_spec(f"prepare {step}", f"prepare-{step}", FLAGS, params)


def _start(step: str, params: Mapping[str, Any]) -> None:
    from joulelab.cli.run import RunOptions, start_run
    from joulelab.runs.store import store_root

    spec = prepare_spec(step, params)
    start_run(spec, RunOptions(store_root(params["runs_dir"]), params["as_json"], params["dry_run"]))
