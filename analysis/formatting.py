"""Format numbers and lists as text."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

WIDE = 100  # an interval is too wide to be shown if its ends differ by more than this factor
NOT_SIGNIFICANT = "not significant"


def join(parts: Sequence[str], last: str = "and") -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *most, end = parts
    return f"{', '.join(most)} {last} {end}" if most else end


def some(names: Sequence[str], most: int = 10) -> str:
    """Return the first `most` names joined, followed by the number of remaining names."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return join([*names[:most], *more])


def pluralize(counts: Iterable[float], name: str) -> str:
    """Return the range of the counts with the name: "1 run", "3 runs" or "1 to 3 runs"."""
    known = [x for x in counts if not np.isnan(x)]
    if not known:
        return f"an unknown number of {name}s"
    low = min(known)
    high = max(known)
    span = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return f"{span} {name}{'' if high == 1 else 's'}"


def number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; return "-" if it is not finite."""
    if not np.isfinite(value):
        return "-"
    return f"{value:,.{decimals_of(value, digits)}f}"


def decimals_of(value: float, digits: int) -> int:
    """Return the number of decimals that shows `digits` significant digits of a value."""
    if value == 0:
        return 0
    rounded = float(f"{abs(value):.{digits - 1}e}")  # 99.97 becomes 100
    return max(0, digits - 1 - math.floor(math.log10(rounded)))


def interval(estimate: float, low: float, high: float) -> str:
    """Return "1.004 [1.001, 1.010]", or only the estimate if there is no interval.

    All three numbers have equally many decimals: enough for three significant digits of the
    largest number, or for four if rounding would hide a difference.
    """
    if not np.isfinite(estimate) or np.isnan(low):
        return number(estimate)
    values = [x for x in (estimate, low, high) if np.isfinite(x)]
    size = max(abs(x) for x in values)
    if estimate and size > 10 * abs(estimate):  # with only two runs, an interval can be very wide
        size = max(abs(estimate), size / 100)
    decimals = decimals_of(size, 3)
    if is_blurred(values, decimals):
        decimals = decimals_of(size, 4)
    end = f"{high:,.{decimals}f}" if np.isfinite(high) else "no end"
    return f"{estimate:,.{decimals}f} [{low:,.{decimals}f}, {end}]"


def ratio(estimate: float, low: float, high: float) -> str:
    """Return "1.02× [0.98, 1.06]", or "1.02×, not significant" if the interval is too wide."""
    if low <= 1 <= high and high > WIDE * low:
        return f"{number(estimate)}×, {NOT_SIGNIFICANT}"
    text, *ends = interval(estimate, low, high).split(" ", 1)
    return text if text == "-" else " ".join([f"{text}×", *ends])


def is_blurred(values: Sequence[float], decimals: int) -> bool:
    """Return whether rounding makes two values equal, or turns another value into 0 or 1."""
    rounded = [round(x, decimals) for x in values]
    if len(set(rounded)) < len(set(values)):
        return True
    return any(y in (0, 1) and x != y for x, y in zip(values, rounded, strict=True))
