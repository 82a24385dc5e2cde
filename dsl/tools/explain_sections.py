"""What `kvpolicy explain` says of propagation, sharing, merging and decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.lengths import computed, lengths
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.ir.nodes import Merge, Node, Propagate, Rules, Share
from kvpolicy.dsl.tools.cost import decode_cost, memory_of_decode
from kvpolicy.dsl.tools.units import flops_text, size_text

Written = Callable[[Node], str]  # a node's expression as the author wrote it


def runs(values: Sequence[object]) -> Iterator[tuple[int, int]]:
    """First and last index of each run of equal values."""
    for _, group in groupby(range(len(values)), key=values.__getitem__):
        indices = list(group)
        yield indices[0], indices[-1]


def layers_text(first: int, last: int) -> str:
    """`layer 3` or `layers 3-5`."""
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def propagation(bound: Bound, propagate: Propagate, length: int, written: Written) -> Iterator[str]:
    """How many tokens reach each layer, and what decides it."""
    if propagate.first is not None:
        yield f"  {'first':<8} {written(propagate.first)}{_acting(bound, length)}"
    if propagate.every is not None:
        yield f"  {'every':<8} {written(propagate.every)}"
    yield f"  {'tokens':<8} {written(propagate.tokens)}"
    if bound.restarts:
        yield "  The prefill begins again on these tokens, at positions 0, 1, ..."
    ranges = lengths(bound, length)
    for first, last in runs(ranges):
        low, high = ranges[first]
        number = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        yield f"  {layers_text(first, last):<14} {number:>9}"
    rows, full = sum(computed(bound, length)), bound.shape.layers * length
    yield f"  {'computed':<14} {rows:>9,}  rows at most, {rows / full:.1%} of the prefill's"


def _acting(bound: Bound, length: int) -> str:
    """The layer after which tokens leave, or that data decide it."""
    layer = bound.propagation_layer(length)
    if layer is None:
        return "  (the prompt's content decides)"
    return "  (never)" if layer == bound.shape.layers else f"  (layer {layer})"


def sharing(bound: Bound, share: Share, written: Written) -> Iterator[str]:
    """Which layers share a direction, and which direction."""
    pairs = ", ".join(f"{i - 1} and {i}" for i in bound.upper_layers) or "none"
    yield f"  {'layers':<10} {pairs}"
    yield f"  {'direction':<10} {written(share.direction)}"
    if share.exceptions is not None:
        yield f"  {'except':<10} {written(share.exceptions)}"


def merging(merge: Merge, written: Written) -> Iterator[str]:
    """What becomes of dropped entries."""
    for name, node in merge.parts.items():
        yield f"  {name:<8} {written(node)}"
    for name, state in merge.states.items():
        if state.next is not None:
            yield f"  {'state':<8} {name}: {written(state.next)}"
    yield f"  {'apply':<8} {' and '.join(f'{tensor}s' for tensor in merge.apply)}"


def decode(
    bound: Bound, rules: Rules, config: ModelConfig, length: int, written: Written
) -> Iterator[str]:
    """When entries leave while decoding, what is remembered for it, and what a step costs."""
    when = decode_words(bound) if rules.when is None else written(rules.when)
    yield f"  {'when':<8} {when}"
    sections = {"score": rules.score, "budget": rules.budget, "keep": rules.keep}
    for name, node in sections.items():
        if node is not None:
            yield f"  {name:<8} {written(node)}"
    for name, state in rules.states.items():
        if state.next is not None:
            yield f"  {'state':<8} {name}: {written(state.next)}  : {state.type}"
            if state.start is not None and not state.inherited:
                yield f"  {'':<8} at the first step from {written(state.start)}"
    if bound.folded.prefill.merge is None and rules.merge is not None:
        yield from merging(rules.merge, written)
    states, queries = memory_of_decode(bound, length, config.element_bytes)
    if states:
        yield f"  {'states':<8} {size_text(states)} per request"
    if queries:
        last = f"the last {bound.step_queries(length):,} of each layer"
        yield f"  {'queries':<8} {size_text(queries)} per request, {last}"
    for name, operations in decode_cost(bound, length).items():
        yield f"  {name:<26} {flops_text(operations):>12} per layer"


def reported(bound: Bound, written: Written) -> Iterator[str]:
    """Which values are shown, and of which phases."""
    lets = {"prefill": bound.folded.prefill.lets}
    if bound.folded.decode is not None:
        lets["decode"] = bound.folded.decode.lets
    names = bound.program.report
    width = max(map(len, names))
    for name in names:
        nodes = {phase: values[name] for phase, values in lets.items() if name in values}
        moments = " and ".join(nodes) or "not computed with these parameters"
        text = "".join(f"  {written(node)}  : {node.type}" for node in [*nodes.values()][:1])
        yield f"  {name:<{width}}  {moments:<7}{text}"


def decode_words(bound: Bound) -> str:
    """When entries leave while decoding, in a few words."""
    if bound.folded.decode is None:
        return "nothing leaves"
    if bound.folded.decode.when is not None:
        return "at the steps of `decode.when`"
    return f"every {bound.fold_interval} steps, or as often as the server is told to"
