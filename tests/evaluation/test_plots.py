"""The pictures have the right size, show something, and cover nothing."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.dsl.tools.units import share_text
from kvpolicy.evaluation.looking.kept import unpacked
from kvpolicy.evaluation.reporting import plot_kept, plot_labels, plots, results
from kvpolicy.evaluation.reporting.plot_style import COLOURS, MOST, style
from kvpolicy.evaluation.reporting.summary import Summary
from matplotlib import pyplot
from matplotlib.text import Annotation

sys.path.insert(0, str(Path(__file__).parent))
import made_run


def made(folder, names, **options):
    made_run.write(folder, names, **{"samples": 8, **options})
    return Summary(results.load(folder))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return made(tmp_path_factory.mktemp("few"), made_run.NAMES[:3])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    return made(folder, made_run.NAMES, tasks=("niah", "kv"), lengths=(512,))


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


@pytest.mark.thorough
def test_pictures_have_their_size_and_are_not_blank(few, tmp_path):
    for path in plots.write(few, tmp_path):
        pixels = pyplot.imread(path)
        height, width = pixels.shape[:2]
        assert 400 < width < 2200, path.name
        assert 300 < height < 2200, path.name
        ink = (np.abs(pixels[:, :, :3] - 1).max(axis=-1) > 0.1).mean()
        assert 0.01 < ink < 0.9, path.name


def test_accuracy_has_a_panel_per_task_and_a_curve_per_policy(few):
    panels = [axis for axis in plots.accuracy(few).axes if axis.get_visible()]
    assert [axis.get_title() for axis in panels] == ["All tasks", *made_run.TITLES]
    for axis in panels:
        assert len(axis.containers) == 3  # curves with intervals
        full = [line for line in axis.lines if line.get_color() == "black"]
        assert len(full) == 1
    row = few.row(("lava", 0.5), "vt")
    x, y = panels[4].containers[few.prominent(3).index("lava")].lines[0].get_data()
    assert (x[-1], y[-1]) == pytest.approx((100 * row.kept, 100 * row.score.mean))


def test_many_policies_are_grey_but_the_best(many):
    figure = plots.accuracy(many)
    axis = figure.axes[0]
    assert len(axis.containers) == MOST
    grey = [line for line in axis.lines if line.get_color() == plots.OTHERS]
    assert len(grey) == len(made_run.NAMES) - MOST
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [*many.prominent(MOST), f"{len(made_run.NAMES) - MOST} others", "full KV"]


def test_styles_differ_in_more_than_colour():
    styles = [style(i) for i in range(26)]
    assert len(set(styles)) == 26
    for first, second in itertools.pairwise(styles[:MOST]):
        assert first.colour != second.colour
        assert first.marker != second.marker
    assert len(set(COLOURS)) == len({s.marker for s in styles[:MOST]}) == MOST


@pytest.mark.parametrize("run", ["few", "many"])
def test_names_on_the_front_do_not_overlap(run, request):
    figure = plots.pareto(request.getfixturevalue(run))
    for axis in figure.axes:
        boxes = [child.get_window_extent() for child in axis.texts if isinstance(child, Annotation)]
        assert boxes
        for first, second in itertools.combinations(boxes, 2):
            assert not first.shrunk(0.9, 0.9).overlaps(second.shrunk(0.9, 0.9))
        inside = axis.get_window_extent()
        for box in boxes:
            assert inside.x0 - 1 <= box.x0 <= box.x1 <= inside.x1 + 1
            assert inside.y0 - 1 <= box.y0 <= box.y1 <= inside.y1 + 1


def test_names_keep_off_points():
    _, axis = pyplot.subplots()
    others = [(x, y) for x in np.linspace(0, 1, 9) for y in np.linspace(0, 1, 5)]
    axis.plot(*zip(*others, strict=True), ".")
    axis.figure.canvas.draw()
    plot_labels.annotate(axis, [(0.5, 0.5)], ["here"], others)
    box = axis.texts[0].get_window_extent()
    assert not any(box.contains(*axis.transData.transform(point)) for point in others)


def test_needle_shows_all_budgets_of_few_and_one_budget_of_many(few, many):
    titles = [a.get_title() for a in plots.needle(few).axes if a.get_visible() and a.images]
    assert len(titles) == 1 + 3 * len(made_run.BUDGETS)
    assert titles[0] == "full KV"
    figure = plots.needle(many)
    panels = [a for a in figure.axes if a.get_visible() and a.images]
    budget = many.telling_budget()
    assert len(panels) == 1 + len(made_run.NAMES)
    assert all(f"{100 * budget:g} %" in a.get_title() for a in panels[1:])


def test_kept_shows_the_bits(few):
    figure = plot_kept.kept(few)
    entry = next(m for m in few.results.maps if m["policy"] == few.prominent(1)[0]
                 and m["budget"] == few.telling_budget())  # fmt: skip
    mask = unpacked(entry, len(entry["tokens"]))
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert np.array_equal(shown, mask.reshape(-1, mask.shape[-1]))
    assert f"{share_text(mask.mean(), 1)} kept" in figure.axes[0].get_title(loc="left")


def test_masks_of_odd_lengths():
    entry = {"shape": [1, 2, 11], "bits": "gCABwA=="}
    rows = [[1] + [0] * 9 + [1], [0] * 7 + [1, 1, 1, 0]]
    assert unpacked(entry, 11).astype(int).tolist() == [rows]


def test_one_policy_one_task_one_sample(tmp_path):
    summary = made(tmp_path, made_run.NAMES[:1], tasks=("niah",), lengths=(512,), samples=1,
                   budgets=(0.25,))  # fmt: skip
    assert len(plots.write(summary, tmp_path)) == 4


def test_full_kv_alone(tmp_path):
    summary = made(tmp_path, (), tasks=("niah",), lengths=(512,), samples=2, maps=False)
    assert [path.name for path in plots.write(summary, tmp_path)] == [
        "accuracy.png", "pareto.png", "needle.png",
    ]  # fmt: skip
