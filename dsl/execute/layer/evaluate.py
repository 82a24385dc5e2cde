"""Values of nodes at one layer, computed when they are asked for.

Prefills, merges, shares and decode steps are evaluated here; nodes that look at other layers, in
`across.py`.

Dimensions: L layers, G KV heads, n candidates of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

import torch
from kvpolicy.dsl.execute.layer.gathered import of_all_heads
from kvpolicy.dsl.execute.layer.generated import Generated
from kvpolicy.dsl.execute.operations.elementwise import mask
from kvpolicy.dsl.execute.operations.in_blocks import in_blocks
from kvpolicy.dsl.execute.operations.operands import operands, operation
from kvpolicy.dsl.execute.tensors.values import (
    Frame,
    Value,
    aligned,
    as_tensor,
    broadcast,
    repeated_along,
    scalar,
    sizes_of,
    union,
)
from kvpolicy.dsl.ir.heads import across_heads
from kvpolicy.dsl.ir.nodes import Node, State, Type


def reduces_past(node: Node) -> bool:
    """Whether a node reduces `past(...)`, which a kernel may do without stacking layers."""
    return node.axes == ("past",) and node.args[0].op == "past"


def updating(states: Mapping[str, State]) -> dict[str, State]:
    """States ready to be evaluated: in `next`, the state's own name is the leaf `before`."""
    return {name: _from_before(state) for name, state in states.items()}


def _from_before(state: State) -> State:
    if state.next is None:
        return state
    before = Node("before", value=state.name, type=state.type, when=state.next.when)

    @cache
    def visit(node: Node) -> Node:
        if node.op == "state" and node.value == state.name:
            return before
        args = tuple(visit(argument) for argument in node.args)
        return node if args == node.args else replace(node, args=args)

    return replace(state, next=visit(state.next))


def alone(node: Node, evaluation: Evaluation) -> Value:
    """`Evaluation.across_layers` where no other layers are at hand.

    Raises:
        TypeError: always.
    """
    raise TypeError(f"`{node.op}` looks at other layers, and none are at hand")


