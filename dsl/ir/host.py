"""Values known before the prefill, which the host evaluates: exact rationals, or float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Protocol
from weakref import ref

from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.host import applied, as_float
from kvpolicy.dsl.ops.operations import Kind

Value = Fraction | bool | float


class Evaluator(Protocol):
    """Gives the values of nodes in one environment."""

    def __call__(self, node: Node, layer: int | None = None) -> Value: ...


class NotStatic(Exception):
    """The node depends on something that is not known before the prefill."""


def evaluate(node: Node, env: Mapping[str, Value]) -> Value:
    """The value of a static node.

    Args:
        node: a number or condition without axes.
        env: values of `layers`, `heads`, `kv_heads`, `layer`, `prompt`, `length`, `generated`,
            `budget` and `param:NAME`; a missing one is not known. Reductions over `layer` need
            `layers`.

    Returns:
        An exact Fraction or a bool; a float after `cos`, `exp`, `log`, `sqrt`, irrational powers
        and infinities. An operation whose result would be NaN gives 0.

    Raises:
        NotStatic: the value depends on data, on a missing name, or is absent.
    """
    return evaluator(env)(node)


def evaluator(env: Mapping[str, Value]) -> Evaluator:
    """`evaluate` in one environment for many nodes, whose second argument is a layer.

    What they share is computed once, and once for all layers if it is the same at each.

    Args:
        env: as of `evaluate`; without `layer` if that is an argument.
    """
    evaluation = _Evaluation(env)

    def value(node: Node, layer: int | None = None) -> Value:
        result = (evaluation if layer is None else evaluation.at_layer(layer)).value(node)
        if result is None:
            raise NotStatic("the value is absent")
        return result

    return value


def truth(condition: Node, known: Callable[[Node], Value | None]) -> bool | None:
    """Whether a condition holds, by the known values of its parts; None: data decide.

    Args:
        known: gives the value of a node; None: data decide it.
    """
    value = known(condition)
    if value is not None or condition.op not in ("and", "or"):
        return None if value is None else bool(value)
    parts = [truth(arg, known) for arg in condition.args]
    decisive = condition.op == "or"
    if decisive in parts:
        return decisive
    return None if None in parts else not decisive


def combined(node: Node, args: Sequence[Value | None]) -> Value | None:
    """The value of an elementwise node, or of a `mask`, by its arguments' values; None: absent.

    Raises:
        NotStatic: the host cannot compute the operation.
    """
    row = node.operation
    if node.op == "choose":
        return args[0 if args[1] else 2]
    if node.op == "mask":
        return args[0] if args[1] else None
    if row.host is None or row.is_reduction:
        raise NotStatic(node.op)
    if row.kind is Kind.LOGIC:
        return bool(row.host(*(bool(arg) for arg in args)))
    if any(arg is None for arg in args):
        return False if node.type.kind == "truth" else None
    if row.kind is Kind.COMPARISON:
        args = [counts.ordered(arg) for arg in args if arg is not None]
    return applied(row.host, args)


def reduced(node: Node, values: Sequence[Value | None]) -> Value:
    """The value of a reduction of some values, of which absent ones do not count.

    Raises:
        NotStatic: the host cannot compute the operation.
    """
    row = node.operation
    if row.host is None or not row.is_reduction:
        raise NotStatic(node.op)
    numbers = [value for value in values if value is not None]
    if any(isinstance(value, float) for value in numbers):
        numbers = [as_float(value) for value in numbers]
    return applied(partial(row.host, numbers), [])


class _Evaluation:
    """One environment, or one layer of it; None stands for an absent value.

    Args:
        env: as of `evaluate`.
        parent: the evaluation of all layers, of which this is one; held by a weak reference.
        layer: the number of this layer.
    """

    def __init__(
        self,
        env: Mapping[str, Value],
        parent: _Evaluation | None = None,
        layer: Fraction | None = None,
    ) -> None:
        self._env = env
        self._parent = None if parent is None else ref(parent)
        self._layer = env.get("layer") if parent is None else layer
        self._layers: dict[int, _Evaluation] = {}

    @property
    def _of_all_layers(self) -> _Evaluation:
        """The evaluation whose layer this is, or this one."""
        return (None if self._parent is None else self._parent()) or self

    def at_layer(self, layer: int) -> _Evaluation:
        """This environment at a layer."""
        if layer not in self._layers:
            self._layers[layer] = _Evaluation(self._env, self, Fraction(layer))
        return self._layers[layer]

    @once
    def value(self, node: Node) -> Value | None:
        """The value of a node; raises NotStatic."""
        if node.type.axes:
            raise NotStatic(node.op)
        all_layers = self._of_all_layers
        if all_layers is not self and not node.counts_layers:
            return all_layers.value(node)
        row = node.operation
        if row.kind is Kind.LITERAL:
            return node.literal
        if node.op == "head_table":
            return node.head_table.layers[self._given_layer()][0]
        if node.op == "size" and node.value == "pi":
            return math.pi
        if row.kind is Kind.GIVEN or node.op == "budget":
            return self._from_env(node)
        if "layer" in node.axes:
            return self._over_layers(node)
        if node.op == "at":
            return self._at(node)
        if node.op == "choose":
            return self.value(node.args[0 if self.value(node.args[1]) else 2])
        return combined(node, [self.value(arg) for arg in node.args])

    def _from_env(self, node: Node) -> Value:
        name = {"size": str(node.value), "param": f"param:{node.value}"}.get(node.op, "budget")
        value = self._layer if name == "layer" else self._env.get(name)
        if value is None:
            raise NotStatic(name)
        return Fraction(value) if type(value) is int else value

    def _each_layer(self) -> list[_Evaluation]:
        """This environment at every layer."""
        if "layers" not in self._env:
            raise NotStatic("layers")
        all_layers = self._of_all_layers
        return [all_layers.at_layer(i) for i in range(int(self._env["layers"]))]

    def _at(self, node: Node) -> Value | None:
        source, own_layer = self.value(node.args[0]), self._given_layer()
        layer = None if source is None else counts.index(source, own_layer + 1)
        return None if layer is None else self._of_all_layers.at_layer(layer).value(node.args[1])

    def _given_layer(self) -> int:
        if self._layer is None:
            raise NotStatic("layer")
        return int(self._layer)

    def _over_layers(self, node: Node) -> Value | None:
        if node.operation.shares_out:
            total = _share(self.value(node.args[0]))
            return Fraction(self._of_all_layers.split(node, total)[self._given_layer()])
        return reduced(node, [layer.value(node.args[0]) for layer in self._each_layer()])

    @once
    def split(self, node: Node, total: Value) -> list[int]:
        """[L] shares of a total at each layer, by a node that shares it out."""
        layers, args = self._each_layer(), node.args[1:]
        weights, *limits = ([_share(layer.value(arg)) for layer in layers] for arg in args)
        maxima = limits[0] if limits else None
        return counts.split(total, weights, maxima, cascade=node.op == "cascade")


def _share(value: Value | None) -> Value:
    if value is None:
        raise NotStatic("an absent share")
    return value
