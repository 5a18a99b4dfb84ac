"""Nothing that looks like a secret leaves the store: texts are searched before they are packed.

The environment was redacted when it was recorded; settings, marks and logs may still hold what somebody typed.
"""

from __future__ import annotations

import re

from joulelab.runs.environment import REDACTED

# Tokens by the prefixes their makers give them, whole; passwords inside addresses; values of fields named for a secret.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bp]-|AKIA)[A-Za-z0-9_\-]{12,}"
    r"|eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-.]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?-----END [A-Z ]*PRIVATE KEY-----"
)
_ADDRESS = re.compile(r"(://[^/\s:@\"']+:)[^/\s@\"']+(@)")
_FIELD = re.compile(
    r"((?:^|[\s\"'{,])[\w.-]*?(?:api_?key|passw(?:or)?d|secret|credential|(?:access|auth|hf|api)_token)[\"']?\s*[:=]\s*)"
    r"(?!null\b|None\b|true\b|false\b|\"\"|'')(\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',}\]]+)",
    re.I,
)


def without_secrets(text: str) -> tuple[str, int]:
    """The text with secrets replaced, and how many there were."""
    text, tokens = _TOKEN.subn(REDACTED, text)
    text, addresses = _ADDRESS.subn(rf"\1{REDACTED}\2", text)
    fields = 0

    def hide(found: re.Match[str]) -> str:
        nonlocal fields
        before, value = found.groups()
        if REDACTED in value:
            return found.group()
        fields += 1
        quote = value[0] if value[0] in "\"'" else ""
        return f"{before}{quote}{REDACTED}{quote}"

    text = _FIELD.sub(hide, text)
    return text, tokens + addresses + fields
