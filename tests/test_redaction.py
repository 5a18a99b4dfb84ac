"""Secrets are found by their form and by their names, and ordinary words stay."""

import html
import json
import random
import string

import pytest

from joulelab.redaction import REDACTED, find_secret, printable, printable_json, redact, redact_command, redact_text

SECRET = "s3cr3tX"  # in every command below


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", SECRET],
        [f"--password={SECRET}"],
        ["--pw", SECRET],
        [f"--pw={SECRET}"],
        ["--hf_token", SECRET],
        ["env", f"WANDB_API_KEY={SECRET}", "prog"],
        ["-H", f"Authorization: Bearer {SECRET}"],
        ["-H", f"authorization: {SECRET}"],
        ["--header", f"X-Api-Key: {SECRET}"],
        ["--url", f"https://user:{SECRET}@example.org/x"],
        ["--redis", f"redis://:{SECRET}@host:6379/0"],
        ["curl", f"https://example.org/?a=1&token={SECRET}abcdefGHI123"],
        ["curl", f"https://example.org/?a=1&password={SECRET}&b=2"],
        ["mysql", "-uroot", f"-p{SECRET}", "db"],
        ["env", "A=1", "/usr/bin/mysqldump", "-pabc" + SECRET],
        ["./mine", f"-p{SECRET}"],
        ["curl", "-u", f"user:{SECRET}"],
        ["curl", f"-uuser:{SECRET}"],
        ["curl", "--user", f"user:{SECRET}"],
        ["curl", f"--user=user:{SECRET}"],
        ["smbclient", "-U", f"me%{SECRET}"],
        ["docker", "login", "-u", "me", "-p", SECRET],
        ["sshpass", "-p", SECRET, "ssh", "host"],
        ["redis-cli", "-a", SECRET],
        ["bash", "-c", f"mysql -u root -p{SECRET} db && echo done"],
        ["sh", "-c", f"train --password {SECRET} --epochs 3"],
        ["--odbc", f"Driver=x;Server=db;Uid=sa;Pwd={SECRET};Encrypt=yes"],
        ["--odbc", f"Server=db;Password={SECRET};"],
        ["--azure", f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}abc/d+e==;EndpointSuffix=core"],
        ["--session", f"session_token={SECRET}"],
        ["--out", f"/data/api_key={SECRET}/x"],
        ["--out", f"/data/token={SECRET}/x"],
        ["net", "use", f"/pw:{SECRET}"],
        ["xfreerdp", "/u:me", f"/Password:{SECRET}", "/v:host"],
        ["--mount", f"//host/share/pwd:{SECRET}/folder"],
        ["curl", f"https://example.org/x?token={SECRET}"],
        ["curl", f"https://example.org/x?a=1&sig={SECRET}#top"],
        ["curl", f"https://example.org/token={SECRET}/x"],
    ],
)
def test_a_command_line_has_no_secret(words):
    clean = redact_command(["prog", *words])
    assert SECRET not in " ".join(clean)
    assert any(REDACTED in word for word in clean)
    assert len(clean) == len(words) + 1
    assert find_secret({"command": clean}) is None
    for written in (html.escape(" ".join(clean)), json.dumps(clean).replace("<", r"\u003c").replace(">", r"\u003e")):
        assert redact_text(written) == (written, 0), "a report of the run can be packed"


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "bert-base"],
        ["--max-tokens", "128"],
        ["--tokens=5"],
        ["--keys", "a,b"],
        ["--author", "me"],
        ["train.py", "--lr", "3e-4"],
        ["--token"],
        ["--token", "--flag"],
        ["task-1.py", "disk-usage", "risk-based"],
        ["docker", "run", "-p8080:80", "image"],
        ["ssh", "-p", "22", "host"],
        ["gcc", "-pthread", "-pipe", "a.c"],
        ["find", ".", "-path", "x", "-print0"],
        ["python", "-u", "train.py"],
        ["mysql", "-p", "db"],
        ["python", "-c", "import sys; print(sys.argv, -p * 3)"],
        ["hf_train.py", "sk-learn", "npm_run"],
        ["--key", "--value"],
    ],
)
def test_ordinary_words_stay(words):
    assert list(redact_command(words)) == words


TOKENS = {
    "AIza": 35, "gsk_": 52, "npm_": 36, "dckr_pat_": 27, "hf_": 34, "sk-": 48, "sk-proj-": 48, "sk-ant-api03-": 80,
    "ghp_": 36, "github_pat_": 60, "glpat-": 20, "xoxb-": 40, "ya29.": 60, "r8_": 37, "nvapi-": 64, "pypi-": 60,
    "SG.": 60, "hvs.": 30,
}  # fmt: skip


