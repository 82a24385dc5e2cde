"""The intermediate representation: what the checker produces and every execution consumes.

A program is a graph of frozen nodes. Lets are inlined (the same `Node` object is shared), derived
functions (`recent`, `entropy`, ...) are expanded to primitives, and `head` is expanded to
`kv, group`, so an execution sees only the operations of `dsl/ops/operations.py`.

Dimensions: L layers, H query heads, G KV heads, N cached tokens, T new tokens, D head size,
W window, B requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from kvpolicy.dsl.ops.operations import Operation
from kvpolicy.dsl.ops.table import OPERATIONS
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError
from kvpolicy.dsl.syntax.source import Source, Span

# Canonical order of axes in types, printed forms and tensors. `layer` is never part of a type: it
# appears only in `Node.axes` of operations that look across layers.
AXES = ("past", "kv", "group", "query", "token", "dropped", "dim", "channel")


def brackets(axes: tuple[str, ...]) -> str:
    """Axes as authors write them, `[head, token]`; an empty string for no axes."""
    if {"kv", "group"} <= {*axes}:
        axes = tuple("head" if axis == "kv" else axis for axis in axes if axis != "group")
    return f"[{', '.join(axes)}]" if axes else ""


class When(IntEnum):
    """The earliest moment at which a value is known. Later moments include earlier ones."""

    LOAD = 0  # parameters, model sizes, `layer`
    PROMPT = 1  # plus `prompt` (and `length` where nothing propagates): budgets known exactly
    LAYER = 2  # end of this layer's prefill: attention, keys, values
    END = 3  # after the last layer: anything reduced over `layer`
    STEP = 4  # a decode step


@dataclass(frozen=True)
class Extent:
    """What the axis `query` or `past` of a value runs along: a window of queries, past layers.

    Attributes:
        kind: "recent", "all" or "new" for a window; "past" for layers.
        definition_id: `Graph.definition_id` of the count, equal for counts of the same definition.
        text: as the author wrote it, for messages.
        count: number of queries or layers; None: all.
    """

    kind: str
    definition_id: int | None
    text: str = field(compare=False)
    count: Node | None = field(compare=False, repr=False, default=None)

    @property
    def axis(self) -> str:
        """The axis whose extent it is."""
        return "past" if self.kind == "past" else "query"


@dataclass(frozen=True)
class Type:
    """Type of a value: what it is, its named axes, its unit, whether it may be absent."""

    kind: str  # "number" or "truth"
    axes: tuple[str, ...] = ()  # subset of AXES in canonical order
    unit: str | None = None  # "tokens", "layers", "ratio", or None; literals have None
    absent: bool = False  # some values may be absent
    exact: bool = False  # known before the prefill: an exact rational, never a float
    window: Extent | None = None  # along which queries the axis `query` runs
    reach: Extent | None = None  # along which layers the axis `past` runs

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.kind}{brackets(self.axes)}{unit}{'?' if self.absent else ''}"

    def extent(self, axis: str) -> Extent | None:
        """The extent of the axis `query` or `past`; None for other axes."""
        return {"query": self.window, "past": self.reach}.get(axis)


class Delivered(NamedTuple):
    """A tensor that came with the model.

    Attributes:
        numbers: lists of lists, one level for each axis; not checked.
        place: the file or policy that holds them, for messages.
    """

    numbers: object
    place: str


@dataclass(frozen=True, eq=False)
class HeadTable:
    """Numbers or conditions that the host knows for every layer and head.

    Attributes:
        axes: what a layer's values run along: `kv`, `group`, both or nothing.
        layers: [L], each layer's values with the last of `axes` running fastest; None: absent.
    """

    axes: tuple[str, ...]
    layers: tuple[tuple[Fraction | float | bool | None, ...], ...]

    def __str__(self) -> str:
        return "; ".join(" ".join(map(str, values)) for values in self.layers)


@dataclass(frozen=True, eq=False)
class Node:
    """One value. Nodes are compared by identity; sharing an object means computing it once."""

    op: str
    args: tuple[Node, ...] = ()
    axes: tuple[str, ...] = ()
    value: Fraction | bool | str | HeadTable | None = None
    type: Type = field(default=Type("number"), kw_only=True)
    when: When = field(default=When.LOAD, kw_only=True)
    span: Span | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)  # the let or section it is the value of
    origin: str | None = field(default=None, kw_only=True)  # derived function it was expanded from

    @cached_property
    def operation(self) -> Operation:
        """The row of the node's operation in the table."""
        return OPERATIONS[self.op]

    @property
    def symbol(self) -> str:
        """The name that `value` holds: of a parameter, a size, a state, ...

        Raises:
            TypeError: `value` is no name.
        """
        if not isinstance(self.value, str):
            raise TypeError(f"`{self.op}` of {self.value} stands for no name")
        return self.value

    @property
    def literal(self) -> Fraction | bool:
        """The number or truth value that `value` holds.

        Raises:
            TypeError: `value` is neither.
        """
        if not isinstance(self.value, Fraction | bool):
            raise TypeError(f"`{self.op}` of {self.value} is no literal")
        return self.value

    @property
    def head_table(self) -> HeadTable:
        """The head table that `value` holds.

        Raises:
            TypeError: `value` is none.
        """
        if not isinstance(self.value, HeadTable):
            raise TypeError(f"`{self.op}` of {self.value} is no head table")
        return self.value

    @property
    def takes_an_end(self) -> bool:
        """Whether it is `recent(n)` or `sinks(n)`: the last or first n tokens."""
        return self.op == "top" and self.origin in ("recent", "sinks")

    @property
    def left_over(self) -> bool:
        """Whether it is a number at tokens that another set left over: the right side of `then`."""
        return self.op == "mask" and self.value == "rest"

    @property
    def across_layers(self) -> bool:
        """Whether it looks at other layers."""
        return "layer" in self.axes or self.operation.across_layers

    @cached_property
    def counts_layers(self) -> bool:
        """Whether the value of a number that the host knows depends on the layer's number."""
        if (self.op == "size" and self.value == "layer") or self.op in ("at", "head_table"):
            return True
        if self.operation.shares_out:  # to each layer its part
            return True
        return "layer" not in self.axes and any(arg.counts_layers for arg in self.args)

    @cached_property
    def reads_data(self) -> bool:
        """Whether it follows from tensors that come with the model."""
        return self.op == "data" or any(arg.reads_data for arg in self.args)

    def walk(self, seen: set[Node] | None = None) -> Iterator[Node]:
        """Every node below and including this one, once, arguments before users."""
        seen = set() if seen is None else seen
        if self in seen:
            return
        seen.add(self)
        for argument in self.args:
            yield from argument.walk(seen)
        yield self


