import pytest

from joulelab.units import duration_text, energy_text, percent_text, power_text, range_text, with_prefix


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 J"), (0.00212, "2.12 mJ"), (1.0, "1.00 J"), (999.9, "1.00 kJ"), (4200.0, "4.20 kJ"), (3.6e6, "3.60 MJ")],
)
def test_joules_read_with_the_right_prefix(value, text):
    assert energy_text(value) == text


def test_missing_energy_is_a_word_and_never_zero():
    assert energy_text(None) == "missing"
    assert power_text(None) == "missing"


def test_kilojoules_are_not_printed_as_megajoules():
    assert with_prefix(12_345.0, "J") == "12.3 kJ"


def test_durations_and_shares():
    assert [duration_text(s) for s in (0.04, 0.0042, 0.0994, 0.0996, 0.0)] == [
        "40 ms",
        "4.2 ms",
        "99 ms",
        "0.1 s",
        "0.0 s",
    ]
    assert duration_text(59.94) == "59.9 s"
    assert duration_text(61) == "1 min 01 s"
    assert duration_text(7260) == "2 h 01 min"
    assert percent_text(0.123) == "12.3 %"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.0000007, 0.0000159, "0.700 to 15.9 µg"),
        (980.0, 1900.0, "0.980 to 1.90 kg"),
        (0.0, 0.0000159, "0 to 15.9 µg"),
        (1.0, 1900.0, "1.00 g to 1.90 kg"),
        (1.2, 1.2, "1.20 g"),
        (1e-9, 2e-9, "1e-09 g to 2e-09 g"),
    ],
)
def test_both_ends_of_a_range_have_one_unit_unless_they_are_far_apart(low, high, text):
    assert range_text(low, high, "g") == text
