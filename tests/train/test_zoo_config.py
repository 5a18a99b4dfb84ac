"""What `joulelab train` derives from the model and from other settings, and what it refuses before anything starts."""

import pytest

from joulelab.errors import ConfigError, DependencyMissing, NotFoundError, UsageError
from joulelab.runs.spec import check, parse_overrides
from joulelab.train.devices import peak_flops
from joulelab.train.zoo_config import TrainSpec


def spec_of(*settings):
    spec = check({"pipeline": "train", **parse_overrides(["model=gpt2", *settings])})
    assert isinstance(spec, TrainSpec)
    return spec


def test_the_batch_size_is_the_size_s_own_unless_one_is_named():
    assert spec_of().training.batch_size == spec_of().entry.sizes["base"].batch_size
    assert spec_of("training.batch_size=3").training.batch_size == 3


def test_without_a_budget_it_is_one_epoch_and_a_budget_replaces_it():
    assert spec_of().training.epochs == 1.0
    assert spec_of("training.max_steps=7").training.epochs is None
    assert spec_of("training.max_time_s=7").training.epochs is None
    assert spec_of("training.max_steps=7", "training.epochs=2").training.epochs == 2.0


def test_a_short_training_has_some_lines_of_metrics():
    assert spec_of("training.max_steps=5").training.log_every_steps == 1
    assert spec_of("training.max_steps=50").training.log_every_steps == 5
    assert spec_of("training.max_steps=5000").training.log_every_steps == 10
    assert spec_of("training.max_steps=5", "training.log_every_steps=3").training.log_every_steps == 3


@pytest.mark.parametrize("setting", ["training.weights=bf16", "training.matmul=fp8"])
def test_auto_is_the_precision_that_another_setting_needs(setting):
    assert spec_of().training.possible_precisions == ("fp32", "bf16")
    assert spec_of("training.precision=tf32").training.possible_precisions == ("tf32",)
    assert spec_of(setting).training.possible_precisions == ("bf16",)
    assert spec_of(setting, "training.precision=auto").training.possible_precisions == ("bf16",)
    with pytest.raises(ConfigError, match="but precision is fp32"):
        spec_of(setting, "training.precision=fp32")


def test_settings_written_to_a_folder_are_read_back_as_they_were():
    spec = spec_of("size=tiny", "training.max_steps=5", "shape.tokens=16", "training.stats=[simple]")
    assert check(spec.model_dump(mode="json")) == spec


def test_a_file_is_named_by_its_full_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from joulelab.zoo.registry import Size, ZooEntry\n"
        "MODEL = ZooEntry('mine', 'f', 't', 'i', 'a', {'tiny': Size(1, {}, {}, 5)}, prepare='x:y', needs=())\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = check({"pipeline": "train", "model": "./mine.py"})
    assert spec.model == str(tmp_path / "mine.py")
    assert spec.name == "mine"
    assert spec.training.batch_size == 5


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (["size=tinny"], NotFoundError, "did you mean 'tiny'"),
        (["shape.tokns=3"], NotFoundError, "did you mean 'tokens'"),
        (["training.stats=[simpel]"], NotFoundError, "did you mean 'simple'"),
        (["training.stats=[./nothing.py]"], NotFoundError, "there is no file"),
        (["dataset_split=trian"], NotFoundError, "did you mean 'train'"),
        (["dataset_split='train['"], ConfigError, "is not a split"),
        (["dataset_split='train[7:7]'"], ConfigError, "has none of the"),
        (["dataset=./nothing"], NotFoundError, "there is no file or folder"),
        (["weights=./nothing"], NotFoundError, "there is no file or folder"),
        (["weights=published", "size=tiny"], ConfigError, "no published weights for size tiny"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(settings, error, message):
    with pytest.raises(error, match=message):
        spec_of(*settings).preflight()


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from joulelab.zoo.registry import Size, ZooEntry\n"
        "MODEL = ZooEntry('mine', 'f', 't', 'i', 'a', {'tiny': Size(1, {}, {}, 5)}, prepare='x:y',"
        " needs=('torch', 'no_such_package'), extra='graphs')\n"
    )
    with pytest.raises(DependencyMissing, match="mine needs no_such_package") as output_text:
        check({"pipeline": "train", "model": str(path)}).preflight()
    assert 'pip install "joulelab[graphs]"' in output_text.value.hint


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("joulelab.runs.environment.gpus", list)
    with pytest.raises(UsageError, match="no NVIDIA GPU was found"):
        spec_of("device=cuda").preflight()


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
    ],
)
def test_a_card_s_peak_is_found_by_the_name_its_driver_states(name, precision, tera):
    assert peak_flops(name, precision) == pytest.approx(tera * 1e12)


def test_a_peak_that_is_not_known_is_not_made_up():
    assert peak_flops("NVIDIA Z9000", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None


def problem_of(*settings):
    found = []
    for one in spec_of(*settings).checks():
        try:
            one()
        except UsageError as error:
            found.append(error.message)
    return "\n".join(found)


def test_data_of_another_kind_is_refused_by_its_name_and_own_models_read_what_they_like(tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "table.csv").write_text("a,b\n")
    images, table = f"dataset={tmp_path}/images", f"validation_dataset={tmp_path}/table.csv"
    assert "resnet50 cannot read the dataset" not in problem_of("model=resnet50", "size=tiny", images)
    assert f"resnet50 cannot read the dataset '{tmp_path}/table.csv'" in problem_of("model=resnet50", images, table)
    (tmp_path / "own.py").write_text(
        "from joulelab.zoo.registry import Size, ZooEntry\n"
        "SIZES = {'tiny': Size(1, {}, {}, 1)}\n"
        "MODEL = ZooEntry('own', 'audio', 't', 'i', 'a', SIZES, 'x:y', needs=(), dataset='clips in a folder')\n"
    )
    assert not problem_of(f"model={tmp_path}/own.py", "size=tiny", images)


def test_a_missing_package_of_a_tracker_is_not_said_to_be_needed_by_the_model(monkeypatch):
    monkeypatch.setattr("joulelab.lookup.absent_packages", lambda *names: [one for one in names if one == "codecarbon"])
    with pytest.raises(DependencyMissing, match="gpt2 with --train_stats codecarbon needs codecarbon"):
        spec_of("size=tiny", "training.stats=[codecarbon]").require_packages()
