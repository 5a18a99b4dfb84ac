"""The flags of `joulelab infer`: which setting each one sets, and how its text is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from joulelab.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from joulelab.runs.spec import RunSpec


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
        raise UsageError(f"--target-ci: expected a percentage, found '{text}'", "write 2% or 0.02") from None
    share = value / 100 if text.strip().endswith("%") else value
    if not 0 < share < 1:
        raise UsageError(f"--target-ci {text} is {100 * share:g} % of the energy", "write 2% (or 0.02) for two percent")
    return share


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


def checked_settings(params: Mapping[str, Any]) -> RunSpec:
    """The settings, or what is wrong with them in the words of the command line."""
    from joulelab.runs.spec import check

    settings = infer_settings(params)
    try:
        return check(settings)
    except ConfigError as error:
        message = _in_options(error.message, [name for name in FLAGS if params[name] is not None])
        hint = "`joulelab infer --help` describes the options; nothing was started"
        raise ConfigError(message, error.hint if message == error.message else hint) from None


def _in_options(message: str, given: Iterable[str]) -> str:
    """`norms.0: expected ...` is about --norm, where that is how it was set."""
    for name in given:
        key, option = re.escape(FLAGS[name][0]), "--" + name.replace("_", "-")
        message = re.sub(rf"^{key}(\.\d+)?:", f"{option}:", message, flags=re.MULTILINE)
        if "_" in key:  # no word of a sentence
            message = re.sub(rf"\b{key}\b", option, message)
    return message


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
