"""The code metrics of scripts/code_metrics.py on a small tree whose figures are counted by hand."""

from code_metrics import PACKAGE, TRACED_COMMANDS, entered_files, repeated_names, size_rows, typer_callbacks

MODULE = '''"""What it is for."""

import os
from pathlib import (
    Path,
)

# why
def command(a, b, c):  # not a line of comment
    """Docstring."""
    if a and b or c:
        return [x for x in c if x]
    return "# no comment"


class Settings:
    size: int = 1
    """A sentence."""

    def method(self, a, *, b): ...
'''


def test_a_file_is_counted_as_by_hand(tmp_path):
    (tmp_path / "one.py").write_text(MODULE)
    rows = size_rows(tmp_path, callbacks=set())
    assert rows["files"] == "1"
    assert rows["lines"] == "20"
    assert rows["import lines, share"] == "20.0 %"
    assert rows["comment lines, share"] == "5.0 %"
    # if, and, or, the comprehension and its condition, in eleven lines that are neither blank, comment nor docstring
    assert rows["decisions per 100 lines of code"] == f"{100 * 5 / 11:.1f}"
    assert rows["most parameters"] == "3 one.py:9 command, 2 one.py:20 method"


def test_typer_callbacks_do_not_count_as_long_signatures(tmp_path):
    (tmp_path / "one.py").write_text(MODULE)
    rows = size_rows(tmp_path, callbacks={((tmp_path / "one.py").resolve(), "command")})
    assert rows["most parameters"] == "2 one.py:20 method"
    assert (PACKAGE / "cli" / "measure.py", "measure") in typer_callbacks()


def test_file_names_may_repeat_in_recipe_folders_only(tmp_path):
    places = ["a/rows.py", "b/rows.py", "a/config.py", "b/config.py", "c/recipe.py", "d/recipe.py", "c/rows.py"]
    paths = [tmp_path / place for place in places]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert repeated_names(paths) == {"rows.py": 2}


def test_the_tracer_finds_files_whose_functions_ran_and_no_others(tmp_path):
    files = entered_files(TRACED_COMMANDS["measure -- true"], tmp_path)
    assert str(PACKAGE / "cli" / "measure.py") in files
    assert str(PACKAGE / "cli" / "compare.py") not in files  # imported by cli.main, but only its module body ran
    assert all(file.startswith(str(PACKAGE)) for file in files)


def test_the_tree_keeps_its_rules() -> None:
    """A file name appears once outside recipe folders, recipe folders have the same four names, and no function but
    commands and Triton kernels has more than 12 parameters."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert repeated_names(paths) == {}
    for name in ("classify", "distilbert", "squad", "causal"):
        folder = PACKAGE / "distill" / name
        assert {"config.py", "data.py", "objective.py", "recipe.py"} <= {path.name for path in folder.glob("*.py")}
    rows = size_rows(PACKAGE, typer_callbacks())
    assert rows["functions with more than 12 parameters"] == "0", rows["most parameters"]
