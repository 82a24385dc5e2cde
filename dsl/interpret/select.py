"""Order, selection and looking across layers, and with them the interpreter's `Evaluator`.

Dimensions: L layers, G KV heads, M candidates of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, When


def _along(e: Values, node: Node, layer: int) -> Array:
    x = arrays.ALONG[node.op](e.gathered(node.args[0], node.axes, layer), node.axes)
    return e.own(x, node.axes, layer)


def _index(e: Values, node: Node, layer: int) -> Array:
    x = e.value(node.args[0], layer)
    return Array.of(node.axes, np.arange(x.data.shape[x.axes.index(node.axes[0])]))


def _top(e: Values, node: Node, layer: int) -> Array:
    if len(node.args) == 1:
        return _fill(e, node, (), layer)
    x = e.gathered(node.args[0], node.axes, layer)
    return e.own(arrays.top(x, e.value(node.args[1], layer), node.axes), node.axes, layer)


def _then(e: Values, node: Node, layer: int) -> Array:
    return _prefix(e, node.args, layer)


def _prefix(e: Values, sets: tuple[Node, ...], layer: int) -> Array:
    """`a then b then ...`: each chooses among what those before it left over."""
    if not sets:
        return Array.of(("token",), np.zeros(e.candidates(layer), dtype=np.bool_))
    if len(sets) == 1:
        return e.truth(sets[0], layer)
    *before, last = sets
    taken = _prefix(e, tuple(before), layer)
    if last.op != "top" or last.name is not None:
        return arrays.elementwise(np.logical_or, taken, e.truth(last, layer))
    if len(last.args) == 1:
        return _fill(e, last, tuple(before), layer)
    rest = _rest(e, last, tuple(before), layer)
    chosen = arrays.top(rest, e.value(last.args[1], layer), last.axes)
    return arrays.elementwise(np.logical_or, taken, e.own(chosen, last.axes, layer))


def _rest(e: Values, top: Node, before: tuple[Node, ...], layer: int) -> Array:
    """`x where not taken`, at all layers if they compete."""

    def at(each: int) -> Array:
        left = arrays.elementwise(np.logical_not, _prefix(e, before, each))
        if e.layers[each].ragged:
            left = e.spread(left, ("kv", "token"), each)
        return arrays.mask(e.value(top.args[0], each), left)

    return e.stacked(at, layer) if "layer" in top.axes else at(layer)


def _fill(e: Values, top: Node, before: tuple[Node, ...], layer: int) -> Array:
    """What `before` takes and the best of the rest, until the budget is full."""
    among = list(e.every_layer) if "layer" in top.axes else [layer]
    sets = [e.spread(_prefix(e, before, each), ("kv", "token"), each) for each in among]
    taken = np.stack([each.data.sum(-1) for each in sets])  # [layers that compete, G]
    held = np.stack([e.layers[each].there.sum(-1) for each in among])
    budget = np.stack([e.spread(whole_budget(e, each), ("kv",), each).data for each in among])
    missing, left = np.maximum(budget - taken, 0), held - taken
    for axis, name in enumerate(("layer", "kv")):
        if name in top.axes:
            missing = np.broadcast_to(missing.sum(axis, keepdims=True), missing.shape)
            left = np.broadcast_to(left.sum(axis, keepdims=True), left.shape)
    here = among.index(layer)
    # Where KV heads compete, all have the same number.
    together = "kv" in top.axes
    number = Array.of((), missing[here, 0]) if together else Array.of(("kv",), missing[here])
    chosen = e.own(arrays.top(_rest(e, top, before, layer), number, top.axes), top.axes, layer)
    fits = (left <= missing)[here][:, None]
    chosen = e.spread(chosen, ("kv", "token"), layer)
    return Array.of(("kv", "token"), sets[here].data | chosen.data | fits)


def whole_budget(e: Values, layer: int) -> Array:
    """The budget in force at a layer, floored."""
    budget = e.own_budget
    if budget is None:
        return Array.of(("kv",), e.budgets[layer])
    if e.bound.static.needs(budget) is not None:
        return Array.of((), float(counts.floored(e.number(budget, layer))))
    value = e.value(budget, layer)
    return Array.of(value.axes, np.floor(arrays.snapped(value.data)))


def _budget(e: Values, node: Node, layer: int) -> Array:
    """The name `budget`: of these rules, or inside `propagate` of that section."""
    outer = e.own_budget
    propagate = e.bound.program.propagate if node.value else None
    e.own_budget = e.rules.budget if propagate is None else propagate.budget
    budget = whole_budget(e, layer)
    e.own_budget = outer
    return budget


def _pool(e: Values, node: Node, layer: int) -> Array:
    width = max(1, counts.whole(e.number(node.args[1], layer), 2**31))
    x, there = e.value(node.args[0], layer), e.layers[layer].there
    held = there if e.layers[layer].ragged and "kv" in x.axes else None
    return arrays.pool(x, width, node.op == "maxpool", held)


def _past(e: Values, node: Node, layer: int) -> Array:
    number = counts.whole(e.number(node.args[1], layer), len(e.every_layer))
    sources = [max(0, layer - i) for i in reversed(range(number))]
    x = arrays.stack("past", [e.read_at(e.value(node.args[0], i), i, layer) for i in sources])
    there = np.array([layer - i >= 0 for i in reversed(range(number))], dtype=np.bool_)
    present = x.present & there.reshape(-1, *[1] * (x.data.ndim - 1))
    return Array.of(x.axes, x.data, present)


def _at(e: Values, node: Node, layer: int) -> Array:
    reached = layer if node.when <= When.LAYER else len(e.every_layer) - 1
    which, x = node.args
    named = e.value(which, layer).present.all()
    wanted = counts.index(e.number(which, layer), reached + 1) if named else None
    if wanted is not None:
        return e.read_at(e.value(x, wanted), wanted, layer)
    own = e.value(x, layer)
    return Array.of(own.axes, own.data, np.zeros(own.data.shape, dtype=np.bool_))


def _split(e: Values, node: Node, layer: int) -> Array:
    total = e.number(node.args[0], 0)
    weights = [e.number(node.args[1], each) for each in e.every_layer]
    maxima = None
    if len(node.args) == 3:
        maxima = [e.number(node.args[2], each) for each in e.every_layer]
    parts = counts.split(total, weights, maxima, cascade=node.op == "cascade")
    return Array.of((), parts[layer])


def _cluster(e: Values, node: Node, layer: int) -> Array:
    values = [e.number(node.args[0], each) for each in e.every_layer]
    number = counts.whole(e.number(node.args[1], layer), len(values))
    return Array.of((), counts.cluster(values, number)[layer])


SELECTIONS: dict[str, Callable[[Values, Node, int], Array]] = {
    **dict.fromkeys(arrays.ALONG, _along),
    "index": _index,
    "top": _top,
    "then": _then,
    "budget": _budget,
    "avgpool": _pool,
    "maxpool": _pool,
    "past": _past,
    "at": _at,
    "split": _split,
    "cascade": _split,
    "cluster": _cluster,
}


class Evaluator(Values):
    """Values of nodes of every operation."""

    def special(self, node: Node, layer: int) -> Array:
        """Operations with rules of their own."""
        if node.op in SELECTIONS:
            return SELECTIONS[node.op](self, node, layer)
        return super().special(node, layer)
