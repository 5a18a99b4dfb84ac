"""Carbon intensity of electricity grids, price of electricity, and the CO2e and cost of an energy figure, as ranges.

No single number is right: years differ, sources differ, and published figures are averages of what a country generates,
not of what its sockets deliver. So every grid is the span of all rows of `grids.csv` (each with source and year),
widened by `MARGIN_REL`. Users can also give a number or a range in g/kWh.

CO2e is reported only if `energy.grid` names a grid. The low end combines the low ends of energy and grid factor, the
high end both high ends; the energy's range is that of its total uncertainty (`EnergyFigure.total_range_j`), which is
the printed one of an estimate. PUE (overhead of the data center) gives separate figures and is never included in the
first ones. The cost is the energy's range times the price, without PUE.
"""

from __future__ import annotations

import csv
import difflib
import re
from functools import cache
from pathlib import Path

from joulelab.meter.figures import EnergyFigure, Frozen, Method
from joulelab.units import J_PER_KWH, plain_range_text, range_text

TABLE = Path(__file__).with_name("grids.csv")
# Generation against consumption: imports, exports and grid losses (5 to 8 % in most countries), and later revisions.
MARGIN_REL = 0.10
NO_GRID = NO_PRICE = "none"
_NUMBER = r"(\d+(?:\.\d+)?)"
_NUMBER_OR_RANGE = rf"{_NUMBER}(?:\s*(?:-|–|to|\.\.)\s*{_NUMBER})?"
# Common two-letter codes that are not ISO's.
_OTHER_CODES = {"UK": "GB", "EL": "GR"}
# Codes are so short that every typo is close to another code, so only names get a suggestion.
_LIKE_A_NAME = 0.75


class GridFactor(Frozen):
    grid: str
    """ISO code, EU, WORLD, or `given` for a number from the user."""
    code3: str | None = None
    """ISO code of three letters, where the grid is a country."""
    name: str
    low_g_per_kwh: float
    high_g_per_kwh: float
    source: str
    year: str


def parse_grid(text: str) -> GridFactor | None:
    """`FR`, `fra`, `world`, `56`, `40-60`; None for `none`. The ValueError lists what is valid."""
    word = text.strip()
    if word.lower() == NO_GRID:
        return None
    given = re.fullmatch(rf"{_NUMBER_OR_RANGE}(?:\s*g(?:CO2e)?/kWh)?", word)
    if given:
        return _given(float(given.group(1)), float(given.group(2) or given.group(1)))
    grids = _by_code()
    if word.upper() in grids:
        return grids[word.upper()]
    named = [grid for grid in grids.values() if grid.name.lower() == word.lower()]
    if named:
        return named[0]
    guess = _meant(word)
    ways = "an ISO code such as FR, DE, US or SE, `EU`, `world`, or grams per kWh as `56` or `40-60`"
    raise ValueError(f"no grid '{word}'; " + (f"did you mean {guess}? Or give {ways}" if guess else f"give {ways}"))


def _meant(word: str) -> str | None:
    if word.upper() in _OTHER_CODES:
        return _OTHER_CODES[word.upper()]
    names = {grid.name.lower(): grid.name for grid in _by_code().values()}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=_LIKE_A_NAME)
    return names[found[0]] if found else None


def _given(low: float, high: float) -> GridFactor:
    if high < low:
        raise ValueError(f"invalid range {low:g}-{high:g}: the first number must not exceed the second")
    if high > 3000:
        raise ValueError(f"{high:g} g/kWh is more than any fuel emits; the unit is grams per kilowatt-hour")
    return GridFactor(
        grid="given",
        name="given by the user",
        low_g_per_kwh=low,
        high_g_per_kwh=high,
        source="stated in energy.grid",
        year="not stated",
    )


@cache
def _by_code() -> dict[str, GridFactor]:
    """Every grid under its two codes."""
    rows: dict[str, list[dict[str, str]]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["code"], []).append(row)
    found: dict[str, GridFactor] = {}
    for code, same in rows.items():
        factor = _span(code, same)
        found[code] = found[same[0]["code3"]] = factor
    return found


