"""`joulelab train`, as the course writes it, on the tiny GPT-2; and what is left in the record and the folder."""

import json

import pytest
from commands import joulelab, joulelab_here, shown

COURSE = ["--batch_size", "4", "--learning_rate", "1e-3", "--dataset_split", "train[:100]"]
# the tracker `energy` takes a minute where joules are estimated; it has tests of its own
KEPT = ["--train_stats", "simple", "--estimate-cpu", "--save_model"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(store):
    """The course's command, with the weights kept and an estimate of the joules where no sensor is."""
    done = joulelab("train", "gpt2", "--size", "tiny", *COURSE, *KEPT, "--runs-dir", store, "-v")
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def record(trained, store):
    return shown(store)


def test_one_epoch_of_the_split_is_trained_and_every_stage_has_its_joules(record):
    assert record["status"] == "done"
    assert record["spec"]["training"]["epochs"] == 1.0
    stages = {stage["name"]: stage for stage in record["stages"]}
    named = [name for name in stages if name.startswith("model.")]
    assert named == ["model.prepare", "model.train", "model.train.setup", "model.evaluate"]
    trained, setup = stages["model.train"], stages["model.train.setup"]
    assert trained["samples"] + setup["samples"] == 100
    assert trained["tokens"] + setup["tokens"] == 100 * 32
    assert stages["model.train"]["j_per_sample"] > 0
    assert all(stage["best"]["energy_j"] > 0 for stage in stages.values())


def test_the_record_states_how_fast_how_large_and_how_well(record):
    found = {name: result["value"] for name, result in record["results"].items()}
    assert found["model.train.steps"] == 25
    assert found["model.parameters"] == 136_960
    assert found["model.train.final_loss"] < found["model.train.first_loss"]
    assert found["model.evaluate.loss"] < found["model.train.first_loss"]
    assert found["model.training_flops_per_item"] == pytest.approx(3 * found["model.forward_flops_per_item"])
    assert found["model.train.items_per_s"] > 0
    assert found["model.peak_memory_bytes"] > 1e6
    assert "model.train.mfu" not in found
    assert record["findings"]["model.train"]["model"]["item"] == "sequence"


def test_the_trackers_findings_are_in_the_record_and_the_table(trained, record):
    phases = {row["phase"] for row in record["findings"]["model.train"]["simple"]["phases"]}
    assert {"input", "forward", "backward", "optimizer_step"} <= phases
    assert "Phases of a step" in trained.stdout


def test_the_table_summarizes_the_training(trained):
    for words in ("sequences/s over the stage", "per sequence", "in 25 steps", "held-out loss", "137 k parameters"):
        assert words in " ".join(trained.stdout.split())  # lines are wrapped where their numbers are long
    assert "model.train.first_loss" not in trained.stdout, "reported in words, not a second time as a raw result"


def test_the_weights_that_were_requested_are_kept_with_their_bill(record, store):
    folder = store / record["run_id"] / "artifacts" / "final_model"
    assert {"config.json", "model.safetensors", "bill.json"} <= {path.name for path in folder.iterdir()}
    bill = json.loads((folder / "bill.json").read_text())
    assert bill["artifact"]["stages"] == ["model.prepare", "model.train"]
    assert bill["artifact"]["energy"]["cpu_estimate"]["energy_j"] > 0


def test_a_page_is_written(record, store):
    page = (store / record["run_id"] / "report.html").read_text()
    assert "sequences/s over the stage" in page


def test_json_goes_to_stdout_and_evaluation_during_training_is_a_separate_stage(tmp_path):
    words = ["--model", "gpt2", "--size", "tiny", "--batch-size", "2", "--max-steps", "6", "--runs-dir", tmp_path]
    stats = ["--train_stats", "simple,energy"]
    done = joulelab_here("train", *words, *stats, "training.evaluate_every_steps=2", "evaluate_batches=1", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    stages = {stage["name"]: stage for stage in record["stages"]}
    assert len(stages["model.evaluate"]["segments"]) == 4  # after 2, 4 and 6 steps, and at the end
    assert record["results"]["model.train.steps"]["value"] == 6
    assert record["findings"]["model.train"].keys() == {"simple", "energy", "model"}
    assert not (tmp_path / record["run_id"] / "artifacts").exists()


def test_a_dry_run_prints_the_settings_and_trains_nothing(tmp_path):
    done = joulelab_here("train", "gpt2", *COURSE, "--trainer", "simple", "--dry-run", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    for line in (
        "model: gpt2",
        "batch_size: 4",
        "learning_rate: 0.001",
        "parallel: none",
        "dataset_split: train[:100]",
    ):
        assert line in done.stdout
    assert not (tmp_path / "runs").exists()


def test_minutes_become_seconds_and_take_the_epoch_s_place(tmp_path):
    words = ["gpt2", "--max_time_minutes", "0.5", "--dry-run", "--runs-dir", tmp_path]
    done = joulelab_here("train", *words)
    assert "max_time_s: 30.0" in done.stdout
    assert "epochs: null" in done.stdout


def test_the_zoo_is_listed_without_a_framework_and_as_json():
    import subprocess
    import sys

    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "sys.argv = ['joulelab', 'zoo', '--json']\n"
        "from joulelab.cli.main import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["gpt2"]["sizes"][0]["parameters"] == 124_439_808
    assert rows["gpt2"]["needs"].keys() == {"torch", "transformers"}


def test_one_model_is_shown_with_its_analytic_cost():
    pytest.importorskip("torch", reason="the cost is computed with torch")
    done = joulelab_here("zoo", "gpt2", "--size", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    output_text = json.loads(done.stdout)
    assert output_text["on_paper"]["parameters"] == output_text["on_paper"]["trained_parameters"] == 136_960
    assert output_text["on_paper"]["training_flops"] == 3 * output_text["on_paper"]["forward_flops"]
    assert {row["optimizer"] for row in output_text["on_paper"]["bytes"]} == {"adamw", "sgd", "adafactor"}
