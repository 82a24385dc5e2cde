"""Order, selection by it, and operations along an axis."""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.ops import ranges
from kvpolicy.dsl.ops.operations import Kind, Operation, Parameter, called

_X = (Parameter("x"),)
_POOLED = (*_X, Parameter("width", "width"))


# `Node.axes` are the axes that compete, in the order written.
_choice = partial(called, kind=Kind.SELECTION, group="Order and selection")
_lowered = partial(
    Operation, kind=Kind.SELECTION, names_axes=True, made_by_lowering=True, per_head=True
)
_along_tokens = partial(
    called, group="Along tokens", unit="first", shape="as x", result="number", takes="number",
    keeps_finite=True, per_head=True,
)  # fmt: skip

ROWS = (
    _choice("top", "top", (*_X, Parameter("n", "entries", optional=True, unit="tokens")),
            "the n highest present values among those that compete along a; equal values in the "
            "order of the axes as written, lower index first. Without n, in last place of `keep` "
            "and `propagate.tokens`: as many as the budget still misses", "select",
            axes="optional", shape="truth, axes of x", result="truth", takes="number", sorts=True,
            has_small_kernel=True, per_head=True, interpret="select.top", torch="select.top",
            triton="leaves.end"),
    _choice("rank", "along", _X, "1 for the highest along a, ties by index; absent stays absent",
            "sort", axes="optional", shape="as x", result="number", takes="number", exact=True,
            whole=True, sorts=True, has_small_kernel=True, per_head=True, interpret="along.rank",
            torch="select.rank"),
    _choice("index", "index", _X, "0, 1, ... along axis a of x", axes="required", shape="number[a]",
            result="number", always_finite=True, whole=True, interpret="along.index",
            torch="select.index", triton="leaves.index"),
    Operation("then", Kind.SELECTION, 2, None, "token sets in order", result="truth", takes="truth",
              interpret="select.then"),
    _lowered("missing", least=2, most=2, meaning="budget, taken: entries to fill, of all who "
             "compete", result="number", whole=True, torch="select.missing"),
    _lowered("remaining", least=1, most=1, meaning="taken: candidates left over, of all who "
             "compete", result="number", whole=True, torch="select.remaining"),
    _lowered("fill", least=4, most=4, meaning="x, taken, n, left: taken, and the n best of the "
             "rest by x", result="truth", sorts=True, has_small_kernel=True, torch="select.fill"),
    _along_tokens("avgpool", "pool", _POOLED,
                  "sum of the present neighbours along `token`, divided by the width; centred, "
                  "stride 1, odd width; absent stays absent", kind=Kind.POOL,
                  reads_along=("token",), interval=ranges.with_zero, interpret="along.pool",
                  torch="pool.pool", triton="pooling.pool"),
    _along_tokens("maxpool", "pool", _POOLED,
                  "largest present neighbour along `token`; centred, stride 1, odd width; absent "
                  "stays absent", kind=Kind.POOL, reads_along=("token",), interval=ranges.first,
                  interpret="along.pool", torch="pool.pool", triton="pooling.pool"),
    _along_tokens("cumsum", "along", _X,
                  "sum of the present values at this token and those before it; absent stays "
                  "absent", axes="token", kind=Kind.OTHER, interval=ranges.total,
                  interpret="along.cumsum", torch="along.cumsum"),
    _along_tokens("sort", "along", _X,
                  "the present values, ascending, at the tokens that have one; absent stays "
                  "absent", "sort", axes="token", kind=Kind.OTHER, sorts=True,
                  interval=ranges.first, interpret="along.sort", torch="along.sort"),
)  # fmt: skip
