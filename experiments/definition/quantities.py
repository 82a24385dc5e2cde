"""Shares and durations as an experiment file writes them: `10 %` and `30m`.

Both are exact: a number that is written is read back as the same number.
"""

from __future__ import annotations

import re
from decimal import Decimal

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")


def percent_value(text: str) -> float | None:
    """The share that a text like `10 %` or `10%` gives, here 0.1; None for other text.

    It may exceed 1.
    """
    match = _PERCENT.fullmatch(text)
    return float(Decimal(match[1]) / 100) if match else None


def percent_text(share: float) -> str:
    """A share in percent: `10 %` for 0.1."""
    return f"{_plain(Decimal(repr(share)) * 100)} %"


def duration_value(text: str) -> float | None:
    """Seconds that a text like `10s`, `30m`, `2h` or `1d` gives; None for other text."""
    match = _DURATION.fullmatch(text)
    return float(Decimal(match[1]) * SECONDS[match[2]]) if match else None


def duration_text(seconds: float) -> str:
    """Seconds in the largest unit that gives a whole number: `30m` for 1800."""
    for unit in ("d", "h", "m"):
        if seconds > 0 and seconds % SECONDS[unit] == 0:
            return f"{int(seconds // SECONDS[unit])}{unit}"
    return f"{_plain(Decimal(repr(seconds)))}s"


def number_text(number: float) -> str:
    """A number without an exponent: `2000` for 2e3, `0.05`."""
    return _plain(Decimal(repr(number)))


def _plain(number: Decimal) -> str:
    """Digits without an exponent and without zeros at the end of the fraction."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
