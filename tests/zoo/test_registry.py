"""A model by name or by file; a mistake in the file is told with its line."""

import pytest

from joulelab import lookup
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.zoo.objective import make_config
from joulelab.zoo.registry import WorkloadRequest, ZooEntry, all_models, find_model


def test_every_model_of_the_zoo_is_found_by_its_own_name():
    for entry in all_models():
        assert find_model(entry.name) is entry
    assert len(all_models()) == len(lookup.ZOO.names())


@pytest.mark.parametrize(("written", "meant"), [("gtp2", "gpt2"), ("GPT2", "gpt2"), ("resnet-50", "resnet50")])
def test_a_misspelled_model_is_answered_with_the_nearest(written, meant):
    if meant not in lookup.ZOO.names():
        pytest.skip(f"{meant} is not in the zoo yet")
    with pytest.raises(NotFoundError, match=f"did you mean '{meant}'"):
        find_model(written)


def test_a_file_of_the_user_s_is_a_model(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from joulelab.zoo.registry import Size, ZooEntry\n"
        "MODEL = ZooEntry('mine', 'f', 't', 'i', 'a', {'tiny': Size(1, {}, {}, 1)}, prepare='x:y')\n"
    )
    entry = find_model(str(path))
    assert isinstance(entry, ZooEntry)
    assert entry.name == "mine"
    assert find_model(str(path)) is entry, "the file is run once"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x = 1\ny = nothing\n", ConfigError, "line 2: NameError"),
        ("def f(:\n", ConfigError, "line 1: SyntaxError"),
        ("import no_such_package\n", DependencyMissing, "line 1: ModuleNotFoundError"),
        ("x = 1\n", ConfigError, "has no MODEL"),
        ("MODEL = 'gpt2'\n", ConfigError, "is a str, expected a ZooEntry"),
        (
            "from joulelab.zoo.registry import ZooEntry\nMODEL = ZooEntry('m', 'f', 't', 'i', 'a', {}, 'x:y')\n",
            ConfigError,
            "has no sizes",
        ),
    ],
)
def test_a_mistake_in_the_file_is_reported(tmp_path, text, error, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(error, match=message):
        find_model(str(path))


def test_a_file_that_is_not_there_is_reported(tmp_path, monkeypatch):
    with pytest.raises(NotFoundError, match="there is no file"):
        find_model(str(tmp_path / "nothing.py"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(NotFoundError, match="unknown model 'mine'") as output_text:
        find_model("mine")
    assert "./mine.py" in output_text.value.hint


@pytest.mark.parametrize(
    "name", ["albert", "bart", "bert", "bigbird", "distilbert", "gpt2", "longformer", "opt", "whisper"]
)
def test_declared_positions_are_those_of_the_architecture(name):
    """They refuse an input that is too long before a framework is imported."""
    entry = find_model(name)
    for size in entry.sizes:
        config = make_config(WorkloadRequest(entry, size))
        positions = config.max_target_positions if name == "whisper" else config.max_position_embeddings
        positions -= entry.options.get("unused_positions", 0)
        WorkloadRequest(entry, size, requested_shape={"tokens": positions}).require_length()
        with pytest.raises(ConfigError, match=f"{positions:,} positions"):
            WorkloadRequest(
                entry, size, requested_shape={"tokens": positions + getattr(config, "block_size", 1)}
            ).require_length()
