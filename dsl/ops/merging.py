"""Operations that exist while a layer merges its dropped entries."""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.ops.operations import Kind, Operation, Parameter, called

_call = partial(called, kind=Kind.MERGE, group="Merging")
_lowered = partial(Operation, kind=Kind.MERGE, least=2, most=2, made_by_lowering=True)

ROWS = (
    _call("nearest", "receivers", (Parameter("x"),),
          "receivers of a dropped entry: the kept entry of the same KV head with the highest "
          "cosine of x; ties to the lower position", "O(P C D)", result="truth",
          reads_along=("kv", "token", "dim")),
    _call("next", "receivers", (Parameter("n"),),
          "receivers of a dropped entry: the n kept entries of the same KV head that follow it",
          "O(P n)", result="truth"),
    _call("target", "target", (Parameter("x"),),
          "mean of x over the receivers of each dropped entry", "O(P size)", unit="first",
          shape="as x, per dropped entry", reads_along=("token",)),
    Operation("dropped", Kind.MERGE, 1, 1, "x with its axis token read at the dropped entries",
              reads_along=("token",)),
    # Of the two vectors of an entry; see `ir/inner_products.py`.
    _lowered("inner_product", meaning="x, y: the inner product of two of the vectors",
             of_two_vectors=True),
    _lowered("inner_cosine", meaning="x, y: the cosine of both vectors", of_two_vectors=True),
    _lowered("blend", meaning="a, b: a times the first vector plus b times the second"),
)  # fmt: skip