@dataclass
class Evaluation:
    """The values at one layer.

    Attributes:
        frame: the layer's tensors.
        updates: the states that nodes may name, from `updating`.
        before: name -> value before this step; a state without one begins.
        after: name -> value after this step, of the states needed so far.
        known: node -> value, of the nodes computed so far.
        unheld_nodes: nodes whose values are not held, because one node alone reads them.
        shared_nodes, shared: nodes with one value in all layers, and the values found so far.
        across_layers: gives the value of a node that looks at other layers.
        own_operations: operation -> what computes it here, as in a merge; gives None for a node
            that is computed as usual.
        budget: in decode, the prefill's floored budget.
        decided: in decode, name -> the prefill's value of a `let`.
        in_block: whether it is for a block of `in_blocks`, or for numbers of all layers.
        dropped: in a merge, bool [G, P], which places of the axis `dropped` hold an entry.
        generated: kernels that are used in place of torch.
        awaited: node -> what gives its value, once other ranks were asked for its operands.
    """

    frame: Frame
    updates: Mapping[str, State] = field(default_factory=dict)
    before: Mapping[str, Value] = field(default_factory=dict)
    after: dict[str, Value] = field(default_factory=dict)
    known: dict[Node, Value] = field(default_factory=dict)
    unheld_nodes: Set[Node] = frozenset()
    shared_nodes: Set[Node] = frozenset()
    shared: dict[Node, Value] = field(default_factory=dict)
    across_layers: Callable[[Node, Evaluation], Value] = alone
    own_operations: Mapping[str, Callable[[Node, Evaluation], Value | None]] = field(
        default_factory=dict
    )
    budget: Value | None = None
    decided: Mapping[str, Value] = field(default_factory=dict)
    in_block: bool = False
    dropped: torch.Tensor | None = None
    generated: Generated | None = None
    awaited: dict[Node, Callable[[], Value]] = field(default_factory=dict, init=False)

    def value(self, node: Node) -> Value:
        """The value of a node."""
        values = self.shared if node in self.shared_nodes else self.known
        x = values.get(node)
        if x is None:
            x = self._masked(node, self._find(node))
            if values is self.shared or node not in self.unheld_nodes:
                values[node] = x
        return x

    def _masked(self, node: Node, x: Value) -> Value:
        """The value, absent (a set: false) where a KV head has no entry, and after the query."""
        step = self.frame.step
        if step is not None and step.number > 1 and not node.operation.is_window:
            x = self.frame.causal(x) if {"query", "token"} <= set(x.axes) else x
        if self.dropped is not None and {"kv", "dropped"} <= set(x.axes):
            return self._of_dropped(x, self.dropped)
        if self.frame.held_mask is None or not {"kv", "token"} <= set(x.axes):
            return x
        return self.frame.present(x)

    def _of_dropped(self, x: Value, dropped: torch.Tensor) -> Value:
        dropped_axes: tuple[str, ...] = ("kv", "dropped")
        if x.mask is dropped:
            return x
        if isinstance(x.data, torch.Tensor) and x.data.dtype == torch.bool:
            return replace(x, data=x.data & aligned(dropped, dropped_axes, x.axes))
        mask, mask_axes = dropped, dropped_axes
        if x.mask is not None:
            mask, mask_axes = self.frame.conjunction(x.mask, x.mask_axes, mask, dropped_axes)
        return replace(x, mask=mask, mask_axes=mask_axes, zero_where_absent=False)

    def number(self, node: Node) -> Fraction | float | bool:
        """A scalar as the host's number, exact where no data decide it; may wait for the device."""
        if self.frame.bound.static.needs(node) is not None:
            return self.frame.number(node)
        data = self.value(node).data
        return data.item() if isinstance(data, torch.Tensor) else data

    def holds(self, node: Node) -> bool:
        """Whether a condition holds for the layer; `and`, `or` stop at the operand that decides."""
        needs, join = self.frame.bound.static.needs, {"and": all, "or": any}.get(node.op)
        if join is None or needs(node) is not None:
            return bool(self.number(node))
        known_first = sorted(node.args, key=lambda operand: needs(operand) is None)
        return join(self.holds(operand) for operand in known_first)

    def tensor(self, node: Node, axes: tuple[str, ...]) -> torch.Tensor:
        """A node's data, repeated as by `spread`."""
        return spread(self.value(node), axes, self.frame)

    def _find(self, node: Node) -> Value:
        if self.frame.bound.static.needs(node) is not None:
            return scalar(self.frame.number(node))
        if self.frame.heads.divided and self.reaches(node):
            return self.of_ranks(node)
        x = self._named(node)
        if x is not None:
            return x
        branch = self._branch(node)
        if branch is not None or node.op == "broadcast":
            return self.broadcast(self.value(branch or node.args[0]), node.type)
        if node.left_over and self.frame.held_mask is not None:
            return self._rest(node)
        if node.across_layers or reduces_past(node):
            return self.across_layers(node, self)
        return self._computed(node)

    def _named(self, node: Node) -> Value | None:
        """The value of a name that this evaluation defines; None for any other node."""
        x = self.own_operations[node.op](node, self) if node.op in self.own_operations else None
        if x is not None:
            return x
        if node.op == "state":
            return self.state(node.symbol)
        if node.op == "before":
            return self._begin(node.symbol)
        if node.op == "decided":
            return self.decided[str(node.value)]
        return self.budget if node.op == "budget" else None

    def _computed(self, node: Node) -> Value:
        """The value of an operation: by generated kernels, in blocks, or by torch at once."""
        if self.frame.heads.divided:
            self._ask(operands(node))
        if not self.in_block and self.generated is not None:
            bundle = self.generated.bundle(node, self.frame)
            if bundle is not None:
                self.known.update(self.generated.values(bundle, self.frame, self.value))
                return self.known[node]
        if not self.in_block and not self._by_kernels(node):
            x = in_blocks(node, self.frame, self.value, self._within)
            if x is not None:
                return x
        return operation(node)(node, self.frame, *self.given(node))

    def _branch(self, node: Node) -> Node | None:
        """The branch that a choice takes, if the host knows its condition; None otherwise."""
        if node.op != "choose" or self.frame.bound.static.needs(node.args[1]) is None:
            return None
        holds = self.value(node.args[1]).data
        return None if isinstance(holds, torch.Tensor) else node.args[0 if holds else 2]

    def given(self, node: Node) -> list[Value]:
        """The values of a node's operands."""
        return [self.value(x) for x in operands(node)]

    def of_ranks(self, node: Node) -> Value:
        """The value of a node that looks at KV heads of other ranks."""
        self._ask([node])
        return self.awaited.pop(node)()

    def ask(self, roots: Iterable[Node]) -> None:
        """Asks other ranks for what roots need of their KV heads, if no other answer decides it."""
        if self.frame.heads.divided:
            done: dict[Node, bool] = {}
            for root in roots:
                self.ask_below(root, done)

    def ask_below(self, node: Node, done: dict[Node, bool]) -> bool:
        """As `ask`, for one node.

        Args:
            done: results for the nodes seen so far.

        Returns:
            Whether the node needs nothing of other ranks.
        """
        if node in self.known or self.frame.bound.static.needs(node) is not None:
            return True
        if node not in done:
            branch = self._branch(node)
            operand_nodes = operands(node) if branch is None else (branch,)
            independent = [self.ask_below(x, done) for x in operand_nodes]
            done[node] = all(independent) and not across_heads(node)
            if all(independent):
                self._ask([node])
        return done[node]

    def _ask(self, nodes: Iterable[Node]) -> None:
        """Asks other ranks for the operands of the nodes that look at their KV heads."""
        for node in nodes:
            if self.reaches(node) and node not in self.known and node not in self.awaited:
                self.awaited[node] = of_all_heads(node, self.frame, self.given(node))

    def reaches(self, node: Node) -> bool:
        """Whether a node looks across KV heads, also of other ranks, of this layer alone."""
        return across_heads(node) and not node.across_layers

    def _by_kernels(self, node: Node) -> bool:
        """Whether generated kernels compute all that a reduction reads of attention's size."""
        if self.generated is None or not node.operation.is_reduction:
            return False
        return self.generated.covers(node, self.frame)

    def _within(self, node: Node, block: Frame, known: dict[Node, Value]) -> Value:
        # What layers share is for all tokens and KV heads.
        inside = replace(self, frame=block, known=known, shared_nodes=frozenset(), in_block=True)
        return inside.value(node)

    def broadcast(self, x: Value, type_: Type) -> Value:
        """The value with all axes of a type."""
        return broadcast(x, type_, self.frame, 0 if self.dropped is None else self.dropped.shape[1])

    def _rest(self, node: Node) -> Value:
        """`x where not taken`: each KV head chooses among the entries that it holds."""
        free = spread(self.value(node.args[1]), ("kv", "token"), self.frame)
        free_set = self.frame.present(Value(free, ("kv", "token"), finite=True))
        return mask(node, self.frame, self.value(node.args[0]), free_set)

    def state(self, name: str) -> Value:
        """A state's value after this step."""
        if name not in self.after:
            state = self.updates[name]
            x = self._begin(name) if state.next is None else self.value(state.next)
            self.after[name] = self._with_all_axes(x, state)
        return self.after[name]

    def _begin(self, name: str) -> Value:
        """A state's value before this step."""
        old, state = self.before.get(name), self.updates[name]
        if old is not None and sizes_of(old).get("token") == self.frame.tokens:
            return old
        start = Value(0.0, finite=True) if state.start is None else self.value(state.start)
        start = self.broadcast(start, state.type)
        if old is None:
            return start
        if "token" in old.axes:
            return self._longer(old, start)
        if not isinstance(old.data, torch.Tensor):
            return start if math.isnan(old.data) else old
        # A state of several layers, NaN at those where it has not begun.
        data = torch.where(old.data.isnan(), aligned(start.data, start.axes, old.axes), old.data)
        return Value(data, old.axes, finite=start.finite and old.finite)

    def _longer(self, old: Value, start: Value) -> Value:
        """A state, with start values appended for new entries."""
        frame, dim, rows = self.frame, old.axes.index("token"), old.tensor
        missing = frame.tokens - rows.shape[dim]
        data = as_tensor(start.data, frame.device).double()
        sizes = {**sizes_of(old), "token": frame.tokens}
        fresh = repeated_along(data, start.axes, old.axes, sizes)
        fresh = fresh.narrow(dim, frame.tokens - missing, missing)
        return Value(torch.cat([rows, fresh], dim), old.axes, finite=old.finite)

    def _with_all_axes(self, x: Value, state: State) -> Value:
        """A state in float64 with all its axes, so that it can follow its entries."""
        frame = self.frame
        axes = union(x.axes, state.type.axes)
        sizes = {
            "kv": frame.kv,
            "group": frame.bound.shape.group,
            "token": frame.tokens,
            "dim": frame.bound.shape.head_dim,
            **sizes_of(x),
        }
        data = repeated_along(as_tensor(x.data, frame.device).double(), x.axes, axes, sizes)
        return Value(data, axes, x.mask, x.mask_axes, finite=x.finite)

    def states_of(self, names: Iterable[str]) -> dict[str, Value]:
        """Name -> value after this step, of some states."""
        return {name: self.state(name) for name in names}


def spread(x: Value, axes: tuple[str, ...], frame: Frame) -> torch.Tensor:
    """Data repeated along the axes, of `kv` and `token`, that they lack; a set: false if absent."""
    data = as_tensor(x.data, frame.device)
    if data.dtype == torch.bool and x.mask is not None and not x.zero_where_absent:
        data = data & aligned(x.mask, x.mask_axes, x.axes)
    sizes = {"kv": frame.kv, "token": frame.tokens}
    return repeated_along(data, x.axes, axes, sizes)
