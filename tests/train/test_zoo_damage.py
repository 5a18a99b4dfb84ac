"""A kept model that a disk has changed is not what the run goes on with: weights have no checksum of their own."""

import pytest

from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import check
from joulelab.train import zoo_pipeline

SHORT = {
    "pipeline": "train", "model": "gpt2", "size": "tiny", "device": "cpu", "save_model": True, "evaluate_batches": 1,
    "training": {"batch_size": 4, "max_steps": 2}, "energy": {"gpus": "none"},
}  # fmt: skip


def flip(path):
    written = bytearray(path.read_bytes())
    written[-1] ^= 1
    path.write_bytes(written)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [None, flip, cut, lambda path: path.unlink()])
def test_a_resumed_run_trains_again_only_what_is_corrupted(tmp_path, monkeypatch, damage):
    paths = create_run(tmp_path, check(SHORT))
    with monkeypatch.context() as patch:
        patch.setattr(zoo_pipeline._TrainPipeline, "evaluate", None)  # the power fails when the model is kept
        with pytest.raises(TypeError):
            execute(paths, SilentProgress())
    weights = paths.artifacts / "final_model" / "model.safetensors"
    trained = weights.read_bytes()
    if damage is not None:
        damage(weights)
    record = execute(paths, SilentProgress())
    attempts = {segment.attempt for segment in record.stage("model.train").segments}
    assert attempts == ({1} if damage is None else {1, 2})
    assert weights.read_bytes() == trained
    assert any("final_model" in note.text and "it is corrupted" in note.text for note in record.validity.notes) == (
        damage is not None
    )
