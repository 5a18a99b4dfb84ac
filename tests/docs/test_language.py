"""Messages, help texts and documents use the field's words: none of the phrases of the first version is left.

Exempt are CHANGELOG.md and docs/decisions.md, which quote the first version. Old names of options and settings are not
phrases and are not searched for. Spelling is American in names, comments and texts alike; the tables that read British
spellings of earlier versions are listed here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from documents import PACKAGE, ROOT

PHRASES = {
    r"\bbills? comes? along\b": "its energy is included",
    r"\bgo(es|ing)? on with\b|\bgone on with\b": "resume",
    r"\b(was|were|is|are|be|been) cut off\b": "interrupted",
    r"\btold apart\b|\btell .{1,20} apart\b": "distinguishable",
    r"\bso often\b": "number of runs",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bbeside\b": "next to, alongside, separately",
    r"\bcrowded\b": "CPU contention",
    r"\bothers used\b": "other processes used",
    r"\bpa(y|ys|id) back\b|\bpayback\b": "breaks even, break-even",
    r"\bexams?\b": "evaluation",
    r"\blooks? on the way\b": "evaluation during training",
    r"\bcomes? to harm\b|\bharmed\b": "corrupted",
    r"\bnobody\b": "name the subject",
    r"\bwhoever\b": "name the subject",
    r"\b(is|are) (told|said)\b|\btold as\b": "is reported, is printed",
    r"\btells? of\b|\bto tell of\b": "describe, show",
    r"\bwhat it took\b|\bwhat .{1,30} took\b": "energy used",
    r"\bin no (bill|sum)\b": "not included",
    r"\bstands? beside\b|\bstands? in for\b": "is next to; replaces",
    r"\bof (its|their|one's) own accord\b|\bfor ever\b": "plain wording",
    r"\bdrawn (weights|from the seed)\b": "randomly initialized",
    r"\bof old\b": "earlier",
    r"\bsay(s)? so\b|\bsays? how\b": "state, report",
    r"(?<!there )\b(is|are) no (archive|percentage|number|share|file|folder|run|setting)\b": "is not a ...",
    r"\bartefacts?\b|\bdistils?\b|\bcolou": "American spelling",
    r"\b(optimis|normalis|summaris|recognis)(e|es|ed|er|ers|ing|ation)\b": "American spelling",
}
EXEMPT = {"CHANGELOG.md", "docs/decisions.md"}


# Names on disk, in code and on the command line are not phrases.
NAMES = re.compile(r"`[^`\n]*`")


def texts() -> dict[str, str]:
    """Every text that a user may read, by where it is."""
    found = {}
    for path in sorted(
        [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.*"), *PACKAGE.rglob("*.yaml")]
    ):
        name = path.relative_to(ROOT).as_posix()
        if name not in EXEMPT:
            found[name] = NAMES.sub("", path.read_text())
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        sentences = [value for value in nodes if isinstance(value, str) and " " in value.strip()]
        found[path.relative_to(ROOT).as_posix()] = NAMES.sub("", "\n".join(sentences))
    for path in sorted((PACKAGE / "report" / "templates").iterdir()):
        found[path.relative_to(ROOT).as_posix()] = path.read_text()
    return found


TEXTS = texts()


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_uses_the_phrase(phrase: str) -> None:
    pattern = re.compile(phrase, re.IGNORECASE)
    places = [f"{name}: {match[0]!r}" for name, text in TEXTS.items() for match in pattern.finditer(text)]
    assert not places, f"write '{PHRASES[phrase]}' in place of these:\n" + "\n".join(places)


_ISE = (
    "author|binar|categor|character|custom|factor|final|general|harmon|initial|local|material|maxim|memor|minim|modern"
    "|normal|optim|organ|parallel|penal|priorit|quant|random|real|recogn|regular|serial|special|stabil|standard|summar"
    "|synchron|token|util|vector|visual"
)
BRITISH = re.compile(
    rf"(?<![a-z])((de|dis|pre|re|un)?({_ISE})is(e[drs]?|ers|ing|ations?)|artefacts?|behaviours?|(dis)?colour\w*|favour\w*"
    r"|neighbour\w*|honour\w*|labour\w*|centre[ds]?|metres?|fibres?|(un|re)?labell(ed|ing)|modell(ed|ing)|travell(ed|ing)"
    r"|signalled|totalled|analyse[drs]?|whilst|amongst|learnt|(mis)?spelt|burnt|distils?|fulfils?|judgements?|towards"
    r"|licence|defence|programmes?)(?![a-z])",
    re.IGNORECASE,
)
# Where British spellings of earlier versions are read, and names in published scripts and models.
READ_IN_BRITISH = {
    "benchmarks/distilbert_step.py": {"materialised", "distil"},
    "scripts/slurm/README.md": {"distil"},
    "src/joulelab/distill/causal/config.py": {"normalised"},
    "src/joulelab/runs/artifacts.py": {"artefact"},
    "src/joulelab/runs/attempt_data.py": {"artefact"},
    "src/joulelab/runs/record.py": {"optimiser", "utilisation", "neighbours"},
    "src/joulelab/train/stats/hooks.py": {"optimiser"},
    "tests/cli/test_usage_errors.py": {"binarise"},
    "tests/cluster/test_real_slurm_scripts.py": {"distil"},
    "tests/distill/squad/test_squad_recipe.py": {"distil"},
    "tests/runs/test_record.py": {"artefact", "optimiser", "utilisation", "neighbours"},
    "tests/runs/test_spec.py": {"normalised"},
    "tests/train/stats/test_trackers.py": {"optimiser"},
    "tests/zoo/test_students.py": {"distil"},
}
SPELLED_KINDS = {".py", ".md", ".yaml", ".toml", ".j2", ".js", ".css"}


def spelled_files() -> list[Path]:
    folders = [ROOT / name for name in ("src", "tests", "docs", "scripts", "benchmarks", "examples")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SPELLED_KINDS]
    others = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    return [path for path in (*files, *others) if path != Path(__file__)]


def test_spelling_is_american_in_names_comments_and_texts() -> None:
    places = []
    for path in sorted(spelled_files()):
        name = path.relative_to(ROOT).as_posix()
        if name in EXEMPT:
            continue
        found = {match[0].lower() for match in BRITISH.finditer(path.read_text(encoding="utf-8"))}
        places += [f"{name}: {word}" for word in sorted(found - READ_IN_BRITISH.get(name, set()))]
    assert not places, "write these in American English:\n" + "\n".join(places)


@pytest.mark.parametrize(
    "word", ["optimiser", "tokenised", "start_optimiser_step", "neighbours", "artefact", "colours"]
)
def test_the_search_finds_british_spellings(word: str) -> None:
    assert BRITISH.search(word)


@pytest.mark.parametrize(
    "word", ["optimizer", "precision", "distilbert", "labels", "color", "raise", "center", "likewise"]
)
def test_the_search_leaves_american_words_alone(word: str) -> None:
    assert not BRITISH.search(word)


def test_the_search_finds_a_phrase_where_there_is_one() -> None:
    assert re.search(next(iter(PHRASES)), "reused from X, its bill comes along")
    assert len(TEXTS) > 200
    assert len(PHRASES) >= 25
