"""Definitions, defects and uses of parameters that one pass of the checker finds in a file.

What names mean is said in scope.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from kvpolicy.dsl.ir.graph import Graph
from kvpolicy.dsl.ir.head_tables import has_head_table
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, on_one_line
from kvpolicy.dsl.syntax.mappings import Item
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.tree import Axis, Call, Expr, Name

T = TypeVar("T")


class Wrong(Exception):
    """A part of the file is wrong and has been reported; its uses report nothing more."""


def sound(read: Callable[[], T]) -> T | None:
    """The result of `read`; None if it raises `Wrong`."""
    try:
        return read()
    except Wrong:
        return None


def all_sound(reads: Iterable[Callable[[], T]]) -> list[T]:
    """The results of all reads; raises `Wrong` if one does, but only after all were made."""
    results, wrong = [], False
    for read in reads:
        try:  # as `sound`, with one call less on the stack of nested expressions
            results.append(read())
        except Wrong:
            wrong = True
    if wrong:
        raise Wrong
    return results


# Where names are defined: in the file ("") or in a section, inside which alone they are seen.
SECTIONS = ("", "decode", "merge", "decode.merge", "share")


@dataclass(frozen=True)
class Context:
    """Where an expression stands, which decides the names that it may use."""

    phase: str  # "static", "prefill" or "decode"
    inside: str | None = None  # "merge", "decode.merge", "share", "propagate", "default"

    @property
    def in_merge(self) -> bool:
        """Whether values per token are read at dropped entries."""
        return self.inside in ("merge", "decode.merge")

    @property
    def base(self) -> When:
        """The moment from which tensors are known."""
        return When.STEP if self.phase == "decode" else When.LAYER


# "let" or "section", the section, the name, and the context in which it is typed.
Key = tuple[str, str, str, Context]


@dataclass(frozen=True)
class Expansion:
    """The call of a derived function whose body is being typed: text, place, arguments and axes."""

    name: str
    span: Span
    values: Mapping[str, Node] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Definition:
    """A name that the policy defines."""

    name: str
    kind: str  # "parameter", "tensor", "state" or "let"
    section: str
    item: Item


@dataclass
class Uses:
    """What the uses of a parameter say about it."""

    unit: str | None = None
    whole: bool = False
    odd: bool = False
    minimum: Fraction | None = None


class Counted(NamedTuple):
    """A number of queries or layers that must be at least one, and the message if it is not."""

    node: Node
    span: Span
    message: str


class Names(ABC):
    """The names of a file, for one pass of the checker.

    Attributes:
        uses: what uses say about each parameter, from earlier passes too.
        propagates: whether the file has the section `propagate`.
        unserved: features that cannot be served yet, in order, each at its first place.
        whole_maps: nodes with a value for every query and every token of the prompt.
        widths: pooling widths, with their places.
        counts: numbers of queries or layers that must be at least one.
    """

    def __init__(self, source: Source, uses: dict[str, Uses], *, propagates: bool) -> None:
        self.source = source
        self.uses = uses
        self.propagates = propagates
        self.diagnostics: list[Diagnostic] = []
        self.graph = Graph()
        self.unserved: dict[str, Diagnostic] = {}
        self.whole_maps: set[Node] = set()
        self.widths: list[tuple[Node, Span]] = []
        self.counts: list[Counted] = []
        self.definitions: dict[str, dict[str, Definition]] = {s: {} for s in SECTIONS}
        self.open: list[Key] = []  # lets and sections that are being typed, the innermost last
        self.level = 0  # nesting of the expression that is being typed, through names too

    @abstractmethod
    def resolve(self, expr: Name, context: Context) -> Node | None:
        """The node of a name in a context; None if the policy does not define it."""

    @abstractmethod
    def knows(self, name: str, context: Context) -> bool:
        """Whether a name without parentheses means something in a context."""

    @abstractmethod
    def unknown(self, expr: Name, context: Context) -> Wrong:
        """Reports a name that means nothing in a context."""

    @abstractmethod
    def type_call(self, typer: Any, call: Call) -> Node:
        """The node of a call whose arguments `typer` types."""

    # Reporting

    def error(self, code: str, message: str, span: Span, help: str | None = None) -> Wrong:
        """Reports a defect; callers that cannot go on raise the result."""
        self.diagnostics.append(Diagnostic(code, message, span, help))
        return Wrong()

    def warn(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        """Reports something that is probably not meant."""
        self.diagnostics.append(Diagnostic(code, message, span, help, "warning"))

    def shown(self, span: Span) -> str:
        """The text at a place, on one line and not longer than 40 characters."""
        return on_one_line(self.source.text[span.start : span.end], 40)

    def note_unserved(self, what: str, span: Span | None) -> None:
        """Notes that the policy uses something that the runtime does not serve yet."""
        diagnostic = Diagnostic("unserved", f"{what} cannot be served yet", span)
        self.unserved.setdefault(what, diagnostic)

    def note_unserved_nodes(self, nodes: Iterable[Node], where: str) -> None:
        """Notes values that are not served in a section, unless the host has them in tables."""
        for node in nodes:
            if not has_head_table(node):
                what = "[layer]" if "layer" in node.axes else node.op
                self.note_unserved(f"`{what}` in {where}", node.span)

    # What uses say about parameters and numbers

    def suggest_unit(self, expr: Expr, unit: str) -> None:
        """Notes the unit of a parameter, if `expr` is one and no other use gave a unit."""
        uses = self._uses(expr)
        if uses and uses.unit is None:
            uses.unit = unit

    def suggest_range(self, expr: Expr, minimum: int, *, odd: bool = False) -> None:
        """Notes that a parameter takes whole numbers from `minimum` on, if `expr` is one."""
        uses = self._uses(expr)
        if uses is not None:
            uses.whole = True
            uses.odd |= odd
            uses.minimum = max(uses.minimum or Fraction(minimum), Fraction(minimum))

    def _uses(self, expr: Expr) -> Uses | None:
        if isinstance(expr, Name) and expr.text in self.definitions[""]:
            if self.definitions[""][expr.text].kind == "parameter":
                return self.uses.setdefault(expr.text, Uses())
        return None

    def at_least_one(self, node: Node, span: Span, message: str) -> None:
        """Notes a number of queries or layers that must be at least one; `message` says if not."""
        self.counts.append(Counted(node, span, message))
