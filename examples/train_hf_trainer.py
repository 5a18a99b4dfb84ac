"""Train a tiny GPT-2 with the Hugging Face Trainer and measure training and evaluation as separate stages.

python train_hf_trainer.py --steps 20
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from joulelab.integrations import JoulelabCallback

VOCABULARY, LENGTH = 64, 32


class Counting(torch.utils.data.Dataset):
    """Rows that count upward from a different number each."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2.")
    parser.add_argument("--steps", type=int, default=20, help="Optimizer steps.")
    arguments = parser.parse_args()

    callback = JoulelabCallback("tiny-gpt2")
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)),
        args=TrainingArguments(
            output_dir="trainer-output",
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to=[],
            include_num_input_tokens_seen=True,
        ),
        train_dataset=Counting(),
        eval_dataset=Counting(),
        callbacks=[callback],  # the only line that joulelab needs
    )
    trainer.train()
    for stage in callback.record.stages:
        print(stage.name, f"{stage.duration_s:.2f} s", stage.best.energy_j, stage.best.method)


if __name__ == "__main__":
    main()
