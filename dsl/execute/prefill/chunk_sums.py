"""Sums over all queries of a prompt that comes in chunks."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.tensors.values import Value
from kvpolicy.dsl.ir.nodes import Node


class ChunkSums:
    """Sum states of a layer over the chunks of a prompt so far."""

    def __init__(self, totals: dict[str, Node]) -> None:
        self.totals = totals
        self.queries = 0
        self.values: dict[str, Value] = {}

    def add(self, evaluation: Evaluation, queries: int) -> None:
        """Adds the reductions over the last `queries` queries."""
        chunk = replace(evaluation, frame=replace(evaluation.frame, last=queries), known={})
        for name, total in self.totals.items():
            value = chunk.value(total)
            self.values[name] = _added(self.values.get(name), value)
        self.queries += queries

    def finish(self, evaluation: Evaluation) -> None:
        """Adds the rest of the prompt, and gives the evaluation the whole sums."""
        self.add(evaluation, evaluation.frame.tokens - self.queries)
        for name, total in self.totals.items():
            evaluation.known[total] = self.values[name]


def _added(a: Value | None, b: Value) -> Value:
    """The sum of `a` and `b`, where `b` may be over more tokens."""
    if a is None:
        return b
    data = b.tensor.clone()
    if "token" in a.axes:
        dim = a.axes.index("token")
        data.narrow(dim, 0, a.tensor.shape[dim]).add_(a.tensor)
    else:
        data += a.data
    return replace(b, data=data)
