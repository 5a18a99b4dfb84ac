"""How energy figures read: the printed uncertainty covers the printed number."""

import re

import pytest

from joulelab.meter.figures import (
    EnergyFigure,
    ErrorComponent,
    amount_text,
    coverage_text,
    estimate_note,
    figure_text,
    gain_text,
    labeled_text,
    missing,
    total,
    uncertainty_note,
)

MEASURED = EnergyFigure(energy_j=512.0, method="counter", half_width_j=1.0, gain_error_rel=0.05, sources=("gpu:0",))
ESTIMATED = EnergyFigure(energy_j=146.0, method="estimated", half_width_j=0.9, gain_error_rel=0.7)


def test_measured_energy_prints_its_random_interval_and_the_gain_error_once():
    assert labeled_text(MEASURED) == "512 J ±0.2 %, energy counter"
    assert figure_text(MEASURED) == "512 J ±0.2 %, gain ±5 %, energy counter"
    assert uncertainty_note([MEASURED, MEASURED]) == "±: random 95 % interval; gain ±5 % in addition."


def test_an_estimate_prints_its_total_uncertainty_and_never_its_small_random_part():
    """0.6 % of 146 J is random; the scale is known to 70 %."""
    assert ESTIMATED.half_width_j / ESTIMATED.energy_j == pytest.approx(0.006, abs=2e-4)
    for text in (amount_text(ESTIMATED), labeled_text(ESTIMATED), figure_text(ESTIMATED)):
        assert text.startswith("146 J ±70 %") and "0.6" not in text
    assert figure_text(ESTIMATED) == "146 J ±70 %, estimated"
    assert gain_text([ESTIMATED]) == "", "it is in the total already"
    assert uncertainty_note([ESTIMATED]) == "±: total uncertainty of the estimate."


def test_random_and_scale_error_of_an_estimate_add_in_quadrature():
    assert amount_text(ESTIMATED.with_interval(10.0, 3.0)) == "10.0 J ±76 %"


def test_an_estimate_without_a_stated_scale_error_prints_no_uncertainty():
    codecarbon = EnergyFigure(energy_j=146.0, method="estimated", half_width_j=0.9, sources=("codecarbon",))
    assert labeled_text(codecarbon) == "146 J, estimated by CodeCarbon"


@pytest.mark.parametrize("half_width_j", [0.0, 0.5])
def test_time_without_data_makes_a_lower_bound_instead_of_a_tight_interval(half_width_j):
    """`512 J ± 0.1 %` at 72 % coverage, `half_width_j: 0.0`."""
    found = MEASURED.model_copy(update={"coverage": 0.72, "half_width_j": half_width_j})
    assert amount_text(found) == "≥ 512 J (72 % covered)"
    assert "±0" not in amount_text(found)
    assert figure_text(found) == "≥ 512 J (72 % covered), gain ±5 %, energy counter"


def test_a_lower_bound_prints_no_interval_whatever_its_method():
    """An interval around a lower bound would not cover the true value; the scale error of the method stays stated."""
    found = ESTIMATED.model_copy(update={"coverage": 0.5})
    assert amount_text(found) == "≥ 146 J (50 % covered)"
    assert figure_text(found) == "≥ 146 J (50 % covered), scale error ±70 %, estimated"


def test_energy_above_idle_that_is_not_distinguishable_from_0_is_no_lower_bound():
    """Energy above idle of 10 % of the time was `≥ 44.3 mJ` where the idle power alone was known to ±2 J."""
    seen = ErrorComponent(name="idle", joules=(2.0,), shared=True)
    found = EnergyFigure(energy_j=0.0443, method="counter", coverage=0.096, errors=(seen,), half_width_j=2.0)
    assert amount_text(found) == "inconclusive (9.6 % covered)"
    gap = ErrorComponent(name="missing time", joules=(2000.0,), shared=True)
    wide = MEASURED.model_copy(update={"coverage": 0.5, "errors": (gap,), "half_width_j": 2000.0})
    assert amount_text(wide) == "≥ 512 J (50 % covered)", "what was seen is a bound, whatever was not"


def test_a_table_with_lower_bounds_states_what_they_are():
    bound = MEASURED.model_copy(update={"coverage": 0.5})
    assert uncertainty_note([bound]) == "≥: lower bound, some time or work has no readings; gain ±5 %."
    assert uncertainty_note([MEASURED, bound]) == (
        "±: random 95 % interval; gain ±5 % in addition. ≥: lower bound, some time or work has no readings."
    )
    assert uncertainty_note([bound], with_gain=False) == "≥: lower bound, some time or work has no readings."


