"""Trackers by name or by file, with an answer to every way of getting the file wrong."""

import pytest

from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.train.stats.hooks import TrainerStats, load_tracker

IMPORT = "from joulelab.train.stats.hooks import TrainerStats\n"
MINE = IMPORT + "class Mine(TrainerStats):\n    pass\n"


def written(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_name_is_one_of_ours_and_a_path_one_of_yours(tmp_path):
    assert type(load_tracker("simple")).__name__ == "SimpleStats"
    tracker = load_tracker(written(tmp_path, MINE))
    assert isinstance(tracker, TrainerStats)
    assert type(tracker).__name__ == "Mine"


def test_a_file_that_was_changed_is_read_again(tmp_path):
    load_tracker(written(tmp_path, MINE))
    assert type(load_tracker(written(tmp_path, MINE.replace("Mine", "Other")))).__name__ == "Other"


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    with pytest.raises(NotFoundError, match="unknown trainer stats 'simpel'; did you mean 'simple'"):
        load_tracker("simpel")
    monkeypatch.chdir(tmp_path)
    written(tmp_path, MINE)
    with pytest.raises(NotFoundError) as found:
        load_tracker("mine")
    assert found.value.hint == "for your own file write ./mine.py"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines no tracker"),
        (IMPORT, "defines no tracker"),
        (MINE + "class Yours(TrainerStats):\n    pass\n", "defines several trackers: Mine and Yours"),
        ("x = 1\n1 / 0\n", r"mine.py, line 2: ZeroDivisionError: division by zero"),
        ("class Mine(\n", r"mine.py, line 1: SyntaxError"),
        (MINE + "    def __init__(self, size):\n        pass\n", "Mine in .*requires constructor arguments"),
    ],
)
def test_a_file_with_a_mistake_is_reported_where(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        load_tracker(written(tmp_path, text))


def test_a_file_that_needs_a_package_names_it(tmp_path):
    with pytest.raises(DependencyMissing) as missing:
        load_tracker(written(tmp_path, "import nosuchpackage\n"))
    assert missing.value.hint == "pip install nosuchpackage"


def test_a_file_that_is_not_there_or_not_python(tmp_path):
    with pytest.raises(NotFoundError, match="there is no file"):
        load_tracker(str(tmp_path / "nothing.py"))
    with pytest.raises(NotFoundError, match="is not a Python file"):
        load_tracker(written(tmp_path, MINE, "mine.txt"))
