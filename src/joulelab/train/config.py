"""Settings of the training loop, the section `training:` of an experiment. Importable without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from joulelab import lookup
from joulelab.errors import ConfigError
from joulelab.runs import environment
from joulelab.runs.spec import RunSpec, Section

Optimizer = Literal["adamw", "adamw-8bit", "adafactor", "sgd"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
CompileMode = Literal["off", "default", "blocks", "reduce-overhead", "max-autotune"]


def unmeasured_budget() -> ConfigError:
    return ConfigError(
        "an energy budget was set but no energy sensor works on this machine",
        "run `joulelab doctor` to see why, or let estimates count (training.budget_counts_estimates=true), or set "
        "another budget",
    )


class TrainingConfig(Section):
    """Training settings of every pipeline. The budget that is reached first ends the training; the learning-rate
    schedule follows the fraction of it that is spent."""

    # budget
    epochs: float | None = Field(1.0, gt=0)
    """Passes over the training data; fractions are allowed. null: limited by the other budgets only."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimizer steps."""
    max_tokens: int | None = Field(None, ge=1)
    """Stop after the step that reaches this many trained tokens."""
    max_time_s: float | None = Field(None, gt=0)
    """Stop after this many seconds of training, including earlier attempts of a resumed run. Setup does not count: the
    first step of each attempt, compilation, evaluations."""
    max_energy_j: float | None = Field(None, gt=0)
    """Stop after this many joules of training, measured while it runs. Setup does not count, as for `max_time_s`."""
    budget_counts_estimates: bool = False
    """Count estimated energy toward `max_energy_j`. If false, an energy budget needs a sensor."""
    replay_budget_of: str | None = None
    """Replay the budget readings of this run step by step, instead of reading this machine's clock and meter."""

    # optimizer step
    batch_size: int = Field(16, ge=1)
    """Samples in a micro-batch."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per optimizer step; the gradient is the mean over all their tokens or samples."""
    optimizer: Optimizer = "adamw"
    """adamw (fused; 8 bytes of state per weight), adamw-8bit (2 bytes; needs joulelab[bitsandbytes]), adafactor
    (factored second moments, almost none) or sgd (with momentum; 4 bytes)."""
    learning_rate: float = Field(5e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments; the first is also the momentum of SGD."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term added to the denominator."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay; not applied to biases and norms."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Clip the gradient norm at this value; null disables clipping."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate after the warm-up: linear to 0, cosine to 0, or constant."""
    warmup_share: float = Field(0.1, ge=0, lt=1)
    """Fraction of the budget over which the learning rate rises from 0."""
    warmup_steps: int | None = Field(None, ge=1)
    """Optimizer steps over which the learning rate rises from 0, instead of a fraction of the budget."""

    # numerics and devices
    precision: Precision = "fp32"
    """fp32; tf32 matrix products; or autocast to bf16 or fp16 (with loss scaling) over fp32 weights."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the trained weights and their gradients are stored. bf16 halves both and needs precision=bf16; the
    optimizer still computes in fp32. The gradients of several micro-batches (`accumulate`) add up in this dtype."""
    rounding: Literal["stochastic", "kahan"] = "stochastic"
    """With weights=bf16, how an updated weight is rounded: up or down at random, so that its expected value is exact;
    or to the nearest number, with the remainder kept for the next update (kahan; 2 more bytes per weight)."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """With weights=bf16, rounding=stochastic and optimizer=adamw: dtype of AdamW's two moments. bf16 saves 4 bytes per
    weight; both are rounded up or down at random like the weights."""
    matmul: Literal["precision", "fp8"] = "precision"
    """Dtype of the matrix products of linear layers: as `precision`, or fp8 in the repeated blocks of a model (not in
    its head and embeddings). fp8 needs precision=bf16 and a GPU of the generations Ada or Hopper, or newer; weights and
    gradients keep their dtype, and evaluations compute as without it. Set `compile` too: without it, finding scales and
    converting take longer than the products save."""
    compile: CompileMode = "off"
    """Mode of torch.compile; `blocks` compiles one layer of a deep model and reuses it for all, which starts faster."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass: less memory, about a third more compute."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """Parallelism over the ranks that torchrun started: replicas (ddp) or shards (fsdp); auto: ddp if several ranks."""
    prefetch: int = Field(2, ge=0)
    """Batches prepared ahead of the current step; 0 prepares each batch when it is needed."""

    # checkpoints, evaluation, logging
    checkpoint_every_steps: int = Field(50, ge=1)
    """Optimizer steps between checkpoints. A killed run repeats at most this many steps; all its energy is recorded."""
    checkpoint_async: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory."""
    keep_checkpoints: int = Field(0, ge=0)
    """Newest periodic checkpoints that stay in `checkpoints/` of the run after training; 0 removes all of them."""
    evaluate_every_steps: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations on held-out data, billed to a separate stage; null evaluates only after
    training."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations without improvement of the held-out loss."""
    log_every_steps: int = Field(10, ge=1)
    """Optimizer steps between log lines; a loss that is not finite ends the run at the next one."""
    stats: tuple[str, ...] = ("no-op",)
    """Additional trackers of the loop's phases."""
    isolation_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds that the tracker `energy` may take to isolate the phases of a step, once per run; null: 10 % of the
    training's expected time, at most 180."""

    @field_validator("compile", mode="before")
    @classmethod
    def _read_yaml_off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.early_stopping_patience and not self.evaluate_every_steps:
            raise ValueError("early_stopping_patience requires evaluate_every_steps")
        limits = (self.epochs, self.max_steps, self.max_tokens, self.max_time_s, self.max_energy_j)
        if not any((*limits, self.replay_budget_of)):
            raise ValueError("training has no end: set epochs, max_steps, max_tokens, max_time_s or max_energy_j")
        return self

    @model_validator(mode="after")
    def _numerics_fit_together(self) -> Self:
        if self.weights == "bf16" and self.precision not in ("bf16", "auto"):
            raise ValueError(f"weights=bf16 computes in bf16, but precision is {self.precision}; set precision=bf16")
        if self.matmul == "fp8" and self.precision not in ("bf16", "auto"):
            raise ValueError(
                f"matmul=fp8 replaces products in bf16, but precision is {self.precision}; set precision=bf16"
            )
        if self.precision == "fp16" and self.parallel == "fsdp":
            raise ValueError("parallel=fsdp does not support precision=fp16, which scales losses; set precision=bf16")
        if self.matmul == "fp8" and self.parallel == "fsdp":
            raise ValueError("matmul=fp8 does not support parallel=fsdp; set parallel=ddp, or set matmul=precision")
        if self.rounding == "kahan" and self.weights == "fp32":
            raise ValueError(
                "rounding=kahan has no effect with weights=fp32, whose updates are not rounded; set weights=bf16, or "
                "remove rounding"
            )
        needed = {"weights": "bf16", "rounding": "stochastic", "optimizer": "adamw"} if self.moments == "bf16" else {}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ValueError(f"moments=bf16 needs {name}={value}, found {getattr(self, name)}; set {name}={value}")
        if self.optimizer == "adamw-8bit" and self.parallel == "fsdp":
            raise ValueError(
                "optimizer=adamw-8bit with parallel=fsdp: quantized blocks of the optimizer's state cannot be divided "
                "among ranks; use adafactor or adamw"
            )
        return self

    def require_ranks(self, launched: bool, ranks: int, hosts: int) -> None:
        """`launched`: whether torchrun starts the ranks, of which there may be one."""
        if self.parallel == "none" and ranks > 1:
            raise ConfigError(
                f"training.parallel=none with {ranks} ranks would train {ranks} separate models",
                "set training.parallel=auto, or start one process",
            )
        if self.max_energy_j is not None and hosts > 1:
            raise ConfigError(
                f"an energy budget was set for {hosts} hosts, but it reads the meter of one",
                "set the budget in tokens, steps or time, or use one host",
            )
        if self.parallel in ("ddp", "fsdp") and not launched:
            raise ConfigError(
                f"training.parallel={self.parallel} requires several ranks but there is one",
                "start with torchrun --nproc-per-node N -m joulelab ... (in a job: joulelab submit --gpus N), or set "
                "training.parallel=auto",
            )

    def require_packages(self) -> None:
        if self.optimizer == "adamw-8bit":
            lookup.require_packages("optimizer=adamw-8bit", "bitsandbytes")


class PipelineTraining(TrainingConfig):
    """The training loop of a pipeline, which finds out what the machine can compute."""

    precision: Literal[Precision, "auto"] = "auto"  # type: ignore[assignment]
    """fp32; tf32 matrix products; or autocast to bf16 or fp16 (with loss scaling) over fp32 weights. auto: bf16 on a
    GPU with tensor cores for it (compute capability 8.0 or newer) and where weights=bf16 or matmul=fp8 need it, else
    fp32; the run's settings then have the chosen one."""

    @property
    def possible_precisions(self) -> tuple[str, ...]:
        """What `auto` may choose from."""
        if self.precision != "auto":
            return (self.precision,)
        return ("bf16",) if self.weights == "bf16" or self.matmul == "fp8" else ("fp32", "bf16")

    def with_precision(self, preferred: Precision) -> Self:
        """In place of `auto`, if it may be chosen."""
        possible = self.possible_precisions
        return self.model_copy(update={"precision": preferred if len(possible) > 1 else possible[0]})


class TrainingRunSpec(RunSpec):
    """Settings shared by all pipelines with a training loop."""

    telemetry_every: int | None = Field(None, ge=0)
    """Optimizer steps between rows of `distill_power.csv`, in addition to one row at the start of each training and one
    after each evaluation. 0 writes only those rows; null disables the file."""

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        """The trainings this run may do."""
        return ()

    def require_energy_reading(self) -> None:
        for training in self.trainings:
            if training.max_energy_j is None or training.replay_budget_of is not None:
                continue
            sensors = environment.discover_sensors(self.energy)
            if not sensors.measured and not (training.budget_counts_estimates and sensors.estimate):
                raise unmeasured_budget()

    def require_ranks(self, launched: bool, ranks: int, hosts: int) -> None:
        for training in self.trainings:
            if training.parallel in ("ddp", "fsdp") and not self.shares_ranks:
                raise ConfigError(
                    f"training.parallel={training.parallel} requires several ranks, but the pipeline "
                    f"'{self.pipeline}' runs in a single process",
                    "set training.parallel=auto",
                )
            training.require_ranks(launched, ranks, hosts)
