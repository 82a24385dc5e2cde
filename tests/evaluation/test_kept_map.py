"""The map of kept tokens: its drawing, and its response to mouse and keyboard."""

import base64
import itertools
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.experiments.reporting import offline_page

SOURCES = Path(__file__).parents[2] / "evaluation" / "pages"

# 2 layers, 2 KV heads, 10 positions: head 0.0 holds the even ones, 0.1 the first five, layer 1 none
# but its last.
HELD = np.zeros((2, 2, 10), dtype=bool)
HELD[0, 0, ::2] = HELD[0, 1, :5] = HELD[1, :, 9] = True
MAP = {
    "tokens": ["a", "b\n", "</script><b>", *"defghij"],
    "layers": 2,
    "kv_heads": 2,
    "bits": base64.b64encode(np.packbits(HELD, axis=-1).tobytes()).decode(),
    "title": "snapkv <i>",
    "asked": [[3, 5]],
}
NONE, LOW, MOST = (238, 241, 245), (198, 219, 239), (8, 48, 107)  # of the light theme
LEFT, RIGHT = 58, 52  # pixels beside the cells
WIDTH = LEFT + RIGHT + 400  # ten positions of 40 pixels
SEEN = """
const [layers, heads] = $$(".kept-plot");
// Colours of the cells at their middles, a row of the map after the other.
const cells = async (plot) => {
  const image = $("image", plot), picture = new Image();
  picture.src = image.href.baseVal;
  await picture.decode();
  const brush = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  brush.drawImage(picture, 0, 0);
  const { data } = brush.getImageData(0, 0, picture.width, picture.height);
  return Array.from({ length: picture.height }, (_, row) =>
    Array.from({ length: picture.width }, (_, i) =>
      [...data.slice(4 * (row * picture.width + i), 4 * (row * picture.width + i) + 3)]));
};
const shades = () => $$(".kept-text span").map((s) => s.className.split(" ")[0].slice(-1)).join("");
const status = () => $(".kept-status").textContent;
const choices = () => $$(".kept-bar select").map((select) => select.value);
"""


@pytest.fixture
def shown(browser):
    """Opens a page with a map, `WIDTH` pixels wide, and returns the browser."""

    def show(drawn=MAP, dark=False):
        own = [SOURCES / name for name in ("kept_map.css", "kept_map.js", "inspect.js")]
        place = f'<div id="map" style="width: {WIDTH}px"></div>'
        browser.open(offline_page.page("a map", place, drawn, own), dark=dark)
        assert browser.problems == []
        return browser

    return show


def test_cells_have_the_share_of_heads_as_their_shade(shown):
    seen = shown().run(
        SEEN
        + """
        const names = $$('g[aria-label="y-axis tick label"] text', layers);
        return { cells: await cells(layers), names: names.map((name) => name.textContent) };"""
    )
    first, second = seen["cells"]
    one = first[1]
    # Both heads of layer 0 hold 0, 2 and 4; one holds 1, 3, 6 and 8.
    assert [tuple(cell) for cell in first[0:5:2]] == [MOST] * 3
    assert [cell == one for cell in first] == [i in (1, 3, 6, 8) for i in range(10)]
    assert all(low > part > most for low, part, most in zip(LOW, one, MOST, strict=True))
    assert [tuple(cell) for cell in first[5::2]] == [NONE] * 3
    assert [tuple(cell) for cell in second] == [NONE] * 9 + [MOST]
    assert seen["names"] == ["layer 0", "layer 1", "50.0 %", "10.0 %"]


def test_cells_stand_at_their_positions(shown):
    """Layer 0 above layer 1, the first position on the left, what is asked for below its own."""
    seen = shown().run(SEEN + """
        const box = (node) => {
          const { left, top } = $("svg", layers).getBoundingClientRect();
          const own = node.getBoundingClientRect();
          return [own.left - left, own.right - left, own.top - top];
        };
        const image = $("image", layers), asked = $$("g[aria-label=rule]", layers).at(-1);
        return { image: box(image), asked: box($("line", asked)),
          flipped: image.getAttribute("transform").includes("-") };""")  # fmt: skip
    assert seen["image"] == pytest.approx([LEFT, LEFT + 400, 0], abs=1)
    assert seen["flipped"] is False
    assert seen["asked"][:2] == pytest.approx([LEFT + 3 * 40, LEFT + 5 * 40], abs=1)
    assert seen["asked"][2] >= 44


