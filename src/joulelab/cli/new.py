"""`joulelab new compare`: a commented group file for a comparison on the user's own data, checked before it is written.

Data and teacher decide the pipeline: labeled texts and an encoder give `classify`, conversations or texts and a causal
language model `sft` and `kd`, a file in SQuAD's format `squad`, plain text and an encoder `distilbert`, and a folder of
images `fitnets-images`. Columns, classes and layers are read from the files; no framework is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.errors import ConfigError, UsageError, refuse_all
from joulelab.lookup import absent_packages, require_extra

if TYPE_CHECKING:
    from joulelab.data.text import Columns

app = typer.Typer(no_args_is_help=True, help="Write a starter file.")


@app.callback()
def _new() -> None:
    """Write a starter file."""


@app.command("compare", short_help="Write a commented group file that compares methods on your data.")
def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="File to write; an existing one is not replaced.")],
    data: Annotated[
        str, typer.Option("--data", metavar="DATA", help="Your data: a file, a folder, a saved dataset or a hub id.")
    ],
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher", metavar="MODEL", help="The large model: a folder, a GGUF file, a hub id or a sample."
        ),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option("--student", metavar="MODEL", help="The small model (default: half of the teacher's layers)."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per method.")] = 3,
) -> None:
    """Write a group file that trains a student on labels alone and with the teacher, on your own data.

    Columns, classes and layers are detected and written into the file, where you can change them. The file is checked
    like a run, and it runs as it is: joulelab run FILE.yaml

    Examples:

      joulelab new compare my.yaml --data my.csv --teacher ./my-bert

      joulelab new compare chats.yaml --data chats.jsonl --teacher sample:smollm2 --seeds 2
    """
    if absent_packages("pyarrow"):  # reads the data; the extra is the one that runs the file
        require_extra("joulelab new compare", "train")
    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file} is not a YAML file", f"name it {file.with_suffix('.yaml')}")
    if file.exists():
        raise UsageError(f"{file} already exists", "choose another name, or remove it first")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.absolute().parent}", "create it first")
    text = group_text(file.name, data, teacher, student, seeds)
    _require_valid(text)
    file.write_text(text, encoding="utf-8")
    question, written = (line.removeprefix("# ") for line in text.splitlines()[:2])
    print(f"wrote {file}: {question} {written.partition('. ')[2]}", file=sys.stderr)
    print(f"run it:   joulelab run {file}\nsettings: joulelab run {file} --dry-run", file=sys.stderr)


def group_text(name: str, data: str, teacher: str | None, student: str | None, seeds: int) -> str:
    """The group file for this data and these models."""
    models = [model for model in (teacher, student) if model]
    found, *read = refuse_all([lambda: _data_for(data, models, teacher), *(partial(_model, model) for model in models)])
    if found.kind == "images":
        return _image_group(name, data, seeds)
    large, small = read[0], read[-1]
    if found.kind == "squad":
        return _squad_group(name, data, large, small, seeds)
    if large.is_causal:
        return _causal_group(name, data, large, student, seeds, found)
    if found.kind == "chats":
        raise UsageError(f"{data} has conversations, but {teacher} is an encoder", "name a causal language model")
    if found.label is None:
        why = f", because no column of {data} has classes" if found.columns else ""
        return _text_group(name, data, large, seeds, f"Masked language modeling{why}.")
    return _classify_group(name, data, large, small, seeds, found)


@dataclass(frozen=True)
class _Data:
    kind: str
    """labels, chats, text, squad or images."""
    columns: tuple[str, ...] = ()
    text: str | None = None
    label: str | None = None
    classes: int = 0
    rows: int = 0
    characters: int = 0
    splits: tuple[str, ...] = ()
    header: bool = True


def _data_for(data: str, models: list[str], teacher: str | None) -> _Data:
    """The data, where they and the named models make a comparison."""
    found = _recognize(data)
    if found.kind == "images" and models:
        raise UsageError(
            f"{data} is a folder of images; image networks are built from sizes in the settings", "omit --teacher"
        )
    if found.kind != "images" and not teacher:
        raise UsageError("no teacher was named", "--teacher MODEL: a folder, a GGUF file, a hub id or a sample")
    return found


def _recognize(data: str) -> _Data:
    from joulelab.data import sources
    from joulelab.data.image_folders import SUFFIXES
    from joulelab.data.text import NO_COLUMN_NAMES, UNSPLIT, ColumnChoice, guess_columns, open_parts

    place = sources.parse(data)
    if place.path is None:
        sources.refuse_missing_file(data)
        raise UsageError(f"{data} is on the hub, so its columns cannot be detected", "download it and name the folder")
    if place.path.is_dir() and any(file.suffix.lower() in SUFFIXES for file in place.path.rglob("*")):
        return _Data("images")
    if place.path.suffix == ".json" and _is_squad(place.path):
        return _Data("squad")
    if place.path.suffix.lower() == ".txt":
        text = place.path.read_text(encoding="utf-8", errors="replace")
        return _Data("text", rows=text.count("\n"), characters=len(text))
    subset = "short" if place.kind == "sample" else "all"
    read = open_parts(data, subset, ColumnChoice(labeled=False))
    header = not any(NO_COLUMN_NAMES in note for note in read.notes)
    # without column names the file's columns have numbers, and the group file names them by these
    parts = read.parts if header else open_parts(data, subset, ColumnChoice(labeled=False, header=False)).parts
    table: Columns = (parts.get("train") or next(iter(parts.values()))).read()
    names = tuple(table.values)
    if not table.rows:
        raise ConfigError(f"{data} has no rows", "name a file with data")
    splits = tuple(parts) if set(parts) != {UNSPLIT} else ()
    if {"messages", "conversations", "conversation"} & set(names) or _has_answers(names):
        size = sum(len(str(value)) for values in table.values.values() for value in values)
        return _Data("chats", names, rows=table.rows, characters=size, splits=splits)
    text_column, label = guess_columns(table)
    if text_column is None:
        raise ConfigError(f"{data} has no column with text: {', '.join(names)}", "name a file with texts")
    size = sum(len(str(value)) for value in table.values[text_column])
    classes = len({str(value) for value in table.values[label]}) if label else 0
    kind = "labels" if label else "text"
    return _Data(kind, names, text_column, label, classes, table.rows, size, splits, header)


def _has_answers(names: tuple[str, ...]) -> bool:
    questions = {"prompt", "instruction", "question", "problem"}
    answers = {"response", "generation", "completion", "output", "answer", "generations"}
    return bool(questions & set(names)) and bool(answers & set(names))


def _is_squad(path: Path) -> bool:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and isinstance(document.get("data"), list)


@dataclass(frozen=True)
class _Model:
    name: str
    config: dict[str, Any]
    is_causal: bool

    @property
    def layers(self) -> int | None:
        return self._number("num_hidden_layers", "n_layers", "n_layer")

    @property
    def positions(self) -> int:
        return self._number("max_position_embeddings", "n_positions") or 512

    def _number(self, *names: str) -> int | None:
        """The first of these that the configuration has."""
        return next((found for name in names if isinstance(found := self.config.get(name), int)), None)

    @property
    def half(self) -> list[int]:
        from joulelab.zoo.registry import default_layers

        return list(default_layers(self.layers or 2))


def _model(name: str) -> _Model:
    from joulelab.data import hub, sources
    from joulelab.runs.paths import read_json

    place = sources.parse(name)
    if place.kind == "sample" and sources.find_sample(place.name).kind == "labeled-text":
        raise UsageError(f"{name} is text, not a model", "name a model")
    folder = place.path if place.path is not None else hub.cached_folder(name, "config.json")
    if folder is not None and folder.suffix.lower() == ".gguf":
        return _Model(name, {}, is_causal=True)
    if folder is None:
        sources.refuse_missing_file(name)
    if folder is None or not (folder / "config.json").is_file():
        where = "is not downloaded" if folder is None else "has no config.json"
        meant = sources.sample_meant(name) if folder is None else ""
        raise UsageError(f"{name} {where}, so its layers are unknown", meant or "name a folder in Hugging Face format")
    config = read_json(folder / "config.json")
    causal = any(str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in config.get("architectures") or ())
    return _Model(name, config, causal)


def _require_valid(text: str) -> None:
    """The file as a run would read it: settings, data and files of every member."""
    from joulelab.runs.groups import check_group
    from joulelab.runs.spec import read_layers

    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft.yaml"
        draft.write_text(text, encoding="utf-8")
        check_group(read_layers(str(draft)), {}, lambda spec: [spec.preflight])


def _head(name: str, question: str, baseline: str, facts: str) -> str:
    return f"""\
