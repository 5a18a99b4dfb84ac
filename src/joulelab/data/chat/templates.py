"""Chat templates: a conversation as text, and the spans of that text that the assistant wrote.

Templates with `{% generation %}` markers state the spans. For others the conversation is rendered turn by turn, and the
text that an answer adds to its prompt is the span. That requires that adding a turn leaves earlier text unchanged; a
template that rewrites it (some drop the reasoning of earlier turns) is refused, because a guess would train on the
user's text.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from joulelab.data.chat.conversations import ASSISTANT, Conversation, tools_of
from joulelab.errors import ConfigError, NotFoundError


def read_template(path: Path) -> str:
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "name a file with a Jinja template", str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {path.absolute()} cannot be read: {error}", "check the path") from error
    if not text.strip():
        raise ConfigError(f"the chat template {path.absolute()} is empty", "write a Jinja template to it")
    return text


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For tokenizers without a template."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIXED_DATE = "26 Jul 2024"
# Some templates write today's date into the system turn; a fixed date keeps the data the same every day.
_FIXED_CLOCK = "{% macro strftime_now(format) %}" + _FIXED_DATE + "{% endmacro %}{{ '' }}"


class ConversationRefused(ConfigError):
    """A template refuses this conversation; it may accept others."""


Span = tuple[int, int]
"""Start and end, in characters."""


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    origin: str
    """tokenizer, given, or the ChatML default."""
    last_answer_only: bool = False
    """Train only on the last answer of a conversation, for templates that rewrite earlier turns."""

    @property
    def has_markers(self) -> bool:
        return _MARKER.search(self.text) is not None


@dataclass(frozen=True)
class RenderedChat:
    text: str
    answers: list[Span]
    """Including the end of each turn, without the whitespace after it."""

    @property
    def pieces(self) -> list[str]:
        """Prompts and answers alternating, starting with a prompt."""
        bounds = [0, *(bound for span in self.answers for bound in span), len(self.text)]
        return [self.text[start:end] for start, end in pairwise(bounds)]


def template_of(tokenizer: Any, given: str | None = None, last_answer_only: bool = False) -> ChatTemplate:
    if given is not None:
        return ChatTemplate(given, "given", last_answer_only)
    if not getattr(tokenizer, "chat_template", None):
        return ChatTemplate(CHATML, "ChatML default, as the tokenizer has none", last_answer_only)
    try:
        return ChatTemplate(str(tokenizer.get_chat_template()), "tokenizer", last_answer_only)
    except ValueError as error:  # several templates without a default
        raise ConfigError(
            f"the tokenizer's chat template is ambiguous: {error}", "choose one: data.template=FILE"
        ) from error


def render(tokenizer: Any, conversation: Conversation, template: ChatTemplate) -> RenderedChat:
    answers = [place for place, message in enumerate(conversation) if message["role"] == ASSISTANT]
    text = render_text(tokenizer, conversation, template)
    _refuse_lost_parts(text, conversation)
    if template.has_markers:
        spans = _marked_spans(tokenizer, conversation, template)
        _refuse_missing_markers(spans, answers)
        spans = spans[-1:] if template.last_answer_only else spans
    else:
        answers = answers[-1:] if template.last_answer_only else answers
        spans = [_added_by(tokenizer, conversation, place, text, template) for place in answers]
    return RenderedChat(text, [_without_blank_end(text, span) for span in spans])


def _refuse_lost_parts(text: str, conversation: Conversation) -> None:
    """Templates ignore what they do not know. Without its tool call an assistant turn is an empty answer, and a student
    trained on it learns to stop instead of calling."""
    calls = [call["function"]["name"] for message in conversation for call in message.get("tool_calls", ())]
    offered = [str(tool.get("function", tool).get("name", "")) for tool in tools_of(conversation) or ()]
    answers = [message for message in conversation if message["role"] == ASSISTANT]
    # Of the last answer only: many templates drop the reasoning of earlier turns, as their models expect it.
    thoughts = [message["reasoning_content"] for message in answers[-1:] if "reasoning_content" in message]
    for what, parts, otherwise in (
        ("tool calls", calls, ""),
        ("tools", offered, ", or remove the column `tools`"),
        ("reasoning_content", thoughts, ", or drop the reasoning: data.strip_think_blocks=true"),
    ):
        lost = next((part for part in parts if part.strip() not in text), None)
        if lost is not None:
            raise ConfigError(
                f"the chat template does not render {what} ({lost[:40]!r} is not in its text)",
                f"use a template that does: data.template=FILE{otherwise}",
            )


def render_text(
    tokenizer: Any, conversation: Conversation, template: ChatTemplate, ask_for_answer: bool = False
) -> str:
    """`ask_for_answer` ends the text where the assistant's answer begins."""
    return str(_rendered(tokenizer, conversation, template, add_generation_prompt=ask_for_answer)[0][0])


