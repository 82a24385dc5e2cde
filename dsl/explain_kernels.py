"""What `kvpolicy explain` says of kernels: what is generated, what stays with torch, and why."""

from __future__ import annotations

from collections.abc import Iterator

from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.ir import Node, When
from kvpolicy.dsl.kernel_values import written_window
from kvpolicy.dsl.lower import ELEMENTWISE, REDUCTIONS
from kvpolicy.dsl.regions import Bundle, Regions
from kvpolicy.dsl.torch_combination import is_combination
from kvpolicy.dsl.torch_direct import Direct
from kvpolicy.dsl.torch_share import side_of_share
from kvpolicy.dsl.traverse import nodes_of
from kvpolicy.dsl.written import written

_TENSORS = frozenset(("attn", "logits", "key", "value"))
# What `torch_kernels` names; merges and shares besides.
_BY_HAND = frozenset(("top", "fill", "split", "cascade"))
_LONGEST = 88


def regions(bound: Bound) -> Regions:
    """What is generated for the prefill of a policy."""
    direct = Direct(bound, False)
    return Regions(bound, direct.everything, direct.updates.states)


def kernels(bound: Bound) -> Iterator[str]:
    """The lines of the explanation."""
    found = regions(bound)
    for bundle in found.bundles:
        yield f"  {_pass(bundle)}"
        for node in _named(bundle):
            yield f"    kernel  {_short(node)}"
    yield from (f"  {line}" for line in reasons(found, bound))


def reasons(found: Regions, bound: Bound) -> Iterator[str]:
    """What stays with torch, and why."""
    known = {id(node): node for node in nodes_of(found.roots)}
    for name, reason in found.reasons.items():
        yield f"torch   {_short(known[name])}: {reason}"
    rest = {node.op for node in found.left() if node.when >= When.LAYER}
    names = rest - ELEMENTWISE - REDUCTIONS - _TENSORS - {"state", "before"}
    for by, chosen in (("kernel  hand-written,", names & _BY_HAND), ("torch  ", names - _BY_HAND)):
        if chosen:
            yield f"{by} on small tensors: {', '.join(sorted(chosen))}"
    if bound.rules.merge is not None:
        yield "kernel  hand-written: merge, of the rows that are dropped into those that stay"
    if bound.share is not None:
        yield _share(bound)
    if any(node.op in _TENSORS for node in bound.decode_nodes()):
        yield "torch   decode steps, whose KV heads may hold different entries"


def _share(bound: Bound) -> str:
    direction = bound.share.direction
    if is_combination(direction, side_of_share):
        return "kernel  hand-written: share, of directions as sums of two layers' vectors"
    return f"torch   share: {_short(direction)}: it is no sum of two layers' vectors"


def _pass(bundle: Bundle) -> str:
    """How often a bundle reads the layer's tensors."""
    roles = {each.role for each in bundle.reductions}
    ops = {node.op for each in bundle.reductions for node in each.node.walk()}
    if bundle.window is None:
        names = " and ".join(f"{name}s" for name in ("key", "value") if name in ops)
        return f"one pass over the {names}"
    passes = ("attn" in ops) + len(roles - {"vectors"})
    count = {1: "one pass", 2: "two passes", 3: "three passes"}[passes]
    also = ", values read once," if "value" in ops else ""
    return f"{count} over the keys{also} for {written_window(bundle.window)}"


def _named(bundle: Bundle) -> list[Node]:
    """Reductions and outputs, once each."""
    nodes = [*(each.node for each in bundle.reductions), *bundle.outputs]
    return list({id(node): node for node in nodes}.values())


def _short(node: Node) -> str:
    text = f"{node.name}: {written(node)}" if node.name else written(node)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3].rstrip()}..."
