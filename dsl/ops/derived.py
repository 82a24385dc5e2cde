"""Functions that are defined in the language itself."""

from __future__ import annotations

from kvpolicy.dsl.ops.operations import Function, Parameter


def _derived(name: str, parameters: str, axes: str, meaning: str, body: str) -> Function:
    kinds = {"n": Parameter("n", "entries", unit="tokens")}
    return Function(
        name, "derived", tuple(kinds.get(x, Parameter(x)) for x in parameters.split()), meaning,
        "as its definition", axes, body=body, group="Derived",
    )  # fmt: skip


DERIVED = (
    _derived("recent", "n", "none", "the last n candidates", "top(position, n)"),
    _derived("sinks", "n", "none", "the first n candidates", "top(-position, n)"),
    _derived("norm1", "x", "required", "sum of absolute values", "sum[a](abs(x))"),
    _derived("norm2", "x", "required", "Euclidean length", "sqrt(sum[a](x ^ 2))"),
    _derived("normalize", "x", "required", "x divided by its sum", "x / sum[a](x)"),
    _derived("softmax", "x", "required", "exponentials that add up to 1",
             "normalize[a](exp(x - max[a](x)))"),
    _derived("minmax", "x", "required", "x moved and scaled to 0 to 1",
             "(x - min[a](x)) / (max[a](x) - min[a](x))"),
    _derived("entropy", "x", "required", "entropy of x seen as a distribution",
             "-sum[a](normalize[a](x) * log(normalize[a](x)))"),
    _derived("cosine", "x y", "required", "cosine of the angle between x and y",
             "sum[a](x * y) / (norm2[a](x) * norm2[a](y))"),
    _derived("clamp", "x low high", "none", "x, not below low and not above high",
             "min(max(x, low), high)"),
    _derived("unit", "x", "required", "the direction of x", "x / norm2[a](x)"),
    _derived("angle", "x y", "required", "angle between x and y",
             "acos(sum[a](unit[a](x) * unit[a](y)))"),
    _derived("slerp", "x y t", "required",
             "the direction t of the way from x to y along the arc between them",
             "(sin((1 - t) * angle[a](x, y)) * unit[a](x) + sin(t * angle[a](x, y)) * unit[a](y))"
             " / sin(angle[a](x, y)) where sin(angle[a](x, y)) > 1e-6"
             " else (1 - t) * unit[a](x) + t * unit[a](y)"),
)  # fmt: skip
