"""The table of operations: one row says all that the rest asks of an operation by its name.

What computes an operation stands where it is computed (the interpreter, torch, generated kernels,
exact numbers, intervals); tests hold that each of these has what its rows ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


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
        meaning: what `Node.value` is, the axes of the result, the arguments in order.
        sign: how an author writes it, between its arguments or before the only one.
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
        like_units: its arguments have one unit.
        infinite_of_none: a reduction of no value is infinite.
        averages: a reduction that divides by the number of values.
        shares_out: divides its first argument among the layers.
        whole: a whole number, at least 0.
        sorts: orders what it chooses from.
        per_head: each KV head's values follow from its own, in every layer alike.
        reads_queries: scores keys by queries.
        of_tokens_there: follows from which tokens reach a layer.
        steady: the same at every step for an entry that is there.
        fleeting: not there again when a layer's entries are merged or shared.
        in_kernels: generated kernels compute it of values of a tile.
    """

    name: str
    kind: Kind
    least: int = 0
    most: int | None = 0
    meaning: str = ""
    sign: str | None = None
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
    like_units: bool = False
    infinite_of_none: bool = False
    averages: bool = False
    shares_out: bool = False
    whole: bool = False
    sorts: bool = False
    per_head: bool = False
    reads_queries: bool = False
    of_tokens_there: bool = False
    steady: bool = False
    fleeting: bool = False
    in_kernels: bool = False

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
    def elementwise(self) -> bool:
        """Each value follows from the values at the same place."""
        return self.kind in (Kind.ARITHMETIC, Kind.COMPARISON, Kind.LOGIC, Kind.BRANCH)

    @property
    def across_layers(self) -> bool:
        """It looks at other layers, whatever its axes are."""
        return self.kind in (Kind.LOOK, Kind.PARTITION)

    @property
    def reads_tensors(self) -> bool:
        """It reads cached keys or values."""
        return self.reads_queries or self.kind is Kind.VECTOR


def _leaf(name: str, kind: Kind, meaning: str, **traits: Any) -> Operation:
    return Operation(name, kind, meaning=meaning, **traits)


def _window(name: str, meaning: str, axes: tuple[str, ...], **traits: Any) -> Operation:
    return Operation(
        name, Kind.WINDOW, 0, 1, meaning, result="number", result_axes=axes, always_finite=True,
        **traits,
    )  # fmt: skip


def _numeric(name: str, arguments: int, sign: str | None = None, /, **traits: Any) -> Operation:
    return Operation(
        name, Kind.ARITHMETIC, arguments, arguments, sign=sign, result="number", takes="number",
        per_head=True, **traits,
    )  # fmt: skip


def _truth(name: str, kind: Kind, arguments: int, sign: str, **traits: Any) -> Operation:
    compares = kind is Kind.COMPARISON
    return Operation(
        name, kind, arguments, arguments, sign=sign, result="truth",
        takes="number" if compares else "truth", like_units=compares, exact=True,
        always_finite=True, keeps_finite=True, per_head=True, in_kernels=True, **traits,
    )  # fmt: skip


def _branch(name: str, arguments: int, meaning: str, **traits: Any) -> Operation:
    return Operation(
        name, Kind.BRANCH, arguments, arguments, meaning, exact=True, keeps_finite=True,
        per_head=True, in_kernels=True, **traits,
    )  # fmt: skip


def _reduction(name: str, result: str = "number", **traits: Any) -> Operation:
    return Operation(
        name, Kind.REDUCTION, 1, 1, "axes: those removed, or (layer,)", result=result,
        names_axes=True, exact=True, per_head=True, **traits,
    )  # fmt: skip


def _selection(name: str, least: int, most: int | None, meaning: str, **traits: Any) -> Operation:
    return Operation(name, Kind.SELECTION, least, most, meaning, **traits)


def _pool(name: str) -> Operation:
    return Operation(
        name, Kind.POOL, 2, 2, "x, width", result="number", takes="number",
        reads_along=("token",), keeps_finite=True, keeps_present=True, per_head=True,
    )  # fmt: skip


def _along_tokens(name: str, **traits: Any) -> Operation:
    return Operation(
        name, Kind.OTHER, 1, 1, "x; axes = (token,)", result="number", takes="number",
        names_axes=True, keeps_finite=True, keeps_present=True, per_head=True, **traits,
    )  # fmt: skip


