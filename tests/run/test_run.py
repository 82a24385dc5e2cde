"""`kvpolicy run`: its JSON, and messages on input that it cannot use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.dsl.check.report import OUTPUT_KEYS
from kvpolicy.dsl.tools.cli import EXECUTIONS, main

L, H, G, D = 2, 4, 2, 4


def arrays(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((L, H, tokens, D), np.float32),
        "k": rng.standard_normal((L, G, tokens, D), np.float32),
        "v": rng.standard_normal((L, G, tokens, D), np.float32),
    }


def run(tmp_path, policy: str, tensors, *options: str) -> int:
    path = tmp_path / "x.npz"
    if isinstance(tensors, dict):
        np.savez(path, **tensors)
    elif tensors is not None:
        path.write_bytes(tensors)
    out = str(tmp_path / "r.json")
    return main(["run", policy, "--tensors", str(path), "--out", out, *options])


def output(tmp_path) -> dict:
    return json.loads((tmp_path / "r.json").read_text())


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 9, 15])
@pytest.mark.parametrize(
    "policy", ["snapkv", "adakv", "pyramidkv", "ada-pyramidkv", "lava", "dynamickv"]
)
def test_form_and_edges(tmp_path, policy, tokens, execution):
    """Window 4, capacity 8: shorter than either, one longer, none."""
    options = ("--set", "capacity=8", "--set", "window=4", "--execution", execution)
    assert run(tmp_path, policy, arrays(tokens), *options) == 0
    result = output(tmp_path)
    assert set(result) == {"kept", "budgets"}
    assert [len(layer) for layer in result["kept"]] == [G] * L
    assert [len(layer) for layer in result["budgets"]] == [G] * L
    for heads in result["kept"]:
        for kept in heads:
            assert kept == sorted(set(kept))
            assert kept[-4:] == list(range(max(0, tokens - 4), tokens))
            if tokens <= 8:
                assert kept == list(range(tokens))
    if tokens > 8 and policy == "snapkv":
        assert all(len(kept) == 8 for heads in result["kept"] for kept in heads)
    assert all(type(n) is int for heads in result["budgets"] for n in heads)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_scores(tmp_path, execution):
    options = ("--set", "capacity=8", "--set", "window=4", "--scores", "--execution", execution)
    assert run(tmp_path, "lava", arrays(12), *options) == 0
    scores = output(tmp_path)["scores"]
    assert np.array(scores, dtype=object).shape == (L, G, 12)
    for heads in scores:
        for row in heads:
            assert row[8:] == [None] * 4
            assert all(isinstance(x, float) for x in row[:8])


def test_policy_without_budget_and_score(tmp_path):
    assert run(tmp_path, "sinks-recent", arrays(9), "--set", "capacity=6", "--scores") == 0
    assert output(tmp_path) == {"kept": [[[0, 1, 2, 3, 7, 8]] * G] * L, "budgets": [[6] * G] * L}


def test_last_queries_suffice(tmp_path):
    options = ("--set", "capacity=8", "--set", "window=4")
    tensors = arrays(20)
    run(tmp_path, "snapkv", tensors, *options)
    expected = output(tmp_path)
    for queries in (4, 7):
        assert (
            run(tmp_path, "snapkv", {**tensors, "q": tensors["q"][:, :, -queries:]}, *options) == 0
        )
        assert output(tmp_path) == expected


def test_standard_output(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **arrays(3))
    assert main(["run", "snapkv", "--tensors", str(tmp_path / "x.npz"), "--out", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == [[[0, 1, 2]] * G] * L


def _changed(**changes) -> dict:
    made = {**arrays(9), **changes}
    return {name: array for name, array in made.items() if array is not None}


def _with(name: str, value: float) -> dict:
    made = arrays(9)
    made[name][1, 1, 5, 2] = value
    return made


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "no such file"),
        (b"not an archive", "x.npz: error[data]: not a readable npz of numbers\n"),
        (b"", "not a readable npz of numbers"),
        (_changed(v=None), "no array `v`; the file has `q`, `k`"),
        (
            _changed(q=np.zeros((2, 4, 9), np.float32)),
            "`q` has shape [2, 4, 9]; it is [L, H, N, D]",
        ),
        (
            _changed(k=np.zeros((2, 2, 8, 4), np.float32)),
            "`k` is [2, 2, 8, 4] and `v` is [2, 2, 9, 4]",
        ),
        (
            _changed(q=np.zeros((3, 4, 9, 4), np.float32)),
            "layers (first) and head size (last) agree",
        ),
        (_changed(q=np.zeros((2, 3, 9, 4), np.float32)), "3 query heads cannot share 2 KV heads"),
        (_changed(q=np.zeros((2, 4, 10, 4), np.float32)), "`q` has 10 queries for 9 tokens"),
        (_changed(q=np.zeros((2, 4, 2, 4), np.float32)), "or at least the last 4"),
        (_changed(q=np.zeros((2, 4, 9, 4), np.int32)), "`q` is int32; it is float32"),
        (_changed(q=np.array([[[[None]]]])), "not a readable npz of numbers"),
        (_with("k", np.nan), "`k` holds NaN or infinity, first at layer 1, head 1, token 5"),
        (_with("v", np.inf), "`v` holds NaN or infinity"),
        (
            _changed(k=np.full((2, 2, 9, 4), 1e39)),
            "`k` holds what float32 cannot, first at layer 0",
        ),
    ],
)
def test_unusable_tensors(tmp_path, capsys, tensors, message):
    assert run(tmp_path, "snapkv", tensors, "--set", "window=4") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "r.json").exists()


def test_single_array(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros(3))
    tensors = str(tmp_path / "x.npy")
    assert main(["run", "snapkv", "--tensors", tensors, "--out", str(tmp_path / "r.json")]) == 2
    assert "holds a single array" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("capcity=3", "did you mean `capacity`?"),
        ("capacity", "`capacity` is not name=value"),
        ("capacity=none", "`capacity` is `none`; it is a number, a whole number, at least 1"),
        ("capacity=16", "requires `(window <= capacity) or (rate > 0)`, but `capacity` is 16"),
        ("kernel=4", "`kernel` is 4; it must be a whole number, odd, at least 1"),
        ("average=yes", "`average` is `yes`; it is `true` or `false`"),
        ("rate=1.01", "`rate` is 1.01; it must be at least 0, at most 1"),
    ],
)
def test_unusable_settings(tmp_path, capsys, setting, message):
    assert run(tmp_path, "snapkv", arrays(9), "--set", setting) == 2
    assert message in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **arrays(3))
    out = str(tmp_path / "missing" / "r.json")
    assert main(["run", "snapkv", "--tensors", str(tmp_path / "x.npz"), "--out", out]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_policy_that_decides_elsewhere(tmp_path, capsys):
    (tmp_path / "p.yaml").write_text(
        "policy: p\nlanguage: 1\nabout: p\nkeep: recent(4)\nread: recent(4)\n"
    )
    assert run(tmp_path, str(tmp_path / "p.yaml"), arrays(9)) == 2
    assert "cannot be served yet" in capsys.readouterr().err


# Decode steps and what goes with them

STEPS = 3


def with_steps(tokens: int, seed: int = 0, **changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed + 1)
    made = {
        **arrays(tokens, seed),
        "q_step": rng.standard_normal((STEPS, L, H, D), np.float32),
        "k_step": rng.standard_normal((STEPS, L, G, D), np.float32),
        "v_step": rng.standard_normal((STEPS, L, G, D), np.float32),
        **changes,
    }
    return {name: array for name, array in made.items() if array is not None}


def both(tmp_path, policy: str, tensors, *options: str) -> dict:
    """Output of both executions, checked to be the same up to rounding."""
    outputs = []
    for execution in EXECUTIONS:
        assert run(tmp_path, policy, tensors, "--execution", execution, *options) == 0
        outputs.append(output(tmp_path))
    assert_alike(*outputs)
    return outputs[0]


def assert_alike(a, b) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_alike(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_alike(x, y)
    else:
        assert a == (pytest.approx(b, rel=1e-5, abs=1e-5) if isinstance(a, float) else b)


def policy_file(tmp_path, text: str) -> str:
    path = tmp_path / "p.yaml"
    path.write_text("policy: p\nlanguage: 1\nabout: p\n" + text)
    return str(path)


@pytest.mark.parametrize("tokens", [0, 1, 5, 12])
def test_steps(tmp_path, tokens):
    options = ("--set", "heavy=2", "--set", "window=2")
    result = both(tmp_path, "h2o", with_steps(tokens), *options)
    assert set(result) == {"kept", "budgets", "steps"}
    for number, step in enumerate(result["steps"], 1):
        assert set(step) == {"kept"}
        for heads in step["kept"]:
            for kept in heads:
                assert kept == sorted(set(kept))
                assert len(kept) == min(4, tokens + number)
                assert kept[-1] == tokens + number - 1


def test_fold_interval(tmp_path):
    options = ("--set", "start=1", "--set", "window=2", "--fold-interval", "2")
    result = both(tmp_path, "streamingllm", with_steps(4), *options)
    kept = [step["kept"][0][0] for step in result["steps"]]
    assert kept == [[0, 2, 3, 4], [0, 4, 5], [0, 4, 5, 6]]


def test_interval_that_is_none(tmp_path, capsys):
    assert run(tmp_path, "streamingllm", with_steps(4), "--fold-interval", "0") == 2
    assert "a fold interval is at least 1, not 0" in capsys.readouterr().err


def test_merged(tmp_path):
    # Nothing leaves before the prompt is longer than the budget.
    options = ("--set", "rate=0.5", "--set", "start=1", "--merged")
    result = both(tmp_path, "d2o", with_steps(14), *options)
    assert len(result["merged"]) == len(result["thresholds"]) == L
    assert all(layer.keys() == {"key", "value"} for layer in result["merged"])
    assert any(layer["key"] > 0 for layer in result["merged"])
    for step in result["steps"]:
        assert len(step["merged"]) == len(step["thresholds"]) == L
    without = both(tmp_path, "d2o", with_steps(14), *options[:-1])
    assert "merged" not in without
    assert without["kept"] == result["kept"]


def test_merged_of_a_policy_that_changes_nothing(tmp_path):
    result = both(tmp_path, "h2o", with_steps(9), "--merged")
    assert "merged" not in result
    assert all("merged" not in step for step in result["steps"])


def test_propagation_that_never_acts(tmp_path):
    text = "propagate: {first: layer == 9, tokens: recent(2)}\n"
    result = both(tmp_path, policy_file(tmp_path, text), arrays(6))
    names = ("selected_layer", "propagated", "positions")
    assert [result[name] for name in names] == [None, None, None]


def test_keys_at_slots_need_frequencies(tmp_path):
    options = ("--set", "start=1", "--set", "window=2", "--merged")
    plain = both(tmp_path, "streamingllm", with_steps(9), *options)
    assert plain["merged"] == [{"key": 0.0, "value": 0.0}] * L
    turned = both(tmp_path, "streamingllm", with_steps(9, inv_freq=np.array([1.0, 0.1])), *options)
    assert turned["kept"] == plain["kept"]
    assert all(layer["key"] > 0.01 and layer["value"] == 0 for layer in turned["merged"])


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_a_policy_reports(tmp_path, execution):
    (tmp_path / "p.yaml").write_text(
        "policy: p\nlanguage: 1\nlet:\n  size: norm1[dim](key) where position > 0\n"
        "  wide: mean[kv, token](size) > 0\nkeep: all where wide else top(size, 2)\n"
        "report: [wide, size]\n"
    )
    given = arrays(3)
    assert run(tmp_path, str(tmp_path / "p.yaml"), given, "--execution", execution) == 0
    result = output(tmp_path)
    assert list(result) == ["kept", "budgets", "wide", "size"]
    assert result["wide"] == [1] * L
    sizes = np.abs(given["k"].astype(float)).sum(-1)
    assert [[head[0] for head in layer] for layer in result["size"]] == [[None] * G] * L
    found = np.array([[head[1:] for head in layer] for layer in result["size"]])
    np.testing.assert_allclose(found, sizes[:, :, 1:])


def test_what_is_written_of_every_policy_is_documented_and_no_name_to_report():
    text = (Path(__file__).parents[2] / "docs" / "run.md").read_text(encoding="utf-8")
    table = text.partition("## Output")[2].partition("## Executions")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(OUTPUT_KEYS)


def test_several_thresholds_are_named(tmp_path):
    text = (
        "keep: recent(2)\nmerge:\n  into: next(1)\n  weight: a + b\n  state:\n"
        "    a: a + 1\n    b: b + count[dropped](position)\n"
    )
    result = both(tmp_path, policy_file(tmp_path, text), arrays(6))
    assert result["thresholds"] == {"a": [1.0] * L, "b": [[4.0] * G] * L}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_step": None}, "decode steps need `v_step` too"),
        ({"q_step": None, "k_step": None}, "decode steps need `q_step` and `k_step` too"),
        (
            {"k_step": np.zeros((STEPS, L, G + 1, D), np.float32)},
            f"`k_step` is [3, 2, 3, 4]; for 3 steps and this `k` it is [3, {L}, {G}, {D}]",
        ),
        ({"v_step": np.zeros((STEPS + 1, L, G, D), np.float32)}, "`v_step` is [4, 2, 2, 4]"),
        ({"q_step": np.zeros((L, H, D), np.float32)}, "`q_step` has shape [2, 4, 4]; it is"),
        ({"q_step": np.full((STEPS, L, H, D), np.nan)}, "`q_step` holds NaN or infinity, first at"),
        ({"inv_freq": np.zeros(3)}, "`inv_freq` is [3]; half the head size 4 is needed"),
        ({"inv_freq": np.zeros((2, 1))}, "`inv_freq` has shape [2, 1]; it is [D / 2]"),
        ({"inv_freq": np.zeros(2, int)}, "`inv_freq` is int64"),
    ],
)
def test_steps_that_cannot_be_used(tmp_path, capsys, changes, message):
    assert run(tmp_path, "tova", with_steps(6, **changes)) == 2
    assert message in capsys.readouterr().err


def test_other_arrays_are_ignored(tmp_path):
    assert run(tmp_path, "tova", {**arrays(6), "note": np.array(["a"])}) == 0