# {question}
# Written by `joulelab new compare`. {facts}
#   joulelab run {name} --dry-run     print the settings of all runs
#   joulelab run {name}               run them and compare quality and energy, the teacher's included
#   joulelab explain KEY              what a setting means
about: {question}
baseline: {baseline}
members:
"""


def _quoted(value: object) -> str:
    """A value in YAML's flow style."""
    return json.dumps(value, ensure_ascii=False)


def _members(first: str, overrides: str, others: list[tuple[str, int]], first_seeds: int = 1) -> str:
    """The first member holds the settings that all others repeat."""
    repeats = f"    seeds: {list(range(first_seeds))}\n" if first_seeds > 1 else ""
    lines = f"  - experiment: {first}\n{repeats}    overrides: &mine\n{indent(overrides, '      ')}"
    for experiment, seeds in others:
        lines += f"  - {{experiment: {experiment}, seeds: {list(range(seeds))}, overrides: *mine}}\n"
    return lines


def _source_lines(data: str, found: _Data) -> str:
    splits = f"splits kept as they are: {', '.join(found.splits)}" if found.splits else "no splits: made by text hash"
    lines = [f"source: {_quoted(data)}  # {splits}; or data.train=, data.validation=, data.test="]
    if not found.header:
        lines.append("header: false  # the file has no column names; columns are numbered from 1")
    if found.text is not None:
        lines.append(f"text_column: {_quoted(found.text)}")
    if found.label is not None:
        lines.append(f"label_column: {_quoted(found.label)}  # {found.classes} classes")
    return "\n".join(lines)


