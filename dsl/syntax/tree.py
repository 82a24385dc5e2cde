"""The syntax tree of expressions: what was written, before any meaning is given to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvpolicy.dsl.syntax.source import Span


@dataclass(frozen=True, eq=False)
class Expr:
    """An expression and the place where it was written."""

    span: Span

    @property
    def children(self) -> tuple[Expr, ...]:
        """The expressions directly inside this one, in the order of writing."""
        fields = (field if isinstance(field, tuple) else (field,) for field in vars(self).values())
        values = (x.value if isinstance(x, Argument) else x for field in fields for x in field)
        return tuple(value for value in values if isinstance(value, Expr))

    def walk(self) -> Iterator[Expr]:
        """This expression and everything inside it, in the order of writing."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, eq=False)
class Number(Expr):
    """A literal number, exact."""

    value: Fraction
    text: str


@dataclass(frozen=True, eq=False)
class Name(Expr):
    """A name that the policy or the language defines."""

    text: str


@dataclass(frozen=True, eq=False)
class Operator(Expr):
    """An operator and its operands; `op` is the operation's name in the IR."""

    op: str
    operands: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Chain(Expr):
    """Two comparisons in one direction, `low <= x < high`."""

    first: str
    second: str
    operands: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Where(Expr):
    """`value where condition`, or with `else other` a choice."""

    value: Expr
    condition: Expr
    other: Expr | None


@dataclass(frozen=True, eq=False)
class Then(Expr):
    """Token sets that fill in order."""

    terms: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Axis:
    """The name of an axis between brackets."""

    span: Span
    text: str


@dataclass(frozen=True, eq=False)
class Argument:
    """An argument of a call, with its name if one was given."""

    name: str | None
    name_span: Span | None
    value: Expr


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """`name[axes](arguments)`; `axes` is None if no brackets were written."""

    name: str
    name_span: Span
    axes: tuple[Axis, ...] | None
    arguments: tuple[Argument, ...]
