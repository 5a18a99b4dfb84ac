"""Settings of `joulelab evaluate`; importable without torch, so that a login node can check them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.errors import ConfigError, NotFoundError
from joulelab.infer.config import require_usable_model, require_weights
from joulelab.runs import environment
from joulelab.runs.spec import RunSpec, user_path
from joulelab.zoo.quantization import Quantization, is_quantized, quantization_packages, require_quantization


class EvaluateSpec(RunSpec):
    """Evaluate a language model: a metered stage for each task, with the result of every item."""

    pipeline: Literal["evaluate"] = "evaluate"
    """Always `evaluate`."""
    model: str
    """A folder (a run's artifact, a checkpoint in Hugging Face format), a hub id, a GGUF file or a sample."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness: gsm8k, mmlu, ifeval, ..., or those in `task_folder`."""
    task_folder: str = ""
    """Folder with task files in the harness's format, for tasks over local data."""
    data: str = ""
    """Questions with answers: a JSONL file with `prompt` (text or messages), `answer` and optional `choices` in each
    line, or `sample:reviews`."""
    limit: int | None = Field(None, ge=1)
    """Items per task; null: all."""
    max_new_tokens: int = Field(64, ge=1)
    """Maximum tokens per answer, for questions of `data` without choices and for judged answers."""
    grader: Literal["text", "math-verify"] = "text"
    """How free answers are compared: as numbers, formulas or normalized text, or as mathematical expressions by the
    package math-verify."""
    judge: str = ""
    """A model that judges the answers to the prompts of `data`: a folder, hub id, GGUF file or sample, or the name of
    the model on `judge_server`. With a reference answer in each line it compares both (as AlpacaEval does), otherwise
    it grades each turn from 1 to 10 (as MT-Bench does)."""
    judge_server: str = ""
    """OpenAI-compatible server that judges; its energy is measured if it runs on this machine and a sensor works."""
    rubric: str = "Consider helpfulness, correctness, depth and clarity."
    """Instruction for the judge."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Format prompts with the model's chat template; auto: if the model has one. The record has its SHA-256."""
    batch_size: int = Field(8, ge=1)
    """Items per call in tasks of the harness. Not used for `data`: its questions are scored in batches of 16,384 tokens
    (4,096 on a CPU); answers are generated in batches that fit into a GPU's memory, or 32 at a time on a CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16", Quantization] = "auto"
    """Type of the weights; auto: bf16 on a GPU with tensor cores for it (compute capability 8.0 or newer), else fp32.
    Quantized: int8, nf4 (extra bitsandbytes), fp8, fp8-weights, int4 (extra torchao)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Names from the model, and absolute paths, so that a run can be resumed from another folder."""
        model = settings.get("model")
        if not isinstance(model, str):
            return dict(settings)
        model = f"{sources.SAMPLE_PREFIX}{model}" if model in sources.SAMPLES else model
        short = model.rstrip("/").rpartition("/")[2].replace(":", "-")[:60]
        result = {"name": f"evaluate-{short}", "label": short} | dict(settings) | {"model": model}
        judge = settings.get("judge")
        if isinstance(judge, str) and judge in sources.SAMPLES:
            result["judge"] = f"{sources.SAMPLE_PREFIX}{judge}"
        for key in ("task_folder", "data"):
            value = settings.get(key)
            if isinstance(value, str) and value and not value.startswith(sources.SAMPLE_PREFIX):
                result[key] = str(user_path(value).absolute())
        return result

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Self:
        if not self.tasks and not self.data:
            raise ValueError("nothing to evaluate: set tasks (--tasks gsm8k,mmlu) or data (--data FILE)")
        if self.task_folder and not self.tasks:
            raise ValueError("task_folder is set, but tasks is empty: name the tasks to run (--tasks)")
        if self.judge_server and not self.judge_server.startswith(("http://", "https://")):
            raise ValueError(f"judge_server: '{self.judge_server}' is not an address such as http://localhost:8000/v1")
        if self.judge_server and not self.judge:
            raise ValueError("judge_server is set, but judge is empty: name the model that it serves (--judge)")
        if self.judge and (not self.data or self.data.startswith(sources.SAMPLE_PREFIX)):
            raise ValueError("judge needs prompts: set data (--data FILE) with prompt or turns in each line")
        if self.judge and not self.rubric.strip():
            raise ValueError("rubric is empty; describe what makes an answer good")
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        changed = {
            name for name in ("rubric", "grader") if getattr(self, name) != type(self).model_fields[name].default
        }
        return (
            ("rubric" in changed and not self.judge, "rubric has no effect without judge; name the judge (--judge)"),
            ("grader" in changed and not self.data, "grader has no effect without data; it compares answers to --data"),
            ("grader" in changed and bool(self.judge), "grader has no effect with judge, which judges all answers"),
        )

    @property
    def precision_here(self) -> str:
        if self.precision != "auto":
            return self.precision
        return "bf16" if environment.has_bf16_cores(self.device) else "fp32"

    @property
    def local_models(self) -> tuple[str, ...]:
        """Models that this process loads: the model, and a judge that no server runs."""
        return (self.model, self.judge) if self.judge and not self.judge_server else (self.model,)

    def checks(self) -> Iterator[Callable[[], object]]:
        for model in self.local_models:
            yield partial(require_model, model)
        yield self.require_files
        if is_quantized(self.precision):
            yield lambda: require_quantization(self.precision, environment.uses_gpu(self.device))

    def require_files(self) -> None:
        if self.task_folder and not Path(self.task_folder).is_dir():
            raise ConfigError(f"{self.task_folder} is not a folder", "pass the folder with your task files")
        if self.data and not self.data.startswith(sources.SAMPLE_PREFIX) and not Path(self.data).is_file():
            raise ConfigError(
                f"{self.data} is not a file", "pass a JSONL file with prompt, answer and optional choices in each line"
            )

    def require_packages(self) -> None:
        optional = {"lm_eval": bool(self.tasks), "math_verify": self.grader == "math-verify"}
        wanted = [name for name, used in optional.items() if used] + quantization_packages(self.precision)
        lookup.require_packages("this run", "torch", "transformers", *wanted)


def require_model(name: str) -> None:
    """Check from the files of `name` that it is a causal language model."""
    path = sources.parse(name).path
    if path is not None and path.is_file() and path.suffix.lower() != ".gguf":
        raise NotFoundError(
            f"{path} is not a model", "pass a model folder in Hugging Face format, a .gguf file, a hub id or a sample"
        )
    require_weights(name, name)
    require_usable_model(name, generate=True)
