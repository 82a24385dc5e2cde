"""Numbers as people read them, in the terminal and on the page."""

from __future__ import annotations

from kvpolicy.experiments.definition.metrics import METRICS


def number(value: float | None) -> str:
    """Three significant digits, or all digits from 1000 on: `0.0312`, `1,024`; `-` for None."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 1e-6 <= abs(value) < 1e-4:
        return f"{value:.7f}".rstrip("0")
    return f"{value:.3g}"


def probability(p: float) -> str:
    """A p-value: `0.43`, `below 0.0001`."""
    return "below 0.0001" if p < 0.0001 else number(p)


def percent(share: float | None) -> str:
    """A share in percent: `49.8 %`; `-` for None."""
    return "-" if share is None else f"{100 * share:.3g} %"


def measured(metric: str, value: float | None) -> str:
    """A value of a metric; shares are in percent."""
    return percent(value) if METRICS[metric].is_share else number(value)


def interval(metric: str, low: float | None, high: float | None) -> str:
    """Bounds of a metric: `0.012 to 0.058`; `-` without bounds."""
    if low is None or high is None:
        return "-"
    if METRICS[metric].is_share:
        return f"{100 * low:.3g} to {percent(high)}"
    return f"{number(low)} to {number(high)}"


def duration(seconds: float) -> str:
    """A time in its two largest units: `2 h 5 min`."""
    seconds = round(seconds) if seconds >= 1 else seconds
    for unit, size, smaller, part in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            whole, rest = divmod(round(seconds / part), size // part)
            return f"{whole} {unit}" + (f" {rest} {smaller}" if rest and whole < 10 else "")
    return f"{seconds} s" if seconds >= 1 else "less than 1 s"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 key`, `1,200 keys`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def rounded(number: int) -> str:
    """An estimate with two significant digits, rounded up: `1,300` for 1234."""
    digits = max(0, len(str(number)) - 2)
    size: int = 10**digits
    return f"{-(-number // size) * size:,}"
