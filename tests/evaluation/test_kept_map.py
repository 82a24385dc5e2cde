"""kept_map.js in Node, with as much of a browser as it uses."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "evaluation" / "pages" / "kept_map.js"

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
START = """
const element = new Element("div");
const map = drawKeptMap(element, MAP);
const seen = {};
const calls = (plot, name) => plot.canvas.brush.calls.filter((c) => c[0] === name);
const rects = (plot) => calls(plot, "fillRect").map((c) => c.slice(1));
const shades = () => map.text.spans.map((s) => s.className.split(" ")[0].slice(-1)).join("");
"""


def run(script: str, drawn: dict = MAP) -> dict:
    """What a script leaves in `seen`, after the map was drawn 200 pixels wide."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js")
    text = f"const MAP = {json.dumps(drawn)};{START}{script};console.log(JSON.stringify(seen))"
    command = [node, str(HERE / "fake_dom.js"), str(SCRIPT)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_cells_have_the_share_of_heads_as_their_shade():
    seen = run("seen.rects = rects(map.layersPlot); seen.texts = calls(map.layersPlot, 'fillText')")
    # 310 pixels less 58 and 52: 20 per position. Both heads hold 0, 2 and 4; one holds 1, 3, 6, 8.
    both, one = "rgb(8, 48, 107)", seen["rects"][1][0]
    assert one not in (both, "#eef1f5")
    expected = [(both, 0), (one, 1), (both, 2), (one, 3), (both, 4), ("#eef1f5", 5), (one, 6)]
    expected += [("#eef1f5", 7), (one, 8), ("#eef1f5", 9)]
    rows = [(colour, x, y, width) for colour, x, y, width, _ in seen["rects"]]
    assert rows[:10] == [(colour, 58 + 20 * at, 0, 20) for colour, at in expected]
    assert rows[10:12] == [("#eef1f5", 58, 22, 180), (both, 238, 22, 20)]
    assert rows[12] == ("#b34700", 58 + 3 * 20, 44, 40)  # what is asked for
    words = [call[2] for call in seen["texts"]]
    assert words[:4] == ["layer 0", "50.0 %", "layer 1", "10.0 %"]


def test_a_click_opens_a_layer_and_a_second_one_a_head():
    seen = run("""
        seen.before = [map.headsPlot.box.hidden, shades(), map.status.textContent];
        map.layersPlot.canvas.fire("click", { offsetX: 58 + 65, offsetY: 5 });
        seen.layer = [map.headsPlot.box.hidden, shades(), map.status.textContent];
        seen.heads = calls(map.headsPlot, "fillText").length;
        map.headsPlot.canvas.fire("click", { offsetX: 58 + 125, offsetY: 30 });
        seen.head = [map.headChoice.value, shades(), map.status.textContent];
        map.headsPlot.canvas.fire("keydown", { key: "Escape" });
        seen.back = [map.layer, map.head];
        map.headsPlot.canvas.fire("keydown", { key: "Escape" });
        seen.all = [map.layer, map.headsPlot.box.hidden];
    """)
    assert seen["before"] == [True, "3232302023", "all layers: 30.0 % of the entries held"]
    assert seen["layer"][:2] == [False, "4343403030"]
    assert seen["layer"][2] == 'position 3 "d": held by 1 of 2 KV heads (layer 0)'
    assert seen["heads"] >= 4
    assert seen["head"] == [1, "4444400000", 'position 6 "g": dropped (layer 0, KV head 1)']
    assert seen["back"] == [0, -1]
    assert seen["all"] == [-1, True]


def test_keys_and_choices_do_what_the_mouse_does():
    seen = run("""
        const press = (key, shiftKey) => map.layersPlot.canvas.fire("keydown", { key, shiftKey });
        press("ArrowDown"); press("ArrowDown"); press("ArrowDown"); press("End");
        seen.last = [map.layer, map.position, map.status.textContent];
        press("ArrowRight"); press("ArrowLeft"); press("ArrowUp");
        seen.moved = [map.layer, map.position];
        seen.other = map.key("x", false, false, () => {});
        map.layerChoice.value = "1";
        map.layerChoice.fire("change");
        seen.chosen = [map.layer, map.head, map.headChoice.disabled, shades()];
    """)
    assert seen["last"] == [1, 9, 'position 9 "j": held by 2 of 2 KV heads (layer 1)']
    assert seen["moved"] == [0, 8]
    assert seen["other"] is False
    assert seen["chosen"] == [1, -1, False, "0000000004"]


def test_texts_are_never_html():
    seen = run("""
        const all = element.find(() => true);
        seen.html = all.filter((n) => "innerHTML" in n || "outerHTML" in n).length;
        seen.texts = map.text.spans.slice(0, 3).map((s) => s.textContent);
        seen.title = all.find((n) => n.name === "h3").textContent;
    """)
    assert seen == {"html": 0, "texts": ["a", "b↵\n", "</script><b>"], "title": "snapkv <i>"}
    script = SCRIPT.read_text()
    assert "innerHTML" not in script
    assert "</script" not in script


def test_many_positions_become_one_cell_per_pixel():
    held = np.zeros((32, 8, 32768), dtype=bool)
    held[:, :, ::64] = True
    big = {**MAP, "layers": 32, "kv_heads": 8, "tokens": ["x"] * 32768, "asked": []}
    big["bits"] = base64.b64encode(np.packbits(held, axis=-1).tobytes()).decode()
    seen = run("seen.rects = rects(map.layersPlot)", big)
    assert len(seen["rects"]) == 32  # every pixel holds as many: one rectangle per layer
    assert {rect[0] for rect in seen["rects"]} != {"#eef1f5"}


def test_bits_that_do_not_fit_say_so():
    seen = run("seen.made = map; seen.text = element.textContent", {**MAP, "layers": 3})
    assert seen["made"] is None
    assert seen["text"] == "This map cannot be drawn: it has 8 bytes of bits instead of 12."
