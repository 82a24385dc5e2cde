"""What the rules of a bound policy keep, and sets of which one chooses among what others left over.

Binding fills in `keep` where a policy has none.
"""

from __future__ import annotations

from kvpolicy.dsl.ir.nodes import Node, Rules


def keep_of(rules: Rules) -> Node:
    """`keep` of the rules of a bound policy, of the prefill or of a decode step.

    Raises:
        ValueError: the rules are not a bound policy's.
    """
    if rules.keep is None:
        raise ValueError("rules without `keep` are not bound")
    return rules.keep


def is_rest(node: Node, taken: Node) -> bool:
    """Whether a value is there only outside of a set: `mask(x, not taken)`."""
    return node.op == "mask" and node.args[1].op == "not" and node.args[1].args[0] is taken


def chooses_after(taken: Node, right: Node) -> bool:
    """Whether `right` is a `top` among what `taken` left over."""
    return right.op == "top" and is_rest(right.args[0], taken)
