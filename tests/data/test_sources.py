"""What users write for a model or dataset is understood one way only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from joulelab.data import sources
from joulelab.data.sources import Source, content_hash
from joulelab.errors import ConfigError, NotFoundError


def test_an_existing_file_or_folder_is_taken_as_such(tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text("text,label\n")
    assert sources.parse(str(file)) == Source("file", str(file), file)
    assert sources.parse(str(tmp_path)) == Source("folder", str(tmp_path), tmp_path)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert sources.parse("~/model").path == tmp_path / "model"


@pytest.mark.parametrize("name", ["bert-base-uncased", "stanfordnlp/imdb", "HuggingFaceTB/SmolLM2-135M_x.y"])
def test_what_is_not_on_disk_and_looks_like_a_hub_id_is_one(name: str) -> None:
    assert sources.parse(name) == Source("hub", name, None)


def test_what_is_on_disk_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert sources.parse("org/name").kind == "folder"


@pytest.mark.parametrize("name", ["./gone", "/no/where", "~/gone", "gone.csv", "data/gone.parquet", "a/b/c"])
def test_a_path_that_is_not_there_is_answered_with_where_we_looked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        sources.parse(name)
    assert str(Path(name).expanduser().absolute()) in caught.value.message
    assert "sample:NAME" in caught.value.hint


def test_what_is_nothing_at_all_is_refused() -> None:
    with pytest.raises(NotFoundError, match="neither a sample nor an existing path"):
        sources.parse("two words")
    with pytest.raises(NotFoundError, match="nor a hub id"):
        sources.parse("samples:minilm")
    with pytest.raises(ConfigError, match="is empty"):
        sources.parse("  ")


def test_an_unknown_sample_gets_the_nearest_name() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'smollm2'"):
        sources.parse("sample:smollm")


def test_a_sample_written_without_its_prefix_is_recognized_when_the_hub_fails() -> None:
    assert sources.hub_hint("minilm") == "did you mean 'sample:minilm'?"
    assert "sample:reviews" in sources.hub_hint("org/name")


@pytest.mark.samples
def test_an_installed_sample_has_its_path() -> None:
    source = sources.parse("sample:reviews")
    assert source.kind == "sample" and source.path is not None and source.path.suffix == ".csv"


def test_the_same_content_has_the_same_hash_anywhere(tmp_path: Path) -> None:
    first = tmp_path / "first"
    (first / "inner").mkdir(parents=True)
    (first / "b.txt").write_text("b")
    (first / "inner" / "a.txt").write_text("a")
    second = shutil.copytree(first, tmp_path / "second")
    assert content_hash(first) == content_hash(second)


def test_a_changed_byte_a_changed_name_or_one_more_file_changes_the_hash(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a")
    hashes = {content_hash(tmp_path)}
    file.write_text("b")
    hashes.add(content_hash(tmp_path))
    file.rename(tmp_path / "b.txt")
    hashes.add(content_hash(tmp_path))
    (tmp_path / "empty").touch()
    hashes.add(content_hash(tmp_path))
    assert len(hashes) == 4


def test_a_missing_path_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="gone"):
        content_hash(tmp_path / "gone")


def test_a_name_in_an_existing_folder_may_be_a_mistyped_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert f"there is no file or folder {tmp_path / 'folder' / 'nope'}" in sources.hub_hint("folder/nope")
    assert "there is no file" not in sources.hub_hint("org/nope")


@pytest.mark.parametrize(
    ("name", "repo", "config", "revision"),
    [
        ("org/name", "org/name", None, None),
        ("org/name@v1.0", "org/name", None, "v1.0"),
        ("org/name:part@refs/pr/3", "org/name", "part", "refs/pr/3"),
        ("gpt2@main", "gpt2", None, "main"),
    ],
)
def test_a_hub_id_may_name_a_configuration_and_a_revision(name, repo, config, revision) -> None:
    found = sources.parse(name)
    assert (found.kind, found.repo, found.config, found.revision) == ("hub", repo, config, revision)


def test_a_path_that_exists_takes_precedence_over_a_revision(tmp_path, monkeypatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model@v1").mkdir()
    monkeypatch.chdir(tmp_path)
    found = sources.parse("org/model@v1")
    assert (found.kind, found.revision) == ("folder", None)


@pytest.mark.parametrize("name", ["org/name@", "org/name@two words", "org/name@v1:part"])
def test_a_malformed_revision_is_refused(name) -> None:
    with pytest.raises(NotFoundError, match=r"nor a hub id|no file or folder"):
        sources.parse(name)
