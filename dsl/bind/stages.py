"""Whether the layers of a model can be computed apart, in stages (pipeline parallelism).

Each stage has some of the layers and decides for these. That is the policy's decision where nothing
in it looks at other layers by numbers that only data know.
"""

from __future__ import annotations

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
    found = _compares(bound)
    if found is not None:
        return f"`{found.op}{brackets(found.axes)}` looks at layers that lie in other stages"
    if bound.folded.decode is not None:
        return "entries leave while it decodes (`decode:`), which stages do at different moments"
    return None


def _compares(bound: Bound) -> Node | None:
    """The first value of the prefill that looks at other layers and is not planned for all."""
    rules = bound.lowered.prefill
    roots = [keep_of(rules), *rules.decided.values(), *state_roots(rules.states)]
    every = nodes_of([*roots, *merge_roots(rules.merge)])
    return next((x for x in every if x.across_layers and not _is_planned(x)), None)


def _is_planned(node: Node) -> bool:
    """Whether every stage computes a value for all layers once it knows the prompt's length."""
    return node.when <= When.PROMPT and not set(node.type.axes) - {"token"}
