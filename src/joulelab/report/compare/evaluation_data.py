"""Whether two runs were evaluated on the same held-out data: losses and scores on different data are not compared.

The settings that select and process the held-out documents decide, and the content of the files that they name. Which
documents are trained on does not matter: documents are held out by split or by hash, whatever the number of others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from joulelab.data.splits import is_place
from joulelab.errors import JoulelabError
from joulelab.report.compare.comparison import ComparedRun
from joulelab.runs.paths import RunPaths, read_json
from joulelab.runs.record import RunRecord

# Settings of `data` that select held-out documents, unless there is a file with test data.
_SOURCES = ("source", "subset", "split", "held_out", "test_size", "validation_size")
# Settings of `data` that change the text of held-out documents.
_PROCESSING = (
    *("form", "header", "text_column", "strip_think_blocks", "code_only", "only_correct"),
    *("max_tokens", "max_model_input_size", "min_tokens", "max_unknown_share", "packing"),
    *("template", "last_answer_only"),
)
_FILES = ("data", "data.source", "data.train", "data.validation", "data.test")


def other_data(runs: Sequence[ComparedRun], baseline: Sequence[ComparedRun]) -> str:
    """What differs between the data on which both sides were evaluated; empty if nothing is known to differ."""
    pairs = [(run, base) for run in runs for base in baseline]
    return next((text for run, base in pairs if (text := _difference(run, base))), "")


def is_known(runs: Sequence[ComparedRun]) -> bool:
    """Whether all records state on which data their models were evaluated."""
    return all(_settings(run.record) for run in runs)


def _difference(run: ComparedRun, base: ComparedRun) -> str:
    ours, theirs = _settings(run.record), _settings(base.record)
    for name in ours:
        if name not in theirs:  # of an older record
            continue
        contents = [_content(one.record, str(values[name])) for one, values in ((run, ours), (base, theirs))]
        if name in _FILES and all(contents):
            if contents[0] != contents[1]:
                changed = "the content differs" if ours[name] == theirs[name] else _values(ours[name], theirs[name])
                return f"{name}: {changed}"
        elif ours[name] != theirs[name]:
            return f"{name}: {_values(ours[name], theirs[name])}"
    tokens = [_held_out_tokens(run), _held_out_tokens(base)]
    if run.quality and run.quality.measure.per_token and None not in tokens and tokens[0] != tokens[1]:
        return (
            f"held-out tokens: {_values(*tokens)}, of different tokenizers; compare --quality bits_per_byte if all "
            "runs have it"
        )
    return ""


def _values(ours: Any, theirs: Any) -> str:
    one, other = (value if isinstance(value, str) else json.dumps(value) for value in (ours, theirs))
    return f"{one} against {other}"


def _settings(record: RunRecord) -> dict[str, Any]:
    """Settings of the held-out data by name; empty if the record has none."""
    data = record.spec.get("data")
    if isinstance(data, str) and data:  # of `joulelab evaluate`
        return {"data": data, "limit": record.spec.get("limit")}
    if not isinstance(data, dict):
        return {}
    # unset files are left out of records; the name of a split, as `train[:1000]`, is no file
    files = {name: str(data[name]) for name in ("train", "validation", "test") if data.get(name)}
    found: dict[str, Any] = {
        name: file if (file := files.get(name)) and is_place(file) else None for name in ("train", "validation")
    }
    found |= {name: data[name] for name in _SOURCES if name in data}
    if "test" in files and is_place(files["test"]):
        found = {}
    found |= {"test": files.get("test")} | {name: data[name] for name in _PROCESSING if name in data}
    return {f"data.{name}": value for name, value in found.items()}


def _content(record: RunRecord, name: str) -> str:
    """Hash of the content of an input; empty if the record does not have it."""
    key = next((ancestor.key for ancestor in record.lineage if ancestor.name == name), "")
    return key.rpartition("@")[2] if "@" in key else ""


def _held_out_tokens(run: ComparedRun) -> int | None:
    """Number of predicted tokens in the evaluation of a language model, which other tokenizers change."""
    for who in ("student", "model", "teacher"):
        file = RunPaths(run.folder).artifacts / f"{who}-quality" / "held_out.json"
        try:
            return int(read_json(file)["tokens"])
        except (OSError, ValueError, KeyError, TypeError, JoulelabError):
            continue
    return None
