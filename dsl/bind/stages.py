"""Whether the layers of a model can be computed apart, in stages (pipeline parallelism).

Each stage has some of the layers and decides for these. That is the policy's decision where nothing
in it looks at other layers by numbers that only data know.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.ir.nodes import Node, When, brackets
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, state_roots


def apart(bound: Bound) -> str | None:
    """What keeps the stages of a model from deciding each for its own layers; None: nothing."""
    if bound.program.share is not None:
        return "layers are stored in pairs (`share:`), and those of a pair may lie in two stages"
    if bound.propagates:
        return "tokens leave between layers (`propagate:`), and the next stage computes all of them"
    found = next((x for x in _read(bound) if x.across_layers and not _is_planned(x)), None)
    if found is not None:
        return f"`{found.op}{brackets(found.axes)}` looks at layers that lie in other stages"
    return None


def _read(bound: Bound) -> Iterator[Node]:
    """Every value that decides what is kept: of the prefill, and while decoding."""
    rules, later = bound.lowered.prefill, bound.lowered.decode
    roots = [keep_of(rules), *rules.decided.values(), *state_roots(rules.states)]
    roots += merge_roots(rules.merge)
    if later is not None:
        decode = [keep_of(later), *state_roots(later.states), *merge_roots(later.merge)]
        takes_budget = any(node.op == "budget" for node in nodes_of(decode))
        roots += [*decode, *([rules.budget] if takes_budget and rules.budget else [])]
    return nodes_of(roots)


def _is_planned(node: Node) -> bool:
    """Whether every stage computes a value for all layers once it knows the prompt's length."""
    return node.when <= When.PROMPT and not set(node.type.axes) - {"token"}