def _partition(name: str, least: int, most: int, meaning: str, **traits: Any) -> Operation:
    return Operation(
        name, Kind.PARTITION, least, most, f"axes = (layer,); {meaning}", result="number",
        names_axes=True, **traits,
    )  # fmt: skip


_HEADS = ("kv", "group", "query", "token")
_VECTOR = ("kv", "token", "dim")
_FINITE = {"keeps_finite": True, "in_kernels": True}

OPERATIONS: dict[str, Operation] = {
    row.name: row
    for row in (
        _leaf("number", Kind.LITERAL, "value: Fraction", result="number", result_axes=(),
              exact=True, always_finite=True),
        _leaf("truth", Kind.LITERAL, "value: bool", result="truth", result_axes=(), exact=True),
        _leaf("param", Kind.GIVEN, "value: name of the parameter", result_axes=(), exact=True),
        _leaf("size", Kind.GIVEN,
              "value: layer layers kv_heads heads prompt length generated cached pi"),
        _leaf("data", Kind.MODEL, "value: name of a tensor delivered with the model"),
        _leaf("hidden_in", Kind.MODEL, "", result="number", result_axes=("token", "channel")),
        _leaf("hidden_mid", Kind.MODEL, "", result="number", result_axes=("token", "channel")),
        _leaf("state", Kind.REMEMBERED,
              "value: name; before this step's update inside its own `next`, after it elsewhere",
              per_head=True, fleeting=True),
        _leaf("before", Kind.REMEMBERED, "value: name of a state; before this step's update",
              made_by_lowering=True, per_head=True, fleeting=True),
        _leaf("budget", Kind.REMEMBERED,
              "the numbers of the section `budget` of the enclosing rules; value: None, or "
              "`propagate` for those of `propagate.budget`", per_head=True),
        _leaf("decided", Kind.REMEMBERED,
              "value: name of a let of the prefill, see `Rules.decided` (in decode)",
              per_head=True),
        _leaf("position", Kind.PLACE, "original position", result="number",
              result_axes=("token",), always_finite=True, keeps_present=True, whole=True,
              of_tokens_there=True, steady=True),
        _leaf("all", Kind.PLACE, "[token] every candidate", result="truth", per_head=True,
              of_tokens_there=True, steady=True),
        _leaf("new", Kind.PLACE, "[token] tokens of this step", result="truth", per_head=True),
        _leaf("key", Kind.VECTOR, "after RoPE", result="number", result_axes=_VECTOR,
              always_finite=True, keeps_present=True, steady=True),
        _leaf("value", Kind.VECTOR, "", result="number", result_axes=_VECTOR,
              always_finite=True, keeps_present=True, steady=True),
        # value: "recent" (argument: count), "all" or "new" (no argument)
        _window("attn", "softmax probabilities", _HEADS, keeps_present=True, reads_queries=True,
                fleeting=True),
        _window("logits", "before the softmax", _HEADS, reads_queries=True, fleeting=True),
        _window("distance", "", ("query", "token"), whole=True, of_tokens_there=True),
        _numeric("add", 2, "+", exact=True, commutative=True, like_units=True, keeps_present=True,
                 **_FINITE),
        _numeric("subtract", 2, "-", exact=True, like_units=True, keeps_present=True, **_FINITE),
        _numeric("multiply", 2, "*", exact=True, commutative=True, keeps_present=True, **_FINITE),
        _numeric("divide", 2, "/", exact=True, keeps_zero=True, may_be_nan=True, divides=True,
                 in_kernels=True),
        _numeric("floor_divide", 2, "//", exact=True, may_be_nan=True, divides=True),
        _numeric("modulo", 2, "%", exact=True, may_be_nan=True, divides=True),
        _numeric("power", 2, "^", exact=True, keeps_zero=True, may_be_nan=True, in_kernels=True),
        _numeric("negate", 1, "-", exact=True, keeps_zero=True, keeps_present=True, **_FINITE),
        _numeric("abs", 1, exact=True, keeps_zero=True, keeps_present=True, **_FINITE),
        _numeric("exp", 1, in_kernels=True),
        _numeric("log", 1, may_be_nan=True, in_kernels=True),
        _numeric("sqrt", 1, keeps_zero=True, may_be_nan=True, **_FINITE),
        _numeric("cos", 1, keeps_finite=True),
        _numeric("sin", 1, keeps_finite=True),
        _numeric("acos", 1, keeps_finite=True, may_be_nan=True),
        _numeric("floor", 1, exact=True, keeps_finite=True),
        _numeric("ceil", 1, exact=True, keeps_finite=True),
        _numeric("round", 1, exact=True, keeps_finite=True),
        _numeric("minimum", 2, exact=True, commutative=True, like_units=True, **_FINITE),
        _numeric("maximum", 2, exact=True, commutative=True, like_units=True, **_FINITE),
        _truth("less", Kind.COMPARISON, 2, "<"),
        _truth("less_equal", Kind.COMPARISON, 2, "<="),
        _truth("greater", Kind.COMPARISON, 2, ">"),
        _truth("greater_equal", Kind.COMPARISON, 2, ">="),
        _truth("equal", Kind.COMPARISON, 2, "==", commutative=True),
        _truth("not_equal", Kind.COMPARISON, 2, "!=", commutative=True),
        _truth("and", Kind.LOGIC, 2, "and", commutative=True),
        _truth("or", Kind.LOGIC, 2, "or", commutative=True),
        _truth("not", Kind.LOGIC, 1, "not"),
        _branch("mask", 2, "x where c", keeps_zero=True),
        _branch("choose", 3, "x where c else y; arguments x, c, y"),
        Operation("broadcast", Kind.OTHER, 1, 1, "x repeated along the axes of the node's type",
                  made_by_lowering=True),
        _reduction("sum", keeps_finite=True),
        _reduction("mean", keeps_finite=True, averages=True),
        _reduction("max", infinite_of_none=True),
        _reduction("min", infinite_of_none=True),
        _reduction("var", keeps_finite=True, averages=True),
        _reduction("any", "truth", takes="truth", always_finite=True, keeps_finite=True),
        _reduction("count", always_finite=True, keeps_finite=True, whole=True),
        # axes: who competes, in the order written
        _selection("rank", 1, 1, "x", result="number", takes="number", names_axes=True, exact=True,
                   whole=True, sorts=True, per_head=True),
        _selection("index", 1, 1, "one axis", result="number", names_axes=True,
                   always_finite=True, whole=True),
        _selection("top", 1, 2, "x and, unless it fills the budget, the count", result="truth",
                   takes="number", names_axes=True, sorts=True, per_head=True),
        _selection("then", 2, None, "token sets in order", result="truth", takes="truth"),
        _selection("missing", 2, 2, "budget, taken: entries to fill, of all who compete",
                   result="number", names_axes=True, made_by_lowering=True, whole=True,
                   per_head=True),
        _selection("remaining", 1, 1, "taken: candidates left over, of all who compete",
                   result="number", names_axes=True, made_by_lowering=True, whole=True,
                   per_head=True),
        _selection("fill", 4, 4, "x, taken, n, left: taken, and the n best of the rest by x",
                   result="truth", names_axes=True, made_by_lowering=True, sorts=True,
                   per_head=True),
        _pool("avgpool"),
        _pool("maxpool"),
        _along_tokens("cumsum"),
        _along_tokens("sort", sorts=True),
        Operation("past", Kind.LOOK, 2, 2, "x, number of layers", fleeting=True),
        Operation("at", Kind.LOOK, 2, 2, "layer, x", exact=True, fleeting=True),
        _partition("split", 2, 3, "total, weight, maximum", takes="number", exact=True,
                   shares_out=True),
        _partition("cascade", 2, 3, "total, weight, maximum", takes="number", shares_out=True),
        _partition("cluster", 2, 2, "x, k"),
        Operation("uniform", Kind.OTHER, 1, 1, "seed", result="number"),
        Operation("nearest", Kind.MERGE, 1, 1, "receivers (merge.into)", result="truth",
                  reads_along=_VECTOR),
        Operation("next", Kind.MERGE, 1, 1, "receivers (merge.into)", result="truth"),
        Operation("target", Kind.MERGE, 1, 1, "x", reads_along=("token",)),
        Operation("dropped", Kind.MERGE, 1, 1,
                  "x with its axis token read at the dropped entries", reads_along=("token",)),
        Operation("special", Kind.MERGE, meaning="value: own below mass members"),
    )
}  # fmt: skip
