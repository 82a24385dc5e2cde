"""Every derived function against its textbook formula, computed in float64 from the tensors.

`key` and `value` are [G, N, D]. The formulas are those of books, not the definitions in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.interpret.values import Layer, Values
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.ops.table import FUNCTIONS
from kvpolicy.dsl.syntax.source import Source

G, N, D = 2, 5, 4
DIMENSIONS = {"kv": 0, "token": 1, "dim": 2}
numbers = st.floats(-8, 8, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
vectors = arrays.arrays(np.float64, (G, N, D), elements=numbers)
positive = arrays.arrays(np.float64, (G, N, D), elements=st.floats(0.125, 8, width=32))
axes = st.sampled_from([("dim",), ("token",), ("kv", "token"), ("token", "dim")])


def computed(text: str, key: np.ndarray, value: np.ndarray, there=None) -> np.ndarray:
    """An expression's values in the interpreter at a layer; NaN where absent."""
    file = f"policy: x\nlanguage: 1\nlet:\n  v: |\n    {text}\nkeep: all\n"
    program = load(Source("x.yaml", file)).require()
    bound = bind(program, ModelShape(1, G, G, D))
    held = np.ones((G, N), dtype=np.bool_) if there is None else there
    queries = np.zeros((G, 0, D))
    layer = Layer(np.arange(N), key, value, queries, np.arange(0), held)
    x = Values(bound, bound.folded.prefill, {0: layer}, N).value(program.prefill.lets["v"], 0)
    if x.data.dtype == np.bool_:
        return x.data & x.present
    return np.where(x.present, x.data, math.nan)


def written(over: tuple[str, ...]) -> str:
    return f"[{', '.join(over)}]"


def places(over: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(DIMENSIONS[axis] for axis in over)


def rows(x: np.ndarray, over: tuple[str, ...], formula: Callable, *others: np.ndarray):
    """Applies a formula for flat vectors along axes; it may return a number or a vector."""
    moved = [np.moveaxis(each, places(over), range(-len(over), 0)) for each in (x, *others)]
    kept, inner = moved[0].shape[: x.ndim - len(over)], moved[0].shape[x.ndim - len(over) :]
    flat = [each.reshape(-1, math.prod(inner)) for each in moved]
    made = np.array([formula(*each) for each in zip(*flat, strict=True)])
    if made.ndim == 1:
        return made.reshape(kept)
    return np.moveaxis(made.reshape(*kept, *inner), range(-len(over), 0), places(over))


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def share(x: np.ndarray) -> np.ndarray:
    """Shares of the sum."""
    return np.array([each / math.fsum(x) for each in x])


def entropy(x: np.ndarray) -> float:
    parts = [each / math.fsum(x) for each in x if each > 0]
    return math.fsum(p * math.log(1 / p) for p in parts)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.array([1 / math.fsum(math.exp(other - each) for other in x) for each in x])


def stretched(x: np.ndarray) -> np.ndarray:
    low, high = sorted(x)[0], sorted(x)[-1]
    return np.array([0.0 if low == high else (each - low) / (high - low) for each in x])


def length(x: np.ndarray) -> float:
    return math.hypot(*x)


def direction(x: np.ndarray) -> np.ndarray:
    return x / length(x) if length(x) else np.zeros_like(x)


def turn(x: np.ndarray, y: np.ndarray) -> float:
    """The angle between two vectors, by Kahan; a right angle if one is 0."""
    a, b = direction(x), direction(y)
    if not length(x) or not length(y):
        return math.pi / 2
    return 2 * math.atan2(length(a - b), length(a + b))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return math.cos(turn(x, y)) if length(x) and length(y) else 0.0


def of_one(name: str, formula: Callable, given_: st.SearchStrategy):
    return pytest.param(name, formula, given_, id=name)


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize(
    ("name", "formula", "tensors"),
    [
        of_one("norm1", lambda x: math.fsum(map(abs, x)), vectors),
        of_one("norm2", length, vectors),
        of_one("normalize", share, positive),
        of_one("softmax", softmax, vectors),
        of_one("minmax", stretched, vectors),
        of_one("entropy", entropy, positive | positive.map(lambda x: np.floor(x) + (x > 1))),
        of_one("unit", direction, vectors),
    ],
)
def test_functions_of_one_value(name, formula, tensors):
    @given(tensors, axes)
    def same(x, over):
        close(computed(f"{name}{written(over)}(key)", x, x), rows(x, over, formula))

    same()


def test_normalize_of_nothing_is_nothing():
    x = np.zeros((G, N, D))
    assert not computed("normalize[token](key)", x, x).any()
    assert not computed("entropy[token](key)", x, x).any()
    opposite = x.copy()
    opposite[..., 0], opposite[..., 1] = 1, -1
    assert computed("normalize[dim](key)", opposite, x)[0, 0].tolist() == [
        math.inf, -math.inf, 0, 0,
    ]  # fmt: skip


@given(positive, st.lists(st.booleans(), min_size=N, max_size=N).filter(any))
def test_absent_values_have_no_part(x, stays):
    some = np.array(stays)
    condition = " or ".join(f"position == {i}" for i in np.flatnonzero(some))
    for name, formula in (("normalize", share), ("softmax", softmax), ("minmax", stretched)):
        made = computed(f"{name}[token](key where {condition})", x, x)
        assert np.isnan(made[:, ~some]).all()
        close(made[:, some], rows(x[:, some], ("token",), formula))
    for name, formula in (("entropy", entropy), ("norm1", math.fsum), ("norm2", length)):
        made = computed(f"{name}[token](key where {condition})", x, x)
        close(made, rows(x[:, some], ("token",), formula))


@given(vectors, vectors, axes)
def test_cosine(x, y, over):
    made = computed(f"cosine{written(over)}(key, value)", x, y)
    close(made, rows(x, over, cosine, y))


# The arc cosine loses half of the digits where vectors are almost parallel.
SLIGHT = 1e-7


@given(vectors, vectors)
def test_angle(x, y):
    made = computed("angle[dim](key, value)", x, y)
    np.testing.assert_allclose(made, rows(x, ("dim",), turn, y), rtol=1e-9, atol=SLIGHT)


def on_the_arc(x: np.ndarray, y: np.ndarray, t: float) -> np.ndarray:
    """The direction of x turned towards y by the share t of their angle."""
    a, b = direction(x), direction(y)
    across = direction(b - a * np.dot(a, b))
    by = t * turn(x, y)
    return a * math.cos(by) + across * math.sin(by)


@given(vectors, vectors, st.sampled_from([0, 0.25, 0.5, 0.75, 1]))
def test_slerp(x, y, t):
    made = computed(f"slerp[dim](key, value, {t})", x, y)
    for head, token in np.ndindex(G, N):
        a, b, found = x[head, token], y[head, token], made[head, token]
        if length(a) and length(b) and 1e-3 < turn(a, b) < math.pi - 1e-3:
            close(found, on_the_arc(a, b, t))
            assert length(found) == pytest.approx(1)
        elif length(a) and length(b) and turn(a, b) <= 1e-7:
            np.testing.assert_allclose(found, direction(a), atol=SLIGHT)


def test_slerp_of_opposite_and_equal_vectors_is_the_straight_way():
    x = np.zeros((G, N, D))
    x[..., 0] = 3
    assert computed("slerp[dim](key, value, 0.25)", x, x)[0, 0].tolist() == [1, 0, 0, 0]
    assert computed("slerp[dim](key, value, 0.25)", x, -x)[0, 0].tolist() == [0.5, 0, 0, 0]


@given(vectors, st.floats(-9, 9), st.floats(-9, 9))
def test_clamp(x, low, high):
    made = computed(f"clamp(key, {low:.6f}, {high:.6f})", x, x)
    low, high = float(f"{low:.6f}"), float(f"{high:.6f}")
    # Where the limits cross, the upper one holds.
    expected = [min(high, each if each > low else low) for each in x.flat]
    assert made.ravel().tolist() == expected


@given(
    st.integers(-2, 7),
    arrays.arrays(np.bool_, (G, N)).map(lambda x: x | ~x.any(1, keepdims=True)),
)
def test_recent_and_sinks_are_each_heads_own(number, there):
    x = np.zeros((G, N, D))
    for name, order in (("recent", -1), ("sinks", 1)):
        expected = np.zeros((G, N), dtype=np.bool_)
        for head in range(G):
            own = np.flatnonzero(there[head])[::order]
            expected[head, own[: max(0, number)]] = True
        made = computed(f"{name}({number})", x, x, there)
        assert np.array_equal(np.broadcast_to(made, (G, N)), expected)


def test_every_derived_function_is_here():
    derived = {name for name, function in FUNCTIONS.items() if function.body}
    assert derived == {
        "norm1", "norm2", "normalize", "softmax", "minmax", "entropy", "unit", "cosine", "angle",
        "slerp", "clamp", "recent", "sinks",
    }  # fmt: skip
