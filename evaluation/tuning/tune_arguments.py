"""Options of `kvpolicy tune`; imports nothing heavy."""

from __future__ import annotations

import argparse
from fractions import Fraction

from kvpolicy.dsl.syntax.expression import NUMBERS, number_of
from kvpolicy.dsl.tools.cli import DATA, FILE, SET


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    FILE(parser)
    parser.add_argument(
        "--for",
        dest="parameter",
        required=True,
        metavar="PARAMETER",
        help="what to choose: a parameter that `propagate` depends on",
    )
    parser.add_argument(
        "--values",
        nargs="+",
        metavar="VALUE",
        help="values to try; default: those that the policy declares",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a checkpoint")
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        metavar="FILE",
        help="*.jsonl with a prompt per line (text or input_ids); other files are one text each",
    )
    parser.add_argument(
        "--most",
        type=_number,
        metavar="VALUE",
        help="largest value to choose; default: of layers the middle one",
    )
    parser.add_argument(
        "--rows",
        type=_share,
        metavar="SHARE",
        help="most token rows that may be computed, 0 to 1",
    )
    parser.add_argument("--device", help="where the model runs; default: a GPU if there is one")
    parser.add_argument("--out", metavar="PLOT.png", help="draw the distances")
    SET(parser)
    DATA(parser)


def _number(text: str) -> Fraction:
    try:
        value = number_of(text.lower())
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from None
    if value is None:
        raise argparse.ArgumentTypeError(f"`{text}` is out of range: {NUMBERS}")
    return value


def _share(text: str) -> float:
    value = float(_number(text))
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not from 0 to 1")
    return value
