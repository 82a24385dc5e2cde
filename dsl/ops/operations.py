"""Rows of the table of operations: how authors write one, and what the rest asks of its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kvpolicy.dsl.ops.ranges import Rule

HEAD = ("kv", "group")  # `head` is shorthand for this pair


class Kind(Enum):
    """What an operation does."""

    LITERAL = auto()  # a number or truth value as written
    GIVEN = auto()  # a number that the host knows: a parameter, a size
    REMEMBERED = auto()  # what was decided or remembered before
    PLACE = auto()  # follows from where a token stands
    VECTOR = auto()  # cached vectors
    MODEL = auto()  # other tensors of the model, and delivered with it
    WINDOW = auto()  # per query and token; says itself which tokens come after the query
    ARITHMETIC = auto()
    COMPARISON = auto()
    LOGIC = auto()
    BRANCH = auto()
    REDUCTION = auto()
    SELECTION = auto()  # order, and what is taken by it
    POOL = auto()
    LOOK = auto()  # a value of this layer or of those before
    PARTITION = auto()  # of one number per layer, what each layer gets
    MERGE = auto()  # known only while a layer merges, or shares
    OTHER = auto()


@dataclass(frozen=True)
class Parameter:
    """An argument of a function. `kind`: number, truth, any, entries, queries or width."""

    name: str
    kind: str = "number"
    optional: bool = False
    unit: str | None = None  # "tokens": a ratio or layers are refused


@dataclass(frozen=True)
class Function:
    """A function of the language.

    `rule` is what types it, of `check/calls.py`; "derived" functions have a `body`. `axes` says
    whether brackets are "none", "required", "optional" (default `token`), "layer" or "token"
    (exactly that one). `unit` is the result's: "first", "none", "tokens" or "count".
    """

    name: str
    rule: str
    parameters: tuple[Parameter, ...]
    meaning: str
    cost: str = "O(size)"
    axes: str = "none"
    unit: str = "none"
    verb: str = "look"  # what it does over its axes, in messages
    result: str = ""  # type as shown in the reference
    body: str | None = None
    group: str = ""

    @property
    def only_axis(self) -> str | None:
        """The one axis that may stand in brackets; None: not just one."""
        return self.axes if self.axes in ("layer", "token") else None

    @property
    def signature(self) -> str:
        """As shown in messages and in the reference: `top[a](x, n)`."""
        arguments = ", ".join(f"{p.name}?" if p.optional else p.name for p in self.parameters)
        brackets = "" if self.axes == "none" else f"[{self.only_axis or 'a'}]"
        return f"{self.name}{brackets}({arguments})"


@dataclass(frozen=True)
class Builtin:
    """A name of the language.

    `where` says in which phases it exists: "always", "layer" (wherever a layer decides), "prompt"
    (from the prompt's arrival), "tensors" (prefill and decode), "prefill", "decode", "merge" or
    "share".
    """

    name: str
    op: str
    axes: tuple[str, ...]
    unit: str | None
    where: str
    meaning: str
    kind: str = "number"
    value: str | bool | None = None  # of the operation
    exact: bool = True
    unserved: bool = False  # the runtime does not serve it


@dataclass(frozen=True)
class Operation:
    """One operation of the intermediate representation.

    Of numbers, conditions and reductions the interpreter's form is a function of numpy arrays: its
    arguments, or data, where these are present, and dimensions. Others take the values, the node
    and the layer. Torch's take the node, the frame and the arguments, those of the library only
    these. Triton's are a text of the arguments, of a reduction the function that folds a tile, or
    take the writer of a kernel and the node. `forms.py` finds what is no text.
    """

    name: str
    kind: Kind
    least: int = 0  # how many arguments
    most: int | None = 0  # None: any number
    meaning: str = ""  # of its value, the axes of the result, the arguments in order
    function: Function | None = None  # how authors call it, and how calls are typed
    names: tuple[Builtin, ...] = ()  # names of the language that stand for it
    # What `Node.value` is: "number", "truth", "name" (one of `names`), "parameter", "tensor",
    # "state", "let", "rules" or "queries"; None: nothing.
    value: str | None = None
    sign: str | None = None  # as authors write it, between its arguments or before the only one
    of_two: str | None = None  # what its name means where it is given two arguments and no axes
    result: str | None = None  # "number" or "truth"; None: either
    takes: str | None = None  # what all its arguments are; None: not alike
    # Of the result by those of its arguments: "alike" (they have one unit), "product", "quotient"
    # or "first"; None: none.
    unit: str | None = None
    combines: str = "compared"  # what it does to arguments that have to have one unit
    result_axes: tuple[str, ...] | None = None  # of a leaf or window; None: they differ
    names_axes: bool = False  # `Node.axes` are its own; otherwise there are none
    reads_along: tuple[str, ...] = ()  # axes of its first argument, which it does not name
    made_by_lowering: bool = False  # no checked program has it
    exact: bool = False  # exact numbers give an exact number
    commutative: bool = False  # the order of its arguments does not matter
    always_finite: bool = False  # no value is infinite
    keeps_finite: bool = False  # finite arguments give finite values, whatever they are
    keeps_zero: bool = False  # 0 where its first argument is, if an exponent is positive
    keeps_present: bool = False  # a value wherever its arguments are finite
    may_be_nan: bool = False  # finite arguments may give what would be NaN, and is 0
    divides: bool = False  # by its second argument
    linear: bool = False  # of sums of its arguments it gives the sum of its results
    scales: bool = False  # its first argument, by its second
    of_none: float | None = None  # what a reduction of no value is
    averages: bool = False  # a reduction that divides by the number of values
    shares_out: bool = False  # divides its first argument among the layers
    whole: bool = False  # a whole number, at least 0
    raises: float | None = None  # rounds its argument, to at most so much more
    sorts: bool = False  # orders what it chooses from
    by_hand: bool = False  # of small tensors: a kernel is named for it, see `execute/kernels.py`
    per_head: bool = False  # each KV head's values follow from its own, in every layer alike
    tensors: tuple[str, ...] = ()  # of "query", "key" and "value", which it reads
    softmax: bool = False  # of scores, over all candidates
    of_tokens_there: bool = False  # follows from which tokens reach a layer
    steady: bool = False  # the same at every step for an entry that is there
    fleeting: bool = False  # not there again when a layer's entries are merged or shared
    host: Callable[..., Any] | None = None  # of numbers that the host knows; of a reduction, a list
    interval: Rule | None = None  # between which numbers it lies; None: not known
    interpret: str | None = None  # what computes it; None: nothing of its own
    torch: str | None = None
    triton: str | None = None

    @property
    def known_to_host(self) -> bool:
        """A leaf that the host knows before any tensor is seen."""
        return self.kind in (Kind.LITERAL, Kind.GIVEN)

    @property
    def is_window(self) -> bool:
        """Values per query and token."""
        return self.kind is Kind.WINDOW

    @property
    def is_reduction(self) -> bool:
        """One value of many, along the axes that it names."""
        return self.kind is Kind.REDUCTION

    @property
    def infinite_of_none(self) -> bool:
        """A reduction of no value is infinite."""
        return self.of_none is not None and math.isinf(self.of_none)

    @property
    def adds_up(self) -> bool:
        """A reduction that is the sum of those of parts of its values."""
        return self.of_none == 0 and self.result == "number" and not self.averages

    @property
    def sums(self) -> bool:
        """Elementwise, the sum of its arguments or of their opposites."""
        return self.elementwise and self.linear

    @property
    def elementwise(self) -> bool:
        """Each value follows from the values at the same place."""
        return self.kind in (Kind.ARITHMETIC, Kind.COMPARISON, Kind.LOGIC, Kind.BRANCH)

    @property
    def in_kernels(self) -> bool:
        """Generated kernels compute it of values at the same place."""
        return self.elementwise and self.triton is not None

    @property
    def across_layers(self) -> bool:
        """It looks at other layers, whatever its axes are."""
        return self.kind in (Kind.LOOK, Kind.PARTITION)

    @property
    def reads_tensors(self) -> bool:
        """It reads cached keys or values."""
        return bool(self.tensors)

    @property
    def reads_queries(self) -> bool:
        """It scores keys by queries."""
        return "query" in self.tensors


def called(
    name: str, rule: str, parameters: tuple[Parameter, ...], meaning: str, cost: str = "O(size)",
    *, kind: Kind, group: str, shape: str = "", axes: str = "none", unit: str = "none",
    verb: str = "look", **traits: Any,
) -> Operation:  # fmt: skip
    """The row of what authors call as a function: its parameters are its arguments, in order."""
    function = Function(name, rule, parameters, meaning, cost, axes, unit, verb, shape, group=group)
    least = sum(not each.optional for each in parameters)
    order = ", ".join(each.name for each in parameters)
    given = {"least": least, "most": len(parameters), "names_axes": axes != "none", **traits}
    return Operation(name, kind, meaning=order, function=function, **given)
