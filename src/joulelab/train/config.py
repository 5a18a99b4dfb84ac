"""Settings of the training loop, as a user writes them under `training:`; importable without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from joulelab.runs.spec import RunSpec, Section

Optimizer = Literal["adamw", "adafactor", "sgd"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
CompileMode = Literal["off", "default", "blocks", "reduce-overhead", "max-autotune"]


class TrainingConfig(Section):
    """One loop for every pipeline. Whichever budget is used up first ends the training; the schedule follows the share
    of it that is spent."""

    # how long
    epochs: float | None = Field(1.0, gt=0)
    """Passes over the training data; fractions are allowed. Nothing: as many as the other budgets allow."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps."""
    max_tokens: int | None = Field(None, ge=1)
    """Stop after the step in which this many tokens have been trained on."""
    max_time_s: float | None = Field(None, gt=0)
    """Stop after this many seconds of training, earlier attempts of a resumed run included. Setup does not count: the
    first step of each attempt, compilation, evaluations."""
    max_energy_j: float | None = Field(None, gt=0)
    """Stop after this many joules of training, as measured while it runs. Setup does not count, as for `max_time_s`."""
    budget_counts_estimates: bool = False
    """Let estimated joules count towards `max_energy_j`; without it a joule budget needs a sensor."""
    replay_budget_of: str | None = None
    """A run whose time or joule budget is followed again step by step, whatever this machine's clock and meter say."""

    # what a step is
    batch_size: int = Field(16, ge=1)
    """Samples in a micro-batch."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches whose gradients make one optimiser step; the mean is over all their tokens or samples."""
    optimizer: Optimizer = "adamw"
    """AdamW (fused), Adafactor (factored second moments, little memory) or SGD with momentum."""
    learning_rate: float = Field(5e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments; the first is also SGD's momentum."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term against division by nothing."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay; biases and norms are left out."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this norm where they are longer; nothing: no clipping."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warm-up: to 0 in a line, to 0 along a cosine, or not at all."""
    warmup_share: float = Field(0.1, ge=0, lt=1)
    """Share of the budget in which the learning rate rises from 0."""

    # how it is computed
    precision: Precision = "fp32"
    """fp32; tf32 matrix products; or autocast to bf16 or fp16 (with loss scaling) over fp32 weights."""
    compile: CompileMode = "off"
    """torch.compile, and its mode; `blocks` compiles a layer of a deep model once for all of them: quick to start."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass: less memory, about a third more work."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """Over the ranks torchrun started: copies (ddp) or shards (fsdp); auto is ddp where there are ranks."""
    prefetch: int = Field(2, ge=0)
    """Batches made ready ahead of the step that needs them; 0 makes each one when it is needed."""

    # what is kept and looked at
    checkpoint_every_steps: int = Field(50, ge=1)
    """Optimiser steps between checkpoints; a killed run loses at most this much work, and none of its joules."""
    checkpoint_async: bool = True
    """Write checkpoints while training goes on; only the copy out of the device is waited for."""
    evaluate_every_steps: int | None = Field(None, ge=1)
    """Optimiser steps between looks at held-out data, each billed to a stage of its own; nothing: none on the way."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after this many looks at held-out data without a better one."""
    log_every_steps: int = Field(10, ge=1)
    """Optimiser steps between lines of metrics; a loss that is not finite is noticed there at the latest."""
    stats: tuple[str, ...] = ("no-op",)
    """Further trackers of the loop's phases, beside the meter's own."""

    @field_validator("compile", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.early_stopping_patience and not self.evaluate_every_steps:
            raise ValueError("early_stopping_patience needs evaluate_every_steps: there is nothing to wait for else")
        if not any((self.epochs, self.max_steps, self.max_tokens, self.max_time_s, self.max_energy_j)):
            raise ValueError("training has no end: set epochs, max_steps, max_tokens, max_time_s or max_energy_j")
        return self


class TrainingRunSpec(RunSpec):
    """What the settings of every pipeline with a training loop have in common."""

    telemetry_every: int | None = Field(None, ge=0)
    """Optimiser steps between rows of `distill_power.csv`, beside a row where a training starts and one after each look
    at held-out data; 0: those alone; nothing: no such file."""
