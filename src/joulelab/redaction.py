"""What must not be written or printed: secrets, and characters that control a terminal. The only owner of these rules.

A secret is recognized in four ways:

- by its own form: the prefixes that clouds and hubs give their tokens, private keys, passwords inside URLs;
- by the name in front of it: `password=x`, `"api_key": "x"`, `--token x`, `Pwd=x;` of a connection string;
- by both: a name that is only sometimes secret (`key`, `token`, `session`) in front of a value that looks random;
- by its place: `token=x` in the query or path of a URL, `/pw:x` of an option or path, however short the value is.

Too much is removed rather than too little, except where a text would lose its meaning: `--max-tokens 128`,
`"token": "##ing"` and the vocabulary entry `"password": 9356` stay.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

REDACTED = "<redacted>"
# As HTML and as JSON inside HTML have it: what a report shows was replaced before and is no secret.
_ESCAPED = {"&lt;redacted&gt;": f"{REDACTED}\x01", r"\u003credacted\u003e": f"{REDACTED}\x02"}

# Prefix of a token -> the characters after it. Published by the vendors for secret scanners; a shorter text than the
# real tokens have is accepted if it has digits or both cases, because truncated tokens are pasted too.
_WORD, _DASHED = "A-Za-z0-9", "A-Za-z0-9_-"
_PREFIXES = {
    "hf_": _WORD, "api_org_": _WORD,  # Hugging Face
    "sk-": _DASHED, "sk_live_": _WORD, "rk_live_": _WORD, "sk_test_": _WORD,  # OpenAI, Anthropic, Stripe
    "gsk_": _WORD, "xai-": _WORD, "pplx-": _WORD, "r8_": _WORD, "nvapi-": _DASHED, "lsv2_": _DASHED, "co_api_": _WORD,
    "ghp_": _WORD, "gho_": _WORD, "ghu_": _WORD, "ghs_": _WORD, "ghr_": _WORD, "github_pat_": "A-Za-z0-9_",
    "glpat-": _DASHED, "gldt-": _DASHED, "glrt-": _DASHED,  # GitLab
    "AKIA": "A-Z0-9", "ASIA": "A-Z0-9",  # AWS
    "AIza": _DASHED, "ya29.": _DASHED, "GOCSPX-": _DASHED,  # Google
    "npm_": _WORD, "pypi-": _DASHED, "dckr_pat_": _DASHED, "dckr_oat_": _DASHED, "rubygems_": _WORD,
    "xoxa-": _DASHED, "xoxb-": _DASHED, "xoxp-": _DASHED, "xoxo-": _DASHED, "xoxr-": _DASHED, "xoxs-": _DASHED,
    "xapp-": _DASHED, "SG.": "A-Za-z0-9_.-", "shpat_": _WORD, "dop_v1_": _WORD, "tskey-": _DASHED, "dapi": "a-f0-9",
    "hvs.": _DASHED, "ATATT": _DASHED,
}  # fmt: skip
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    + "|".join(f"{re.escape(prefix)}(?:[{chars}]{{8,}})" for prefix, chars in _PREFIXES.items())
    + ")"
)
_FIXED_FORM = re.compile(
    r"eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-.]+"  # a JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=hooks\.slack\.com/services/)[A-Za-z0-9/]{10,}"
)
# In a query any value counts, in a path one with a digit or a capital: `/token=word/` is a folder of a data set. What a
# template fills in (`$x`, `{x}`, `%s`, `<x>`, `...`) is no secret, nor is the target of a mount (`/run/pw:/run/pw`).
_IN_ADDRESS = (
    re.compile(r"((?:[?&]|&amp;)(?:token|auth|sig|signature)=)((?![$%{<]|\.{3})[^\s\"'&#;,)\]}]+)", re.I),
    re.compile(r"(/(?:token|TOKEN|auth|AUTH)=)((?=[^/\s\"'&?]*[A-Z0-9])(?![$%{<])[^/\s\"'&?;,)\]}]+)"),
    re.compile(r"(/(?:pw|pwd|passw(?:or)?d|passwd|passphrase):)((?![/\\$%{<]|r[ow]\b)[^/\s\"'&;,)\]}]+)", re.I),
)
_ADDRESS = re.compile(r"(://[^/\s:@\"']*:)([^/\s@\"']+)(@)")
_HEADER = re.compile(
    r"(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token|digest|negotiate)\s+)?|\bbearer\s+)"
    r"([^\s\"',;]+)",
    re.I,
)
_SECRET_WORDS = (
    r"api[-_]?key|secret[-_]?key|private[-_]?key|access[-_]?key|account[-_]?key|shared[-_]?access[-_]?key|passw(?:or)?d|"
    r"passwd|passphrase|pwd|pw|secret|credentials?|(?:access|auth|hf|api|refresh|bearer|session|id|hub)[-_]?token"
)
# The value ends at a quote or a separator; in a connection string at `;`, in a URL at `&`.
_VALUE = r"(?P<value>\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;&}\])]+)"
_UNSET = r"(?!null\b|None\b|true\b|false\b|\"\"|'')"
_FIELD = re.compile(
    rf"(?P<name>(?:^|[\s\"'{{,;?&(\[]|/(?=[\w.-]+=))[\w.-]*?(?:{_SECRET_WORDS})[\"']?\s*(?P<sign>[:=])\s*){_UNSET}{_VALUE}",
    re.I | re.M,
)
_MAYBE_FIELD = re.compile(
    r"(?P<name>(?:^|[\s\"'{,;?&(\[]|/(?=[\w.-]+=))[\w.-]*?(?:[-_.]key|token|auth|cookie|session|signature|sig|license)[\"']?\s*(?P<sign>[:=])\s*)"
    rf"{_UNSET}{_VALUE}",
    re.I | re.M,
)

# Names of options and variables whose value is a secret, whatever it looks like. Whole words only.
_SECRET_NAME = re.compile(
    rf"(?:^|[-_.])(?:{_SECRET_WORDS}|key|token|pass|auth|authorization|cookie|bearer|private|sas)(?:$|[-_.](?:id|value|env)?$)",
    re.I,
)
_STRONG_NAME = re.compile(rf"(?:^|[-_.])(?:{_SECRET_WORDS})$", re.I)
# `-pX` is a password for these programs (mysql, 7z, `docker login`). Elsewhere a number or a usual option is kept.
_PASSWORD_OPTIONS = {
    "-p": ("mysql", "mysqldump", "mysqladmin", "mariadb", "sshpass", "7z", "7za", "7zr", "mongo", "mongosh", "login"),
    "-P": ("unzip", "zip"),
    "-a": ("redis-cli",),
    "-w": ("ldapsearch", "ldapmodify"),
    "-W": ("isql",),
}  # fmt: skip
_USUAL_P = re.compile(
    r"-p(?:[\d:./,x-]*|thread|ipe|g|ie|edantic|rint0?|rune|ath|erm|ort|arallel|ix_fmt|idfile|reset|rofile\S*|y|c|v|vv|"
    r"ass(?:logfile)?|attern|refix|attern_type|robesize|rotocol|rogress|roject|arent|arents|artition|lot|lots)",
)
_USER_OPTIONS = ("-u", "-U", "--user", "--proxy-user", "--userpass", "--username", "--creds", "--auth-user")


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The same characters escaped in JSON. Escaped backslashes and surrogate pairs come first, because they are text.
_ESCAPES = re.compile(
    r"\\\\|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}"
    r"|(?P<bad>\\(?:u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f])|u202[a-e]|u206[6-9]|ud[89a-f][0-9a-f]{2}|[bf]))",
    re.I,
)
_LINE_END = re.compile(r"\r\n?")


def printable(text: str) -> str:
    """The text without characters that move the cursor, color or reorder what a terminal shows. Line breaks and tabs
    stay; bytes that are not UTF-8, as in a file name, are shown as `\\xff`."""
    if not _CONTROLS.search(text):
        return text
    shown = _LINE_END.sub("\n", text).encode("utf-8", errors="surrogateescape" if _is_bytes(text) else "replace")
    return _CONTROLS.sub("\ufffd", shown.decode("utf-8", errors="backslashreplace"))


def _is_bytes(text: str) -> bool:
    """Whether its surrogates stand for undecodable bytes, as in arguments and paths."""
    return not re.search(r"[\ud800-\udc7f\udd00-\udfff]", text)


def printable_json(text: str) -> str:
    """JSON text whose strings are `printable`."""
    shown = _CONTROLS.sub("\ufffd", _LINE_END.sub("\n", text))
    return _ESCAPES.sub(lambda found: "\ufffd" if found["bad"] else found[0], shown) if "\\" in shown else shown


_JSON_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def redact_text(text: str) -> tuple[str, int]:
    """The text with secrets replaced, and their number."""
    count = 0

    def whole(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return REDACTED

    def token(match: re.Match[str]) -> str:
        found = match.group()
        if (
            len(found) >= 20
            or any(c.isdigit() for c in found[4:])
            or (found.lower() != found and found.upper() != found)
        ):
            return whole(match)
        return found

    def after_name(match: re.Match[str]) -> str:
        nonlocal count
        before, value = match.group(1), match.group(2)
        if REDACTED in value:
            return match.group()
        count += 1
        return before + REDACTED + (match.group(3) if (match.lastindex or 0) > 2 else "")

    def field(match: re.Match[str]) -> str:
        nonlocal count
        value = match.group("value")
        bare = value.strip("\"'")
        if match.group("name").startswith("/"):  # `/token=word/part-0.parquet`: only the part of the path counts
            bare = bare.partition("/")[0]
        # A number in JSON is an index or a measurement: {"password": 9356} is an entry of a vocabulary, and
        # {"j_per_token": 8.3e-05} an energy.
        is_number = match.group("sign") == ":" and bare == value and _JSON_NUMBER.fullmatch(bare) is not None
        if REDACTED in value or is_number or (match.re is _MAYBE_FIELD and not looks_random(bare)):
            return match.group()
        count += 1
        quote = value[0] if value[0] in "\"'" else ""
        return f"{match.group('name')}{quote}{REDACTED}{quote}"

    for escaped, plain in _ESCAPED.items():
        text = text.replace(escaped, plain)
    text = _FIXED_FORM.sub(whole, text)
    text = _TOKEN.sub(token, text)
    text = _ADDRESS.sub(after_name, text)
    for in_address in _IN_ADDRESS:
        text = in_address.sub(after_name, text)
    text = _HEADER.sub(after_name, text)
    text = _FIELD.sub(field, text)
    text = _MAYBE_FIELD.sub(field, text)
    for escaped, plain in _ESCAPED.items():
        text = text.replace(plain, escaped)
    return text, count


def looks_random(value: str) -> bool:
    """At least 16 characters of several kinds without a repeating pattern; words, paths and numbers are not random."""
    kinds = (any(c.islower() for c in value), any(c.isupper() for c in value), any(c.isdigit() for c in value))
    if len(value) < 16 or sum(kinds) < 2 or not re.fullmatch(r"[\w+/=.~-]+", value) or value.count("/") > 2:
        return False
    shares = [number / len(value) for number in Counter(value).values()]
    # Bits per character: 16 hexadecimal digits drawn at random have about 3.4, English words with digits about 3.
    return -sum(share * math.log2(share) for share in shares) >= 3.2


def redact(name: str, value: str) -> str:
    """The value of a variable, printable: replaced if its name means a secret, else without the secrets in it."""
    return REDACTED if value and _SECRET_NAME.search(name) else redact_text(printable(value))[0]


def redact_command(words: Sequence[str]) -> tuple[str, ...]:
    """A command line, printable, without the values of secret options and anything that looks like a secret."""
    words = [printable(word) for word in words]
    clean: list[str] = []
    program, hides_next = "", ""
    for word in words:
        if hides_next and not word.startswith("--"):
            clean.append(_without_password(word) if hides_next == "user" else REDACTED)
            hides_next = ""
            continue
        hides_next = ""
        # The last program before an option decides: `env A=1 mysql -psecret`, `bash -c ...`.
        if not word.startswith("-") and "=" not in word and re.fullmatch(r"[\w./+-]+", word):
            program = PurePath(word).name if PurePath(word).name in _PASSWORD_PROGRAMS or not program else program
        if len(pieces := re.split(r"(\s+)", word)) > 1:
            clean.append(_redact_phrase(pieces))
            continue
        redacted, hides_next = _redact_word(word, program)
        clean.append(redacted)
    return tuple(clean)


_PASSWORD_PROGRAMS = frozenset(name for programs in _PASSWORD_OPTIONS.values() for name in programs)


def _redact_word(word: str, program: str) -> tuple[str, str]:
    """The word without its secret, and what the next word is: a `secret`, a `user` with a password, or nothing."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("-")
    is_secret = bool(_SECRET_NAME.search(bare))
    if equals and is_secret:
        return (f"{name}={REDACTED}" if value else word), ""
    if name in _USER_OPTIONS:
        return (f"{name}={_without_password(value)}" if equals else word), "" if equals else "user"
    if word.startswith(("-u", "-U")) and not word.startswith("--") and ":" in word[2:]:
        return word[:2] + _without_password(word[2:]), ""
    option = word[:2]
    if option in _PASSWORD_OPTIONS and not word.startswith("--"):
        is_known = program in _PASSWORD_OPTIONS[option]
        if len(word) > 2 and (is_known or (option == "-p" and not _USUAL_P.fullmatch(name))):
            return option + REDACTED, ""
        # mysql's password is attached; a word after `-p` is a database.
        if word == option and is_known and not program.startswith(("mysql", "mariadb")):
            return word, "secret"
    return redact_text(word)[0], "secret" if is_secret and word.startswith("-") else ""


def _redact_phrase(pieces: Sequence[str]) -> str:
    """A word with spaces in it: a header, a script of `sh -c`, or code."""
    text, count = redact_text("".join(pieces))
    if count:
        return text
    words = [piece.strip("\"'()") for piece in pieces[::2]]
    redacted = redact_command(words)
    for word, clean in zip(words, redacted, strict=True):
        if word != clean:
            text = text.replace(word, clean)
    return text


def _without_password(value: str) -> str:
    """`user:password` and `user%password`."""
    found = re.match(r"([^:%]*[:%])(.+)", value)
    return found.group(1) + REDACTED if found and not found.group(2).startswith("//") else redact_text(value)[0]


def find_secret(settings: Any, key: str = "") -> str | None:
    """The key of the first setting whose name or value looks like a secret; None if there is none."""
    for name, value in texts_by_key(settings, key):
        named = _STRONG_NAME.search(name) and REDACTED not in value  # `pad_token` and `sort_key` are no secrets
        if value and (named or redact_text(value)[1]):
            return name
    return None


def texts_by_key(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every text in nested settings, as `data.source` and `command[2]`."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_by_key(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from texts_by_key(inner, f"{key}[{place}]")
    elif isinstance(value, str):
        yield key, value
