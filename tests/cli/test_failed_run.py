"""A run that fails while it trains says so, with the right exit code, and its joules stay."""

from pathlib import Path

from commands import joulelab_here, shown

MODEL = Path(__file__).parent / "perceptron.py"


def test_a_nan_loss_ends_the_run_as_failed_with_its_joules(tmp_path):
    words = ["--learning_rate", "1e30", "--max_steps", "5", "--estimate-cpu"]
    done = joulelab_here("train", MODEL, *words, "--runs-dir", tmp_path)
    assert done.returncode == 1
    assert "error: the loss became" in done.stderr
    assert "resume" not in done.stderr, "the same settings diverge again"
    assert "Traceback" not in done.stderr
    record = shown(tmp_path, "perceptron")
    assert record["status"] == "failed"
    assert record["totals"]["best"]["energy_j"] > 0
    assert record["error"]["kind"] == "NonFiniteLoss"
