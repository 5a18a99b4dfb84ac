"""Hints between CNNs: a ResNet's maps lead a smaller network, in stages of their own."""

import pytest

from joulelab.errors import ConfigError
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.groups import check_group
from joulelab.runs.spec import check, load_spec, read_layers

TRAINING = {"epochs": 2, "batch_size": 32, "learning_rate": 3e-3, "prefetch": 0}


@pytest.mark.slow
def test_a_small_cnn_is_led_to_the_maps_of_a_resnet_and_learns(tmp_path):
    chosen = {
        "name": "maps", "pipeline": "fitnets-images", "device": "cpu", "telemetry_every": 0,
        "data": {"side": 16, "classes": 4, "train": "train[:1024]", "validation": "validation[:64]",
                 "test": "test[:128]"},
        "teacher": {"channels": [16, 32], "blocks": [1, 1], "stem": 16, "training": TRAINING},
        "student": {"channels": [8, 8], "blocks": [1, 1], "stem": 8, "training": TRAINING},
        "hint": TRAINING,
        "distill": {"kd_alpha": 0.5, "feat_beta": 0.5, "t_layer": -1, "s_layer": "encoder.stages.0",
                    "rel_distance": 0.1},
        "energy": {"gpus": "none", "sample_interval_s": 1.0},
    }  # fmt: skip
    paths = create_run(tmp_path, check(chosen))
    record = execute(paths, SilentProgress())
    names = [stage.name for stage in record.stages if stage.is_method_work]
    assert names == [
        "teacher.train", "teacher.validate", "teacher.evaluate", "student.hint", "student.train", "student.validate",
        "student.evaluate",
    ]  # fmt: skip
    assert {"student.agreement", "student.over_teacher", "student.macro_f1"} <= set(record.results)
    assert record.results["student.accuracy"].value > 0.4  # of four classes
    assert (paths.folder / "distill_power.csv").read_text().count("\n") == 1 + 3 + 4


def test_every_experiment_that_ships_fits_its_pipeline():
    for name in ("fitnets", "fitnets-3-layers", "fitnets-quick"):
        group, specs = check_group(read_layers(name), {})
        assert group.baseline in {spec.label for spec in specs}
    for name in ("fitnets-images", "fitnets-two-stages"):
        assert load_spec(name).label == "hint, then response"


def test_own_validation_images_next_to_synthetic_training_images_are_refused(tmp_path):
    spec = load_spec("fitnets-images", {"data": {"validation": str(tmp_path)}})
    with pytest.raises(ConfigError, match="synthetic is not a folder of images"):
        spec.preflight()