def _classify_group(name: str, data: str, large: _Model, small: _Model, seeds: int, found: _Data) -> str:
    words = found.characters / max(1, found.rows) / 4  # about four characters per token
    tokens = min(large.positions, small.positions, next(size for size in (32, 64, 128, 256, 10**9) if words < size))
    layers = large.half if small is large else "all"
    overrides = f"""\
data:
{indent(_source_lines(data, found), "  ")}
  train_size: all  # or a number, or a fraction: 0.1
  validation_size: all
  test_size: all
  max_tokens: {min(tokens, 512)}  # longer texts are truncated
teacher:
  model: {_quoted(large.name)}  # fine-tuned here, in a measured stage; or fine_tuned: FOLDER of a fine-tuned model
  training: {{epochs: 3, batch_size: 32, learning_rate: 5.0e-5}}
student:
  model: {_quoted(small.name)}
  layers: {layers}  # layers copied from it; a single number N initializes N layers randomly
training: {{epochs: 3, batch_size: 32, learning_rate: 1.0e-4}}
"""
    others = [("demo-labels", seeds), ("demo-kd", seeds), ("demo-features", seeds)]
    facts = f"{found.rows:,} rows, {found.classes} classes; columns: {', '.join(found.columns)}."
    head = _head(name, "Does a teacher pay off on my data?", "labels only", facts)
    return head + _members("demo-teacher", overrides, others)


