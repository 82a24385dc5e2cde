"""Operations that exist while a layer merges its dropped entries."""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.ops.operations import Kind, Operation, Parameter, called

_call = partial(called, kind=Kind.MERGE, group="Merging")

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
)  # fmt: skip
