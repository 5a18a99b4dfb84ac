"""mkdocs hook: links to files outside docs/ become plain names on the site, which does not contain these files."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(_name, markdown)


def _name(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return text if path.rpartition("/")[2] in text or path in text else f"{text} (`{path}`)"
