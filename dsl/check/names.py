"""What a pass of the checker over a file knows and finds, whatever names mean (scope.py).

Definitions, defects, and what uses say about parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from kvpolicy.dsl.ir.graph import Graph
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.syntax.blocks import Item
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, on_one_line
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.tree import Axis, Call, Expr, Name

T = TypeVar("T")


class Wrong(Exception):
    """Something is wrong and has been reported; whatever uses it stays silent."""


def sound(read: Callable[[], T]) -> T | None:
    """What is read; None where it is wrong."""
    try:
        return read()
    except Wrong:
        return None


def all_sound(reads: Iterable[Callable[[], T]]) -> list[T]:
    """What each of several gives; where one is wrong, the others are looked at all the same."""
    found, wrong = [], False
    for read in reads:
        try:  # as `sound`, with one call less on the stack of nested expressions
            found.append(read())
        except Wrong:
            wrong = True
    if wrong:
        raise Wrong
    return found


# Where names are defined. Those of a section are seen only inside it.
SECTIONS = ("", "decode", "merge", "decode.merge", "share")


@dataclass(frozen=True)
class Context:
    """Where an expression stands, which decides what exists there."""

    phase: str  # "static", "prefill" or "decode"
    inside: str | None = None  # "merge", "decode.merge", "share" or "propagate"

    @property
    def in_merge(self) -> bool:
        """Whether the expression is about dropped entries."""
        return self.inside in ("merge", "decode.merge")

    @property
    def base(self) -> When:
        """The moment at which tensors are there."""
        return When.STEP if self.phase == "decode" else When.LAYER


# "let" or "section", the section, the name, and where it is typed.
Key = tuple[str, str, str, Context]


@dataclass(frozen=True)
class Expansion:
    """The body of a derived function being typed: its arguments, its axes and the call."""

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
    """A number of queries or layers, of which at least one is needed."""

    node: Node
    span: Span
    message: str


class Names(ABC):
    """The names of a file, for one pass of the checker."""

    def __init__(self, source: Source, uses: dict[str, Uses], *, propagates: bool) -> None:
        self.source = source
        self.uses = uses
        self.propagates = propagates
        self.diagnostics: list[Diagnostic] = []
        self.graph = Graph()
        self.not_served: dict[str, None] = {}
        self.whole_maps: set[Node] = set()
        self.widths: list[tuple[Node, Span]] = []
        self.counts: list[Counted] = []
        self.definitions: dict[str, dict[str, Definition]] = {s: {} for s in SECTIONS}
        self.open: list[Key] = []  # lets and sections that are being typed, the innermost last
        self.level = 0  # how deep the expression now typed is nested, through names too

    @abstractmethod
    def resolve(self, expr: Name, context: Context) -> Node | None:
        """The node of a name there; None: the policy does not define it."""

    @abstractmethod
    def knows(self, name: str, context: Context) -> bool:
        """Whether a name means something there."""

    @abstractmethod
    def unknown(self, expr: Name, context: Context) -> Wrong:
        """Reports a name that means nothing there."""

    @abstractmethod
    def type_call(self, typer: Any, call: Call) -> Node:
        """The node of a call whose arguments `typer` types."""

    # Reporting

    def error(self, code: str, message: str, span: Span, help: str | None = None) -> Wrong:
        """Reports a defect; what it returns is raised where nothing can be made of it."""
        self.diagnostics.append(Diagnostic(code, message, span, help))
        return Wrong()

    def warn(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        """Reports something that is probably not meant."""
        self.diagnostics.append(Diagnostic(code, message, span, help, "warning"))

    def shown(self, span: Span) -> str:
        """The text at a place, on one line and not longer than 40 characters."""
        return on_one_line(self.source.text[span.start : span.end], 40)

    def unserved(self, what: str) -> None:
        """Notes that the policy uses something that the runtime does not serve yet."""
        self.not_served[what] = None

    # What uses say about parameters and numbers

    def suggest_unit(self, expr: Expr, unit: str) -> None:
        """Notes the unit of what a parameter is combined with."""
        uses = self._uses(expr)
        if uses and uses.unit is None:
            uses.unit = unit

    def suggest_range(
        self, expr: Expr, *, whole: bool = False, odd: bool = False, minimum: int | None = None
    ) -> None:
        """Notes what values the place asks for where a parameter stands."""
        uses = self._uses(expr)
        if uses is None:
            return
        uses.whole |= whole
        uses.odd |= odd
        if minimum is not None:
            uses.minimum = max(uses.minimum or Fraction(minimum), Fraction(minimum))

    def _uses(self, expr: Expr) -> Uses | None:
        if isinstance(expr, Name) and expr.text in self.definitions[""]:
            if self.definitions[""][expr.text].kind == "parameter":
                return self.uses.setdefault(expr.text, Uses())
        return None

    def at_least_one(self, node: Node, span: Span, message: str) -> None:
        """Notes a number of queries or layers that is at least one; what to say where it is not."""
        self.counts.append(Counted(node, span, message))
