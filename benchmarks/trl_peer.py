"""TRL, with and without Liger's kernels, over the rows and pairs of our benchmarks: the peer of the comparison.

The same random model in the same dtype, the same micro-batches and the same optimizer by name; TRL's own loop, loss and
data path. Warm-up and window are as in `pacing`: some steps, then an undisturbed window between two synchronizations.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pacing import SETTLING_S, Window, forget_peak, peak_gib, wait
from torch import nn

OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip


def why_absent(liger: bool) -> str | None:
    """Why this peer cannot be measured here; None: it can."""
    if importlib.util.find_spec("trl") is None:
        return "trl is not installed"
    if liger and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if liger and not torch.cuda.is_available():
        return "Liger's kernels need a GPU"
    return None


@dataclass(frozen=True)
class PeerSettings:
    batch_size: int
    optimizer: str
    half: bool
    """bf16: as the dtype of the weights where the model has it, otherwise by autocast."""
    checkpointing: bool
    compiled: bool
    liger: bool
    seconds: float


@dataclass(frozen=True)
class PeerWindow:
    steps: int
    window_ns: Window
    loss: float
    peak_gib: float | None


def sft_window(model: nn.Module, rows: Sequence[Iterable[int]], settings: PeerSettings) -> PeerWindow:
    """SFT on rows of tokens, all of them trained."""
    import datasets
    import trl

    data = datasets.Dataset.from_dict({"input_ids": [list(map(int, row)) for row in rows]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            output_dir=folder, max_length=None, packing=False, dataset_kwargs={"skip_prepare_dataset": True},
            **_arguments(settings),
        )  # fmt: skip
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=_tokenizer(model))
        return _window(trainer, model, settings)


def dpo_window(
    model: nn.Module, pairs: Sequence[tuple[Iterable[int], Iterable[int], Iterable[int]]], beta: float,
    settings: PeerSettings,
) -> PeerWindow:  # fmt: skip
    """DPO on (prompt, chosen, rejected) with a copy of the model as its live reference, TRL's default."""
    import datasets
    import trl

    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    data = datasets.Dataset.from_dict(
        {name: [list(map(int, pair[place])) for pair in pairs] for place, name in enumerate(columns)}
    )

    class Tokenized(trl.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *ignored: Any, **also_ignored: Any) -> Any:
            return dataset  # the rows are tokens already, which TRL has no option for

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.DPOConfig(output_dir=folder, beta=beta, max_length=None, **_arguments(settings))
        # TRL would load the reference by the model's name, and a random model has none.
        reference, tokenizer = copy.deepcopy(model), _tokenizer(model)
        trainer = Tokenized(
            model=model, ref_model=reference, args=arguments, train_dataset=data, processing_class=tokenizer
        )
        return _window(trainer, model, settings)


def _arguments(settings: PeerSettings) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": settings.batch_size,
        "max_steps": 10**7,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": OPTIMIZERS[settings.optimizer],
        "bf16": settings.half,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": settings.checkpointing,
        "torch_compile": settings.compiled,
        "use_liger_kernel": settings.liger,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 10**7,
        "dataloader_num_workers": 0,
    }


def _tokenizer(model: nn.Module) -> Any:
    """TRL asks for one; rows of tokens do not need it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(16)}
    core = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<0>", bos_token="<1>", eos_token="<2>")


def _window(trainer: Any, model: nn.Module, settings: PeerSettings) -> PeerWindow:
    from transformers import TrainerCallback

    device = next(model.parameters()).device

    class Timer(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.steps, self.warm_until_s, self.begin_ns, self.end_ns = 0, 0.0, 0, 0

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if not self.begin_ns:
                wait(device)
                self.warm_until_s = self.warm_until_s or time.monotonic() + SETTLING_S
                if state.global_step >= 3 and time.monotonic() >= self.warm_until_s:
                    self.begin_ns = time.monotonic_ns()
                return
            self.steps += 1
            if time.monotonic_ns() - self.begin_ns >= settings.seconds * 1e9:
                wait(device)
                self.end_ns = time.monotonic_ns()
                control.should_training_stop = True

    timer = Timer()
    trainer.add_callback(timer)
    forget_peak()
    outcome = trainer.train()
    return PeerWindow(timer.steps, (timer.begin_ns, timer.end_ns), float(outcome.training_loss), peak_gib())
