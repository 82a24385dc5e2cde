"""The table of the language's functions, and every name that a policy may not give.

The checker types calls by this table, the function reference is generated from it, and derived
functions are defined in it, in the language itself, so that they have no meaning of their own.

Letters in costs: N cached tokens, w queries, D head size, P dropped entries, C kept entries,
L layers; per layer and KV head unless said otherwise.
"""

from __future__ import annotations

from kvpolicy.dsl.ops.names import BUILTINS
from kvpolicy.dsl.ops.signatures import Function, Parameter


def _numbers(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, unit="tokens" if name == "n" else None) for name in names)


def _reduction(name: str, meaning: str, unit: str = "first", kind: str = "number") -> Function:
    return Function(
        name,
        "reduction",
        (Parameter("x", kind),),
        meaning,
        axes="required",
        unit=unit,
        result="x without a",
        group="Reductions",
    )


def _elementwise(name: str, meaning: str, unit: str = "none") -> Function:
    return Function(
        name, "elementwise", _numbers("x"), meaning, unit=unit, group="Elementwise", result="as x"
    )


def _derived(name: str, parameters: str, axes: str, meaning: str, body: str) -> Function:
    return Function(
        name,
        "derived",
        _numbers(*parameters.split()),
        meaning,
        axes=axes,
        body=body,
        group="Derived",
        cost="as its definition",
    )


_QUERIES = (Parameter("queries", "queries"),)

FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function(
            "attn",
            "attention",
            _QUERIES,
            "softmax over all candidates of q.k / sqrt(D), causal, in float32; absent where the "
            "token comes after the query",
            "O(w N D); all queries: O(N^2 D)",
            result="number[head, query, token]",
            group="Attention",
        ),
        Function(
            "logits",
            "attention",
            _QUERIES,
            "the same before the softmax",
            "O(w N D)",
            result="number[head, query, token]",
            group="Attention",
        ),
        Function(
            "distance",
            "attention",
            _QUERIES,
            "position of the query minus position of the token; absent where negative",
            "O(w N)",
            result="number[query, token] tokens",
            group="Attention",
        ),
        _reduction("sum", "sum of the present values; 0 of none"),
        _reduction("mean", "mean of the present values; 0 of none"),
        _reduction(
            "max", "largest present value; -inf of none. `max(a, b)`, without axes, is elementwise"
        ),
        _reduction(
            "min", "smallest present value; inf of none. `min(a, b)`, without axes, is elementwise"
        ),
        _reduction("var", "variance, divided by the number of present values; 0 of none", "none"),
        _reduction("any", "whether it is true anywhere", "none", "truth"),
        _reduction("count", "how many are true or, of numbers, present", "count", "any"),
        Function(
            "top",
            "top",
            (Parameter("x"), Parameter("n", optional=True, unit="tokens")),
            "the n highest present values among those that compete along a; equal values in the "
            "order of the axes as written, lower index first. Without n, in last place of `keep` "
            "and `propagate.tokens`: as many as the budget still misses",
            "select",
            axes="optional",
            result="truth, axes of x",
            group="Order and selection",
        ),
        Function(
            "rank",
            "along",
            _numbers("x"),
            "1 for the highest along a, ties by index; absent stays absent",
            "sort",
            axes="optional",
            result="as x",
            group="Order and selection",
        ),
        Function(
            "index",
            "index",
            _numbers("x"),
            "0, 1, ... along axis a of x",
            axes="required",
            result="number[a]",
            group="Order and selection",
        ),
        Function(
            "avgpool",
            "pool",
            (Parameter("x"), Parameter("width", "width")),
            "sum of the present neighbours along `token`, divided by the width; centred, stride "
            "1, odd width; absent stays absent",
            unit="first",
            result="as x",
            group="Along tokens",
        ),
        Function(
            "maxpool",
            "pool",
            (Parameter("x"), Parameter("width", "width")),
            "largest present neighbour along `token`; centred, stride 1, odd width; absent stays "
            "absent",
            unit="first",
            result="as x",
            group="Along tokens",
        ),
        Function(
            "cumsum",
            "along",
            _numbers("x"),
            "sum of the present values at this token and those before it; absent stays absent",
            axes="token",
            unit="first",
            result="as x",
            group="Along tokens",
        ),
        Function(
            "sort",
            "along",
            _numbers("x"),
            "the present values, ascending, at the tokens that have one; absent stays absent",
            "sort",
            axes="token",
            unit="first",
            result="as x",
            group="Along tokens",
        ),
        Function(
            "past",
            "past",
            (Parameter("x", "any"), Parameter("n")),
            "x at this layer and the n - 1 before it; absent below layer 0",
            "n times the size kept",
            unit="first",
            result="[past] and the axes of x",
            group="Across layers",
        ),
        Function(
            "at",
            "at",
            (Parameter("layer"), Parameter("x", "any")),
            "x at that layer; absent where that layer does not exist, or is deeper than this one "
            "and x is known at its own layer",
            "size kept",
            unit="first",
            result="as x",
            group="Across layers",
        ),
        Function(
            "split",
            "split",
            (
                Parameter("total", unit="tokens"),
                Parameter("weight"),
                Parameter("max", optional=True, unit="tokens"),
            ),
            "whole numbers for the layers that add up to floor(total), in proportion to the "
            "weights; no layer gets more than max",
            "O(L log L)",
            axes="layer",
            result="number tokens",
            group="Across layers",
        ),
        Function(
            "cascade",
            "split",
            (
                Parameter("total", unit="tokens"),
                Parameter("weight"),
                Parameter("max", optional=True, unit="tokens"),
            ),
            "`split` made after every layer among the layers so far; each layer has the least that "
            "any of these gave it, because what left does not come back",
            "O(L^2 log L)",
            axes="layer",
            result="number tokens",
            group="Across layers",
        ),
        Function(
            "cluster",
            "cluster",
            (Parameter("x"), Parameter("k")),
            "optimal k-means of one number per layer; the label of this layer, 0 for the lowest "
            "mean",
            "O(k L^2)",
            axes="layer",
            result="number",
            group="Across layers",
        ),
        Function(
            "uniform",
            "uniform",
            (Parameter("seed"),),
            "pseudo-random number in [0, 1) per KV head and entry, from a hash of seed, layer, "
            "head, position and decode step; the same on every device",
            result="number[kv, token]",
            group="Other",
        ),
        Function(
            "nearest",
            "receivers",
            _numbers("x"),
            "receivers of a dropped entry: the kept entry of the same KV head with the highest "
            "cosine of x; ties to the lower position",
            "O(P C D)",
            group="Merging",
        ),
        Function(
            "next",
            "receivers",
            (Parameter("n"),),
            "receivers of a dropped entry: the n kept entries of the same KV head that follow it",
            "O(P n)",
            group="Merging",
        ),
        Function(
            "target",
            "target",
            _numbers("x"),
            "mean of x over the receivers of each dropped entry",
            "O(P size)",
            unit="first",
            group="Merging",
            result="as x, per dropped entry",
        ),
        _elementwise("abs", "absolute value", "first"),
        _elementwise("exp", "e to the power x"),
        _elementwise("log", "natural logarithm"),
        _elementwise("sqrt", "square root; of a negative number 0"),
        _elementwise("cos", "cosine"),
        _elementwise("sin", "sine"),
        _elementwise("acos", "arc cosine"),
        _elementwise("floor", "largest whole number not above x", "first"),
        _elementwise("ceil", "smallest whole number not below x", "first"),
        _elementwise("round", "nearest whole number, halves to even", "first"),
        _derived("recent", "n", "none", "the last n candidates", "top(position, n)"),
        _derived("sinks", "n", "none", "the first n candidates", "top(-position, n)"),
        _derived("norm1", "x", "required", "sum of absolute values", "sum[a](abs(x))"),
        _derived("norm2", "x", "required", "Euclidean length", "sqrt(sum[a](x ^ 2))"),
        _derived("normalize", "x", "required", "x divided by its sum", "x / sum[a](x)"),
        _derived(
            "softmax",
            "x",
            "required",
            "exponentials that add up to 1",
            "normalize[a](exp(x - max[a](x)))",
        ),
        _derived(
            "minmax",
            "x",
            "required",
            "x moved and scaled to 0 to 1",
            "(x - min[a](x)) / (max[a](x) - min[a](x))",
        ),
        _derived(
            "entropy",
            "x",
            "required",
            "entropy of x seen as a distribution",
            "-sum[a](normalize[a](x) * log(normalize[a](x)))",
        ),
        _derived(
            "cosine",
            "x y",
            "required",
            "cosine of the angle between x and y",
            "sum[a](x * y) / (norm2[a](x) * norm2[a](y))",
        ),
        _derived(
            "clamp",
            "x low high",
            "none",
            "x, not below low and not above high",
            "min(max(x, low), high)",
        ),
        _derived("unit", "x", "required", "the direction of x", "x / norm2[a](x)"),
        _derived(
            "angle",
            "x y",
            "required",
            "angle between x and y",
            "acos(sum[a](unit[a](x) * unit[a](y)))",
        ),
        _derived(
            "slerp",
            "x y t",
            "required",
            "the direction t of the way from x to y along the arc between them",
            "(sin((1 - t) * angle[a](x, y)) * unit[a](x) + sin(t * angle[a](x, y)) * unit[a](y))"
            " / sin(angle[a](x, y)) where sin(angle[a](x, y)) > 1e-6"
            " else (1 - t) * unit[a](x) + t * unit[a](y)",
        ),
    )
}

# Names that no parameter, state or let may have, with what they are.
RESERVED: dict[str, str] = {
    **dict.fromkeys(
        ("past", "kv", "group", "head", "query", "token", "dropped", "dim", "channel"), "an axis"
    ),
    **dict.fromkeys(BUILTINS, "a name of the language"),
    **dict.fromkeys(FUNCTIONS, "a function"),
    **dict.fromkeys(("score", "budget"), "a section"),
}
