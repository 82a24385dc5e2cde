"""Whether a policy can be decided apart, in stages of a model's layers (pipeline parallelism).

Each stage decides for its own layers. That gives the policy's decision if nothing in it reads data
of other layers; also if layers are compared by one number each at the prompt's end, and stages
exchange these numbers. All stages must then know how many entries every layer keeps without another
exchange, so that these numbers of entries must follow from the exchanged ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.entries import deciding_numbers
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.ir.nodes import Node, When, brackets
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, rules_roots, state_roots


class Obstacle(NamedTuple):
    """Why stages cannot decide apart: a clause, and the value of the policy that is the cause."""

    why: str
    cause: Node


def why_not_apart(bound: Bound) -> Obstacle | None:
    """Why stages cannot decide each for its own layers; None: they can.

    They may have to exchange numbers: `exchanged`.
    """
    if bound.program.share is not None:
        why = "layers are stored in pairs (`share:`), and those of a pair may lie in two stages"
        return Obstacle(why, bound.program.share.when)
    if bound.folded.propagate is not None:
        why = "tokens leave between layers (`propagate:`), and the next stage computes all of them"
        return Obstacle(why, bound.folded.propagate.tokens)
    culprit = next((x for x in _read(bound) if _looks(x) and not _compares_numbers(x)), None)
    culprit = culprit or next((x for x in nodes_of(_decoding(bound)) if _looks(x)), None)
    if culprit is not None:
        looks = f"`{culprit.op}{brackets(culprit.axes)}`"
        return Obstacle(f"{looks} looks at layers that lie in other stages", culprit)
    numbers = deciding_numbers(keep_of(bound.lowered.prefill))
    if exchanged(bound) and (numbers is None or not all(map(_is_number, numbers))):
        why = "layers are compared, and only its own data say how many entries a layer keeps then"
        return Obstacle(why, keep_of(bound.folded.prefill))
    return None


def exchanged(bound: Bound) -> tuple[Node, ...]:
    """Nodes with one number per layer that the stages exchange, where they decide apart."""
    compared_nodes = [arg for node in _read(bound) if _looks(node) for arg in node.args]
    if not compared_nodes:
        return ()
    nodes_by_id = {id(x): x for node in compared_nodes for x in _own(node)}
    for number in deciding_numbers(keep_of(bound.lowered.prefill)) or ():
        nodes_by_id.update((id(x), x) for x in _own(number))
    return tuple(nodes_by_id.values())


def _read(bound: Bound) -> Iterator[Node]:
    """Every node of the prefill that decides what is kept, in the prefill and in decode."""
    rules, decode_rules = bound.lowered.prefill, bound.lowered.decode
    roots = [keep_of(rules), *rules.decided.values()]
    if decode_rules is not None and rules.budget is not None:
        if any(node.op == "budget" for node in nodes_of(_decoding(bound))):
            roots.append(rules.budget)
    return nodes_of([*roots, *state_roots(rules.states), *merge_roots(rules.merge)])


def _decoding(bound: Bound) -> list[Node]:
    return [] if bound.lowered.decode is None else rules_roots(bound.lowered.decode)


def _looks(node: Node) -> bool:
    """Whether a value reads data of other layers."""
    return node.across_layers and not _is_planned(node)


def _is_planned(node: Node) -> bool:
    """Whether every stage can compute a value for all layers from the prompt's length."""
    return node.when <= When.PROMPT and not set(node.type.axes) - {"token"}


def _compares_numbers(node: Node) -> bool:
    """Whether a value compares layers by one number each, after the last layer."""
    return node.when == When.END and all(map(_is_number, node.args))


def _is_number(node: Node) -> bool:
    """Whether a layer's value is one number, of its own data or of comparisons of such numbers."""
    if node.type.axes:
        return False
    return node.when < When.END or all(map(_is_number, node.args))


def _own(node: Node) -> Iterator[Node]:
    """The largest parts of a number that follow from a layer's own data."""
    if node.when >= When.END:
        for arg in node.args:
            yield from _own(arg)
    elif not _is_planned(node):
        yield node