def test_a_click_opens_a_layer_and_a_second_one_a_head(shown):
    page = shown()
    seen = (
        SEEN
        + """
        return { open: !heads.hidden, shades: shades(), status: status(), choices: choices(),
          corners: [layers, heads].map((plot) => {
            const { left, top } = plot.getBoundingClientRect();
            return [left, top];
          }) };"""
    )
    before = page.run(seen)
    assert (before["open"], before["shades"]) == (False, "3232302023")
    assert before["status"] == "all layers: 30.0 % of the entries held"
    left, top = before["corners"][0]
    page.point(left + LEFT + 3.5 * 40, top + 5, click=True)
    layer = page.run(seen)
    assert (layer["open"], layer["shades"], layer["choices"]) == (True, "4343403030", ["0", "-1"])
    assert layer["status"] == 'position 3 "d": held by 1 of 2 KV heads (layer 0)'
    left, top = layer["corners"][1]
    page.point(left + LEFT + 6.5 * 40, top + 30, click=True)
    head = page.run(seen)
    assert (head["shades"], head["choices"]) == ("4444400000", ["0", "1"])
    assert head["status"] == 'position 6 "g": dropped (layer 0, KV head 1)'


def test_keys_and_choices_do_what_the_mouse_does(shown):
    page = shown()
    page.run("$$('.kept-plot [tabindex]')[0].focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "End"):
        page.press(key)
    seen = SEEN + "return [choices(), status(), shades()]"
    last = 'position 9 "j": held by 2 of 2 KV heads (layer 1)'
    assert page.run(seen) == [["1", "-1"], last, "0000000004"]
    for key in ("ArrowRight", "ArrowLeft", "ArrowUp"):
        page.press(key)
    assert page.run(seen)[:2] == [["0", "-1"], 'position 8 "i": held by 1 of 2 KV heads (layer 0)']
    page.press("Home")
    page.press("ArrowRight", shift=True)  # a twentieth of the prompt, one position at least
    assert page.run(seen)[1] == 'position 1 "b\\n": held by 1 of 2 KV heads (layer 0)'
    page.press("Tab")  # to the heads
    page.press("ArrowDown")
    assert page.run(seen)[0] == ["0", "0"]
    page.press("Escape")
    assert page.run(seen)[0] == ["0", "-1"]
    page.press("Escape")
    assert page.run(seen)[0] == ["-1", "-1"]
    chosen = page.run(
        SEEN
        + """
        choose(".kept-bar select", "1");
        return [choices(), $$(".kept-bar select")[1].disabled, shades()];"""
    )
    assert chosen == [["1", "-1"], False, "0000000004"]


def test_the_text_points_back_to_the_map(shown):
    page = shown()
    x, y = page.run("""
        const { x, y } = $$(".kept-text span")[4].getBoundingClientRect();
        return [x, y];""")
    page.point(x + 2, y + 2)
    seen = page.run(
        SEEN
        + """
        const cursor = $(".kept-cursor", layers).getBoundingClientRect();
        return [status(), Math.round(cursor.left - layers.getBoundingClientRect().left),
          $(".kept-here").textContent, $$(".kept-asked").map((span) => span.textContent)];"""
    )
    assert seen == [
        'position 4 "e": held by 2 of 4 lists (all layers)',
        LEFT + 180,
        "e",
        ["d", "e"],
    ]


def test_colours_follow_the_theme(shown):
    page = shown()
    light = page.run(SEEN + "return cells(layers)")
    page.emulate(dark=True)
    dark = page.run(SEEN + "await drawn(); return cells(layers)")
    assert tuple(light[1][0]) == NONE
    assert sum(dark[1][0]) < sum(dark[1][9])  # dark: the more is held, the lighter
    assert dark == shown(dark=True).run(SEEN + "return cells(layers)")
    page.emulate(dark=True, media="print")
    assert page.run(SEEN + "await drawn(); return cells(layers)") == light


def test_texts_are_never_html(shown):
    assert shown().run("""return [
        $$(".kept-text span").slice(0, 3).map((span) => span.textContent), $("h3").textContent];
    """) == [["a", "b↵\n", "</script><b>"], "snapkv <i>"]  # fmt: skip
    assert "innerHTML" not in (SOURCES / "kept_map.js").read_text()


def test_many_positions_become_one_cell_per_pixel(shown):
    held = np.zeros((32, 8, 32768), dtype=bool)
    held[:, :, ::64] = True
    big = {**MAP, "layers": 32, "kv_heads": 8, "tokens": ["x"] * 32768, "asked": []}
    big["bits"] = base64.b64encode(np.packbits(held, axis=-1).tobytes()).decode()
    rows = shown(big).run(SEEN + "return cells(layers)")
    assert (len(rows), len(rows[0])) == (32, 400)
    colours = {tuple(cell) for cell in itertools.chain(*rows)}
    assert NONE not in colours  # every pixel holds some


def test_bits_that_do_not_fit_say_so(shown):
    seen = shown({**MAP, "layers": 3}).run('return $("#map").textContent')
    assert seen == "This map cannot be drawn: it has 8 bytes of bits instead of 12."