@dataclass(frozen=True, eq=False)
class Param:
    """A parameter of a policy: its default and the values that it accepts."""

    name: str
    default: Node  # static: a literal or an expression over model sizes and other parameters
    kind: str = "number"  # or "truth"
    unit: str | None = None
    minimum: Fraction | None = None  # inclusive
    above: Fraction | None = None  # exclusive minimum
    maximum: Fraction | None = None  # inclusive
    odd: bool = False
    whole: bool = False  # only integers
    choices: tuple[Fraction | bool, ...] = ()
    about: str = ""
    span: Span | None = None


@dataclass(frozen=True, eq=False)
class Data:
    """A tensor delivered with the model."""

    name: str
    axes: tuple[str, ...]  # among layer, kv, group
    minimum: Fraction | None = None
    maximum: Fraction | None = None
    about: str = ""


@dataclass(frozen=True, eq=False)
class State:
    """What is remembered between steps.

    In the rules of decode, an `inherited` state goes on from its value after the prefill; any other
    is empty before the first decode step.
    """

    name: str
    start: Node | None  # before the first update; None: 0
    next: Node | None  # after each step; None: `start` stays
    type: Type
    inherited: bool = False


@dataclass(frozen=True, eq=False)
class Propagate:
    """Which tokens deeper layers compute.

    Attributes:
        tokens: the set of tokens that a layer hands on.
        moment: condition for a layer to choose them.
        repeats: whether every layer where `moment` holds chooses, not only the first one.
        budget: number of tokens up to which an unsized `top` in `tokens` fills.
        restart: condition for the prefill to begin again on them; None: it never does.
    """

    tokens: Node
    moment: Node
    repeats: bool
    budget: Node | None = None
    restart: Node | None = None

    @property
    def first(self) -> Node | None:
        """`moment` if the section gives it by the key `first`, else None."""
        return None if self.repeats else self.moment

    @property
    def every(self) -> Node | None:
        """`moment` if the section gives it by the key `every`, else None."""
        return self.moment if self.repeats else None


