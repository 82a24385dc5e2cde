"""Rows of the table of operations: how authors write an operation, and its traits."""

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
    PLACE = auto()  # follows from a token's place
    VECTOR = auto()  # cached vectors
    MODEL = auto()  # other tensors of the model, or delivered with it
    WINDOW = auto()  # per query and token; absent where the token comes after the query
    ARITHMETIC = auto()
    COMPARISON = auto()
    LOGIC = auto()
    BRANCH = auto()
    REDUCTION = auto()
    SELECTION = auto()  # order, and what is taken by it
    POOL = auto()
    LOOK = auto()  # a value at this layer or at another
    PARTITION = auto()  # each layer's part or label, from one number per layer
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

    `rule` names the function of `check/calls.py` that types calls; "derived" functions have a
    `body`. `axes` says whether brackets are "none", "required", "optional" (default `token`),
    "layer" or "token" (exactly that one). `unit` is the result's: "first", "none", "tokens" or
    "count".
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
        """The only axis that may stand in brackets; None: there is no such axis."""
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
    value: str | bool | None = None  # `Node.value` of the operation
    exact: bool = True
    unserved: bool = False  # the runtime does not serve it


@dataclass(frozen=True)
class Operation:
    """One operation of the intermediate representation.

    `interpret`, `torch` and `triton` are paths of functions, which `forms.py` finds. In arithmetic,
    comparisons and logic the interpreter's take the arguments as numpy arrays, in a reduction data,
    presence and dimensions, else the values, the node and the layer. Torch's take the node, the
    frame and the arguments (and dimensions in a reduction), those of the library only arguments.
    Triton's take the writer of a kernel and the node; or `triton` is a text with places for the
    arguments, or for a reduction the name of the function that folds a tile.
    """

    name: str
    kind: Kind
    least: int = 0  # least number of arguments
    most: int | None = 0  # largest number of arguments; None: no limit
    meaning: str = ""  # describes its value, the axes of the result, the arguments in order
    function: Function | None = None  # how authors call it, and how calls are typed
    names: tuple[Builtin, ...] = ()  # names of the language that stand for it
    # What `Node.value` is: "number", "truth", "name" (one of `names`), "parameter", "tensor",
    # "state", "let", "rules" or "queries"; None: nothing.
    value: str | None = None
    sign: str | None = None  # as authors write it, between its arguments or before the only one
    of_two: str | None = None  # operation that its name means with two arguments and no axes
    result: str | None = None  # "number" or "truth"; None: either
    takes: str | None = None  # "number" or "truth", if all arguments must be; else None
    # How the result's unit follows from the arguments': "alike" (they have one unit), "product",
    # "quotient" or "first"; None: it has none.
    unit: str | None = None
    combines: str = "compared"  # what it does to arguments of one unit, for messages
    result_axes: tuple[str, ...] | None = None  # of a leaf or window; None: they depend on the node
    names_axes: bool = False  # whether `Node.axes` names axes, or is empty
    reads_along: tuple[str, ...] = ()  # axes of its first argument, not named in `Node.axes`
    made_by_lowering: bool = False  # no checked program has it
    exact: bool = False  # exact numbers give an exact number
    commutative: bool = False  # the order of its arguments does not matter
    always_finite: bool = False  # no value is infinite
    keeps_finite: bool = False  # finite arguments give finite values, whatever they are
    keeps_zero: bool = False  # 0 where its first argument is 0; a power if its exponent is positive
    may_be_nan: bool = False  # finite arguments may give NaN, which counts as 0
    divides: bool = False  # by its second argument
    linear: bool = False  # for sums of arguments it gives the sum of their results
    scales: bool = False  # multiplies or divides its first argument by its second
    of_none: float | None = None  # result of a reduction of no value
    averages: bool = False  # a reduction that divides by the number of values
    shares_out: bool = False  # divides its first argument among the layers
    whole: bool = False  # a whole number, at least 0
    rounds_up_by: float | None = None  # most that rounding adds to its argument; None: no rounding
    sorts: bool = False  # sorts its candidates
    has_small_kernel: bool = False  # has a kernel for small tensors in `execute/tensors/kernels.py`
    per_head: bool = False  # a KV head's values follow from its own, alike in all layers
    tensors: tuple[str, ...] = ()  # those of "query", "key", "value" that it reads
    softmax: bool = False  # a softmax of logits over all candidates
    of_tokens_there: bool = False  # follows from which tokens reach a layer
    same_at_each_step: bool = False  # the same at every step for a cached entry
    of_two_vectors: bool = False  # a number per entry that a kernel finds of two vectors
    gone_after_layer: bool = False  # not available when a layer's entries are merged or shared
    host: Callable[..., Any] | None = None  # of numbers that the host knows; a reduction: of a list
    interval: Rule | None = None  # interval of its values; None: not known
    interpret: str | None = None  # None: no function of its own
    torch: str | None = None
    triton: str | None = None

    @property
    def known_to_host(self) -> bool:
        """Whether it is a leaf that the host knows before any tensor is seen."""
        return self.kind in (Kind.LITERAL, Kind.GIVEN)

    @property
    def is_window(self) -> bool:
        """Whether it has values per query and token."""
        return self.kind is Kind.WINDOW

    @property
    def is_reduction(self) -> bool:
        """Whether it makes one value of many, along the axes that it names."""
        return self.kind is Kind.REDUCTION

    @property
    def infinite_of_none(self) -> bool:
        """Whether it is a reduction that is infinite for no value."""
        return self.of_none is not None and math.isinf(self.of_none)

    @property
    def adds_up(self) -> bool:
        """Whether it is a reduction whose results for parts of the values add up: sum, count."""
        return self.of_none == 0 and self.result == "number" and not self.averages

    @property
    def sums(self) -> bool:
        """Whether it is the elementwise sum of its arguments, some of them negated."""
        return self.elementwise and self.linear

    @property
    def elementwise(self) -> bool:
        """Whether each value follows from the arguments' values at the same place."""
        return self.kind in (Kind.ARITHMETIC, Kind.COMPARISON, Kind.LOGIC, Kind.BRANCH)

    @property
    def in_kernels(self) -> bool:
        """Whether it is elementwise and generated kernels compute it."""
        return self.elementwise and self.triton is not None

    @property
    def across_layers(self) -> bool:
        """Whether it looks at other layers, whatever its axes are."""
        return self.kind in (Kind.LOOK, Kind.PARTITION)

    @property
    def reads_tensors(self) -> bool:
        """Whether it reads cached keys or values."""
        return bool(self.tensors)

    @property
    def reads_queries(self) -> bool:
        """Whether it scores keys by queries."""
        return "query" in self.tensors


def called(
    name: str, rule: str, parameters: tuple[Parameter, ...], meaning: str, cost: str = "O(size)",
    *, kind: Kind, group: str, shape: str = "", axes: str = "none", unit: str = "none",
    verb: str = "look", **traits: Any,
) -> Operation:  # fmt: skip
    """The row of an operation that authors call as a function, its parameters as arguments."""
    function = Function(name, rule, parameters, meaning, cost, axes, unit, verb, shape, group=group)
    least = sum(not parameter.optional for parameter in parameters)
    order = ", ".join(parameter.name for parameter in parameters)
    row_traits = {"least": least, "most": len(parameters), "names_axes": axes != "none", **traits}
    return Operation(name, kind, meaning=order, function=function, **row_traits)
