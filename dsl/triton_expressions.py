"""Expressions of the language as lines of Triton, on tiles with the axes group, query and token.

A tile has three dimensions, of size 1 where a value lacks the axis: query heads of one KV head,
queries, tokens; in a kernel over vectors two, tokens and `dim`. Absent values are conditions
beside the data, as in the torch program, and are applied where a reduction or a store reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.kernel_values import exponent, finite, is_end
from kvpolicy.dsl.lower import REDUCTIONS
from kvpolicy.dsl.triton_tiles import SEEN, TILE, Arguments, Condition, Tile, conjunction, together
from kvpolicy.dsl.written import written

_BINARY = {
    "add": "+", "subtract": "-", "multiply": "*", "less": "<", "less_equal": "<=",
    "greater": ">", "greater_equal": ">=", "equal": "==", "not_equal": "!=",
}  # fmt: skip
_CALLS = {
    "abs": "tl.abs", "exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt",
    "minimum": "tl.minimum", "maximum": "tl.maximum",
}  # fmt: skip
_MAY_BE_NAN = frozenset(("divide", "power", "log", "sqrt"))
EMPTY = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")', "any": "0", "count": "0.0"}
FOLDS = {"sum": "tl.sum", "max": "tl.max", "min": "tl.min", "any": "tl.max", "count": "tl.sum"}


@dataclass
class Writer:
    """Writes the lines of one kernel's body.

    Attributes:
        token: name of the tile of tokens; `held`: condition that a token exists.
        sizes: texts of the sizes of the tile, by axis; 1 where the kernel has none of them.
        given: values at hand, by id of node.
        stored: names of pointers to values of reductions made by an earlier kernel.
        used: names of arguments that this kernel needs; `reads`: of `stored`.
        made: names that its lines gave to values.
    """

    bound: Bound
    arguments: Arguments
    indent: str
    sizes: dict[str, str]
    token: str = "token"
    held: str = "held"
    lines: list[str] = field(default_factory=list)
    given: dict[int, Tile] = field(default_factory=dict)
    stored: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    reads: dict[str, None] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    leaf: Callable[[Writer, Node], Tile | None] = lambda writer, node: None

    def line(self, text: str) -> None:
        """One line at the present indentation."""
        self.lines.append(f"{self.indent}{text}")

    def comment(self, node: Node) -> None:
        """The expression of a node, for the reader."""
        name = f"{node.name}: " if node.name else ""
        self.line(f"# {name}{written(node)}")

    def named(self, wish: str, text: str) -> str:
        """A new name for a text."""
        name = self.arguments.fresh(wish)
        self.line(f"{name} = {text}")
        self.made.add(name)
        return name

    def is_outside(self, text: str) -> bool:
        """Whether a text uses nothing that this kernel's lines have made."""
        return not self.made & set(re.findall(r"\w+", text))

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
            self.reads[name] = None
            return self._load(node.name or node.op, name, axes, node)
        made = self.leaf(self, node)
        if made is not None:
            return made
        if node.op in ("position", "all", "new", "index", "top"):
            made = self._place(node)
            if made is not None:
                return made
        if node.op in REDUCTIONS and node.axes == ("group",):
            return self._over_group(node)
        if node.op in ("avgpool", "maxpool"):
            return self._pooled(node)
        if node.op in ("mask", "choose", "and", "or", "not"):
            return getattr(self, f"_{node.op}")(node)
        return self._arithmetic(node)

    # Leaves.

    def _number(self, node: Node, exact: bool) -> Tile:
        truth = node.type.kind == "truth"
        if exact:
            x = self.bound.number(node, 1)
            if truth:
                return Tile("(tokens > 0)" if x else "(tokens < 0)")
            x = float(x)
            if x in (float("inf"), float("-inf")):
                return Tile(f'float("{x}")')
            return Tile(f"({x!r})" if x < 0 else repr(x))
        name = self.arguments.number(node, "truth" if truth else "value")
        self.used[name] = None
        return Tile(f"({name} != 0)" if truth else name)

    def _count(self, node: Node) -> str:
        """A whole number of tokens."""
        if self.bound.static.needs(node) == frozenset():
            number = self.bound.number(node, 1)
            if number == int(number):
                return str(max(0, int(number)))
        name = self.arguments.number(node, "count")
        self.used[name] = None
        return name

    def _place(self, node: Node) -> Tile | None:
        """What follows from a token's place."""
        axes = frozenset(("token",))
        if node.op in ("all", "new"):
            return Tile(f"({self.token} >= 0)", axes)
        if node.op == "index" and node.axes == ("token",):
            return Tile(self.named("index", f"{self.token}.to(tl.float32)"), axes)
        if node.op == "position":
            name = self.named("position", f"{self.token}.to(tl.float32)")
            self.line("if POSITIONS:")
            load = f"tl.load(positions + {self.token}, mask={self.held}, other=0)"
            self.line(f"    {name} = {load}.to(tl.float32)")
            return Tile(name, axes)
        if is_end(node, self.bound):
            count = self._count(node.args[1])
            if node.origin == "sinks":
                return Tile(f"({self.token} < {count})", axes)
            return Tile(f"({self.token} >= tokens - {count})", axes)
        return None

    def load(self, node: Node) -> Tile:
        """An input, with where it is present if it may be absent."""
        axes, wish = node.type.axes, node.name or node.op
        name = self.arguments.tensor(node, False)
        self.used[name] = None
        made = self._load(wish, name, axes, node)
        if not node.type.absent:
            return made
        there = self.arguments.tensor(node, True)
        self.used[there] = None
        text = self._load(f"{wish}_there", there, axes, None).text
        return replace(made, present=(Condition(f"({text} != 0)", made.axes),))

    def _load(self, wish: str, pointer: str, axes: tuple[str, ...], node: Node | None) -> Tile:
        place, masks = "0", []
        steps = {
            "kv": ("head", None, None),
            "group": ("group", "GROUP", "group < GROUP"),
            "query": ("row", "queries", "(row < queries)"),
            "token": (self.token, "tokens", self.held),
        }
        for axis in axes:
            name, size, mask = steps[axis]
            inner = f"({place})" if " " in place else place
            place = name if place == "0" else f"{inner} * {size} + {name}"
            if mask is not None:
                masks.append(f"({mask})" if " " in mask and mask[0] != "(" else mask)
        guard = f", mask={' & '.join(masks)}, other=0" if masks else ""
        text = f"tl.load({pointer} + {place}{guard})"
        if node is not None and node.type.kind == "truth":
            text = f"{text} != 0"
        return Tile(self.named(wish, text), frozenset(axes) - {"kv"})

    # Elementwise.

    def _arithmetic(self, node: Node) -> Tile:
        tiles = [self.value(each) for each in node.args]
        axes = frozenset().union(*(each.axes for each in tiles))
        text = self._operation(node, [each.text for each in tiles])
        clean = node.type.kind == "truth" or (
            node.op not in _MAY_BE_NAN and all(finite(each) for each in node.args)
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
            power = exponent(node)
            return (
                f"tl.sqrt({args[0]} + 0.0)" if power == 0.5 else " * ".join([args[0]] * int(power))
            )
        if node.op == "negate":
            return f"-{args[0]}"
        if node.op in _CALLS:
            return f"{_CALLS[node.op]}({', '.join(args)})"
        return f"{args[0]} {_BINARY[node.op]} {args[1]}"

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
            count = self._count(inner.args[1])
            sinks = inner.origin == "sinks"
            text = f">= {count}" if sinks else f"< tokens - {count}"
            return Tile(f"({self.token} {text})", frozenset(("token",)))
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
        inner.line(f"{near} = {self.token} + step")
        inner.line(f"{near}_held = ({near} >= 0) & ({near} < tokens)")
        x = inner.value(node.args[0])
        there = conjunction((Condition(f"{near}_held", frozenset()), *x.present))
        kept = f"tl.where({there}, {x.text}, {empty})"
        inner.line(f"{name} = tl.maximum({name}, {kept})" if largest else f"{name} += {kept}")
        if not largest:
            self.line(f"{name} = {name} / {width}")
        return Tile(name, axes, self._presence(node.args[0]))

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
            size = max(1, int(self.bound.number(width, 1)))
            return str((size - 1) // 2), str(size // 2), repr(float(size))
        names = [self.arguments.number(width, how) for how in ("before", "after", "width")]
        self.used.update(dict.fromkeys(names))
        return names[0], names[1], names[2]


def of_numbers(node: Node) -> Node:
    """A node whose argument counts as a number, so that present values are counted."""
    x = node.args[0]
    if x.type.kind == "number":
        return node
    return replace(node, args=(replace(x, type=replace(x.type, kind="number")),))


def _short(op: str) -> str:
    return {"multiply": "product", "add": "total", "subtract": "difference"}.get(op, op)
