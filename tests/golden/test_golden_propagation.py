"""Vectors made by the authors' code: propagated tokens, chosen layers, lengths, by the command."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kvpolicy.dsl.syntax.library import find
from kvpolicy.dsl.tools.cli import EXECUTIONS
from recorded import VECTORS, run

pytestmark = pytest.mark.parametrize("execution", EXECUTIONS)


def sines(layers: int, tokens: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """The vectors' tensors: q [layers, 4, tokens, 4] and k [layers, 2, tokens, 4]."""
    layer, h, i, c = np.ogrid[:layers, :4, :tokens, :4]
    q = np.round(2 * np.sin(0.7 * (i + 1) * (c + 1) + 1.3 * h + 0.9 * layer + 0.5), 3)
    layer, g, i, c = np.ogrid[:layers, :2, :tokens, :4]
    k = np.round(2 * np.cos(0.45 * (i + 1) * (c + 2) + 0.8 * g + 0.37 * layer * (c + 1)), 3)
    return q.astype(np.float32), k.astype(np.float32)


def with_let(policy: str, name: str, expression: str) -> str:
    """A shipped policy's text with one name's value replaced."""
    text, number = re.subn(
        rf"^  {name}: .*$", f"  {name}: {expression}", find(policy).read_text(), flags=re.M
    )
    assert number == 1
    return text


def test_sines(execution):
    q, k = sines(1)
    np.testing.assert_array_equal(q[0], np.array(VECTORS["sines"]["q"], np.float32))
    np.testing.assert_array_equal(k[0], np.array(VECTORS["sines"]["k"], np.float32))


@pytest.mark.parametrize(
    ("name", "capacity", "tsp", "average"),
    [("fastkv_avgpool3_cap7_tsp8", 7, 8, True), ("fastkv_maxpool3_cap9_tsp6", 9, 6, False)],
)
def test_fastkv(tmp_path, execution, name, capacity, tsp, average):
    settings = {"capacity": capacity, "tsp_capacity": tsp, "average": average}
    settings.update(window=3, kernel=3, tsp_layer=0)
    q, k = sines(1)
    output = run(tmp_path, "fastkv", settings, execution, q.repeat(2, 0), k.repeat(2, 0))
    window = [9, 10, 11]
    expected = [[*head, *window] for head in VECTORS[name]["kept_besides_window"]]
    assert output["kept"][0] == expected
    assert output["selected_layer"] == 0
    assert output["propagated"] == output["positions"] == VECTORS["fastkv_tsp"][name]
    assert all(set(head) <= set(output["propagated"]) for head in output["kept"][1])


def test_gemfilter(tmp_path, execution):
    case = VECTORS["gemfilter"]
    settings = {"capacity": 5, "kernel": 5, "filter": 0}
    q, k = sines(2)
    steps = np.ones((1, 2, 4, 4)), np.ones((1, 2, 2, 4)), np.ones((1, 2, 2, 4))
    output = run(tmp_path, "gemfilter", settings, execution, q, k, steps=steps)
    assert output["propagated"] == case["selected_sorted"]
    assert output["positions"] == case["second_pass_positions"]
    assert output["kept"] == [[case["selected_sorted"]] * 2] * 2
    # The first new token comes after the second pass's.
    assert output["steps"][0]["kept"] == [[[*case["selected_sorted"], 12]] * 2] * 2
    assert len(output["positions"]) == case["first_decode_position"]


@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("case", VECTORS["asl"], ids=lambda c: f"tau{c['tau']}")
def test_asl(tmp_path, execution, case, two_pass):
    names = ("tau", "start", "lookback", "capacity", "window", "kernel")
    settings = {**{name: case[name] for name in names}, "two_pass": two_pass}
    q, k = sines(24)
    output = run(tmp_path, "asl", settings, execution, q, k)
    chosen = case["selected_layer"]
    if chosen is None and two_pass:
        chosen = 23  # never settled: the last layer selects
    assert output["selected_layer"] == chosen
    for layer, ratio in case["ratios"].items():
        assert output["layer_ratio"][int(layer)] == pytest.approx(ratio, abs=1e-5)
    if chosen is None:
        assert output["propagated"] is None
        assert output["positions"] is None
        return
    assert output["layer_ratio"][chosen + 1 :] == [None] * (23 - chosen)
    tokens = case["selected_tokens"] or output["propagated"]
    assert output["propagated"] == tokens
    assert output["positions"] == (list(range(7)) if two_pass else tokens)
    deeper = output["kept"] if two_pass else output["kept"][chosen + 1 :]
    assert all(head == tokens for layer in deeper for head in layer)


@pytest.mark.parametrize("case", VECTORS["asl"][:1], ids=["ranks"])
def test_asl_ranks(tmp_path, execution, case):
    q, k = sines(len(case["ranks"]))
    text = find("asl").read_text()
    text = re.sub(r"^score: .*$", "score: rank(saliency)", text, flags=re.M)
    settings = {"window": case["window"], "kernel": case["kernel"], "tau": 1e-6}
    settings.update(start=3, lookback=3, capacity=7)
    scores = run(tmp_path, text, settings, execution, q, k, options=["--scores"])["scores"]
    assert [layer[0][:9] for layer in scores] == case["ranks"]


def test_asl_hand_ranks(tmp_path, execution):
    # The ranks stand in the values.
    case = VECTORS["asl_hand_ranks"]
    ranks = np.array(case["ranks"], np.float32)
    v = np.zeros((len(ranks), 1, 10, 1), np.float32)
    v[:, 0, :8, 0] = ranks
    text = with_let("asl", "saliency", "0 - sum[kv, dim](value) where not recent(window)")
    settings = {name: case[name] for name in ("tau", "start", "lookback", "capacity", "window")}
    zeros = np.zeros_like(v)
    output = run(tmp_path, text, {**settings, "kernel": 1}, execution, zeros, zeros, v)
    layer, tokens = case["selected"]
    assert output["selected_layer"] == layer
    assert output["propagated"] == tokens
    for place, ratio in case["ratios"].items():
        assert output["layer_ratio"][int(place)] == pytest.approx(ratio, abs=1e-5)


@pytest.mark.parametrize(
    "case",
    VECTORS["pyramidinfer_lengths"],
    ids=lambda c: f"{c['strategy']}-{c['N']}-{c['prefill_decay_ratio']}-{c['interval']}",
)
def test_pyramidinfer_lengths(tmp_path, execution, case):
    settings = {
        "floor_rate": case["prefill_decay_ratio"],
        "interval": case["interval"],
        "recent_rate": case["recent_ratio"],
        "least": case["min_context"],
        "constant": case["strategy"] == "linear",
    }
    rng = np.random.default_rng(1)
    q = rng.standard_normal((case["L"], 2, case["N"], 4), np.float32)
    output = run(tmp_path, "pyramidinfer", settings, execution, q, q[:, :1])
    assert [len(layer[0]) for layer in output["kept"]] == case["lengths"]
    last = output["propagated"][max(output["propagated"], key=int)]
    assert output["positions"] == last
    assert output["selected_layer"] is None


def test_pyramidinfer_one_layer(tmp_path, execution):
    case = VECTORS["pyramidinfer_one_layer"]
    q, k = (x.repeat(8, 0) for x in sines(1))
    settings = {"floor_rate": 0.5, "recent_rate": 0.2, "interval": 4, "start": 1, "least": 2}
    output = run(tmp_path, "pyramidinfer", settings, execution, q, k)
    assert output["propagated"] == {"4": [*case["kept_context"], 9, 10, 11]}
