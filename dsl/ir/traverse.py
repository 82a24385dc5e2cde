"""Every value of a program's sections, to rewrite them together or to walk over them.

Sections share nodes (the prefill's `keep` and `propagate.tokens` read one attention map), so they
are always rewritten by one function: what was shared stays shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvpolicy.dsl.ir.nodes import Merge, Node, Program, Propagate, Rules, Share, State

Visit = Callable[[Node], Node]


@dataclass(frozen=True, eq=False)
class Sections:
    """What decides, of a program or of a binding."""

    prefill: Rules
    decode: Rules | None = None
    propagate: Propagate | None = None
    share: Share | None = None

    @classmethod
    def of(cls, program: Program) -> Sections:
        """The sections of a checked program."""
        return cls(program.prefill, program.decode, program.propagate, program.share)


def map_rules(rules: Rules, visit: Visit) -> Rules:
    """The rules with every value rewritten."""
    return replace(
        rules,
        score=_one(rules.score, visit),
        budget=_one(rules.budget, visit),
        keep=_one(rules.keep, visit),
        when=_one(rules.when, visit),
        merge=_map_merge(rules.merge, visit),
        states=_map_states(rules.states, visit),
        lets={name: visit(node) for name, node in rules.lets.items()},
        decided={name: visit(node) for name, node in rules.decided.items()},
    )


def map_propagate(propagate: Propagate, visit: Visit) -> Propagate:
    """The section with every value rewritten."""
    return replace(
        propagate,
        tokens=visit(propagate.tokens),
        moment=visit(propagate.moment),
        budget=_one(propagate.budget, visit),
        restart=_one(propagate.restart, visit),
    )


def map_share(share: Share, visit: Visit) -> Share:
    """The section with every value rewritten."""
    exceptions = _one(share.exceptions, visit)
    return replace(
        share, when=visit(share.when), direction=visit(share.direction), exceptions=exceptions
    )


def _one(node: Node | None, visit: Visit) -> Node | None:
    return None if node is None else visit(node)


def _map_states(states: Mapping[str, State], visit: Visit) -> dict[str, State]:
    return {
        name: replace(state, start=_one(state.start, visit), next=_one(state.next, visit))
        for name, state in states.items()
    }


def _map_merge(merge: Merge | None, visit: Visit) -> Merge | None:
    if merge is None:
        return None
    return replace(
        merge,
        into=visit(merge.into),
        accept=_one(merge.accept, visit),
        weight=_one(merge.weight, visit),
        own=_one(merge.own, visit),
        divide=_one(merge.divide, visit),
        states=_map_states(merge.states, visit),
    )


def merge_roots(merge: Merge | None) -> list[Node]:
    """The values that a merge reads, its states included."""
    if merge is None:
        return []
    parts = [merge.into, merge.accept, merge.weight, merge.own, merge.divide]
    return [node for node in (*parts, *state_roots(merge.states)) if node is not None]


def state_roots(states: Mapping[str, State]) -> list[Node]:
    """The first and next values of states."""
    return [node for state in states.values() for node in (state.start, state.next) if node]


def propagate_roots(propagate: Propagate | None) -> list[Node]:
    """The values by which tokens are propagated."""
    if propagate is None:
        return []
    parts = (propagate.moment, propagate.budget, propagate.tokens)
    return [node for node in parts if node is not None]


def nodes_of(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Every node below the roots, once, arguments before users."""
    seen: set[int] = set()
    for root in roots:
        if root is not None:
            yield from root.walk(seen)


def states_needed(roots: list[Node | None], states: Mapping[str, State]) -> set[str]:
    """Names of the states that the roots read, directly or through other states."""
    found: set[str] = set()
    waiting = roots
    while waiting:
        names = {node.symbol for node in nodes_of(waiting) if node.op == "state"}
        new = (names & states.keys()) - found
        found |= new
        waiting = [*state_roots({name: states[name] for name in new})]
    return found
