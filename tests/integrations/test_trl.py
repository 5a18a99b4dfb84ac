"""JoulelabCallback in TRL's trainers, on a model and a tokenizer made here; skipped where TRL is not installed."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from joulelab.integrations import JoulelabCallback
from joulelab.runs.store import load_record

pytestmark = pytest.mark.filterwarnings("ignore")
ENERGY = {"gpus": "none", "estimate_cpu": True, "sample_interval_s": 0.05}
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{k}" for k in range(60))]
ROWS, STEPS, BATCH = 22, 5, 4


def tokenizer():
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model():
    sizes = {"vocab_size": len(WORDS), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    )


def text(number, words=12):
    return " ".join(f"w{(7 * number + k) % 60}" for k in range(words))


def settings(folder, **more):
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "logging_steps": 2,  # so that the last step has no log line of its own
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **more,
    }


def trained(trainer, config, folder, rows, **more):
    callback = JoulelabCallback("tiny", energy=ENERGY, runs_dir=folder / "runs")
    data = Dataset.from_list(rows)
    training = trainer(
        model=model(),
        args=config,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tokenizer(),
        callbacks=[callback],
        **more,
    )
    training.train()
    return training, load_record(callback.folder)


@pytest.mark.parametrize("evaluation", ["no", "steps"])
def test_supervised_fine_tuning_is_a_run_with_every_token_counted(tmp_path, evaluation):
    config = trl.SFTConfig(**settings(tmp_path, eval_strategy=evaluation, eval_steps=STEPS), max_length=32)
    training, record = trained(trl.SFTTrainer, config, tmp_path, [{"text": text(k)} for k in range(ROWS)])
    train = record.stage("model.train")
    assert record.status == "done"
    assert (train.phases["step"].count, train.samples) == (STEPS, STEPS * BATCH)
    assert train.tokens == STEPS * BATCH * 13  # 12 words and the end
    assert any("energy_estimated_j" in line for line in training.state.log_history)


def test_preference_optimization_is_a_run_with_evaluation_apart(tmp_path):
    config = trl.DPOConfig(**settings(tmp_path, eval_strategy="steps", eval_steps=3), max_length=48)
    rows = [{"prompt": f"{text(k)} ", "chosen": text(k + 1), "rejected": text(k + 2)} for k in range(ROWS)]
    _, record = trained(trl.DPOTrainer, config, tmp_path, rows, ref_model=model())
    train, evaluate = record.stage("model.train"), record.stage("model.evaluate")
    assert record.status == "done"
    assert (train.phases["step"].count, train.samples, len(evaluate.segments)) == (STEPS, STEPS * BATCH, 2)
    assert train.tokens == STEPS * BATCH * 2 * 25  # a pair is two rows: prompt, answer and the end
    assert record.results["model.evaluate.eval_rewards/accuracies"].value >= 0
    assert train.best.energy_j > 0