def _causal_group(name: str, data: str, large: _Model, student: str | None, seeds: int, found: _Data) -> str:
    row = min(large.positions, 512)
    tokens = max(20_000, min(5_000_000, 3 * found.characters // 4))
    start = f"size: null, layers: {large.half}" if large.layers else "size: 10m"
    if student is not None:
        start = f"size: null, model: {_quoted(student)}"
    chosen = f"\n  text_column: {_quoted(found.text)}" if found.text else ""
    overrides = f"""\
data:
  source: {_quoted(data)}  # or data.train=, data.validation=, data.test=; without splits, split by hash{chosen}
  max_tokens: {row}
  row_length: {row}
teacher: {{model: {_quoted(large.name)}, batch_size: 8}}
student: {{{start}, teacher_embeddings: false}}  # layers of the teacher, model: NAME, or size: 10m
budget: {{tokens: {tokens}}}  # about three passes over the data; the same for every method
training: {{batch_size: 4, learning_rate: 5.0e-4}}
"""
    facts = f"{found.rows:,} rows; columns: {', '.join(found.columns) or 'none'}."
    head = _head(name, "Does a teacher pay off on my conversations or texts?", "SFT", facts)
    return head + _members("sft-tiny", overrides, [("kd-tiny", seeds)], seeds)


def _squad_group(name: str, data: str, large: _Model, small: _Model, seeds: int) -> str:
    length = min(large.positions, small.positions, 384)
    layers = large.half if small is large else "null"
    overrides = f"""\
data:
  train: {_quoted(data)}  # add validation: FILE and test: FILE; without them, paragraphs are held out by hash
  max_seq_length: {length}
  doc_stride: {max(8, length // 3)}
  max_query_length: {max(8, length // 6)}
teacher: {{model: {_quoted(large.name)}, training: {{epochs: 2, batch_size: 8, learning_rate: 5.0e-5}}}}
student: {{model: {_quoted(small.name)}, layers: {layers}}}
training: {{epochs: 3, batch_size: 8, learning_rate: 5.0e-5}}
"""
    head = _head(name, "Does a teacher pay off on my questions?", "answers only", "Questions in SQuAD's format.")
    return head + _members("squad-tiny", overrides, [("squad-tiny-labels", seeds)], seeds)


def _text_group(name: str, data: str, large: _Model, seeds: int, facts: str) -> str:
    kind = large.config.get("model_type")
    if kind != "bert":
        raise UsageError(f"{large.name} is a model of type {kind}", "name a BERT, or a causal language model")
    model, length = _quoted(large.name), min(large.positions, 128)
    overrides = f"""\
data:
  source: {_quoted(data)}  # or data.train=, data.validation=, data.test=
  max_model_input_size: {length}
teacher: {{type: bert, model: {model}}}
student: {{layers: {large.half}, layers_of: {model}}}
"""
    head = _head(name, "Does a teacher pay off on my text?", "masks only", facts)
    others = [("distilbert-tiny-alone", seeds), ("distilbert-tiny-kd", seeds)]
    return head + _members("distilbert-tiny-teacher", overrides, others)


def _image_group(name: str, data: str, seeds: int) -> str:
    listed = list(range(seeds))
    head = _head(
        name, "Does a teacher pay off on my images?", "labels only", "A folder of images, one folder per class."
    )
    return f"""{head}\
  - experiment: fitnets-images
    seeds: {listed}
    overrides: &mine
      label: labels only
      data: {{source: {_quoted(data)}, side: 32}}  # folders train, validation and test are kept as they are
      hint: null
      distill: {{alpha: 1.0, feat_beta: 0.0}}
  - experiment: fitnets-images
    seeds: {listed}
    overrides: {{<<: *mine, label: response KD, distill: {{alpha: 0.3, feat_beta: 0.0}}}}
"""
