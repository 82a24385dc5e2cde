"""Expressions of the language as lines of Triton, on tiles with the axes group, query and token.

A tile has three dimensions, of size 1 where a value lacks the axis: query heads of one KV head,
queries, tokens; in a kernel over vectors two, tokens and `dim`. Absent values are conditions
beside the data, as in the torch program, and are applied where a reduction or a store reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.kernel_values import exponent, finite, is_end
from kvpolicy.dsl.codegen.leaves import Leaves
from kvpolicy.dsl.codegen.tiles import SEEN, TILE, Condition, Tile, conjunction, together
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind

_CALLS = {
    "abs": "tl.abs", "exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt",
    "minimum": "tl.minimum", "maximum": "tl.maximum",
}  # fmt: skip
EMPTY = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")', "any": "0", "count": "0.0"}
FOLDS = {"sum": "tl.sum", "max": "tl.max", "min": "tl.min", "any": "tl.max", "count": "tl.sum"}


@dataclass
class Writer(Leaves):
    """Writes the lines of one kernel's body.

    Attributes:
        leaf: what a kernel has at hand: the tile of a node, or None.
    """

    leaf: Callable[[Writer, Node], Tile | None] = lambda writer, node: None

    def value(self, node: Node) -> Tile:
        """The tile of a node."""
        if id(node) not in self.given:
            self.given[id(node)] = self._make(node)
        return self.given[id(node)]

    def _make(self, node: Node) -> Tile:
        static = self.bound.static.needs(node)
        if static is not None:
            return self._number(node, exact=not static)
        if id(node) in self.stored:
            name, axes = self.stored[id(node)]
            return self._load(node.name or node.op, name, axes, node)
        made = self.leaf(self, node)
        if made is not None:
            return made
        row = node.operation
        if row.kind is Kind.PLACE or node.op in ("index", "top"):
            made = self._place(node)
            if made is not None:
                return made
        if row.is_reduction and node.axes == ("group",):
            return self._over_group(node)
        if row.kind is Kind.POOL:
            return self._pooled(node)
        if row.kind in (Kind.BRANCH, Kind.LOGIC):
            write: Callable[[Node], Tile] = getattr(self, f"_{node.op}")
            return write(node)
        return self._arithmetic(node)

    # Elementwise.

    def _arithmetic(self, node: Node) -> Tile:
        tiles = [self.value(each) for each in node.args]
        axes = frozenset().union(*(each.axes for each in tiles))
        text = self._operation(node, [each.text for each in tiles])
        clean = node.type.kind == "truth" or (
            not node.operation.may_be_nan and all(finite(each) for each in node.args)
        )
        if node.op == "divide" and node.args[1].op == "number" and node.args[1].value != 0:
            clean = finite(node.args[0])
        name = self.named(node.name or _short(node.op), text)
        if not clean:
            self.line(f"{name} = tl.where({name} == {name}, {name}, 0.0)  # no NaN")
        present = together(*tiles)
        if node.type.kind == "truth":  # a comparison with an absent value is false
            every = (Condition(name, axes), *present)
            both = frozenset().union(axes, *(each.axes for each in present))
            return Tile(f"({conjunction(every)})", both)
        return Tile(name, axes, present)

    def _operation(self, node: Node, args: list[str]) -> str:
        if node.op == "divide":
            known = node.args[1].op == "number"
            return f"{args[0]} / {args[1]}" if known else f"{args[0]} / ({args[1]} + 0.0)"
        if node.op == "power":
            return _power(args[0], exponent(node))
        if node.op == "negate":
            return f"-{args[0]}"
        if node.op in _CALLS:
            return f"{_CALLS[node.op]}({', '.join(args)})"
        return f"{args[0]} {node.operation.sign} {args[1]}"

    def truth(self, node: Node) -> Tile:
        """A truth value, false where it is absent."""
        x = self.value(node)
        if not x.present:
            return x
        axes = frozenset().union(x.axes, *(each.axes for each in x.present))
        return Tile(f"({conjunction((Condition(x.text, x.axes), *x.present))})", axes)

    def _and(self, node: Node) -> Tile:
        a, b = (self.truth(each) for each in node.args)
        return Tile(f"({a.text} & {b.text})", a.axes | b.axes)

    def _or(self, node: Node) -> Tile:
        a, b = (self.truth(each) for each in node.args)
        return Tile(f"({a.text} | {b.text})", a.axes | b.axes)

    def _not(self, node: Node) -> Tile:
        inner = node.args[0]
        if is_end(inner, self.bound):
            return self.end(inner, outside=True)
        x = self.truth(inner)
        return Tile(f"({x.text} == 0)", x.axes)

    def _mask(self, node: Node) -> Tile:
        x, holds = self.value(node.args[0]), self.truth(node.args[1])
        condition = Condition(holds.text, holds.axes)
        return Tile(x.text, x.axes | holds.axes, tuple(dict.fromkeys((*x.present, condition))))

    def _choose(self, node: Node) -> Tile:
        x, holds, y = self.value(node.args[0]), self.truth(node.args[1]), self.value(node.args[2])
        axes = x.axes | holds.axes | y.axes
        name = self.named(node.name or "chosen", f"tl.where({holds.text}, {x.text}, {y.text})")
        if not x.present and not y.present:
            return Tile(name, axes)
        first = conjunction(x.present) or "(tokens > 0)"
        second = conjunction(y.present) or "(tokens > 0)"
        text = f"({holds.text} & {first}) | (({holds.text} == 0) & {second})"
        all_axes = axes.union(*(each.axes for each in (*x.present, *y.present)))
        there = self.named(f"{name}_there", text)
        return Tile(name, axes, (Condition(there, all_axes),))

    # Reductions within a tile.

    def _over_group(self, node: Node) -> Tile:
        x = self.value(node.args[0])
        self.comment(node)
        made = self.reduced(node.op, x, ("group",), node)
        name = self.named(node.name or f"{node.op}_of_group", made.text)
        if not finite(node.args[0]) and node.op in ("sum", "mean"):
            self.line(f"{name} = tl.where({name} == {name}, {name}, 0.0)  # no NaN")
        return replace(made, text=name)

    def reduced(self, op: str, x: Tile, over: tuple[str, ...], node: Node) -> Tile:
        """A reduction of a tile over some of its axes, skipping absent values and padding."""
        if op == "mean":
            total = self.reduced("sum", x, over, node)
            number = self.number(x, over, node)
            some = number.text if number.text == "GROUP" else f"tl.maximum({number.text}, 1)"
            return Tile(f"{total.text} / {some}", total.axes | number.axes)  # of nothing: 0
        truth = node.args[0].type.kind == "truth"
        conditions = (*x.present, *self.padding(over, x))
        fixed = tuple(each for each in conditions if not each.axes & set(over))
        inner = tuple(each for each in conditions if each.axes & set(over))
        text = {"count": f"tl.where({x.text}, 1.0, 0.0)", "any": f"tl.where({x.text}, 1, 0)"}.get(
            op, x.text
        )
        if op == "count" and not truth:
            text = "1.0"
        axes = (x.axes if text != "1.0" else frozenset()).union(*(each.axes for each in inner))
        if inner:
            text = self.named("present", f"tl.where({conjunction(inner)}, {text}, {EMPTY[op]})")
        axes_wanted = set(over) | (x.axes if not inner else set())
        if not axes_wanted <= axes:
            shape = ", ".join(self.sizes[a] if a in axes_wanted else "1" for a in TILE)
            text = f"({text} + tl.zeros([{shape}], tl.float32))"
        for axis in over:
            text = f"{FOLDS[op]}({text}, {TILE.index(axis)}, keep_dims=True)"
        if fixed:
            text = self.named(f"{op}_of_present", text)
            text = f"tl.where({conjunction(fixed)}, {text}, {EMPTY[op]})"
            axes = axes.union(*(each.axes for each in fixed))
        text = f"({text} > 0)" if op == "any" else text
        return Tile(text, (axes | x.axes) - set(over))

    def number(self, x: Tile, over: tuple[str, ...], node: Node) -> Tile:
        """How many values are present along some axes."""
        known = self.known_number(x, over)
        if known is not None:
            return known
        return self.reduced("count", replace(x, text="1.0"), over, of_numbers(node))

    def known_number(self, x: Tile, over: tuple[str, ...]) -> Tile | None:
        """The same where it need not be counted: each query sees the tokens up to its own."""
        inner = [each for each in x.present if each.axes & set(over)]
        if self.steps and (inner or (self.causal and "query" in over)):
            return None
        if any(each.text != SEEN.text for each in inner) or "token" in over:
            return None
        sizes = ["GROUP"] if "group" in over else []
        if "query" in over:
            sizes.append(f"tl.minimum(queries, tokens - {self.token})" if inner else "queries")
        fixed = tuple(each for each in x.present if each not in inner)
        axes = frozenset().union(*(each.axes for each in fixed), ("token",) if inner else ())
        size = " * ".join(sizes)
        return Tile(f"tl.where({conjunction(fixed)}, {size}, 0)" if fixed else size, axes)

    def padding(self, over: tuple[str, ...], x: Tile) -> tuple[Condition, ...]:
        """Conditions that hold for what is no padding of the axes."""
        group, found = self.bound.shape.group, []
        if "group" in over and group & (group - 1):
            found.append(Condition("(group < GROUP)", frozenset(("group",))))
        if SEEN not in x.present:  # which says so too
            if self.causal and {"query", "token"} & set(over):
                return (*found, SEEN)
            if "query" in over:
                found.append(Condition("(row < queries)", frozenset(("query",))))
            if "token" in over:
                found.append(Condition(self.held, frozenset(("token",))))
        return tuple(found)

    # Pooling.

    def _pooled(self, node: Node) -> Tile:
        """Neighbours in order, for each token on its own: equal ones give equal results."""
        largest = node.op == "maxpool"
        self.comment(node)
        name = self.arguments.fresh(node.name or "pooled")
        axes = frozenset(node.type.axes) - {"kv"}
        shape = ", ".join(self.sizes[a] if a in axes else "1" for a in TILE)
        empty = EMPTY["max" if largest else "sum"]
        self.line(f"{name} = tl.full([{shape}], {empty}, tl.float32)")
        before, after, width = self._reach(node.args[1])
        near = self.arguments.fresh("near")
        self.line(f"for step in range(-{before}, {after} + 1):")
        inner = replace(
            self, indent=self.indent + "    ", token=near, held=f"{near}_held", given={}
        )  # fmt: skip
        self._neighbour(inner, near)
        x = inner.value(node.args[0])
        there = conjunction((Condition(f"{near}_held", frozenset()), *x.present))
        kept = f"tl.where({there}, {x.text}, {empty})"
        inner.line(f"{name} = tl.maximum({name}, {kept})" if largest else f"{name} += {kept}")
        if not largest:
            self.line(f"{name} = {name} / {width}")
        return Tile(name, axes, self._presence(node.args[0]))

    def _neighbour(self, inner: Writer, near: str) -> None:
        """A token `step` places further; at decode steps among the entries that the head holds."""
        if not self.steps:
            inner.line(f"{near} = {self.token} + step")
            inner.line(f"{near}_held = ({near} >= 0) & ({near} < tokens)")
            return
        rank = f"{near}_rank"
        inner.line(f"{rank} = {self.token}_rank + step")
        inner.line(f"{near}_held = {self.held} & ({rank} >= 1) & ({rank} <= own_entries)")
        inner.line(f"{near} = {rank} - 1")
        inner.line("if order is not None:")
        load = f"tl.load(order + head * tokens + {near}, mask={near}_held, other=0)"
        inner.line(f"    {near} = {load}")

    def _presence(self, node: Node) -> tuple[Condition, ...]:
        """Where a value is present."""
        if not node.type.absent or id(node) in self.stored:
            return ()
        if node.op != "mask":
            return self.value(node).present
        holds = self.truth(node.args[1])
        own = Condition(holds.text, holds.axes)
        return tuple(dict.fromkeys((*self._presence(node.args[0]), own)))

    def _reach(self, width: Node) -> tuple[str, str, str]:
        """How far a pool reaches before and after a token, and its width."""
        if self.bound.static.needs(width) == frozenset():
            size = max(1, counts.whole(self.bound.number(width, 1), 2**31))
            return str((size - 1) // 2), str(size // 2), repr(float(size))
        names = [self.arguments.number(width, how) for how in ("before", "after", "width")]
        return names[0], names[1], names[2]


def of_numbers(node: Node) -> Node:
    """A node whose argument counts as a number, so that present values are counted."""
    x = node.args[0]
    if x.type.kind == "number":
        return node
    return replace(node, args=(replace(x, type=replace(x.type, kind="number")),))


def _power(x: str, exponent: float | None) -> str:
    if exponent is None:
        raise TypeError("a power that no kernel computes")
    return f"tl.sqrt({x} + 0.0)" if exponent == 0.5 else " * ".join([x] * int(exponent))


def _short(op: str) -> str:
    return {"multiply": "product", "add": "total", "subtract": "difference"}.get(op, op)