def _added_by(tokenizer: Any, conversation: Conversation, place: int, whole: str, template: ChatTemplate) -> Span:
    """The text that the turn at `place` adds to the prompt before it."""
    if place == 0:
        raise ConversationRefused(
            "a conversation begins with the assistant, and this template does not show where its answer begins",
            "put a user turn before it, or use a template with {% generation %} markers: data.template=FILE",
        )
    before = render_text(tokenizer, conversation[:place], template, ask_for_answer=True)
    last = place == len(conversation) - 1
    answered = whole if last else render_text(tokenizer, conversation[: place + 1], template)
    if not answered.startswith(before) and answered.startswith(render_text(tokenizer, conversation[:place], template)):
        raise ConfigError(
            f"the chat template ends a prompt with {before[-20:]!r}, but answers do not begin there",
            "use a template with {% generation %} markers: data.template=FILE",
        )
    if not answered.startswith(before) or not whole.startswith(answered):
        raise ConfigError(
            f"the chat template rewrites earlier turns when turn {place + 1} of {len(conversation)} is added, "
            "so the assistant's text cannot be located",
            "use a template with {% generation %} markers (data.template=FILE), or train only on last answers: "
            "data.last_answer_only=true",
        )
    return len(before), len(answered)


def _marked_spans(tokenizer: Any, conversation: Conversation, template: ChatTemplate) -> list[Span]:
    text, found = _rendered(tokenizer, conversation, template, return_assistant_tokens_mask=True)
    ends = _special_texts(tokenizer)
    return [(start, _end_of_turn(text[0], end, ends)) for start, end in found[0]]


def _end_of_turn(text: str, end: int, specials: tuple[str, ...]) -> int:
    """Some markers exclude the token that ends the turn; without it a student would not learn to stop."""
    following = next((special for special in specials if text.startswith(special, end)), "")
    return end + len(following)


def _special_texts(tokenizer: Any) -> tuple[str, ...]:
    return tuple(sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True))


def _without_blank_end(text: str, span: Span) -> Span:
    start, end = span
    return start, start + len(text[start:end].rstrip())


def _refuse_missing_markers(spans: list[Span], answers: list[int]) -> None:
    if len(spans) != len(answers):
        raise ConfigError(
            f"the chat template marks {len(spans)} of {len(answers)} assistant turns",
            "the {% generation %} block must enclose every assistant turn",
        )


def _rendered(
    tokenizer: Any, conversation: Conversation, template: ChatTemplate, **options: Any
) -> tuple[list[str], list[list[Span]]]:
    from jinja2 import TemplateError

    render_jinja: Any = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
    text = _FIXED_CLOCK + template.text if "strftime_now" in template.text else template.text
    words = {"date_string": _FIXED_DATE, **tokenizer.special_tokens_map, **options}
    try:
        found: tuple[list[str], list[list[Span]]] = render_jinja(
            conversations=[list(conversation)], chat_template=text, tools=tools_of(conversation), **words
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in conversation)
        raise ConversationRefused(
            f"the chat template refuses a conversation with the turns {roles}: {error}",
            "system turns or repeated roles are often refused; use another template: data.template=FILE",
        ) from error
    return found
