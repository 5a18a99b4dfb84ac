"""CO2e: a range with source and year, only where a grid is named."""

import csv

import pytest
from pydantic import ValidationError

from joulelab.errors import ConfigError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import EnergyFigure, missing, uncertainty_text
from joulelab.meter.grids import TABLE, co2e, cost, cost_text, parse_grid, parse_price
from joulelab.runs.spec import load_spec

KWH = EnergyFigure(energy_j=3.6e6, method="counter", half_width_j=0.0, gain_error_rel=0.0)


def test_one_kwh_on_a_stated_grid_is_its_factor():
    found = co2e(KWH, parse_grid("50"), None)
    assert (found.co2e_g_low, found.co2e_g_high) == (50.0, 50.0)
    assert found.with_pue_co2e_g_low is None


def test_grid_and_energy_both_widen_the_range():
    figure = KWH.model_copy(update={"half_width_j": 0.36e6, "gain_error_rel": 0.05})
    found = co2e(figure, parse_grid("40-60"), None)
    error = (0.1**2 + 0.05**2) ** 0.5
    assert found.co2e_g_low == pytest.approx(40 * (1 - error))
    assert found.co2e_g_high == pytest.approx(60 * (1 + error))


@pytest.mark.parametrize(("half_width_j", "gain"), [(3.81e6, 0.7), (0.43e6, 0.7), (0.0, 0.5)])
def test_cost_and_co2e_have_the_range_of_the_printed_uncertainty(half_width_j, gain):
    """±841 mJ of 656 mJ were printed, and the cost ended at 1.9 times the price of the high end."""
    figure = KWH.model_copy(update={"method": "estimated", "half_width_j": half_width_j, "gain_error_rel": gain})
    printed = uncertainty_text(figure).removeprefix("±")
    if printed.endswith("%"):
        share = float(printed.removesuffix("%")) / 100
    else:
        assert printed.endswith(" MJ")
        share = float(printed.removesuffix(" MJ")) * 1e6 / KWH.energy_j
    for low, high in (_cost_ends(figure), _co2e_ends(figure)):
        assert low == pytest.approx(max(0.0, 1 - share), abs=0.006)
        assert high == pytest.approx(1 + share, abs=0.006)


def _cost_ends(figure):
    found = cost(figure, parse_price("1"))
    return found.low, found.high


def _co2e_ends(figure):
    found = co2e(figure, parse_grid("1"), None)
    return found.co2e_g_low, found.co2e_g_high


def test_pue_is_reported_separately():
    found = co2e(KWH, parse_grid("100"), 1.5)
    assert (found.co2e_g_high, found.with_pue_co2e_g_high) == (100.0, 150.0)


def test_an_interval_wider_than_the_figure_never_gives_negative_grams():
    figure = KWH.model_copy(update={"half_width_j": 9e6, "gain_error_rel": 0.7})
    assert co2e(figure, parse_grid("100"), None).co2e_g_low == 0.0


def test_no_grid_no_grams_and_no_joules_no_grams():
    assert co2e(KWH, None, 1.2) is None
    assert co2e(missing("no sensor"), parse_grid("FR"), 1.2) is None


def test_grams_of_an_estimate_state_that_they_are_one():
    assert co2e(KWH.model_copy(update={"method": "estimated"}), parse_grid("FR"), None).method == "estimated"


def test_a_country_spans_its_sources_and_cites_them():
    france = parse_grid("FR")
    assert (france.low_g_per_kwh, france.high_g_per_kwh) == (39.6, 61.6)
    assert (france.year, france.code3) == ("2023 to 2024", "FRA")
    assert "Our World in Data" in france.source and "widened by 10 %" in france.source


@pytest.mark.parametrize("name", ["FR", "fr", "FRA", "france", " France "])
def test_a_grid_answers_to_its_codes_and_its_name(name):
    assert parse_grid(name).grid == "FR"


def test_every_row_of_the_table_has_source_year_and_a_possible_value():
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 90
    assert all(
        row["source"] and 2015 <= int(row["year"]) <= 2026 and 0 < float(row["g_per_kwh"]) < 1200 for row in rows
    )
    assert {"FR", "DE", "US", "SE", "GB", "CN", "WORLD", "EU"} <= {row["code"] for row in rows}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("Franc", "did you mean France"),
        ("swedn", "did you mean Sweden"),
        ("uk", "did you mean GB"),
        ("ZZ", "no grid 'ZZ'; give an ISO code"),
        ("Mars", "no grid 'Mars'; give an ISO code"),
        ("FX", "no grid 'FX'; give an ISO code"),
        ("60-40", "invalid range 60-40"),
        ("9999", "grams per kilowatt-hour"),
        (False, "write NOR for Norway"),
        ("", "no grid ''"),
    ],
)
def test_a_grid_no_one_knows_is_answered_with_what_would_be_right(value, words):
    with pytest.raises(ValidationError, match=words):
        EnergyConfig(grid=value)


def test_a_wrong_grid_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"energy\.grid: no grid 'Germny'; did you mean Germany"):
        load_spec("demo-kd", {"energy": {"grid": "Germny"}})


def test_a_number_may_be_written_as_a_number():
    assert load_spec("demo-kd", {"energy": {"grid": 56, "pue": 1.1}}).energy.grid == "56"


@pytest.mark.parametrize("pue", [0.9, 12])
def test_a_pue_no_building_has_is_refused(pue):
    with pytest.raises(ValidationError):
        EnergyConfig(pue=pue)


@pytest.mark.parametrize(
    ("text", "low", "high", "currency"),
    [
        ("0.30", 0.3, 0.3, ""),
        ("0.30 EUR", 0.3, 0.3, "EUR"),
        ("0.25-0.35 EUR/kWh", 0.25, 0.35, "EUR"),
        ("0.2 to 0.4 $", 0.2, 0.4, "$"),
        ("0.30EUR", 0.3, 0.3, "EUR"),
    ],
)
def test_a_price_is_a_number_or_range_with_a_currency(text, low, high, currency):
    found = parse_price(text)
    assert (found.low_per_kwh, found.high_per_kwh, found.currency) == (low, high, currency)


@pytest.mark.parametrize("text", ["-0.3", "cheap", "", "0.3 EUR per month", "0.4-0.3"])
def test_what_is_no_price_is_refused(text):
    with pytest.raises(ValueError, match=r"expected an amount per kWh|invalid range"):
        parse_price(text)


def test_a_cost_is_the_energys_range_times_the_price():
    kwh = EnergyFigure(energy_j=3.6e6, method="counter", half_width_j=0.0, gain_error_rel=0.1)
    found = cost(kwh, parse_price("0.20-0.30 EUR"))
    assert (found.low, found.high) == (pytest.approx(0.18), pytest.approx(0.33))
    assert cost_text(found, lower_bound=False) == "0.18 to 0.33 EUR"
    assert cost_text(found, lower_bound=True) == "≥ 0.18 EUR"
    assert cost_text(cost(kwh, parse_price("0.3")), lower_bound=False) == "cost 0.27 to 0.33"
    assert cost(missing("no sensor"), parse_price("0.3")) is None and cost(kwh, parse_price("none")) is None
