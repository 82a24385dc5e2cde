"""Vectors made by the authors' code: policies keep the same sets.

`vectors.json` names the code that made them. All are float32 with a gap at every cut, except LAVa's
with maximum pooling, where ties go to the lower position.
"""

from __future__ import annotations

import numpy as np
import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.counts import split
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cli import EXECUTIONS
from kvpolicy.dsl.tools.commands import execute
from kvpolicy.dsl.tools.policy_tests import generated
from recorded import VECTORS, run
from shipped_policies import shipped_program

# The vectors' sinusoidal tensors: H=4, G=2, N=12, D=4.
SINES_Q = np.array([VECTORS["sines"]["q"]], dtype=np.float32)
SINES_K = np.array([VECTORS["sines"]["k"]], dtype=np.float32)

pytestmark = pytest.mark.parametrize("execution", EXECUTIONS)


def keep(text: str, execution: str, q, k, v=None, **settings: str) -> list:
    """Positions that a policy written in the test keeps, by layer and KV head."""
    header = "policy: a-test\nlanguage: 1\nabout: a test\n"
    program = load(Source("a-test.yaml", header + text)).require()
    bound = bind(program, ModelShape(q.shape[0], q.shape[1], k.shape[1], q.shape[3]), settings)
    result = execute(bound, execution, q, k, np.zeros_like(k) if v is None else v)
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in result.kept]


def with_window(heads: list) -> list:
    return [[[*head, 9, 10, 11] for head in heads]]


@pytest.mark.parametrize(
    ("name", "capacity", "kernel", "average"),
    [
        ("snapkv_qhead_avgpool3_cap7", 7, 3, True),
        ("snapkv_qhead_maxpool3_cap9", 9, 3, False),
        ("snapkv_qhead_avgpool5_cap7", 7, 5, True),
        ("fastkv_avgpool3_cap7_tsp8", 7, 3, True),
        ("fastkv_maxpool3_cap9_tsp6", 9, 3, False),
    ],
)
def test_snapkv(tmp_path, execution, name, capacity, kernel, average):
    # SnapKV's own code selects per query head; FastKV's adds up the group, as the policy does.
    k = np.repeat(SINES_K, 2, axis=1) if name.startswith("snapkv") else SINES_K
    settings = {"capacity": capacity, "window": 3, "kernel": kernel, "average": average}
    output = run(tmp_path, "snapkv", settings, execution, SINES_Q, k)
    assert output["kept"] == with_window(VECTORS[name]["kept_besides_window"])
    assert output["budgets"] == [[capacity] * k.shape[1]]


def test_snapkv_of_kvpress(tmp_path, execution):
    settings = {"rate": 0.5, "window": 3, "kernel": 3, "average": True}
    output = run(tmp_path, "snapkv", settings, execution, SINES_Q, SINES_K)
    assert output["kept"] == [VECTORS["kvpress_snapkv_w3_k3_ratio0.5"]["kept"]]


def test_sinks_recent(tmp_path, execution):
    output = run(tmp_path, "sinks-recent", {"rate": 0.5}, execution, SINES_Q, SINES_K)
    assert output["kept"] == [VECTORS["kvpress_streaming_llm_sink4_ratio0.5"]["kept"]]
    for tokens in (10, 12):
        q, k = SINES_Q[:, :, :tokens], SINES_K[:, :, :tokens]
        output = run(tmp_path, "sinks-recent", {"capacity": 10}, execution, q, k)
        assert output["kept"] == [[VECTORS["streamingllm_4_6"][f"n{tokens}"]] * 2]


