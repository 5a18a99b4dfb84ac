"""Stage data.preprocess: a source of conversations or texts becomes stores of token ids, for training and test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from joulelab.data import sources
from joulelab.data.chat.conversations import (
    PreferenceConversation,
    PreferenceText,
    Row,
    file_notes,
    has_parts,
    in_split,
    own_splits,
    prompts_of,
    row_id,
    uses_tools,
)
from joulelab.data.chat.datasets import ChatDataSettings, settings_rows, write_rows
from joulelab.data.chat.encoding import encoding_identity, require_end_id
from joulelab.data.chat.templates import read_template, render, template_of
from joulelab.data.splits import SPLITS
from joulelab.distill.causal.config import CausalData, CausalSpec
from joulelab.distill.causal.models import TEST, TRAIN, VALIDATION, CausalContext, Split, student_tokenizer
from joulelab.distill.runner import PREPROCESS
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import TEXT_PROMPTS
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.paths import read_json, write_json

_SPLITS = "splits.json"


def prepare_data(context: CausalContext) -> Artifact:
    """All stores in one artifact: they come from one source, by one tokenizer."""
    data, runner = context.spec.data, context.runner
    raw = [runner.input_bill(name, file, "text", role="data") for name, file in data.inputs().items()]
    inputs = {
        **data.model_dump(mode="json", exclude={"tokenizer", "template", "row_length"}),
        # two models of one family often share a tokenizer, but not the chat template
        **encoding_identity(context.tokenizer, template_of(context.tokenizer, last_answer_only=data.last_answer_only)),
    }
    own = _own_splits(data)
    if own:
        inputs["splits"] = sorted(own)  # artifacts of earlier releases ignored them
    made = runner.make(
        "data",
        PREPROCESS,
        lambda folder, stage: _write_stores(context, folder, stage),
        kind="documents",
        inputs=inputs,
        parents=raw,
    )
    if data.is_own:
        _report_splits(context, made, own)
    _report_kept(context, made)
    return made


def _report_kept(context: CausalContext, data: Artifact) -> None:
    """Rows used of those read, and why the others are not: by split, by the requested number, by the filters."""
    names = [name for name in (TRAIN, VALIDATION, TEST) if (data.folder / name).is_dir()]
    for name in names:
        attributes = context.documents(data, name).attributes
        tally, dropped = Counter(attributes.get("rows", {})), Counter(attributes.get("dropped", {}))
        beyond = attributes.get("documents_without_trained_tokens", 0)
        kept = tally["texts"] + tally["conversations"] - beyond
        others = {in_split(one) for one in SPLITS if one != name and one in names}
        not_used = {in_split(one) for one in SPLITS if one not in names}
        # The line of a held-out split does not count the rows of other splits.
        counted = {why: n for why, n in dropped.items() if n and (name == TRAIN or why not in others | not_used)}
        reasons = [
            f"{count:,} {why}{', which this pipeline does not use' if why in not_used else ''}"
            for why, count in counted.items()
        ]
        if beyond:
            reasons.append(f"{beyond:,} have no token to train on before max_tokens={attributes['max_tokens']}")
        if (cut := tally["cut at max_tokens"] - beyond) > 0:
            reasons.append(f"{cut:,} of those used are cut at max_tokens={attributes['max_tokens']}")
        total = kept + beyond + sum(counted.values())
        context.run.note(
            f"{name}: {kept:,} of {total:,} rows are used" + (f" ({'; '.join(reasons)})" if reasons else "")
        )


_CHECKED_ROWS, _CHECKED_CHATS = 10_000, 20


def check_chat_parts(spec: CausalSpec) -> None:
    """Refuse tools, tool calls and reasoning that the chat template would drop, or that generation cannot take, by the
    first local rows that have them; other rows are checked when they are encoded."""
    prompts = spec.generation.prompts_from if spec.answers_prompts else None
    local = prompts is not None and sources.parse(prompts).path is not None
    if local and any(uses_tools(row) for row in islice(prompts_of(str(prompts)), _CHECKED_ROWS)):
        raise ConfigError(f"a conversation of {prompts} has tools or tool calls", TEXT_PROMPTS)
    if sources.parse(spec.data.files.get(TRAIN, spec.data.source)).kind not in ("file", "folder"):
        return
    first = islice(data_rows(spec.data, TRAIN, limit=None), _CHECKED_ROWS)
    found = islice((row for row in first if not isinstance(row, str) and has_parts(row)), _CHECKED_CHATS)
    tokenizer = None
    for row in found:
        if spec.answers_prompts and spec.generation.prompts_from is None and uses_tools(row):
            raise ConfigError(f"a conversation of {spec.data.source} has tools or tool calls", TEXT_PROMPTS)
        tokenizer = tokenizer or student_tokenizer(spec)
        given = read_template(Path(spec.data.template)) if spec.data.template else None
        render(tokenizer, row, template_of(tokenizer, given, spec.data.last_answer_only))


def check_end_of_text(spec: CausalSpec) -> None:
    """Refuse a tokenizer without the token that ends a text, by the first local row."""
    source = spec.data.files.get(TRAIN, spec.data.source)
    is_local = sources.parse(source).kind != "hub"
    if is_local and isinstance(next(data_rows(spec.data, TRAIN, limit=None), None), str):
        require_end_id(student_tokenizer(spec))


def check_own_pairs(spec: CausalSpec) -> None:
    """Refuse data without pairs where the settings say that it has them, by its first local row."""
    source = spec.data.files.get(TRAIN, spec.data.source)
    if not spec.own_pairs or sources.parse(source).kind == "hub":
        return
    row = next(data_rows(spec.data, TRAIN, limit=None), None)
    if not isinstance(row, PreferenceConversation | PreferenceText):
        raise ConfigError(
            f"{source} has no preference pairs, but preferences.candidates_from=data",
            "expected the columns chosen and rejected, and optionally prompt; for other data use "
            "preferences.candidates_from=teacher",
        )


def _own_splits(data: CausalData) -> set[str]:
    """Splits besides training that the user has."""
    return {*(() if "train" in data.files else own_splits(data.source)), *data.files} - {TRAIN}


def _report_splits(context: CausalContext, data: Artifact, own: set[str]) -> None:
    settings, path = context.spec.data, data.folder / _SPLITS
    duplicates = read_json(path)["duplicates"] if path.exists() else 0
    notes = [note for place in settings.inputs().values() for note in file_notes(place, settings.columns)]
    if TEST not in own:
        where = settings.files.get(TRAIN, settings.source)
        notes.append(f"{where} has no test split: about a fifth is held out by the hash of each text or question")
    names: tuple[Split, ...] = (TRAIN, *((VALIDATION,) if VALIDATION in own else ()), TEST)
    sizes: dict[str, int] = {name: len(context.documents(data, name)) for name in names}
    context.runner.report_data(sizes, notes, duplicates)


def _write_stores(context: CausalContext, folder: Path, stage: Stage) -> None:
    data, rows, tokens = context.spec.data, 0, 0
    trained: set[str] = set()
    duplicates = 0

    def counted(source: Iterator[Row], split: str) -> Iterator[Row]:
        nonlocal rows, duplicates
        for row in source:
            rows += 1
            stage.count(samples=rows)
            context.run.stop.check()
            if data.is_own and split == TRAIN:
                trained.add(row_id(row))
            elif data.is_own and split == TEST:
                duplicates += row_id(row) in trained
            yield row

    splits: tuple[Split, ...] = (TRAIN, *((VALIDATION,) if VALIDATION in _own_splits(data) else ()), TEST)
    for split in splits:
        dropped: Counter[str] = Counter()
        store = write_rows(
            folder / split,
            context.tokenizer,
            counted(split_rows(context, split, dropped), split),
            tokenizer_name=context.spec.tokenizer,
            max_tokens=data.max_tokens,
            last_answer_only=data.last_answer_only,
            dropped=dropped,
        )
        tokens += store.tokens_total
        stage.count(samples=rows, tokens=tokens)
    if data.is_own:
        write_json(folder / _SPLITS, {"duplicates": duplicates})


def split_rows(context: CausalContext, split: Split, dropped: Counter[str] | None = None) -> Iterator[Row]:
    """The cleaned conversations or texts of a split."""
    return data_rows(context.spec.data, split, context.spec.data.limit(split), dropped)


def data_rows(
    data: CausalData, split: Split, limit: int | float | None, dropped: Counter[str] | None = None
) -> Iterator[Row]:
    return settings_rows(
        ChatDataSettings(
            source=data.source,
            subset=data.subset,
            split=split,
            form=data.form,
            limit=limit,
            strip_think_blocks=data.strip_think_blocks,
            code_only=data.code_only,
            only_correct=data.only_correct,
            max_tokens=data.max_tokens,
            files=data.files,
            text_column=data.text_column,
            header=data.header,
            shares=data.shares,
        ),
        dropped,
    )