@dataclass(frozen=True, eq=False)
class Merge:
    """How dropped entries are merged into kept ones."""

    into: Node
    accept: Node | None = None
    weight: Node | None = None
    own: Node | None = None
    divide: Node | None = None  # None: the mass, a weighted mean
    apply: tuple[str, ...] = ("key", "value")
    states: Mapping[str, State] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Node]:
        """The values that are given, by key."""
        names = ("into", "accept", "weight", "own", "divide")
        return {name: part for name in names if (part := getattr(self, name)) is not None}


@dataclass(frozen=True, eq=False)
class Share:
    """Two adjacent layers that store one direction."""

    when: Node
    direction: Node
    exceptions: Node | None = None
    apply: tuple[str, ...] = ("key", "value")


@dataclass(frozen=True, eq=False)
class Rules:
    """What decides in one phase: in the prefill or, under `decode`, at a step.

    `decided`, in the prefill alone, are the lets whose values rules of decode read. `lets` are all
    that the phase uses; in a bound program, those that are reported.
    """

    score: Node | None = None
    budget: Node | None = None
    keep: Node | None = None  # None: everything
    merge: Merge | None = None
    states: Mapping[str, State] = field(default_factory=dict)
    lets: Mapping[str, Node] = field(default_factory=dict)
    decided: Mapping[str, Node] = field(default_factory=dict)
    when: Node | None = None  # decode only: the steps at which entries leave


@dataclass(frozen=True, eq=False)
class Program:
    """A checked policy, ready to be bound to a model and parameter values."""

    name: str
    about: str
    source: str
    params: Mapping[str, Param]
    requires: tuple[Node, ...]
    data: Mapping[str, Data]
    prefill: Rules
    decode: Rules | None = None
    propagate: Propagate | None = None
    share: Share | None = None
    read: Node | None = None
    positions: str = "original"  # or "slots"
    report: tuple[str, ...] = ()  # names of lets
    file: Source | None = field(default=None, repr=False)  # what it was checked from
    # Tensors that came with the model, by name.
    delivered: Mapping[str, Delivered] = field(default_factory=dict, repr=False)

    def given(self, tensors: Mapping[str, Delivered]) -> Program:
        """The policy with those of some tensors that it declares under `data`."""
        delivered = {name: x for name, x in tensors.items() if name in self.data}
        return replace(self, delivered=delivered)

    def refused(
        self, code: str, message: str, span: Span | None = None, help: str | None = None
    ) -> PolicyError:
        """The error to raise about it; `span` is its place in the file, if there is one."""
        diagnostic = Diagnostic(code, message, span if self.file else None, help)
        return PolicyError([diagnostic], self.file or Source(self.name, ""))


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a policy may depend on."""

    layers: int  # L
    heads: int  # H query heads
    kv_heads: int  # G; divides H
    head_dim: int  # D

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads
