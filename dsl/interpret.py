"""The interpreter: it defines what a policy keeps. Clear over fast; numpy, float64, one layer at a
time.

Every value is computed from the definition in docs/language.md, without the rewriting that the
torch program uses, so that the two are independent.

Dimensions: L layers, H query heads, G KV heads, N cached tokens, D head size, W window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from kvpolicy.dsl import arrays, counts
from kvpolicy.dsl.arrays import Array
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.diagnostics import refused
from kvpolicy.dsl.ir import Node, When
from kvpolicy.dsl.result import Result, Steps


def interpret(
    bound: Bound,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    steps: Steps | None = None,
    inv_freq: np.ndarray | None = None,
) -> Result:
    """Applies a policy to the tensors of one whole prompt, and of the decode steps after it.

    Args:
        bound: the policy with its model and parameters.
        q: [L, H, T, D] queries after RoPE; T is N, or at least `bound.queries(N)` last ones.
        k: [L, G, N, D] keys after RoPE.
        v: [L, G, N, D] values.
        steps: the new token of each decode step.
        inv_freq: [D / 2] angle per position by which RoPE turns dimensions i and i + D / 2, for
            `positions: slots`; without it keys are not turned.

    Raises:
        PolicyError: the policy needs data that these tensors do not hold, or they hold NaN.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not np.isfinite(tensor).all():
            raise refused(
                bound.program.name,
                "data",
                f"`{name}` holds NaN or infinity; nothing can be decided by it",
            )
    layers, (_, kv, tokens, _) = range(bound.shape.layers), k.shape
    if tokens == 0:
        empty = [np.zeros((kv, 0), dtype=np.bool_) for _ in layers]
        return Result(empty, None, None)
    return _Interpreter(bound, q, k, v).run()


class _Interpreter:
    """Values of nodes for one prompt, each computed once per layer."""

    def __init__(self, bound: Bound, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.bound, self.q, self.k, self.v = bound, q, k, v
        self.layers, self.kv, self.tokens = range(k.shape[0]), k.shape[1], k.shape[2]
        self.rules = bound.program.prefill
        self._known: dict[tuple[int, int], Array] = {}

    def run(self) -> Result:
        kept, budgets, scores = [], [], []
        keep = self.rules.keep or Node("all")
        for layer in self.layers:
            kept.append(self._spread(self.value(keep, layer), ("kv", "token")).data)
            if self.rules.budget is not None:
                budgets.append(self._spread(self._budget(layer), ("kv",)).data.astype(np.int64))
            if self.rules.score is not None:
                score = self._spread(self.value(self.rules.score, layer), ("kv", "token"))
                scores.append(np.where(score.present, score.data, np.nan))
            self._forget(layer)
        return Result(kept, budgets or None, scores or None)

    def value(self, node: Node, layer: int) -> Array:
        """The value of a node at a layer."""
        key = (id(node), layer)
        if key not in self._known:
            if self.bound.static.needs(node) is not None:
                number = self.bound.number(node, self.tokens, layer)
                known = Array.of((), number if isinstance(number, bool) else float(number))
            elif node.op in _FUNCTIONS:
                arguments = (self.value(argument, layer) for argument in node.args)
                known = arrays.elementwise(_FUNCTIONS[node.op], *arguments)
            elif node.op in _LOGIC:
                arguments = (self._truth(argument, layer) for argument in node.args)
                known = arrays.elementwise(_LOGIC[node.op], *arguments)
            elif node.op in _COMPARISONS:
                arguments = (self.value(argument, layer) for argument in node.args)
                known = arrays.compare(_COMPARISONS[node.op], *arguments)
            elif node.op in _REDUCTIONS:
                x = self._gather(node.args[0], node.axes, layer)
                known = arrays.reduce(node.op, x, node.axes)
            elif node.op in _SPECIAL:
                known = _SPECIAL[node.op](self, node, layer)
            else:
                raise refused(
                    self.bound.program.name,
                    "phase",
                    f"`{node.op}` is not available at the end of a layer's prefill",
                )
            self._known[key] = known
        return self._known[key]

    def _truth(self, node: Node, layer: int) -> Array:
        """A truth value, false where absent."""
        x = self.value(node, layer)
        return Array.of(x.axes, x.data & x.present)

    def _forget(self, layer: int) -> None:
        """Drops the attention maps of a layer, which nothing across layers needs."""
        for key in [key for key, x in self._known.items() if key[1] == layer and "query" in x.axes]:
            del self._known[key]

    def _number(self, node: Node, layer: int) -> Fraction | float:
        """A scalar: exact if it is known before the prefill."""
        if self.bound.static.needs(node) is not None:
            return self.bound.number(node, self.tokens, layer)
        return float(self.value(node, layer).data)

    def _stack(self, values: list[Array]) -> Array:
        """One array with the axis `layer` in front."""
        axes = arrays.union(*values)
        sizes = self._sizes(values)
        shape = tuple(sizes[axis] for axis in axes)
        parts = [value.to(axes) for value in values]
        data = np.stack([np.broadcast_to(data, shape) for data, _ in parts])
        present = np.stack([np.broadcast_to(present, shape) for _, present in parts])
        return Array.of(("layer", *axes), data, present)

    @staticmethod
    def _sizes(values: list[Array]) -> dict[str, int]:
        return {a: n for value in values for a, n in zip(value.axes, value.data.shape, strict=True)}

    def _gather(self, node: Node, axes: tuple[str, ...], layer: int) -> Array:
        """A node's value at this layer, or at all layers if `axes` names `layer`."""
        if "layer" not in axes:
            return self.value(node, layer)
        values = []
        for each in self.layers:
            values.append(self.value(node, each))
            if each != layer:
                self._forget(each)
        return self._stack(values)

    def _spread(self, x: Array, axes: tuple[str, ...]) -> Array:
        """The array repeated along those of `kv`, `token` that it lacks."""
        sizes = {"kv": self.kv, "token": self.tokens}
        shape = tuple(sizes[axis] for axis in axes)
        data, present = x.to(axes)
        return Array.of(axes, np.broadcast_to(data, shape), np.broadcast_to(present, shape))

    # Leaves.

    def _position(self, node: Node, layer: int) -> Array:
        return Array.of(("token",), np.arange(self.tokens))

    def _all(self, node: Node, layer: int) -> Array:
        return Array.of(("token",), np.ones(self.tokens, dtype=np.bool_))

    def _tensor(self, node: Node, layer: int) -> Array:
        return Array.of(("kv", "token", "dim"), (self.k if node.op == "key" else self.v)[layer])

    def _distance(self, node: Node, layer: int) -> Array:
        window = self.bound.window(node, self.tokens, layer)
        queries = np.arange(self.tokens - window, self.tokens)
        distance = queries[:, None] - np.arange(self.tokens)
        return Array.of(("query", "token"), distance, distance >= 0)

    def _logits(self, node: Node, layer: int) -> Array:
        """q.k / sqrt(D), absent where the token comes after the query."""
        window = self.bound.window(node, self.tokens, layer)
        heads, total, size = self.q.shape[1:]
        q = self.q[layer, :, total - window :].astype(np.float64)
        q = q.reshape(self.kv, heads // self.kv, window, size)
        logits = np.einsum("grwd,gnd->grwn", q, self.k[layer].astype(np.float64)) / math.sqrt(size)
        seen = self._distance(node, layer).present
        return Array.of(
            ("kv", "group", "query", "token"), logits, np.broadcast_to(seen, logits.shape)
        )

    def _attn(self, node: Node, layer: int) -> Array:
        logits = self._logits(node, layer)
        if logits.data.size == 0:
            return logits
        data = np.where(logits.present, logits.data, -np.inf)
        weights = np.exp(data - data.max(-1, keepdims=True))
        return Array.of(logits.axes, weights / weights.sum(-1, keepdims=True), logits.present)

    def _uniform(self, node: Node, layer: int) -> Array:
        seed = math.floor(self._number(node.args[0], layer))
        kv, token = np.arange(self.kv)[:, None], np.arange(self.tokens)
        return Array.of(("kv", "token"), counts.hashed(seed, layer, kv, token))

    # Elementwise with their own rules.

    def _mask(self, node: Node, layer: int) -> Array:
        return arrays.mask(self.value(node.args[0], layer), self.value(node.args[1], layer))

    def _choose(self, node: Node, layer: int) -> Array:
        x, condition, y = node.args
        if self.bound.static.needs(condition) is not None:
            return self.value(x if self._number(condition, layer) else y, layer)
        return arrays.choose(*(self.value(each, layer) for each in node.args))

    # Order and selection.

    def _rank(self, node: Node, layer: int) -> Array:
        return self._own(
            arrays.rank(self._gather(node.args[0], node.axes, layer), node.axes), layer
        )

    def _index(self, node: Node, layer: int) -> Array:
        x = self.value(node.args[0], layer)
        return Array.of(node.axes, np.arange(x.data.shape[x.axes.index(node.axes[0])]))

    def _top(self, node: Node, layer: int) -> Array:
        if len(node.args) == 1:
            return self._fill(node, (), layer)
        x = self._gather(node.args[0], node.axes, layer)
        return self._own(arrays.top(x, self.value(node.args[1], layer), node.axes), layer)

    def _own(self, x: Array, layer: int) -> Array:
        """This layer's part of a value that compares layers."""
        if "layer" not in x.axes:
            return x
        return Array.of(x.axes[1:], x.data[layer], x.present[layer])

    def _then(self, node: Node, layer: int) -> Array:
        return self._prefix(node.args, layer)

    def _prefix(self, sets: tuple[Node, ...], layer: int) -> Array:
        """`a then b then ...`: each chooses among what those before it left over."""
        if not sets:
            return Array.of(("token",), np.zeros(self.tokens, dtype=np.bool_))
        if len(sets) == 1:
            return self._truth(sets[0], layer)
        *before, last = sets
        taken = self._prefix(tuple(before), layer)
        if last.op != "top" or last.name is not None:
            return arrays.elementwise(np.logical_or, taken, self._truth(last, layer))
        if len(last.args) == 1:
            return self._fill(last, tuple(before), layer)
        rest = self._rest(last, tuple(before), layer)
        chosen = arrays.top(rest, self.value(last.args[1], layer), last.axes)
        return arrays.elementwise(np.logical_or, taken, self._own(chosen, layer))

    def _rest(self, top: Node, before: tuple[Node, ...], layer: int) -> Array:
        """`x where not taken`, at all layers if they compete."""

        def at(each: int) -> Array:
            left = arrays.elementwise(np.logical_not, self._prefix(before, each))
            return arrays.mask(self.value(top.args[0], each), left)

        if "layer" in top.axes:
            return self._stack([at(each) for each in self.layers])
        return at(layer)

    def _fill(self, top: Node, before: tuple[Node, ...], layer: int) -> Array:
        """What `before` takes and the best of the rest, until the budget is full."""
        among = list(self.layers) if "layer" in top.axes else [layer]
        sets = [self._spread(self._prefix(before, each), ("kv", "token")) for each in among]
        taken = np.stack([each.data for each in sets])  # [layers that compete, G, N]
        budget = np.stack([self._spread(self._budget(each), ("kv",)).data for each in among])
        missing = np.maximum(budget - taken.sum(-1), 0)
        left = self.tokens - taken.sum(-1)
        for axis, name in enumerate(("layer", "kv")):
            if name in top.axes:
                missing = np.broadcast_to(missing.sum(axis, keepdims=True), missing.shape)
                left = np.broadcast_to(left.sum(axis, keepdims=True), left.shape)
        here = among.index(layer)
        # Where KV heads compete, all have the same number.
        together = "kv" in top.axes
        number = Array.of((), missing[here, 0]) if together else Array.of(("kv",), missing[here])
        chosen = self._own(arrays.top(self._rest(top, before, layer), number, top.axes), layer)
        fits = (left <= missing)[here][:, None]
        return Array.of(
            ("kv", "token"), taken[here] | self._spread(chosen, ("kv", "token")).data | fits
        )

    def _budget(self, layer: int) -> Array:
        budget = self.rules.budget
        if self.bound.static.needs(budget) is not None:
            return Array.of((), float(math.floor(self._number(budget, layer))))
        value = self.value(budget, layer)
        return Array.of(value.axes, np.floor(arrays.snapped(value.data)))

    # Along tokens and across layers.

    def _pool(self, node: Node, layer: int) -> Array:
        width = max(1, counts.whole(self._number(node.args[1], layer), 2**31))
        return arrays.pool(self.value(node.args[0], layer), width, node.op == "maxpool")

    def _past(self, node: Node, layer: int) -> Array:
        number = counts.whole(self._number(node.args[1], layer), len(self.layers))
        newest_last = [self.value(node.args[0], max(0, layer - i)) for i in range(number)][::-1]
        there = np.array([layer - i >= 0 for i in range(number)][::-1])
        x = self._stack(newest_last)
        present = x.present & there.reshape(-1, *[1] * (x.data.ndim - 1))
        return Array.of(("past", *x.axes[1:]), x.data, present)

    def _at(self, node: Node, layer: int) -> Array:
        wanted = counts.snap(self._number(node.args[0], layer))
        reached = layer if node.when <= When.LAYER else len(self.layers) - 1
        if wanted == int(wanted) and 0 <= wanted <= reached:
            return self.value(node.args[1], int(wanted))
        x = self.value(node.args[1], layer)
        return Array.of(x.axes, x.data, np.zeros(x.data.shape, dtype=np.bool_))

    def _split(self, node: Node, layer: int) -> Array:
        total = self._number(node.args[0], 0)
        weights = [self._number(node.args[1], each) for each in self.layers]
        maxima = None
        if len(node.args) == 3:
            maxima = [self._number(node.args[2], each) for each in self.layers]
        return Array.of((), counts.split(total, weights, maxima)[layer])

    def _cluster(self, node: Node, layer: int) -> Array:
        values = [self._number(node.args[0], each) for each in self.layers]
        number = counts.whole(self._number(node.args[1], layer), len(values))
        return Array.of((), counts.cluster(values, number)[layer])


def _round(x: np.ndarray) -> np.ndarray:
    return np.round(arrays.snapped(x))


_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    # -0 is 0: adding 0 to a divisor or a base makes it so.
    "divide": lambda a, b: a / (b + 0.0),
    "floor_divide": lambda a, b: np.floor(arrays.snapped(a / (b + 0.0))),
    "modulo": lambda a, b: a - b * np.floor(arrays.snapped(a / (b + 0.0))),
    "power": lambda a, b: np.power(a + 0.0, b),
    "negate": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "cos": np.cos,
    "sin": np.sin,
    "acos": np.arccos,
    "floor": lambda a: np.floor(arrays.snapped(a)),
    "ceil": lambda a: np.ceil(arrays.snapped(a)),
    "round": _round,
    "minimum": np.minimum,
    "maximum": np.maximum,
}

# An absent truth value counts as false.
_LOGIC: dict[str, Callable[..., np.ndarray]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
}

_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}

_REDUCTIONS = frozenset("sum mean max min var any count".split())

_SPECIAL: dict[str, Callable[[_Interpreter, Node, int], Array]] = {
    "position": _Interpreter._position,
    "all": _Interpreter._all,
    "key": _Interpreter._tensor,
    "value": _Interpreter._tensor,
    "attn": _Interpreter._attn,
    "logits": _Interpreter._logits,
    "distance": _Interpreter._distance,
    "uniform": _Interpreter._uniform,
    "mask": _Interpreter._mask,
    "choose": _Interpreter._choose,
    "rank": _Interpreter._rank,
    "index": _Interpreter._index,
    "top": _Interpreter._top,
    "then": _Interpreter._then,
    "budget": lambda self, node, layer: self._budget(layer),
    "avgpool": _Interpreter._pool,
    "maxpool": _Interpreter._pool,
    "past": _Interpreter._past,
    "at": _Interpreter._at,
    "split": _Interpreter._split,
    "cluster": _Interpreter._cluster,
}
