"""Names beside points of a plot, placed so that they cover neither each other nor points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

ANGLES = (0, 180, 45, -45, 135, -135, 90, -90, 20, -20, 160, -160)  # degrees, best first
DISTANCES = (7, 14, 24, 36, 50, 66, 84)  # points
HALO = withStroke(linewidth=2, foreground="white")
Point = tuple[float, float]


def annotate(
    axes: Axes,
    points: Sequence[Point],
    names: Sequence[str],
    others: Sequence[Point],
    line: Sequence[Point] = (),
) -> None:
    """Writes `names` beside `points`; a name far from its point gets a line to it.

    Names avoid each other, `others` and the steps of `line`. The layout of the figure must be
    final.
    """
    axes.autoscale(False)  # lines to labels must not move labels that are placed
    pixel = axes.figure.dpi / 72
    centres = axes.transData.transform(others)
    covered = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in centres]
    if len(line) > 1:
        covered += _steps(axes.transData.transform(line))
    for point, name in zip(points, names, strict=True):
        label = axes.annotate(name, point, (0, 0), textcoords="offset points", fontsize=7.5,
                              path_effects=[HALO], zorder=5)  # fmt: skip
        size = label.get_window_extent()
        place, box = _place(axes, axes.transData.transform(point), size, covered, pixel)
        label.set_position(place)
        covered.append(box)
        _line(axes, point, box)


def _steps(points: np.ndarray) -> list[Bbox]:
    """The boxes that a line of steps through the points covers, in pixels."""
    boxes = []
    for (x, y), (x_next, y_next) in pairwise(points):
        boxes += [Bbox.from_extents(x, y - 1, x_next, y + 1),
                  Bbox.from_extents(x_next - 1, y, x_next + 1, y_next)]  # fmt: skip
    return boxes


def _place(
    axes: Axes, point: np.ndarray, size: Bbox, covered: Sequence[Bbox], pixel: float
) -> tuple[Point, Bbox]:
    """The best place of a label: offset of its lower left corner in points, and box in pixels.

    Args:
        point: the point in pixels.
        size: size of the label in pixels.
        covered: boxes to avoid, in pixels.
        pixel: pixels per point of type.
    """
    places = _places(axes, point, size, covered, pixel)
    best = next(places)
    for place in places:
        if best[0] == 0:
            break
        if place[0] < best[0]:
            best = place
    return best[1:]


def _places(
    axes: Axes, point: np.ndarray, size: Bbox, covered: Sequence[Bbox], pixel: float
) -> Iterator[tuple[int, Point, Bbox]]:
    """Each place to try, the preferred ones first: how much it covers, then as in `_place`."""
    area = axes.get_window_extent()
    for distance in DISTANCES:
        for angle in ANGLES:
            vector = np.array((np.cos(np.radians(angle)), np.sin(np.radians(angle))))
            middle = point + vector * (distance * pixel + np.array((size.width, size.height)) / 2)
            box = Bbox.from_bounds(middle[0] - size.width / 2, middle[1] - size.height / 2,
                                   size.width, size.height)  # fmt: skip
            x, y = (np.array((box.x0, box.y0)) - point) / pixel
            outside = box.x0 < area.x0 or box.x1 > area.x1 or box.y0 < area.y0
            outside = outside or box.y1 > area.y1
            yield sum(box.overlaps(other) for other in covered) + 100 * outside, (x, y), box


def _line(axes: Axes, point: Point, box: Bbox) -> None:
    """Draws a line from a point to its label if they are more than 12 pixels apart."""
    start = axes.transData.transform(point)
    end = np.clip(start, (box.x0, box.y0), (box.x1, box.y1))
    if np.hypot(*(end - start)) > 12:
        ends = axes.transData.inverted().transform((start, end))
        axes.plot(*ends.T, color="#666666", linewidth=0.6, zorder=2.5)
