"""`kvpolicy run`: its JSON, and what it says about input that it cannot use."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kvpolicy.dsl.cli import main
from kvpolicy.dsl.commands import EXECUTIONS

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
        (b"not an archive", "not a readable npz of numbers"),
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
