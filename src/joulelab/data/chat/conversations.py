"""Conversations and texts from any source: rows recognized by their columns, split by hash, and cleaned."""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from joulelab.data import labeled_text, sources
from joulelab.data.splits import SPLITS, USUAL_SHARES, HashShares, SplitName, split_of, text_id
from joulelab.data.text import (
    BY_NAME,
    CSV_SUFFIXES,
    TEXT_COLUMNS,
    ColumnChoice,
    Columns,
    check_source,
    chosen_column,
    files_by_split,
    is_saved_dataset,
    json_rows,
    open_file,
    read_files,
    unreadable,
)
from joulelab.errors import ConfigError

ASSISTANT, TOOL = "assistant", "tool"


class Message(TypedDict):
    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Calls by an assistant, as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`."""
    reasoning_content: NotRequired[str]
    """Reasoning of an assistant, if the dataset keeps it separate from the answer."""
    name: NotRequired[str]
    tool_call_id: NotRequired[str]


Conversation = list[Message]


class ToolConversation(list[Message]):
    """A conversation with the tools that the assistant may call, as JSON schemas. A slice of it has the same tools."""

    def __init__(self, messages: Iterable[Message], tools: list[dict[str, Any]]) -> None:
        super().__init__(messages)
        self.tools = tools

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return ToolConversation(found, self.tools) if isinstance(place, slice) else found


class PreferenceConversation(list[Message]):
    """A conversation that ends with the better of two answers, with the worse one (TRL's preference type)."""

    def __init__(self, messages: Iterable[Message], rejected: str) -> None:
        super().__init__(messages)
        self.rejected = rejected


class PreferenceText(str):
    """A plain text with the better of two endings: the beginning that both share, and the worse ending."""

    prompt: str
    rejected: str

    def __new__(cls, text: str, prompt: str, rejected: str) -> PreferenceText:
        made = super().__new__(cls, text)
        made.prompt, made.rejected = prompt, rejected
        return made

    @property
    def chosen(self) -> str:
        return self[len(self.prompt) :]


Row = Conversation | str
"""A conversation, trained on the assistant's turns, or a plain text, trained on all of it."""


def tools_of(conversation: Conversation) -> list[dict[str, Any]] | None:
    return conversation.tools if isinstance(conversation, ToolConversation) else None


def uses_tools(row: Row) -> bool:
    """Whether a row has tools, or calls of tools and their results."""
    if isinstance(row, str):
        return False
    return bool(tools_of(row)) or any("tool_calls" in turn or turn["role"] == TOOL for turn in row)


def has_parts(row: Conversation) -> bool:
    """Whether a conversation has more than text, which a chat template may drop."""
    return uses_tools(row) or any("reasoning_content" in turn for turn in row)


def prompt_of(conversation: Conversation) -> Conversation:
    """The turns before the last answer: the prompt for a teacher that generates a new one."""
    answers = [place for place, message in enumerate(conversation) if message["role"] == ASSISTANT]
    return conversation[: answers[-1]] if answers else conversation


def row_id(row: Row) -> str:
    """Hash of the question, so that two answers to it are never in different splits."""
    if isinstance(row, str):
        return text_id(row)
    first_answer = next((place for place, turn in enumerate(row) if turn["role"] == ASSISTANT), len(row))
    prompt_turns = row[:first_answer] or row
    return text_id("\n".join(turn["content"] for turn in prompt_turns))


# Records of published datasets are recognized by their columns: `messages` (Tulu-3 and most others; also
# `conversations` with `from` and `value`), `prompt` and `generation` (Codeforces-CoTs), `problem` and several
# `generations` with a verdict on each (OpenR1-Math), `prompt` and `response` or `completion`, and `text`. These are
# also TRL's language-modeling and prompt-completion types, with `tools`, `tool_calls` and `reasoning_content`. Rows of
# its preference type are trained on with the better answer, and as pairs in preference training; prompts without an
# answer are refused, except where only prompts are needed (`generation.prompts_from`).


_MESSAGES = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "problem")
_ANSWERS = ("response", "generation", "completion", "output", "answer")
_VERDICTS = ("correctness_math_verify", "correctness_llama")
_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
_CALL_ROLES = ("function_call", "tool_call", "function")  # a call or a result as a turn: which of both, datasets differ
_TRUNCATED = "length"

Record = Mapping[str, Any]


def row_of(record: Record, dropped: Counter[str], only_correct: bool = True) -> Row | None:
    """The row of a record, or None if it is not to be trained on; `dropped` counts the reasons."""
    if record.get("generations") is not None and record.get("problem"):
        return _several_answers(record, dropped, only_correct)
    if record.get("finish_reason") == _TRUNCATED:
        # it ends in the middle, and a student trained on it does not learn to stop
        dropped["answer was truncated"] += 1
        return None
    messages = next((record[name] for name in _MESSAGES if record.get(name) is not None), None)
    if messages is not None:
        return _with_answer(_with_tools(_conversation(messages), record), dropped)
    prompt, answer = _first(record, _PROMPTS), _first(record, _ANSWERS)
    if record.get("chosen") is not None and record.get("rejected") is not None:
        return _preference(record["chosen"], record["rejected"], prompt, dropped)
    if prompt is not None and answer is not None:
        return _with_answer(_with_tools(_prompt_and_answer(prompt, answer), record), dropped)
    _refuse_other_types(record, prompt)
    text = _first(record, TEXT_COLUMNS)
    if text is None and _has(record, (*_MESSAGES, *TEXT_COLUMNS)):
        dropped["empty"] += 1
        return None
    if text is None and _has(record, _PROMPTS) and _has(record, _ANSWERS):
        dropped["no assistant answer" if prompt is not None else "no question"] += 1
        return None
    if text is None:
        raise ConfigError(
            f"a row has the columns {', '.join(record) or 'none'}, which are neither a conversation nor a text",
            "expected messages, or prompt and response, or question and answer, or problem and generations, or text",
        )
    if not _words(text, "text").strip():
        dropped["empty"] += 1
        return None
    return _words(text, "text")


def _preference(chosen: Any, rejected: Any, prompt: Any, dropped: Counter[str]) -> Row | None:
    """With an explicit prompt, or with the one that both answers begin with."""
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        return _preference_text(chosen, rejected, dropped)
    whole, other = (
        _conversation(answer) if prompt is None or _has_prompt(answer) else _prompt_and_answer(prompt, answer)
        for answer in (chosen, rejected)
    )
    if any(not turns or turns[-1]["role"] != ASSISTANT for turns in (whole, other)):
        dropped["no assistant answer"] += 1
        return None
    if whole[:-1] != other[:-1] or not whole[:-1]:
        dropped["the two answers do not follow the same prompt"] += 1
        return None
    if not whole[-1]["content"].strip():
        dropped["no assistant answer"] += 1
        return None
    return PreferenceConversation(whole, other[-1]["content"])


def _has_prompt(answer: Any) -> bool:
    """Whether messages begin with the prompt: UltraFeedback repeats it in both answers."""
    return isinstance(answer, list) and bool(answer) and _message(answer[0])["role"] != ASSISTANT


def _preference_text(chosen: str, rejected: str, dropped: Counter[str]) -> Row | None:
    """The prompt is what both texts begin with, up to the last complete word."""
    shared = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    shared = min(len(chosen), len(rejected)) if shared is None else shared
    while 0 < shared < len(chosen) and not chosen[shared - 1].isspace():
        shared -= 1
    prompt = chosen[:shared].rstrip()
    if not prompt or not chosen[len(prompt) :].strip():
        dropped["the two answers do not follow the same prompt" if not prompt else "no assistant answer"] += 1
        return None
    return PreferenceText(chosen, prompt, rejected[len(prompt) :])


def _refuse_other_types(record: Record, prompt: Any) -> None:
    """TRL's type whose rows have no answer to train on."""
    if prompt is not None and not _has(record, (*_ANSWERS, *TEXT_COLUMNS)):
        raise ConfigError(
            f"it is a prompt without an answer ({', '.join(record)}); training and the held-out loss need answers",
            "add a column `completion`; or use the prompts in synthetic, dpo or on-policy, with "
            "generation.prompts_from=FILE next to a data.source that has answers",
        )


def prompt_row_of(record: Record, dropped: Counter[str]) -> Row | None:
    """The row of a record that is used for its prompt: it may end before the answer, as TRL's prompt-only type."""
    messages, prompt = _first(record, _MESSAGES), _first(record, _PROMPTS)
    if messages is None and prompt is None:
        return row_of(record, dropped)
    if messages is None:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": _words(prompt, "prompt")}]
    conversation = _with_tools(_conversation(messages), record)
    if not any(turn["content"].strip() for turn in prompt_of(conversation)):
        dropped["empty"] += 1
        return None
    return conversation


def _with_tools(conversation: Conversation, record: Record) -> Conversation:
    """With the tools of the record: a list of JSON schemas, or its JSON text."""
    found = record.get("tools")
    tools = _without_none(_parsed(found, "tools"))
    if not tools:
        return conversation
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"its tools are {_kind(tools)}; expected a list of JSON schemas", "see TRL's tool calling")
    return ToolConversation(conversation, tools)


def _parsed(value: Any, what: str) -> Any:
    """Decode JSON text: columns of a table often hold tools and arguments as JSON strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise ConfigError(f"its {what} are not JSON: {error}", "expected a JSON string or an object") from error


def _without_none(value: Any) -> Any:
    """Without the keys that are null: Arrow gives every object of a column the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _tool_call(found: Any) -> dict[str, Any]:
    """A call with its arguments as an object, which chat templates expect; the OpenAI protocol has them as text."""
    call = _without_none(found)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        expected = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise ConfigError(f"a tool call is {found!r:.80}", f"expected {expected}")
    arguments = _parsed(function.get("arguments"), "arguments of a tool call")
    known = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **known, "function": {**function, "arguments": arguments or {}}}


def _several_answers(record: Record, dropped: Counter[str], only_correct: bool) -> Row | None:
    """The first complete and correct answer."""
    answers: Sequence[Any] = record["generations"] or ()
    whole = record.get("is_reasoning_complete") or [True] * len(answers)
    reasons = record.get("finish_reasons") or [None] * len(answers)
    verdicts = [record[name] for name in _VERDICTS if record.get(name)]
    only_correct = only_correct and _has(record, _VERDICTS)  # without verdicts, all answers are used
    for place, answer in enumerate(answers):
        complete = _at(whole, place) and _at(reasons, place) != _TRUNCATED
        correct = not only_correct or any(_at(verdict, place) for verdict in verdicts)
        if complete and correct and str(answer or "").strip():
            return _prompt_and_answer(record["problem"], answer)
    dropped["no complete and correct answer" if only_correct else "no complete answer"] += 1
    return None


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _has(record: Record, names: Sequence[str]) -> bool:
    """Whether the record has such a column, even if empty."""
    return any(name in record for name in names)


def _first(record: Record, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _prompt_and_answer(prompt: Any, answer: Any) -> Conversation:
    """Either may be a list of messages, as in preference datasets."""
    prompt_turns = (
        _conversation(prompt) if isinstance(prompt, list) else [Message(role="user", content=_words(prompt, "prompt"))]
    )
    if isinstance(answer, list):
        return prompt_turns + _conversation(answer)
    return [*prompt_turns, Message(role=ASSISTANT, content=_words(answer, "answer"))]


def _words(value: Any, what: str) -> str:
    """As text; numbers are accepted, but a list or object is an error, because its text form would be trained on."""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        raise ConfigError(f"its {what} is {_kind(value)}; expected text", "convert it to text")
    return str(value)


def _kind(value: Any) -> str:
    names = ((Mapping, "an object"), (str, "text"), (Sequence, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), f"{value!r:.40}")


def _conversation(messages: Any) -> Conversation:
    if not isinstance(messages, list):
        raise ConfigError(
            f"its messages are {_kind(messages)}, not a list", "expected a list of objects with role and content"
        )
    return [_message(found) for found in messages]


def _message(found: Any) -> Message:
    role = found.get("role", found.get("from")) if isinstance(found, Mapping) else None
    if not isinstance(role, str):
        has = f"has {', '.join(map(str, found)) or 'nothing'}" if isinstance(found, Mapping) else f"is {_kind(found)}"
        raise ConfigError(f"a message {has} and no role", "expected an object with role and content")
    content = found.get("content", found.get("value"))
    if not isinstance(content, str | None):
        raise ConfigError(f"a message's content is {_kind(content)}; expected text", "convert it to text")
    if role in _CALL_ROLES:
        raise ConfigError(
            f"a message has the role '{role}'; expected system, user, assistant or tool",
            "write calls as `tool_calls` of an assistant message, and results as messages with the role `tool`",
        )
    message = Message(role=_ROLES.get(role, role), content=content or "")
    if found.get("tool_calls"):
        calls = _parsed(found["tool_calls"], "tool calls")
        message["tool_calls"] = [_tool_call(call) for call in calls]
    if found.get("function_call"):
        raise ConfigError("a message has function_call, which is deprecated", "write it as tool_calls")
    for key in ("reasoning_content", "name", "tool_call_id"):
        if found.get(key):
            message[key] = _words(found[key], key)
    return message


def _is_answer(turn: Message) -> bool:
    return turn["role"] == ASSISTANT and bool(turn["content"].strip() or turn.get("tool_calls"))


def _with_answer(conversation: Conversation, dropped: Counter[str]) -> Conversation | None:
    if not any(_is_answer(turn) for turn in conversation):
        dropped["no assistant answer"] += 1
        return None
    return conversation


Form = Literal["text", "chat"]
_OPENING_WORDS = 6  # of a review, which the prompt contains
_TRAIN = "train"
_WHOLE_BYTES = 256 * 2**20  # files up to this size are checked completely before a run
_FIRST_ROWS = 10_000
_FEW = 50  # distinct rows; with fewer, a split may be empty


def rows_of(
    source: str,
    *,
    split: SplitName | None = None,
    subset: str = "all",
    form: Form = "text",
    limit: int | float | None = None,
    only_correct: bool = True,
    dropped: Counter[str] | None = None,
    files: Mapping[str, str] | None = None,
    choice: ColumnChoice = BY_NAME,
    shares: HashShares = USUAL_SHARES,
) -> Iterator[Row]:
    """The rows of a source (sample, file, folder or hub dataset).

    Existing splits, and `files` that the user names for a split, are kept as they are; rows without a split are
    divided by the hash of each row's question.

    `subset` is the configuration of a hub dataset, or short, long, all of sample:reviews; `form` selects plain texts or
    questions with answers for these. With a `limit`, all rows are read and those with the smallest hashes are used:
    published datasets are often sorted by origin, so their first rows are of one kind. A smaller limit gives a subset;
    a fraction is a share of the rows.
    """
    counts = dropped if dropped is not None else Counter()
    if limit is not None and (limit < 1 if isinstance(limit, int) else not 0 < limit <= 1):
        raise ConfigError(f"limit={limit}; expected 1 or more", "set a limit of 1 or more, or none")
    named = files or {}
    if "train" not in named and sources.parse(source).kind == "sample" and split not in named:
        rows = _review_rows(source, subset, form, split, counts, shares)
    else:
        rows = _split_rows(source, split, subset, only_correct, counts, named, choice, shares)
    return rows if limit is None else iter(_with_smallest_hashes(rows, limit, counts))


def _split_rows(
    source: str,
    split: SplitName | None,
    subset: str,
    only_correct: bool,
    dropped: Counter[str],
    named: Mapping[str, str],
    choice: ColumnChoice,
    shares: HashShares,
) -> Iterator[Row]:
    whole = named.get("train", source)
    if split is None:
        return _some_of(_read(whole, subset, only_correct, dropped, choice=choice), None, whole, dropped)
    own = named if "train" in named else {**dict.fromkeys(own_splits(source), source), **named}
    held_out = {name for name in own if name != "train"}
    if split in held_out:
        place, part = (named[split], None) if split in named else (source, split)
        rows = _read(place, subset if place == source else "all", only_correct, dropped, part, choice)
        return _some_of(rows, None, place, dropped)
    # A row without an answer or a text has no hash: it is counted once, with the training rows.
    unusable = dropped if split == "train" else Counter[str]()
    rows = _read(whole, subset if whole == source else "all", only_correct, unusable, choice=choice)
    if split == "train" and "test" in held_out:
        return _some_of(rows, None, whole, dropped)
    # With validation rows given, only test rows are held out.
    splits: tuple[SplitName, ...] = ("train", "validation") if split == "train" and held_out else (split,)
    return _some_of(rows, splits, whole, dropped, shares, unusable)


def own_splits(source: str) -> tuple[str, ...]:
    """The splits besides `train` that a local source has; a dataset on the hub is asked when it is read."""
    found = sources.parse(source)
    if found.kind != "folder" or found.path is None:
        return ()
    if is_saved_dataset(found.path):
        from joulelab.data.hub import SavedText

        names = SavedText(found.path).splits()
    else:
        names = tuple(files_by_split(found.path))
    return tuple(name for name in names if name in SPLITS and name != _TRAIN)


def prompts_of(source: str, dropped: Counter[str] | None = None) -> Iterator[Row]:
    """Rows to take prompts from, in the order of the source."""
    counts = dropped if dropped is not None else Counter()
    if sources.parse(source).kind == "sample":
        return rows_of(source, split="train", dropped=counts)
    return _some_of(_read(source, "all", True, counts, only_prompts=True), None, source, counts)


def check_prompts(source: str) -> None:
    """Refuse a local file that has no prompts, by its first rows."""
    if sources.parse(source).path is not None:
        for _ in islice(prompts_of(source), _FIRST_ROWS):
            pass


def check_rows(
    source: str,
    subset: str,
    files: Mapping[str, str],
    choice: ColumnChoice,
    only_correct: bool,
    limits: Mapping[str, Any],
    shares: HashShares = USUAL_SHARES,
) -> None:
    """Refuse local files whose rows cannot be trained on, before a run starts; of large files the first rows count."""
    places = [files[name] for name in files] if "train" in files else [source, *files.values()]
    paths = [sources.parse(place).path for place in places]
    if any(path is None for path in paths) or sources.parse(places[0]).kind == "sample":
        return
    small = sum(path.stat().st_size for path in paths if path is not None and path.is_file()) <= _WHOLE_BYTES
    for split in (name for name in SPLITS if name != "validation" or name in files):
        limit = limits.get(split)
        rows = rows_of(
            source, split=split, subset=subset, only_correct=only_correct, files=files, choice=choice, shares=shares
        )
        found = sum(1 for _ in islice(rows, None if small else _FIRST_ROWS))
        if small and isinstance(limit, int) and limit > found:
            name = "documents" if split == "train" else "held_out"
            raise ConfigError(
                f"data.{name}={limit}: {files.get(split, places[0])} has only {found:,} rows for {split}",
                f"set data.{name} to at most {found:,}, or leave it out for all",
            )


def _read(
    source: str,
    subset: str,
    only_correct: bool,
    dropped: Counter[str],
    split: str | None = None,
    choice: ColumnChoice = BY_NAME,
    only_prompts: bool = False,
) -> Iterator[Row]:
    for number, record in enumerate(_records(source, subset, split, choice), 1):
        if choice.text is not None:
            record = _text_record(record, choice.text, source)
        try:
            row = prompt_row_of(record, dropped) if only_prompts else row_of(record, dropped, only_correct)
        except ConfigError as error:
            raise ConfigError(f"{source}, row {number}: {error.message}", error.hint) from None
        if row is not None:
            yield row


def _some_of(
    rows: Iterable[Row],
    splits: tuple[SplitName, ...] | None,
    source: str,
    dropped: Counter[str],
    shares: HashShares = USUAL_SHARES,
    unusable: Counter[str] | None = None,
) -> Iterator[Row]:
    """Rows of the splits, or (None) all. If there is none, the error names the reason: no rows at all, or how they are
    split. `unusable`: where reading counts rows that are no row of any split; None: in `dropped`."""
    different: set[str] = set()
    seen = taken = 0

    def counted() -> Iterator[Row]:
        nonlocal seen
        for row in rows:
            seen += 1
            if len(different) < _FEW:
                different.add(row_id(row))
            yield row

    for row in counted():
        if splits is not None and (other := split_of(row_id(row), shares)) not in splits:
            dropped[in_split(other)] += 1
            continue
        taken += 1
        yield row
    if not seen:
        counts = dropped if unusable is None else unusable
        why = ", ".join(f"{reason}: {count:,}" for reason, count in counts.items())
        raise ConfigError(
            f"{source} has no row to train on: " + (f"all were dropped ({why})" if why else "it is empty"),
            "a row needs an assistant answer or a text",
        )
    if not taken and splits is not None:
        few = f"all {seen:,} rows have the same one" if len(different) == 1 else f"only {len(different)} are distinct"
        raise ConfigError(
            f"{source} has no row for {splits[0]}: splits are fixed by the hash of text or question, and "
            + (few if seen > 1 else "there is a single row"),
            f"provide at least {_FEW} distinct rows: about a fifth is held out for testing",
        )


def _text_record(record: Record, name: str | int, source: str) -> dict[str, Any]:
    columns = Columns(dict.fromkeys(record, ()))
    return {"text": record[chosen_column(columns, name, TEXT_COLUMNS, "text", source)]}


BEYOND_LIMIT = "beyond the requested number"


def in_split(split: str | None) -> str:
    """Why a row is not in a split: its hash assigns it to another one."""
    return f"in the {split} split"


def _with_smallest_hashes(rows: Iterable[Row], limit: int | float, dropped: Counter[str]) -> list[Row]:
    total = 0

    def numbered() -> Iterator[tuple[str, int, Row]]:
        nonlocal total
        for place, row in enumerate(rows):
            total += 1
            yield row_id(row), place, row

    if isinstance(limit, float):
        everything = sorted(numbered(), key=lambda entry: entry[:2])
        chosen = everything[: max(1, round(limit * len(everything)))]
    else:
        chosen = heapq.nsmallest(limit, numbered(), key=lambda entry: entry[:2])
    if total > len(chosen):
        dropped[BEYOND_LIMIT] += total - len(chosen)
    return [row for _, _, row in chosen]


def _review_rows(
    source: str, subset: str, form: Form, split: SplitName | None, dropped: Counter[str], shares: HashShares
) -> Iterator[Row]:
    data = labeled_text.load(source, subset)
    by_split = labeled_text.rows_by_split(data, shares)
    dropped.update({in_split(name): len(rows) for name, rows in by_split.items() if split and name != split})
    chosen = by_split[split] if split else sorted(chain(*by_split.values()), key=lambda row: data.ids[row])
    for row in chosen:
        text = data.texts[row]
        yield text if form == "text" else _as_question(text, data.class_names[data.labels[row]])


def _as_question(review: str, polarity: str) -> Row:
    """A different prompt for every review, simple enough for a small model."""
    words = review.split()
    opening, rest = " ".join(words[:_OPENING_WORDS]), " ".join(words[_OPENING_WORDS:])
    return [
        Message(role="user", content=f"Continue this {polarity} film review: {opening}"),
        Message(role=ASSISTANT, content=rest or opening),
    ]


def _records(
    source: str, subset: str, split: str | None = None, choice: ColumnChoice = BY_NAME
) -> Iterator[dict[str, Any]]:
    part = split or _TRAIN
    found = check_source(source, subset)
    if found.path is None:
        from joulelab.data.hub import HubText

        return HubText(source, None if subset == "all" else subset, whole=True).rows(part)
    if is_saved_dataset(found.path):
        from joulelab.data.hub import SavedText

        return SavedText(found.path).rows(part)
    files = files_by_split(found.path)
    if part not in files:
        raise ConfigError(
            f"{found.path.absolute()} has files of {', '.join(files)} but no training files", "name a single file"
        )
    return chain.from_iterable(_file_records(file, choice) for file in files[part])


def _file_records(file: Path, choice: ColumnChoice = BY_NAME) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    kind = file.name.lower().removesuffix(".gz")
    if file.suffix.lower() in CSV_SUFFIXES:
        columns = open_file(file, choice)[0].read()
        yield from (dict(zip(columns.values, row, strict=True)) for row in zip(*columns.values.values(), strict=True))
        return
    if not kind.endswith((".json", ".jsonl", ".parquet")):
        yield from ({"text": text} for text in read_files([file]))
        return
    try:
        yield from _parquet_rows(file) if kind.endswith(".parquet") else _objects(json_rows(file))
    # Errors of Arrow, of JSON and of UTF-8 decoding are all ValueErrors.
    except (pa.ArrowException, ValueError, OSError) as error:
        raise unreadable(file, error) from error


def file_notes(source: str, choice: ColumnChoice) -> list[str]:
    """What is assumed about the CSV files of a local source."""
    path = sources.parse(source).path
    if path is None or is_saved_dataset(path):
        return []
    files = [file for files in files_by_split(path).values() for file in files if file.suffix.lower() in CSV_SUFFIXES]
    return [note for file in files for note in open_file(file, choice)[1]]


def _objects(rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {row!r:.60}, expected an object")
        yield row


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            yield from batch.to_pylist()


# Cleaning of assistant answers: removal of reasoning, or of everything but code.


_THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
_FENCED = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[^\n]*\n(.*?)^[ ]{0,3}\1[ \t]*$", re.DOTALL | re.MULTILINE)


def cleaned(
    rows: Iterable[Row], dropped: Counter[str], *, strip_reasoning: bool = False, only_code: bool = False
) -> Iterator[Row]:
    """Cleaned rows; conversations with an empty answer are dropped and counted, plain texts are unchanged."""
    for row in rows:
        if isinstance(row, str) or not (strip_reasoning or only_code):
            yield row
            continue
        kept = _clean_answers(row, strip_reasoning, only_code)
        if kept is None:
            dropped["an answer without code" if only_code else "an answer with reasoning only"] += 1
        else:
            yield kept


def strip_think_blocks(text: str) -> str:
    """The answer without its `<think>` blocks.

    A block that never ends was truncated, so everything after its start is thought. One without a start was opened by
    the prompt, as in some chat templates, so everything before its end is thought.
    """
    kept: list[str] = []
    depth = start = 0
    for tag in _THINK_TAG.finditer(text):
        if not tag[1]:
            if depth == 0:
                kept.append(text[start : tag.start()])
            depth += 1
        elif depth <= 1:
            if depth == 0:
                kept.clear()
            depth, start = 0, tag.end()
        else:
            depth -= 1
    if depth == 0:
        kept.append(text[start:])
    return "".join(kept).strip()


def code_only(text: str) -> str:
    """The last fenced code block with its fence, or an empty string; earlier blocks are drafts and examples."""
    found = list(_FENCED.finditer(text))
    return found[-1][0].strip() if found else ""


def _clean_answers(conversation: Conversation, strip_reasoning: bool, only_code: bool) -> Conversation | None:
    """None if an answer is empty: an empty turn must not be trained on."""
    kept: Conversation = []
    for message in conversation:
        cleaned_message = message.copy()
        if message["role"] == ASSISTANT:
            words = strip_think_blocks(message["content"]) if strip_reasoning else message["content"]
            words = code_only(words) if only_code else words
            if strip_reasoning:
                cleaned_message.pop("reasoning_content", None)
            if not words.strip() and not message.get("tool_calls"):
                return None
            cleaned_message["content"] = words
        kept.append(cleaned_message)
    if isinstance(conversation, PreferenceConversation):
        rejected = strip_think_blocks(conversation.rejected) if strip_reasoning else conversation.rejected
        return PreferenceConversation(kept, code_only(rejected) if only_code else rejected)
    tools = tools_of(conversation)
    return kept if tools is None else ToolConversation(kept, tools)
