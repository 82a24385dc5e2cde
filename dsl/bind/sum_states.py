"""States that queries only add to, so that what many queries add is one sum.

    heat: heat + sum[group, query](attn(new))

While no entry leaves, what T decode steps add to an entry is the sum over their T queries, if an
entry gets nothing from the queries before its own: `Step` says that values per query and token are
absent where the token comes after the query. Likewise the chunks of a prompt add to it one after
the other. Maxima, decay, values that differ from step to step, other states and what may become
infinite (with both signs, the order of a sum would matter) are computed step by step instead, or of
the whole prompt.
"""

from __future__ import annotations

from kvpolicy.dsl.ir.lower import Static
from kvpolicy.dsl.ir.nodes import Node, State
from kvpolicy.dsl.ops.operations import Kind


class SumStates:
    """Which states queries only add to; in `next`, the state's own value is `before`.

    Args:
        static: of the policy.
        queries: by which names windows have the queries at hand: "new", in a prefill also "all".
    """

    def __init__(self, static: Static, queries: tuple[str, ...] = ("new",)) -> None:
        self._static, self._queries = static, queries

    def state(self, state: State) -> bool:
        """Whether several steps, or chunks, change a state by one sum over their queries."""
        if state.start is not None and not self.constant(state.start):
            return False
        return state.next is None or self._adds(state.next, "token" in state.type.axes)

    def constant(self, node: Node) -> bool:
        """Whether a value is the same at every step, for the entries that are there."""
        needs = self._static.needs(node)
        if needs is not None:
            return "generated" not in needs
        row = node.operation
        if row.same_at_each_step:
            return True
        if row.is_reduction and {"token", "layer"} & set(node.axes):
            return False
        return (row.elementwise or row.is_reduction) and all(map(self.constant, node.args))

    def _adds(self, node: Node, by_token: bool) -> bool:
        """Whether a value is `before` plus what the step's query gives."""
        if node.op == "before":
            return True
        if not node.operation.sums or len(node.args) != 2:
            return False
        left, right = node.args
        if self._adds(left, by_token) and self._additive(right, by_token):
            return True
        commutative = node.operation.commutative
        return commutative and self._additive(left, by_token) and self._adds(right, by_token)

    def _additive(self, node: Node, by_token: bool) -> bool:
        """Whether the sum of a value over several steps is its value for all their queries.

        Args:
            by_token: whether the value must have the axis `token`: one for all tokens would be
                added to entries before they exist.
        """
        if by_token and "token" not in node.type.axes:
            return False
        row = node.operation
        if row.adds_up and "query" in node.axes and "layer" not in node.axes:
            return self._of_query(node.args[0])
        if row.sums:
            return all(self._additive(arg, by_token) for arg in node.args)
        if row.scales:
            first, second = node.args
            if row.commutative and self._number(first):
                return self._additive(second, by_token)
            fits = self._number(second) if row.commutative else _not_zero(second)
            return fits and self._additive(first, by_token)
        over = {"kv", "group"} if row.averages else {"kv", "group", "token"}
        return row.linear and set(node.axes) <= over and self._additive(node.args[0], by_token)

    def _number(self, node: Node) -> bool:
        return self._static.needs(node) is not None and self.constant(node)

    def _of_query(self, node: Node) -> bool:
        """Whether a query's value is finite and does not depend on the other queries."""
        row = node.operation
        if self._static.needs(node) is not None or row.same_at_each_step:
            return self.constant(node)
        if row.is_window:
            return node.value in self._queries
        if row.kind is Kind.POOL:
            inner, width = node.args
            return "query" in inner.type.axes and self._number(width) and self._of_query(inner)
        if row.is_reduction:
            if {"query", "layer"} & set(node.axes):
                return False
            if "token" in node.axes and "query" not in node.args[0].type.axes:
                return False
        elif not row.elementwise:
            return False
        return _stays_finite(node) and all(map(self._of_query, node.args))


def _not_zero(node: Node) -> bool:
    return node.op == "number" and node.value != 0


def _stays_finite(node: Node) -> bool:
    """Whether an operation gives finite values of finite ones."""
    row = node.operation
    if row.divides:
        return _not_zero(node.args[1])
    if node.op == "power":
        return node.args[1].op == "number" and node.args[1].literal > 0
    if row.infinite_of_none:
        return not any(part.op == "mask" for part in node.walk())
    return row.keeps_finite
