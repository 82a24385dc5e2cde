"""What generated kernels read: numbers of the host, places of tokens, inputs.

A tile has three dimensions, of size 1 where a value lacks the axis: query heads of one KV head,
queries, tokens; in a kernel over vectors two, tokens and `dim`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.codegen.tiles import TILE, Arguments, Condition, Tile
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ir.written import described


def comment_on(node: Node) -> str:
    """The expression of a node, equal for policies of which kernels are equal."""
    return described(node, lambda value: shown(value) if _is_inline(value) else "number")


def _is_inline(value: Fraction | float | bool) -> bool:
    """Whether a number is written into kernels; others are their arguments.

    A parameter that may have any value must not have a kernel for each: compiled ones stay.
    """
    x = float(value)
    return math.isinf(x) or (abs(x) <= 64 and (2 * x).is_integer())


@dataclass
class Leaves:
    """Lines of one function, and the values that they begin from.

    Attributes:
        sizes: axis -> text of the tile's size, `1` for an axis that the kernel lacks.
        steps: whether for decode steps, else for a prefill.
        token: name of the tile of tokens.
        held: condition that a token exists and, at decode steps, that the KV head holds it.
        given: node -> tile, for values at hand.
        stored: node -> pointer and axes, for values that an earlier kernel stored.
        made: names that the lines define.
        causal: whether every value per query and token is absent where the token comes after the
            query.
    """

    bound: Bound
    arguments: Arguments
    sizes: dict[str, str]
    steps: bool
    token: str = "token"
    held: str = "held"
    indent: str = "    "
    lines: list[str] = field(default_factory=list)
    given: dict[Node, Tile] = field(default_factory=dict)
    stored: dict[Node, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    causal: bool = False

    def line(self, text: str) -> None:
        """Adds a line at the current indentation."""
        self.lines.append(f"{self.indent}{text}")

    def comment(self, node: Node) -> None:
        """Adds the expression of a node as a comment."""
        self.line(f"# {comment_on(node)}")

    def named(self, wish: str, text: str) -> str:
        """Adds an assignment of a text to a new name, and returns the name."""
        name = self.arguments.fresh(wish)
        self.line(f"{name} = {text}")
        self.made.add(name)
        return name

    def shape(self, axes: Set[str]) -> str:
        """The shape of a tile with these axes."""
        return f"[{', '.join(self.sizes[axis] if axis in axes else '1' for axis in TILE)}]"

    def is_outside(self, text: str) -> bool:
        """Whether a text uses no name that this function's lines define."""
        return not self.made & set(re.findall(r"\w+", text))

    def _number(self, node: Node, exact: bool) -> Tile:
        truth = node.type.kind == "truth"
        if exact:
            x = self.bound.number(node, 1)
            if truth:
                return Tile("(tokens > 0)" if x else "(tokens < 0)")
            x = float(x)
            if math.isinf(x):
                return Tile(f'float("{x}")')
            if _is_inline(x):
                return Tile(f"({x!r})" if x < 0 else repr(x))
        name = self.arguments.number(node, "truth" if truth else "value")
        return Tile(f"({name} != 0)" if truth else name)

    def tokens_in(self, node: Node) -> str:
        """The text of a whole number of tokens."""
        if self.bound.static.needs(node) == frozenset():
            number = self.bound.number(node, 1)
            if number == int(number):
                return str(max(0, int(number)))
        name = self.arguments.number(node, "count")
        return name

    def load(self, node: Node) -> Tile:
        """The tile of an input, with a condition to be present if it may be absent."""
        axes, wish = self.arguments.axes(node), node.name or node.op
        name = self.arguments.tensor(node, False)
        tile = self._load(wish, name, axes, node)
        if not node.type.absent:
            return tile
        presence = self.arguments.tensor(node, True)
        text = self._load(f"{wish}_there", presence, axes, None).text
        return replace(tile, present=(Condition(f"({text} != 0)", tile.axes),))

    def _load(self, wish: str, pointer: str, axes: tuple[str, ...], node: Node | None) -> Tile:
        place, masks = "0", []
        indices = {
            "kv": ("head", None, None),
            "group": ("group", "GROUP", "group < GROUP"),
            "query": ("row", "queries", "(row < queries)"),
            "token": (self.token, "tokens", self.held),
        }
        for axis in axes:
            name, size, mask = indices[axis]
            inner = f"({place})" if " " in place else place
            place = name if place == "0" else f"{inner} * {size} + {name}"
            if mask is not None:
                masks.append(f"({mask})" if " " in mask and mask[0] != "(" else mask)
        guard = f", mask={' & '.join(masks)}, other=0" if masks else ""
        text = f"tl.load({pointer} + {place}{guard})"
        if node is not None and node.type.kind == "truth":
            text = f"{text} != 0"
        elif node is not None and node in self.stored:
            text = f"{text}.to(tl.float32)"  # the type in which it was computed
        return Tile(self.named(wish, text), frozenset(axes) - {"kv"})


# What follows from a token's place.

_TOKEN = frozenset(("token",))


def position(writer: Leaves, node: Node) -> Tile:
    """The original position, read from a tensor where it may differ from the token's place."""
    load = f"tl.load(positions + {writer.token}, mask={writer.held}, other=0).to(tl.float32)"
    if writer.steps:
        return Tile(writer.named("position", load), _TOKEN)
    name = writer.named("position", f"{writer.token}.to(tl.float32)")
    writer.line("if positions is not None:")
    writer.line(f"    {name} = {load}")
    return Tile(name, _TOKEN)


def everything(writer: Leaves, node: Node) -> Tile:
    return Tile(f"({writer.token} >= 0)", _TOKEN)


def newest(writer: Leaves, node: Node) -> Tile:
    """All tokens in a prefill, the last one at decode steps."""
    if writer.steps:
        return Tile(f"({writer.token} == tokens - 1)", _TOKEN)
    return everything(writer, node)


def index(writer: Leaves, node: Node) -> Tile:
    """`index[token]`."""
    return Tile(writer.named("index", f"{writer.token}.to(tl.float32)"), _TOKEN)


def end(writer: Leaves, node: Node, *, outside: bool = False) -> Tile:
    """`recent(n)` or `sinks(n)`, or the tokens outside of it."""
    count, sinks = writer.tokens_in(node.args[1]), node.origin == "sinks"
    if writer.steps:  # of the entries that the head holds
        at_start = sinks != outside
        boundary = count if sinks else f"own_entries - {count}"
        text = f"{writer.token}_rank {'<=' if at_start else '>'} {boundary}"
    else:
        boundary = count if sinks else f"tokens - {count}"
        text = f"{writer.token} {'<' if sinks != outside else '>='} {boundary}"
    return Tile(f"({text})", _TOKEN)
