"""Styles that distinguish policies in every picture: colours, markers and dashes.

The colours are those of Okabe and Ito, which colour-blind people can distinguish. There are fewer
colours than policies: the best policies are drawn in colour, the others in grey.
"""

from __future__ import annotations

from typing import NamedTuple


class LineStyle(NamedTuple):
    """Style of one line; `dash` as in SVG and matplotlib, empty for a solid line."""

    colour: str
    marker: str
    dash: tuple[int, ...]


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("circle", "square", "diamond", "triangle", "down", "cross")
DASHES = ((), (6, 2), (2, 2), (8, 2, 2, 2), (4, 4), (1, 2))
MOST = len(COLOURS)
OTHERS = "#9a9a9a"


def style(number: int) -> LineStyle:
    """The `number`-th style, from 0; colours repeat with other markers and dashes."""
    cycle, place = divmod(number, MOST)
    turned = (place + cycle) % MOST
    return LineStyle(COLOURS[place], MARKERS[turned], DASHES[turned])
