"""Rows of the table of operations: what the rest asks of an operation by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kvpolicy.dsl.ops.ranges import Rule
from kvpolicy.dsl.ops.signatures import Builtin, Function


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
class Operation:
    """One operation of the intermediate representation.

    Attributes:
        least, most: how many arguments; None: any number.
        meaning: of `Node.value`, the axes of the result, the arguments in order.
        value: what `Node.value` is: "number", "truth", "name" (one of `names`), "parameter",
            "tensor", "state", "let", "rules" or "queries"; None: nothing.
        function: how authors call it, and how calls are typed.
        names: names of the language that stand for it.
        sign: how an author writes it, between its arguments or before the only one.
        of_two: the operation that its name means where it is given two arguments and no axes.
        result: "number" or "truth"; None: either.
        takes: what all its arguments are; None: not alike.
        result_axes: of a leaf or window; None: they differ.
        names_axes: `Node.axes` are its own; otherwise there are none.
        reads_along: axes of its first argument that it reads along without naming them.
        made_by_lowering: no checked program has it.
        exact: exact numbers give an exact number.
        commutative: the order of its arguments does not matter.
        always_finite: no value is infinite.
        keeps_finite: finite arguments give finite values, whatever they are.
        keeps_zero: 0 where its first argument is, if an exponent is positive.
        keeps_present: a value wherever its arguments are finite.
        may_be_nan: finite arguments may give what would be NaN, and is 0.
        divides: by its second argument.
        unit: of the result by those of its arguments: "alike" (they have one unit), "product",
            "quotient" or "first"; None: none.
        combines: what it does to its arguments, if they have to have one unit.
        of_none: what a reduction of no value is.
        averages: a reduction that divides by the number of values.
        shares_out: divides its first argument among the layers.
        whole: a whole number, at least 0.
        sorts: orders what it chooses from.
        per_head: each KV head's values follow from its own, in every layer alike.
        reads_queries: scores keys by queries.
        of_tokens_there: follows from which tokens reach a layer.
        steady: the same at every step for an entry that is there.
        fleeting: not there again when a layer's entries are merged or shared.
        host: computes it of numbers that the host knows, see `exact.py`; of a reduction, of a list.
        interval: between which numbers it lies, see `ranges.py`; None: not known.
        interpret, torch: what computes it in an execution, see `forms.py`; None: nothing of its
            own. Of numbers and conditions the interpreter's is a function of numpy arrays, of
            reductions one of data, where these are present, and dimensions; others take the
            values, the node and the layer. Torch's takes the node, the frame and the arguments,
            but that of the library only these.
        triton: how generated kernels compute it: a text of its arguments, of a reduction the
            function that folds a tile, or what writes it, see `forms.py`; None: they do not.
    """

    name: str
    kind: Kind
    least: int = 0
    most: int | None = 0
    meaning: str = ""
    function: Function | None = None
    value: str | None = None
    names: tuple[Builtin, ...] = ()
    sign: str | None = None
    of_two: str | None = None
    result: str | None = None
    takes: str | None = None
    result_axes: tuple[str, ...] | None = None
    names_axes: bool = False
    reads_along: tuple[str, ...] = ()
    made_by_lowering: bool = False
    exact: bool = False
    commutative: bool = False
    always_finite: bool = False
    keeps_finite: bool = False
    keeps_zero: bool = False
    keeps_present: bool = False
    may_be_nan: bool = False
    divides: bool = False
    unit: str | None = None
    combines: str = "compared"
    of_none: float | None = None
    averages: bool = False
    shares_out: bool = False
    whole: bool = False
    sorts: bool = False
    per_head: bool = False
    reads_queries: bool = False
    of_tokens_there: bool = False
    steady: bool = False
    fleeting: bool = False
    host: Callable[..., Any] | None = None
    interval: Rule | None = None
    interpret: str | None = None
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
        return self.reads_queries or self.kind is Kind.VECTOR
