"""Selections among the entries of a layer, and the budget that they fill.

Dimensions: L layers, G KV heads, M candidates of a layer.
"""

from __future__ import annotations

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node


def top(e: Values, node: Node, layer: int) -> Array:
    if len(node.args) == 1:
        return _fill(e, node, (), layer)
    x = e.gathered(node.args[0], node.axes, layer)
    return e.own(arrays.top(x, e.value(node.args[1], layer), node.axes), node.axes, layer)


def then(e: Values, node: Node, layer: int) -> Array:
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


def _rest(e: Values, best: Node, before: tuple[Node, ...], layer: int) -> Array:
    """`x where not taken`, at all layers if they compete."""

    def at(each: int) -> Array:
        left = arrays.elementwise(np.logical_not, _prefix(e, before, each))
        if e.layers[each].ragged:
            left = e.spread(left, ("kv", "token"), each)
        return arrays.mask(e.value(best.args[0], each), left)

    return e.stacked(at, layer) if "layer" in best.axes else at(layer)


def _fill(e: Values, best: Node, before: tuple[Node, ...], layer: int) -> Array:
    """What `before` takes and the best of the rest, until the budget is full."""
    among = list(e.every_layer) if "layer" in best.axes else [layer]
    sets = [e.spread(_prefix(e, before, each), ("kv", "token"), each) for each in among]
    taken = np.stack([each.data.sum(-1) for each in sets])  # [layers that compete, G]
    held = np.stack([e.layers[each].there.sum(-1) for each in among])
    whole = np.stack([e.spread(whole_budget(e, each), ("kv",), each).data for each in among])
    missing, left = np.maximum(whole - taken, 0), held - taken
    for axis, name in enumerate(("layer", "kv")):
        if name in best.axes:
            missing = np.broadcast_to(missing.sum(axis, keepdims=True), missing.shape)
            left = np.broadcast_to(left.sum(axis, keepdims=True), left.shape)
    here = among.index(layer)
    # Where KV heads compete, all have the same number.
    together = "kv" in best.axes
    number = Array.of((), missing[here, 0]) if together else Array.of(("kv",), missing[here])
    chosen = e.own(arrays.top(_rest(e, best, before, layer), number, best.axes), best.axes, layer)
    fits = (left <= missing)[here][:, None]
    chosen = e.spread(chosen, ("kv", "token"), layer)
    return Array.of(("kv", "token"), sets[here].data | chosen.data | fits)


def whole_budget(e: Values, layer: int) -> Array:
    """The budget in force at a layer, floored."""
    own = e.own_budget
    if own is None:
        return Array.of(("kv",), e.budgets[layer])
    if e.bound.static.needs(own) is not None:
        return Array.of((), float(counts.floored(e.number(own, layer))))
    value = e.value(own, layer)
    return Array.of(value.axes, np.floor(arrays.snapped(value.data)))


def budget(e: Values, node: Node, layer: int) -> Array:
    """The name `budget`: that of these rules, or inside `propagate` that of the section."""
    outer = e.own_budget
    propagate = e.bound.program.propagate if node.value else None
    e.own_budget = e.rules.budget if propagate is None else propagate.budget
    found = whole_budget(e, layer)
    e.own_budget = outer
    return found