@pytest.mark.parametrize("prefix", [*TOKENS, "AKIA", "ASIA"])
def test_tokens_of_clouds_and_hubs_are_found_anywhere_in_a_text(prefix):
    letters = (
        string.ascii_uppercase + string.digits if prefix in ("AKIA", "ASIA") else string.ascii_letters + string.digits
    )
    drawn = random.Random(prefix)
    for _ in range(20):
        token = prefix + "".join(drawn.choices(letters, k=TOKENS.get(prefix, 16)))
        for text in (token, f"use {token}.", f'{{"note": "{token}"}}', f"https://{token}@host/x", f"x={token};"):
            clean, count = redact_text(text)
            assert token[len(prefix) :] not in clean and count >= 1, text
            assert redact_text(clean) == (clean, 0), "redacted once, it is not redacted again"


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
        '{"client_secret": "MIIabc"}',
        "password: MIIabc",
        "export AWS_SECRET_ACCESS_KEY=MIIabc",
        "cookie: 9f86d081884c7d659a2feaa0MIIabc",
        "https://hooks.slack.com/services/T000/B000/MIIabc",
    ],
)
def test_secrets_are_found_by_their_form_and_name(text):
    clean, count = redact_text(text)
    assert "MIIabc" not in clean and "eyJ" not in clean and count == 1
    assert redact_text(clean) == (clean, 0)


@pytest.mark.parametrize(
    "text",
    [
        *("risk-based-approach-to-it", "tokens: 123", '"token": "##ing"', "https://host/a:b@c", "secrets.py"),
        *('{"password": 9356, "secret": 12}', "hub_token: null", "key: learning_rate", "token=bert-base-uncased"),
        *("sort_key: energy_per_item_in_joules", "session: 2026-11-17T02:10:11+00:00", "session_id=abcd", "sk-learn"),
        *("/data/token=word/part-0.parquet", "/run/pw:/run/pw:ro", "http://localhost:9000/?token=...", "/pw:"),
        *("?token=${token}", "/?token={token}", "?tokens=5&page=2", "org/tokens:latest", "/data/password/x:y"),
        *("auth: none", '"key": "9f86d081884c7d"', "author: me", "signature: f(x, y)", "pw_w: 3"),
    ],
)
def test_what_is_no_secret_is_left(text):
    assert redact_text(text) == (text, 0)


def test_a_setting_is_named_by_its_key():
    assert find_secret({"data": {"source": "a"}, "teacher": {"server": "http://me:pass@host"}}) == "teacher.server"
    assert find_secret({"export": {"WANDB_API_KEY": "abc"}}) == "export.WANDB_API_KEY"
    assert find_secret({"tokenizer": {"pad_token": "[PAD]"}, "sort_key": "x", "max_tokens": 5}) is None


def test_a_variable_is_judged_by_name_and_value():
    assert redact("DB_PASSWORD", "x") == REDACTED
    assert redact("DB_PASSWORD", "") == ""
    assert redact("CUDA_VISIBLE_DEVICES", "GPU-0123") == "GPU-0123"


def test_random_command_lines_keep_their_length_and_are_redacted_once():
    drawn = random.Random(1)
    pieces = [
        "-p",
        "-u",
        "--user",
        "=",
        ":",
        "@",
        "//",
        "pass",
        "word",
        "token",
        "key",
        '"',
        "'",
        " ",
        ";",
        "&",
        "x1",
        "\n",
    ]
    for _ in range(3000):
        words = ["".join(drawn.choices(pieces, k=drawn.randint(1, 6))) for _ in range(drawn.randint(1, 5))]
        clean = redact_command(words)
        assert len(clean) == len(words)
        assert find_secret({"command": clean}) is None, (words, clean)


def test_nothing_that_controls_a_terminal_is_printed():
    assert printable("a\tb\nc é 漢") == "a\tb\nc é 漢"
    assert printable("\x1b[31mred\x1b[0m\x07") == "\ufffd[31mred\ufffd[0m\ufffd"
    assert printable("abc\u202e") == "abc\ufffd"
    assert printable("name-\udcff") == r"name-\xff"  # a byte of a path that is not UTF-8
    assert printable("\ud800") == "?"


def test_escapes_in_json_are_controls_too():
    given = json.dumps({"a": "\x1b[31m\b", "b": "C:\\u001b \\\\b", "c": "\n\t", "d": "\u202e"})
    assert json.loads(printable_json(given)) == {
        "a": "\ufffd[31m\ufffd",
        "b": "C:\\u001b \\\\b",
        "c": "\n\t",
        "d": "\ufffd",
    }
    raw = json.dumps({"d": "\u202e\x9b"}, ensure_ascii=False)
    assert json.loads(printable_json(raw)) == {"d": "\ufffd\ufffd"}


def test_lone_surrogates_in_json_are_replaced_and_pairs_stay():
    assert json.loads(printable_json(r'["\ud83d\ude00", "\ud800", "\ude00", "\\ud800"]')) == [
        "😀",
        "\ufffd",
        "\ufffd",
        r"\ud800",
    ]


def test_a_small_energy_per_token_is_a_number():
    text = '{"j_per_token": 8.324708421454908e-05, "name": "evaluate.data"}'
    assert redact_text(text) == (text, 0)
