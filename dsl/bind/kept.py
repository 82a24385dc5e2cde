"""What the rules of a bound policy keep: binding fills in `keep` where a policy has none."""

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
