"""The nodes of a program's sections, to rewrite them together or to walk over them.

Sections share nodes (the prefill's `keep` and `propagate.tokens` read one attention map), so they
are always rewritten by one function: what was shared stays shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from kvpolicy.dsl.ir.nodes import Merge, Node, Propagate, Rules, Share, State

S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class Sections:
    """The sections of a program, checked or bound, that decide."""

    prefill: Rules
    decode: Rules | None = None
    propagate: Propagate | None = None
    share: Share | None = None


# Classes with nodes in their fields.
_SECTIONS = Sections | Rules | Merge | State | Propagate | Share


def rewritten(section: S, visit: Callable[[Node], Node]) -> S:
    """A section, or several, with every node in it rewritten by `visit`."""
    result: Any = section
    if isinstance(section, Node):
        result = visit(section)
    elif isinstance(section, dict):
        result = {name: rewritten(part, visit) for name, part in section.items()}
    elif isinstance(section, _SECTIONS):
        parts = {field.name: getattr(section, field.name) for field in fields(section)}
        result = replace(section, **rewritten(parts, visit))
    return cast(S, result)


def rules_roots(rules: Rules) -> list[Node]:
    """The values by which rules keep, remember and merge, and those that decode reads."""
    kept = [] if rules.keep is None else [rules.keep]
    return [*kept, *rules.decided.values(), *state_roots(rules.states), *merge_roots(rules.merge)]


def merge_roots(merge: Merge | None) -> list[Node]:
    """The values that a merge reads, its states included."""
    return [] if merge is None else [*merge.parts.values(), *state_roots(merge.states)]


def state_roots(states: Mapping[str, State]) -> list[Node]:
    """`start` and `next` of states, where they are given."""
    return [node for state in states.values() for node in (state.start, state.next) if node]


def propagate_roots(propagate: Propagate | None) -> list[Node]:
    """The values by which tokens are propagated."""
    if propagate is None:
        return []
    parts = (propagate.moment, propagate.budget, propagate.tokens)
    return [node for node in parts if node is not None]


def nodes_of(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Every node below the roots, once, arguments before users."""
    seen: set[Node] = set()
    for root in roots:
        if root is not None:
            yield from root.walk(seen)


def states_needed(roots: list[Node | None], states: Mapping[str, State]) -> set[str]:
    """Names of the states that the roots read, directly or through other states."""
    needed: set[str] = set()
    frontier = roots
    while frontier:
        names = {node.symbol for node in nodes_of(frontier) if node.op == "state"}
        new_names = (names & states.keys()) - needed
        needed |= new_names
        frontier = [*state_roots({name: states[name] for name in new_names})]
    return needed
