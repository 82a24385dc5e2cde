"""Values known before the prefill, which the host evaluates: exact rationals, or float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.host import applied, as_float
from kvpolicy.dsl.ops.operations import Kind

Value = Fraction | bool | float


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


def evaluator(env: Mapping[str, Value]) -> Callable[[Node], Value]:
    """`evaluate` in one environment for many nodes: what they share is computed once."""
    evaluation = _Evaluation(env)

    def value(node: Node) -> Value:
        found = evaluation.value(node)
        if found is None:
            raise NotStatic("the value is absent")
        return found

    return value


def truth(condition: Node, known: Callable[[Node], Value | None]) -> bool | None:
    """Whether a condition holds, by the known values of its parts; None: data decide.

    Args:
        known: gives the value of a node; None: data decide it.
    """
    value = known(condition)
    if value is not None or condition.op not in ("and", "or"):
        return None if value is None else bool(value)
    parts = [truth(each, known) for each in condition.args]
    decisive = condition.op == "or"
    if decisive in parts:
        return decisive
    return None if None in parts else not decisive


class _Evaluation:
    """One environment; None stands for an absent value."""

    def __init__(self, env: Mapping[str, Value]) -> None:
        self.env = env
        self.layers: list[_Evaluation] | None = None

    @once
    def value(self, node: Node) -> Value | None:
        if node.type.axes:
            raise NotStatic(node.op)
        row = node.operation
        if row.kind is Kind.LITERAL:
            return node.literal
        if node.op == "size" and node.value == "pi":
            return math.pi
        if row.kind is Kind.GIVEN or node.op == "budget":
            return self._given(node)
        if "layer" in node.axes:
            return self._over_layers(node)
        if node.op == "at":
            return self._at(node)
        if node.op == "choose":
            return self.value(node.args[0 if self.value(node.args[1]) else 2])
        args = [self.value(arg) for arg in node.args]
        if node.op == "mask":
            return args[0] if args[1] else None
        if row.host is None or row.is_reduction:
            raise NotStatic(node.op)
        if row.kind is Kind.LOGIC:
            return bool(row.host(*(bool(arg) for arg in args)))
        if any(arg is None for arg in args):
            return False if node.type.kind == "truth" else None
        return applied(row.host, args)

    def _given(self, node: Node) -> Value:
        name = {"size": str(node.value), "param": f"param:{node.value}"}.get(node.op, "budget")
        if name not in self.env:
            raise NotStatic(name)
        value = self.env[name]
        return Fraction(value) if type(value) is int else value

    def _each_layer(self) -> list[_Evaluation]:
        """This environment at every layer."""
        if self.layers is None:
            if "layers" not in self.env:
                raise NotStatic("layers")
            count = int(self.env["layers"])
            self.layers = [_Evaluation({**self.env, "layer": Fraction(i)}) for i in range(count)]
            for layer in self.layers:
                layer.layers = self.layers
        return self.layers

    def _at(self, node: Node) -> Value | None:
        which, here = self.value(node.args[0]), self._given_layer()
        layer = None if which is None else counts.index(which, here + 1)
        return None if layer is None else self._each_layer()[layer].value(node.args[1])

    def _given_layer(self) -> int:
        if "layer" not in self.env:
            raise NotStatic("layer")
        return int(self.env["layer"])

    def _over_layers(self, node: Node) -> Value | None:
        layers = self._each_layer()
        row = node.operation
        if row.shares_out:
            return self._split(node, layers)
        if row.host is None:
            raise NotStatic(node.op)
        values = [v for v in (layer.value(node.args[0]) for layer in layers) if v is not None]
        if any(isinstance(value, float) for value in values):
            values = [as_float(value) for value in values]
        return applied(partial(row.host, values), [])

    def _split(self, node: Node, layers: list[_Evaluation]) -> Value:
        here = self._given_layer()
        columns = [[_share(layer.value(arg)) for layer in layers] for arg in node.args]
        maxima = columns[2] if len(columns) > 2 else None
        cascade = node.op == "cascade"
        return Fraction(counts.split(columns[0][here], columns[1], maxima, cascade=cascade)[here])


def _share(value: Value | None) -> Value:
    if value is None:
        raise NotStatic("an absent share")
    return value
