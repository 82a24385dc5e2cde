"""Operations over other layers: `past` and `at`, and what each layer gets of a division."""

from __future__ import annotations

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, When


def past(e: Values, node: Node, layer: int) -> Array:
    number = counts.whole(e.number(node.args[1], layer), len(e.every_layer))
    sources = [max(0, layer - i) for i in reversed(range(number))]
    x = arrays.stack("past", [e.read_at(e.value(node.args[0], i), i, layer) for i in sources])
    exists = np.array([layer - i >= 0 for i in reversed(range(number))], dtype=np.bool_)
    present = x.present & exists.reshape(-1, *[1] * (x.data.ndim - 1))
    return Array.of(x.axes, x.data, present)


def at(e: Values, node: Node, layer: int) -> Array:
    deepest = layer if node.when <= When.LAYER else len(e.every_layer) - 1
    number, x = node.args
    is_present = e.value(number, layer).present.all()
    source = counts.index(e.number(number, layer), deepest + 1) if is_present else None
    if source is not None:
        return e.read_at(e.value(x, source), source, layer)
    value = e.value(x, layer)
    return Array.of(value.axes, value.data, np.zeros(value.data.shape, dtype=np.bool_))


def split(e: Values, node: Node, layer: int) -> Array:
    """`split` and `cascade`."""
    total = e.number(node.args[0], 0)
    weights = [e.number(node.args[1], source) for source in e.every_layer]
    maxima = None
    if len(node.args) == 3:
        maxima = [e.number(node.args[2], source) for source in e.every_layer]
    parts = counts.split(total, weights, maxima, cascade=node.op == "cascade")
    return Array.of((), parts[layer])


def cluster(e: Values, node: Node, layer: int) -> Array:
    values = [e.number(node.args[0], source) for source in e.every_layer]
    number = counts.whole(e.number(node.args[1], layer), len(values))
    return Array.of((), counts.cluster(values, number)[layer])
