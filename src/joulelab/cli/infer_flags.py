"""The flags of `joulelab infer`: which setting each one sets, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from joulelab.errors import UsageError


def _numbers(text: str) -> list[int]:
    try:
        return [int(piece) for piece in _names(text)]
    except ValueError:
        raise UsageError(f"'{text}' is no list of whole numbers", "write them with commas: 1,8,32") from None


def _names(text: str) -> list[str]:
    found = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not found:
        raise UsageError(f"'{text}' names nothing", "write at least one value, several with commas; or leave it out")
    return found


def _share(text: str) -> float:
    """`2%` and `0.02` are the same."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"--target-ci '{text}' is no percentage", "write 2% or 0.02") from None
    return value / 100 if text.strip().endswith("%") else value


# flag -> setting and reader; a reader of None takes the value as typer read it
FLAGS: Mapping[str, tuple[str, Callable[[str], Any] | None]] = {
    "batch_size": ("batch_sizes", _numbers),
    "seq_length": ("seq_lengths", _numbers),
    "dtype": ("dtypes", _names),
    "mode": ("modes", _names),
    "norm": ("norms", _names),
    "threads": ("threads", None),
    "min_run_time": ("min_run_time_s", None),
    "target_ci": ("target_ci", _share),
    "max_time": ("max_time_s", None),
    "weights": ("weights", None),
    "size": ("size", None),
    "device": ("device", None),
    "prompt_tokens": ("prompt_tokens", None),
    "new_tokens": ("new_tokens", None),
    "require": ("energy.require", None),
    "require_grade": ("energy.require_grade", None),
}


def infer_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """base.yaml, the model, and what was asked for."""
    from joulelab.runs.spec import BASE, EXPERIMENTS, merge, nest, parse_overrides
    from joulelab.runs.yaml_text import read_mapping

    if params["model"] is None:
        raise UsageError("no model was named", "for a first look: joulelab infer deit-t --min-run-time 5")
    settings = {**read_mapping(EXPERIMENTS / f"{BASE}.yaml"), "pipeline": "infer", "model": params["model"]}
    for name, (key, read) in FLAGS.items():
        if params[name] is not None:
            settings = merge(settings, nest(key, params[name] if read is None else read(params[name])))
    for name, key in (("generate", "generate"), ("estimate_cpu", "energy.estimate_cpu")):
        if params[name]:
            settings = merge(settings, nest(key, True))
    return merge(settings, parse_overrides(params["overrides"] or []))
