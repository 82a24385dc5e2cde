"""What a policy costs a request while it decodes: memory, and operations of a step."""

from __future__ import annotations

import math

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.work import Sizes
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, state_roots

_VALUE = 8  # bytes of float64


def memory_of_decode(bound: Bound, prompt: int, element: int) -> tuple[int, int]:
    """Bytes that one request remembers for its decode steps: of states, and of queries.

    Args:
        bound: the policy.
        prompt: N tokens.
        element: bytes of one number of a query.
    """
    shape = bound.shape
    entries = max(1, max_entries(bound, prompt) // (shape.layers * shape.kv_heads))
    axes = {"kv": shape.kv_heads, "group": shape.group, "token": entries, "dim": shape.head_dim}
    states = bound.decode.states.values() if bound.decode is not None else ()
    values = sum(math.prod(axes.get(axis, 1) for axis in x.type.axes) for x in states)
    # The newest query is at hand; only older ones are kept.
    queries = bound.step_queries(prompt)
    remembered = queries * shape.heads * shape.head_dim if queries > 1 else 0
    return shape.layers * values * _VALUE, shape.layers * remembered * element


def decode_cost(bound: Bound, prompt: int) -> dict[str, float]:
    """Operations per layer of a decode step: at every step, and where entries leave."""
    shape = bound.shape
    entries = max(1, max_entries(bound, prompt) // (shape.layers * shape.kv_heads)) + 1
    sizes = Sizes(bound, prompt, 0, entries, entries - 1, _VALUE, step=True)
    rules = bound.decode_lowered
    if rules is None:
        return {}
    always = list(nodes_of([*state_roots(rules.states)]))
    known = {id(node) for node in always}
    leaving = [
        node for node in nodes_of([rules.keep, *merge_roots(rules.merge)]) if id(node) not in known
    ]
    every = sum(sizes.work(node).operations for node in always)
    costs = {"at every step": every} if every else {}
    costs["where entries leave"] = sum(sizes.work(node).operations for node in leaving)
    return costs
