"""Settings of the training loop, as a user writes them under `training:`; importable without torch."""

from __future__ import annotations

from pydantic import Field

from joulelab.runs.spec import Section


class TrainingConfig(Section):
    """One loop for every pipeline; schedules and budgets count optimiser steps."""

    epochs: float = Field(1.0, gt=0)
    """Passes over the training data; fractions are allowed."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps even if epochs remain."""
    batch_size: int = Field(16, ge=1)
    """Samples in a micro-batch."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches whose gradients make one optimiser step; the mean is over all their samples."""
    learning_rate: float = Field(5e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    warmup_share: float = Field(0.1, ge=0, lt=1)
    """Share of the steps in which the learning rate rises from 0; after it, it falls linearly to 0."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm where they are longer."""
    checkpoint_every_steps: int = Field(50, ge=1)
    """Optimiser steps between checkpoints; a killed run loses at most this much work, and none of its joules."""
    log_every_steps: int = Field(10, ge=1)
    """Optimiser steps between lines of metrics; a loss that is not finite is noticed there at the latest."""
    stats: tuple[str, ...] = ("no-op",)
    """Further trackers of the loop's phases, beside the meter's own."""