@pytest.mark.parametrize("case", VECTORS["adakv"], ids=lambda c: f"seed{c['inputs']['seedQ']}")
def test_adakv(tmp_path, execution, case):
    given = case["inputs"]
    settings = {
        "capacity": given["C"],
        "window": given["w"],
        "kernel": given["kernel"],
        "alpha": given["alpha"],
        "average": given["pool"] == "avgpool",
        "strongest": given["gqa"] == "max",
        "concentrate": given["normalize"],
    }
    q = generated(given["seedQ"], (1, given["H"], 12, 4))
    k = generated(given["seedK"], (1, given["G"], 12, 4))
    output = run(tmp_path, "adakv", settings, execution, q, k)
    assert output["kept"] == [case["kept"]]
    assert output["budgets"] == [[n + given["w"] for n in case["caps_outside_window"]]]


@pytest.mark.parametrize("case", VECTORS["adakv_caps"], ids=lambda c: f"alpha{c['alpha']}")
def test_adakv_budgets(execution, case):
    # The scores stand in the values, the head size being 1.
    scores = np.array(case["scores"], dtype=np.float32)[None, :, :, None]
    text = f"""
score: sum[dim](value)
let:
  wins: count[token](top[kv, token](score, kv_heads * {case["b"]}))
budget: round((1 - {case["alpha"]}) * wins + floor({case["alpha"]} * {case["b"]}))
keep: top(score)
"""
    kept = keep(text, execution, np.zeros_like(scores), np.zeros_like(scores), scores)
    assert [len(head) for head in kept[0]] == case["caps"]


def test_pyramidkv(tmp_path, execution):
    q = np.repeat(generated(4, (1, 2, 12, 4)), 4, axis=0)
    k = np.repeat(generated(104, (1, 2, 12, 4)), 4, axis=0)
    settings = {"capacity": 5, "window": 2, "kernel": 3, "beta": 3, "average": True}
    output = run(tmp_path, "pyramidkv", settings, execution, q, k)
    assert output["kept"] == VECTORS["pyramidkv"]["kept"]


@pytest.mark.thorough(every=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", VECTORS["pyramidkv_budgets"], ids=lambda c: f"{c['L']}-{c['C']}-{c['N']}-{c['beta']}"
)
@pytest.mark.parametrize("policy", ["pyramidkv", "ada-pyramidkv"])
def test_pyramidkv_budgets(execution, policy, case):
    layers, tokens, window = case["L"], case["N"], case["w"]
    expected = case["factory" if policy == "pyramidkv" else "ada_repo"]
    if None in expected:
        expected = [tokens - window] * layers
    settings = {"capacity": case["C"], "window": window, "beta": case["beta"]}
    if policy == "ada-pyramidkv":
        settings["alpha"] = 1
    q = np.zeros((layers, 1, tokens, 1), dtype=np.float32)
    bound = bind(
        shipped_program(policy),
        ModelShape(layers, 1, 1, 1),
        {name: str(value) for name, value in settings.items()},
    )
    kept = execute(bound, execution, q, q, q).kept
    counts = [min(int(layer.sum()) - window, tokens) for layer in kept]
    shown = [counts[i - len(expected)] if i > 3 else counts[i] for i in range(len(expected))]
    wanted = [min(n, tokens - window) if n != "..." else n for n in expected]
    pairs = [(a, b) for a, b in zip(shown, wanted, strict=True) if b != "..."]
    assert [a for a, _ in pairs] == [b for _, b in pairs]


@pytest.mark.parametrize("case", VECTORS["lava"], ids=lambda c: c["name"].replace(" ", "-"))
def test_lava(tmp_path, execution, case):
    def layers(seed: int, heads: int, scale: float, step: float) -> np.ndarray:
        parts = [
            generated(seed + i, (heads, 12, 4)) * np.float32(scale + step * i) for i in range(3)
        ]
        return np.stack(parts)

    q = layers(case["seed"], 4, case["scale"], case["step"])
    k, v = layers(case["seed"] + 100, 2, 1, 0), layers(case["seed"] + 200, 2, 1, 0)
    names = ("capacity", "window", "kernel", "alpha", "average")
    output = run(tmp_path, "lava", {n: case[n] for n in names}, execution, q, k, v)
    assert output["kept"] == case["kept"]
    assert output["budgets"] == [[n + case["window"] for n in heads] for heads in case["caps"]]