def test_a_sum_with_a_lower_bound_is_one_also_in_records_that_state_only_coverage():
    """First-release records have no `lower_bound`, and a short stage hardly lowers the coverage of the sum."""
    short = EnergyFigure(energy_j=0.1, method="counter", coverage=0.5)
    found = total([MEASURED, short])
    assert found.coverage > 0.999 and found.is_lower_bound
    assert amount_text(found).startswith("≥ 512 J")


def test_work_that_no_meter_saw_makes_a_lower_bound_with_all_of_its_time_covered():
    assert amount_text(MEASURED.model_copy(update={"lower_bound": True})) == "≥ 512 J"


def test_a_sum_with_a_missing_part_is_a_lower_bound():
    assert amount_text(total([MEASURED, missing("no sensor")])) == "≥ 512 J (50 % covered)"


def test_missing_energy_has_its_reason_and_fix_and_is_never_0():
    nothing = missing("RAPL is readable by root only", "chmod a+r the energy_uj files")
    assert figure_text(nothing) == "missing: RAPL is readable by root only (chmod a+r the energy_uj files)"
    assert labeled_text(nothing) == amount_text(nothing) == "missing"


@pytest.mark.parametrize(
    ("coverage", "text"),
    [(0.72, "72 % covered"), (0.29, "29 % covered"), (0.577, "57.7 % covered"), (0.99899, "99.8 % covered")],
)
def test_incomplete_coverage_never_reads_as_complete(coverage, text):
    assert coverage_text(coverage) == text


def test_no_figure_prints_an_interval_of_0():
    for half_width_j in (0.0, 1e-9, 1e-4):
        text = amount_text(MEASURED.model_copy(update={"half_width_j": half_width_j}))
        assert not re.search(r"±0(\.0)? ?%", text)
    assert amount_text(EnergyFigure(energy_j=0.0, method="counter", half_width_j=0.5)) == "0 J ±500 mJ"


def test_mean_power_is_energy_over_covered_time():
    """A full disk left 31 % of 6.74 s with data: 1.45 J are 0.69 W, not 0.215 W."""
    found = EnergyFigure(energy_j=1.45, method="counter", coverage=0.31)
    assert found.mean_power_w(6.74) == pytest.approx(1.45 / (0.31 * 6.74))
    assert amount_text(found) == "≥ 1.45 J (31 % covered)"
    assert missing("no sensor").mean_power_w(6.74) is None


def test_digits_are_as_many_as_the_interval_deserves():
    """1.23 kJ ±0.1 % would be off by up to 0.4 % from rounding alone."""
    assert amount_text(MEASURED.with_interval(1846.2, 1.9)) == "1.846 kJ ±0.1 %"
    assert amount_text(MEASURED.with_interval(0.1475, 0.0005)) == "147.5 mJ ±0.3 %"
    assert amount_text(MEASURED.with_interval(12.0, 0.6)) == "12.0 J ±5 %"
    assert amount_text(ESTIMATED) == "146 J ±70 %"


def test_an_uncertainty_beyond_the_figure_is_printed_in_joules():
    assert amount_text(MEASURED.with_interval(0.165, 0.185)) == "165 mJ ±185 mJ"
    assert amount_text(MEASURED.with_interval(-0.04, 0.38)) == "-40.0 mJ ±380 mJ"


def test_a_table_of_estimates_without_intervals_has_a_note():
    assert estimate_note([ESTIMATED]) == "Energy is estimated, ±70 %; the scale error cancels in ratios and counts."
    assert estimate_note([MEASURED]) == ""
    unsure = ESTIMATED.model_copy(update={"half_width_j": 2 * ESTIMATED.energy_j})
    assert estimate_note([unsure]).startswith("Energy is estimated, ±212 %;"), "joules of one figure fit no other"
    exact = ESTIMATED.model_copy(update={"gain_error_rel": 0.09})
    assert "±70 %" in estimate_note([exact, ESTIMATED]), "the largest, not the last by spelling"


def test_a_short_part_without_data_hardly_lowers_the_coverage_of_a_sum():
    """Bills add stages without their durations: half of 0.1 J is 0.01 % of 512 J."""
    short = EnergyFigure(energy_j=0.1, method="counter", coverage=0.5)
    assert total([MEASURED, short]).coverage > 0.9998
    assert total([MEASURED, short], [9.0, 1.0]).coverage == pytest.approx(0.95)


def test_an_estimate_of_no_cpu_time_is_below_its_resolution():
    """A block that failed at once was printed as `0 J ±268 µJ`."""
    figure = EnergyFigure(energy_j=0.0, method="estimated", half_width_j=268e-6, gain_error_rel=0.7)
    assert amount_text(figure) == "< 268 µJ"
    assert amount_text(figure.model_copy(update={"method": "counter"})) == "0 J ±268 µJ"
