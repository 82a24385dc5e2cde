"""Values in generated kernels, where they are present, and the kernels' arguments.

A tile has the axes group, query and token, of size 1 where a value lacks the axis.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

from kvpolicy.dsl.codegen.text import PLACES, TILES
from kvpolicy.dsl.ir.nodes import Node

TILE = ("group", "query", "token")
_RESERVED = frozenset(PLACES).union(
    TILES,
    "tl triton TEMPLATE asked logits seen order state results k_tile v_tile step index "
    "columns_start columns_tile columns_store rows_start rows_tile rows_store tail_store "
    "max min abs sum any range float int".split(),
)


@dataclass(frozen=True)
class Condition:
    """Where something is present: the text of a truth value and the axes that its tile has."""

    text: str
    axes: frozenset[str]


@dataclass(frozen=True)
class Tile:
    """A value in a kernel: an expression, its axes, and where it is present."""

    text: str
    axes: frozenset[str] = frozenset()
    present: tuple[Condition, ...] = ()


# Where a token does not come after a query; a kernel over queries defines it.
SEEN = Condition("seen", frozenset(("query", "token")))


def together(*tiles: Tile) -> tuple[Condition, ...]:
    """Where all are present."""
    return tuple(dict.fromkeys(condition for tile in tiles for condition in tile.present))


def conjunction(conditions: tuple[Condition, ...]) -> str:
    """All conditions as one text."""
    return " & ".join(condition.text for condition in conditions)


@dataclass
class Arguments:
    """Arguments of the functions of one source besides the tensors of the model.

    Attributes:
        steps: whether for decode steps, where values may differ between KV heads.
        numbers: name -> how the host makes the number (`value`, `count`, `before`, `after`,
            `width`, `truth`), and of which node.
        tensors: name -> input, and whether the tensor holds where it is present instead of data.
        taken: names in use.
    """

    steps: bool = False
    numbers: dict[str, tuple[str, Node]] = field(default_factory=dict)
    tensors: dict[str, tuple[Node, bool]] = field(default_factory=dict)
    _names: dict[tuple[Node, bool | str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = set(_RESERVED)

    def fresh(self, wish: str) -> str:
        """A name that is not in use, `wish` if possible."""
        base = re.sub(r"\W", "_", wish)
        base = f"{base}_" if keyword.iskeyword(base) else base
        name, number = base, 2
        while name in self.taken:
            name, number = f"{base}_{number}", number + 1
        self.taken.add(name)
        return name

    def number(self, node: Node, how: str) -> str:
        """The name of the argument that holds a number of the host."""
        key = (node, how)
        if key not in self._names:
            wish = node.name or ("count" if how == "count" else "number")
            name = self.fresh(f"{wish}_{how}" if how in ("before", "after") else wish)
            self._names[key] = name
            self.numbers[name] = (how, node)
        return self._names[key]

    def axes(self, node: Node) -> tuple[str, ...]:
        """Axes of the tensor of an input."""
        axes = node.type.axes
        return ("kv", *axes) if self.steps and "kv" not in axes else axes

    def tensor(self, node: Node, present: bool) -> str:
        """The name of the pointer to an input, or to where it is present."""
        key = (node, present)
        if key not in self._names:
            name = self.fresh((node.name or node.op) + ("_there" if present else "_input"))
            self._names[key] = name
            self.tensors[name] = (node, present)
        return self._names[key]