@pytest.mark.parametrize("case", VECTORS["cake"], ids=lambda c: f"gamma{c['gamma']}")
def test_cake(tmp_path, execution, case):
    q = np.stack([generated(30 + i, (4, 12, 4)) * np.float32(0.3 + 0.5 * i) for i in range(3)])
    k = np.stack([generated(130 + i, (2, 12, 4)) for i in range(3)])
    settings = {name: case[name] for name in ("gamma", "tau1", "tau2")}
    settings.update(capacity=6, window=3, kernel=5)
    assert run(tmp_path, "cake", settings, execution, q, k)["kept"] == case["kept"]


def test_cake_splits_what_the_cascade_ends_with(execution):
    # Shares of three layers, then of four: what a layer gets may grow again.
    case = VECTORS["cake_non_monotone"]
    for stage in ("stage3", "stage4"):
        weights = case["prefs"][: len(case[stage])]
        assert split(case["T"], weights, [case["cap"]] * len(weights)) == case[stage]


@pytest.mark.parametrize("case", VECTORS["cake_adjust"], ids=lambda c: str(c["shares"]))
def test_split(execution, case):
    assert (
        split(case["total"], case["shares"], [case["cap"]] * len(case["shares"]))
        == (case["adjusted"])
    )
    weights = np.array(case["shares"], dtype=np.float32)[:, None, None, None]
    tokens = np.repeat(weights, 30, axis=2)
    text = f"""
budget: split[layer]({case["total"]}, mean[kv, token, dim](value), max = {case["cap"]})
keep: top(-position)
"""
    kept = keep(text, execution, np.zeros_like(tokens), np.zeros_like(tokens), tokens)
    assert [len(layer[0]) for layer in kept] == case["adjusted"]


def test_tova_and_observed_attention_of_kvpress(execution):
    tova = "score: mean[head, query](attn(recent(1)))\nbudget: 6\nkeep: recent(1) then top(score)\n"
    assert keep(tova, execution, SINES_Q, SINES_K) == [VECTORS["kvpress_tova_ratio0.5"]["kept"]]
    observed = "score: mean[group](mean[query](attn(all)))\nbudget: 6\nkeep: top(score)\n"
    expected = [VECTORS["kvpress_observed_attention_ratio0.5"]["kept"]]
    assert keep(observed, execution, SINES_Q, SINES_K) == expected


def test_simlayerkv_laziness(execution):
    # Keys are the unit vectors, so that the last query chooses its attention freely.
    case = VECTORS["simlayerkv"]
    attention = np.array(case["A"])
    q = np.zeros((1, 2, 10, 10), dtype=np.float32)
    q[0, :, -1] = np.log(attention) * np.sqrt(10)
    k = np.repeat(np.eye(10, dtype=np.float32)[None, None], 2, axis=1)
    text = """
params: {threshold: 0.9}
let:
  ends: sinks(2) or recent(3)
  lazy: mean[head](sum[query, token](attn(recent(1)) where ends)) > threshold
keep: ends where lazy else all
"""
    for at in case["lazy_at"]:
        # 0.8 is exact in the vector and half a unit off in tensors of float32.
        threshold = at["thr"] + 1e-6 * (not at["lazy"])
        kept = keep(text, execution, q, k, threshold=f"{threshold:.7f}")
        expected = case["kept_if_lazy"] if at["lazy"] else list(range(10))
        assert kept == [[expected] * 2]


def test_generator(execution):
    check = VECTORS["generator_check"]
    assert np.allclose(generated(1, (6,)), check["gen(1,2,3)"], atol=1e-6)
    assert np.allclose(generated(5, (4,)), check["gen(5,4)"], atol=1e-6)