def _span(code: str, rows: list[dict[str, str]]) -> GridFactor:
    grams = [float(row["g_per_kwh"]) for row in rows]
    years = sorted({row["year"] for row in rows})
    sources = dict.fromkeys(f"{row['source']}: {row['g_per_kwh']} g/kWh in {row['year']}" for row in rows)
    return GridFactor(
        grid=code,
        code3=rows[0]["code3"] if len(rows[0]["code3"]) == 3 else None,
        name=rows[0]["name"],
        low_g_per_kwh=round(min(grams) * (1 - MARGIN_REL), 1),
        high_g_per_kwh=round(max(grams) * (1 + MARGIN_REL), 1),
        source=f"{'; '.join(sources)}; widened by {100 * MARGIN_REL:.0f} %",
        year=years[0] if len(years) == 1 else f"{years[0]} to {years[-1]}",
    )


class Co2e(Frozen):
    co2e_g_low: float
    co2e_g_high: float
    with_pue_co2e_g_low: float | None = None
    with_pue_co2e_g_high: float | None = None
    method: Method
    """Method of the energy figure: CO2e of an estimate is an estimate."""


def co2e(figure: EnergyFigure, grid: GridFactor | None, pue: float | None) -> Co2e | None:
    """None without a grid or without energy; no default is assumed for either."""
    return co2e_of_range(figure.total_range_j, figure.method, grid, pue)


def co2e_of_range(
    energy: tuple[float, float] | None, method: Method, grid: GridFactor | None, pue: float | None
) -> Co2e | None:
    """CO2e of an energy range in joules."""
    if grid is None or energy is None:
        return None
    low = energy[0] / J_PER_KWH * grid.low_g_per_kwh
    high = energy[1] / J_PER_KWH * grid.high_g_per_kwh
    return Co2e(
        co2e_g_low=low,
        co2e_g_high=high,
        with_pue_co2e_g_low=None if pue is None else low * pue,
        with_pue_co2e_g_high=None if pue is None else high * pue,
        method=method,
    )


class Price(Frozen):
    low_per_kwh: float
    high_per_kwh: float
    currency: str = ""
    """As the user wrote it; empty if none was given."""


def parse_price(text: str) -> Price | None:
    """`0.30`, `0.30 EUR`, `0.25-0.35 EUR/kWh`; None for `none`."""
    word = text.strip()
    if word.lower() == NO_PRICE:
        return None
    given = re.fullmatch(rf"{_NUMBER_OR_RANGE}\s*([^\W\d]{{1,8}}|[€$£¥])?(?:\s*/\s*kWh)?", word)
    if given is None:
        raise ValueError(
            f"expected an amount per kWh that is not negative, as `0.30`, `0.30 EUR` or `0.25-0.35 EUR`, found '{word}'"
        )
    low, high = float(given.group(1)), float(given.group(2) or given.group(1))
    if high < low:
        raise ValueError(f"invalid range {low:g}-{high:g}: the first number must not exceed the second")
    return Price(low_per_kwh=low, high_per_kwh=high, currency=given.group(3) or "")


class Cost(Frozen):
    low: float
    high: float
    currency: str


def cost(figure: EnergyFigure, price: Price | None) -> Cost | None:
    """None without a price or without energy."""
    energy = figure.total_range_j
    if price is None or energy is None:
        return None
    low, high = energy[0] / J_PER_KWH * price.low_per_kwh, energy[1] / J_PER_KWH * price.high_per_kwh
    return Cost(low=low, high=high, currency=price.currency)


# CO2e and cost as text: ranges, and a lower bound where the energy is one.


def co2e_text(found: Co2e, lower_bound: bool) -> str:
    return range_text(found.co2e_g_low, found.co2e_g_high, "gCO2e", lower_bound)


def cost_text(found: Cost, lower_bound: bool) -> str:
    """`0.0012 to 0.0049 EUR`; `cost 0.0012 to 0.0049` if the user named no currency."""
    return ("" if found.currency else "cost ") + plain_range_text(found.low, found.high, found.currency, lower_bound)
