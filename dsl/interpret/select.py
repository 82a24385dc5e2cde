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
    *prefix, last = sets
    taken_set = _prefix(e, tuple(prefix), layer)
    if last.op != "top" or last.name is not None:
        return arrays.elementwise(np.logical_or, taken_set, e.truth(last, layer))
    if len(last.args) == 1:
        return _fill(e, last, tuple(prefix), layer)
    rest = _rest(e, last, tuple(prefix), layer)
    chosen = arrays.top(rest, e.value(last.args[1], layer), last.axes)
    return arrays.elementwise(np.logical_or, taken_set, e.own(chosen, last.axes, layer))


def _rest(e: Values, best: Node, prefix: tuple[Node, ...], layer: int) -> Array:
    """`x where not taken`, at all layers if they compete."""

    def rest_at(source: int) -> Array:
        left_over = arrays.elementwise(np.logical_not, _prefix(e, prefix, source))
        if e.layers[source].ragged:
            left_over = e.spread(left_over, ("kv", "token"), source)
        return arrays.mask(e.value(best.args[0], source), left_over)

    return e.stacked(rest_at, layer) if "layer" in best.axes else rest_at(layer)


def _fill(e: Values, best: Node, prefix: tuple[Node, ...], layer: int) -> Array:
    """What `prefix` takes and the best of the rest, until the budget is full."""
    layers = list(e.every_layer) if "layer" in best.axes else [layer]
    sets = [e.spread(_prefix(e, prefix, i), ("kv", "token"), i) for i in layers]
    taken_counts = np.stack([x.data.sum(-1) for x in sets])  # [layers that compete, G]
    held_counts = np.stack([e.layers[i].held.sum(-1) for i in layers])
    budgets = np.stack([e.spread(whole_budget(e, i), ("kv",), i).data for i in layers])
    missing, remaining = np.maximum(budgets - taken_counts, 0), held_counts - taken_counts
    for axis, name in enumerate(("layer", "kv")):
        if name in best.axes:
            missing = np.broadcast_to(missing.sum(axis, keepdims=True), missing.shape)
            remaining = np.broadcast_to(remaining.sum(axis, keepdims=True), remaining.shape)
    row = layers.index(layer)
    # Where KV heads compete, all have the same number.
    heads_compete = "kv" in best.axes
    number = Array.of((), missing[row, 0]) if heads_compete else Array.of(("kv",), missing[row])
    chosen = e.own(arrays.top(_rest(e, best, prefix, layer), number, best.axes), best.axes, layer)
    fits = (remaining <= missing)[row][:, None]
    chosen = e.spread(chosen, ("kv", "token"), layer)
    return Array.of(("kv", "token"), sets[row].data | chosen.data | fits)


def whole_budget(e: Values, layer: int) -> Array:
    """The budget in force at a layer, floored."""
    budget_node = e.own_budget
    if budget_node is None:
        return Array.of(("kv",), e.budgets[layer])
    if e.bound.static.needs(budget_node) is not None:
        return Array.of((), float(counts.floored(e.number(budget_node, layer))))
    value = e.value(budget_node, layer)
    return Array.of(value.axes, np.floor(arrays.snapped(value.data)))


def budget(e: Values, node: Node, layer: int) -> Array:
    """The name `budget`: that of these rules, or inside `propagate` that of the section."""
    outer_budget = e.own_budget
    propagate = e.bound.program.propagate if node.value else None
    e.own_budget = e.rules.budget if propagate is None else propagate.budget
    result = whole_budget(e, layer)
    e.own_budget = outer_budget
    return result
