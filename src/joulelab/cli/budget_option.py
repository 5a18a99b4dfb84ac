"""`--budget 500kJ`: how much a student may train, as people write it, turned into the settings of its pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from joulelab.errors import UsageError
from joulelab.units import J_PER_KWH, J_PER_WH

if TYPE_CHECKING:
    from joulelab.runs.spec import RunSpec

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([A-Za-z]+)")
_JOULES = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9, "Wh": J_PER_WH, "kWh": J_PER_KWH}
_TOKENS = {"tokens": 1, "ktokens": 1_000, "Mtokens": 1_000_000, "Gtokens": 1_000_000_000}


_LIMITS = ("budget.energy_j", "budget.tokens", "training.max_energy_j", "training.max_tokens")


def budget_settings(text: str, experiment: str, overrides: Iterable[str] = ()) -> list[str]:
    """As `key.path=value`. It takes the place of the experiment's own limits, so that one thing alone is equal."""
    _require_no_other_limit(text, overrides)
    energy_j, tokens = parse_budget(text)
    if all("budget" in model.model_fields for model in _models(experiment)):
        found = {"budget.energy_j": energy_j, "budget.tokens": tokens}
    else:
        found = {"training.max_energy_j": energy_j, "training.max_tokens": tokens, "training.epochs": None}
    return [f"{key}={'null' if value is None else value}" for key, value in found.items()]


def _require_no_other_limit(text: str, overrides: Iterable[str]) -> None:
    """Two answers to one question: whichever held, it would be the wrong one for somebody."""
    from joulelab.runs.spec import parse_overrides

    given = parse_overrides(overrides)
    for key in _LIMITS:
        section, _, name = key.partition(".")
        inside = given.get(section)
        if isinstance(inside, dict) and inside.get(name) is not None:
            raise UsageError(
                f"--budget {text} and {key}={inside[name]} both say how much may be trained", "leave one of them out"
            )


def parse_budget(text: str) -> tuple[float | None, int | None]:
    """Joules or tokens, whichever it is."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = match.group(2) if match else ""
    if match is None or unit not in {*_JOULES, *_TOKENS} or float(match.group(1)) <= 0:
        raise UsageError(
            f"'{text}' is not a budget",
            f"a number and a unit: {', '.join(_JOULES)} for joules, {', '.join(_TOKENS)} for tokens; for example 500kJ",
        )
    amount = float(match.group(1))
    if unit in _JOULES:
        return amount * _JOULES[unit], None
    tokens = round(amount * _TOKENS[unit], 6)  # 4.1 ktokens are 4100, whatever their product's last bit says
    if tokens != int(tokens):
        raise UsageError(f"'{text}' are {tokens:g} tokens, and there are no parts of a token", "name a whole number")
    return None, int(tokens)


def _models(experiment: str) -> Iterable[type[RunSpec]]:
    from joulelab import lookup
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_experiment, read_layers

    settings = read_layers(experiment)
    names = [str(member["experiment"]) for member in settings["members"]] if is_group(settings) else [experiment]
    return [lookup.PIPELINE_SPECS.resolve(str(read_experiment(name).get("pipeline"))) for name in names]
