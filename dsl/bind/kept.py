"""`keep` of a bound policy, and token sets that choose among what other sets left over.

Binding fills in `keep` where a policy has none.
"""

from __future__ import annotations

from kvpolicy.dsl.ir.heads import across_heads
from kvpolicy.dsl.ir.nodes import Node, Rules
from kvpolicy.dsl.ir.traverse import Sections, merge_roots, nodes_of, state_roots
from kvpolicy.dsl.ops.operations import Kind


def keep_of(rules: Rules) -> Node:
    """`keep` of the rules of a bound policy, of the prefill or of a decode step.

    Raises:
        ValueError: the rules are not a bound policy's.
    """
    if rules.keep is None:
        raise ValueError("rules without `keep` are not bound")
    return rules.keep


def heads_differ(sections: Sections) -> bool:
    """Whether the KV heads of a layer may hold different entries, by a bound policy's sections."""
    keeps = [keep_of(rules) for rules in (sections.prefill, sections.decode) if rules is not None]
    return any("kv" in keep.type.axes for keep in keeps)


def entries_compared(sections: Sections) -> bool:
    """Whether decode steps compare entries of KV heads, which may hold different ones.

    Args:
        sections: with reductions over KV heads after all others, see `heads_last`.
    """
    if sections.decode is None or not heads_differ(sections):
        return False
    rules = sections.decode
    roots = [keep_of(rules), *state_roots(rules.states), *merge_roots(rules.merge)]
    nodes = filter(across_heads, nodes_of(roots))
    return any("token" in arg.type.axes for node in nodes for arg in node.args)


def filling(fill: Node) -> tuple[Node, Node, Node]:
    """Score of a `fill`, by which the rest competes, the set taken before, and the budget."""
    score, taken_set, missing, _ = fill.args
    return score, taken_set, missing.args[0]


def is_rest(node: Node, taken: Node) -> bool:
    """Whether a value is `mask(x, not taken)`, present only outside of a set."""
    return node.op == "mask" and node.args[1].op == "not" and node.args[1].args[0] is taken


def chooses_after(taken: Node, right: Node) -> bool:
    """Whether `right` is a `top` among what `taken` left over."""
    return right.op == "top" and is_rest(right.args[0], taken)


def present_outside(x: Node, taken: Node) -> bool:
    """Whether a value is present at every token that is not in `taken`."""
    if not x.type.absent:
        return True
    if x.op == "mask":
        return any(is_rest(x, part) for part in _parts(taken)) and present_outside(x.args[0], taken)
    if x.operation.kind is Kind.LOOK:  # absent at layers that do not exist
        return False
    return bool(x.args) and all(present_outside(arg, taken) for arg in x.args)


def sized_terms(token_set: Node) -> list[Node] | None:
    """The parts of a union, if each takes a number of entries of a list; None: it has others."""
    if token_set.op == "truth" and token_set.value is False:
        return []
    if token_set.op == "top" and token_set.axes == ("token",):
        return [token_set]
    parts = [sized_terms(arg) for arg in token_set.args] if token_set.op == "or" else [None]
    return None if None in parts else [term for part in parts for term in part or ()]


def _parts(token_set: Node) -> list[Node]:
    """A set and, if it is a union, the sets in it."""
    if token_set.op != "or":
        return [token_set]
    return [token_set, *(part for arg in token_set.args for part in _parts(arg))]
