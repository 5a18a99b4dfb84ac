"""Numbers as text. Values are in SI units, with the unit in the name; the functions here format them for people."""

from __future__ import annotations

J_PER_WH = 3_600.0
J_PER_KWH = 3_600_000.0
BYTES_PER_MB = 1024.0**2  # the monitor's `memory_used_MB` is in MiB

_SI_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def three_digits(value: float, more: int = 0) -> str:
    """Three significant digits without an exponent, plus `more` digits for values known better than to 0.5 %."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    # The limits are where rounding carries into the next digit: 99.96 prints as 100, not as 100.0.
    decimals = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2 if magnitude >= 0.9995 else 3
    return f"{value:.{decimals + more}f}"


def with_prefix(value: float, unit: str, more: int = 0) -> str:
    """4,200 J -> '4.20 kJ'; 0.0042 J -> '4.20 mJ'; one more digit: '4.200 kJ'."""
    for factor, prefix in _SI_STEPS:
        # 0.9995 rounds to '1000' of the smaller unit, so the step is taken a little early.
        if abs(value) >= factor * 0.9995:
            return f"{three_digits(value / factor, more)} {prefix}{unit}"
    return f"0 {unit}" if value == 0 else f"{value:.2g} {unit}"


def range_text(low: float, high: float, unit: str, lower_bound: bool = False) -> str:
    """`0.980 to 1.90 kgCO2e`; `1.00 gCO2e to 1.90 kgCO2e` if one end is below 1 % of the other; of energy that is a
    lower bound `≥ 1.20 kgCO2e`."""
    ends = with_prefix(low, unit), with_prefix(high, unit)
    if lower_bound:
        return f"≥ {ends[0]}"
    if ends[0] == ends[1]:
        return ends[0]
    prefixed = ends[1].split(" ")[1]
    factor = next((factor for factor, prefix in _SI_STEPS if prefix + unit == prefixed and high >= factor), None)
    if factor is None or 0 < low < 0.01 * high:
        return " to ".join(ends)
    return f"{three_digits(low / factor)} to {ends[1]}"


def plain_range_text(low: float, high: float, unit: str = "", lower_bound: bool = False) -> str:
    """`1.2 to 2.3 EUR`, without prefixes and with two digits: the ends of such ranges are no more precise."""
    ends, unit = (two_digits(low), two_digits(high)), f" {unit}" if unit else ""
    if lower_bound:
        return f"≥ {ends[0]}{unit}"
    return f"{ends[0]}{unit}" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}{unit}"


def two_digits(value: float) -> str:
    if value == 0:
        return "0"
    return three_digits(value) if abs(value) >= 99.5 else f"{value:.2g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def kwh_text(energy_j: float) -> str:
    """`0.0406 kWh`; `4.06e-05 kWh` below a ten-thousandth."""
    kwh = energy_j / J_PER_KWH
    return f"{three_digits(kwh) if abs(kwh) >= 99.95 else f'{kwh:.3g}'} kWh"


def plural(count: int, noun: str) -> str:
    """'1 attempt', '2 attempts'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def energy_text(energy_j: float | None) -> str:
    return "missing" if energy_j is None else with_prefix(energy_j, "J")


def power_text(power_w: float | None) -> str:
    return "missing" if power_w is None else f"{three_digits(power_w)} W"


def duration_text(duration_s: float) -> str:
    """`40 ms` where tenths of a second would be too coarse, `59.9 s`, `1 min 01 s`, `2 h 01 min`."""
    if 0 < duration_s < 0.0995:
        return f"{1000 * duration_s:.2g} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def percent_text(share: float | None, decimals: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{decimals}f} %"


def size_text(size_bytes: float) -> str:
    return with_prefix(size_bytes, "B")


def count_text(count: float) -> str:
    """124,439,808 -> '124 M'; billions are B, as usual for model sizes."""
    return with_prefix(count, "").strip().replace("G", "B")


def flops_text(flops: float) -> str:
    return with_prefix(flops, "FLOP")
