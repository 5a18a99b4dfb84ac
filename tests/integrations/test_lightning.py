"""JoulelabLightningCallback in the real Lightning Trainer; skipped where Lightning is not installed."""

import time

import pytest

torch = pytest.importorskip("torch")
L = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

from joulelab.integrations import JoulelabLightningCallback  # noqa: E402
from joulelab.integrations.lightning import batch_size  # noqa: E402
from joulelab.runs.store import load_record  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ENERGY = {"gpus": "none", "estimate_cpu": True, "sample_interval_s": 0.05}


class Tiny(L.LightningModule):
    def __init__(self, breaks_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.breaks_at = breaks_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.breaks_at:
            raise RuntimeError("out of luck")
        time.sleep(0.08)  # so that the fit is long enough to be read while it goes on
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layer(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(size):
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(size, 8, generator=generator), torch.randint(0, 2, (size,), generator=generator)
    )
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(tmp_path, module):
    callback = JoulelabLightningCallback("tiny", energy=ENERGY, runs_dir=tmp_path / "runs")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        enable_checkpointing=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
        **quiet,
    )
    try:
        trainer.fit(module, loader(10), loader(8))
    finally:
        fit.callback, fit.trainer = callback, trainer
    return callback


def test_a_fit_is_a_run_with_validation_apart_from_training(tmp_path):
    callback = fit(tmp_path, Tiny())
    record = load_record(callback.folder)
    train, evaluate = record.stage("model.train"), record.stage("model.evaluate")
    assert record.status == "done"
    assert len(evaluate.segments) == 3  # the sanity check and two epochs
    assert (train.samples, train.phases["step"].count) == (20, 6)
    assert record.results["model.evaluate.val_loss"].value > 0
    assert float(fit.trainer.callback_metrics["energy_estimated_j"]) >= 0
    assert "val_loss" in (callback.folder / "metrics.jsonl").read_text()


def test_a_fit_that_raises_is_a_failed_run(tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, Tiny(breaks_at=1))
    record = load_record(fit.callback.folder)
    assert (record.status, record.error.message) == ("failed", "out of luck")


def test_batches_of_any_shape_are_counted():
    rows = torch.zeros(5, 3)
    assert [batch_size(batch) for batch in (rows, [rows, rows], {"a": {"b": rows}}, ["text"], torch.tensor(1.0))] == [
        5, 5, 5, 0, 1,
    ]  # fmt: skip
