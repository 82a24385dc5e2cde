"""What ranks exchange where a model is divided over them (`--tp-size`), for `kvpolicy explain`.

Every rank gets the arguments of operations across KV heads from all other ranks
(dsl/execute/layer/gathered.py). Bytes are those of all KV heads of a model, whatever the number of
ranks, compared with what the ranks exchange for the model itself: two sums of all hidden states per
layer.
If several ranks hold the same KV head, each also gets the queries of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.entries import known_counts
from kvpolicy.dsl.bind.kept import entries_compared, heads_differ
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.bind.work import Sizes
from kvpolicy.dsl.execute.decode.keep_stages import KeepStage
from kvpolicy.dsl.ir.heads import across_heads, heads_last
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.traverse import nodes_of, propagate_roots, rules_roots
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.tools.units import size_text

_NUMBER, _TRUTH = 8, 1  # bytes
_SUMS = 2  # sums of hidden states that a model exchanges per layer
_COLUMNS = 2  # numbers per list after a fold: entries before it, and entries that stay


def exchanged(bound: Bound, config: ModelConfig, length: int, kept: Sequence[int]) -> Iterator[str]:
    """Lines on the bytes exchanged in a prefill, in a fold, and of queries.

    Args:
        kept: [L], the most entries that a KV head of each layer keeps.
    """
    prompt = _prefill_bytes(bound, length, config.element_bytes, kept)
    model = _SUMS * config.shape.layers * length * config.hidden * config.element_bytes
    yield f"  {'prefill':<10} {size_text(prompt):>10}  {_share(prompt, model)} a prefill"
    if bound.folded.decode is not None:
        fold = _fold_bytes(bound, length, config.element_bytes, kept)
        model = _SUMS * config.shape.layers * config.hidden * config.element_bytes
        yield f"  {'fold':<10} {size_text(fold):>10}  {_share(fold, model)} a decode step"
    prompt, step = _query_bytes(bound, length, config.element_bytes)
    if prompt or step:
        suffix = f", and {size_text(step)} of a decode step that it reads" if step else ""
        why = f"of a prefill besides, where there are more ranks than KV heads{suffix}"
        yield f"  {'queries':<10} {size_text(prompt):>10}  {why}"


def _share(policy: int, model: int) -> str:
    return f"{policy / model:.3%} of what the model itself exchanges in"


def _prefill_bytes(bound: Bound, length: int, element: int, kept: Sequence[int]) -> int:
    """Bytes exchanged in a prefill; `element`: bytes of a number of queries, keys and values."""
    sections = heads_last(bound.lowered)
    rules = sections.prefill
    roots = [*rules_roots(rules), rules.budget, *propagate_roots(sections.propagate)]
    nodes, total = _across(roots), _known_to_hosts(bound, length, roots)
    total += bound.shape.layers * length * _columns(bound)
    for layer, (_, tokens) in enumerate(lengths(bound, length)):
        sizes = Sizes(bound, length, layer, tokens, kept[layer], element)
        total += _bytes(nodes, sizes)
    return total


def _known_to_hosts(bound: Bound, length: int, roots: list[Node | None]) -> int:
    """Bytes that say whether what was read is finite, and how many entries each list keeps."""
    shape = bound.shape
    reads = any(node.operation.reads_tensors for node in nodes_of(roots))
    finite = shape.kv_heads * _TRUTH * reads
    goes_on = bound.folded.decode is not None
    if known_counts(bound, length) is not None and not (goes_on and heads_differ(bound.lowered)):
        return finite
    return finite + shape.layers * shape.kv_heads * _NUMBER


def _fold_bytes(bound: Bound, length: int, element: int, kept: Sequence[int]) -> int:
    """Bytes exchanged in a fold of one request, for all layers."""
    rules = heads_last(bound.lowered).decode
    if rules is None:
        return 0
    nodes = _across(rules_roots(rules))
    candidates = _competing(bound, rules.keep, length)
    columns = _columns(bound)
    # Heads that hold different entries: a layer has at most so many times more columns.
    factor = bound.shape.kv_heads if columns else 1
    total = bound.shape.layers * bound.shape.kv_heads * _said(bound, nodes)
    for layer, most in enumerate(kept):
        held = min(most * factor, length) + bound.fold_interval
        total += held * columns
        for node in nodes:
            tokens = min(candidates.get(id(node), held), held)
            sizes = Sizes(bound, length, layer, tokens, most, element, step=True)
            total += _bytes([node], sizes)
    return total


def _said(bound: Bound, nodes: list[Node]) -> int:
    """Bytes per list in a fold, besides the arguments of operations across KV heads."""
    if heads_differ(bound.lowered):
        return _COLUMNS * _NUMBER
    return _TRUTH if nodes else 0  # whether what was read is finite


def _columns(bound: Bound) -> int:
    """Bytes per token and layer that say which positions some KV head holds, at most."""
    return bound.shape.kv_heads * _TRUTH * entries_compared(heads_last(bound.lowered))


def _competing(bound: Bound, keep: Node | None, length: int) -> dict[int, int]:
    """Node id -> number of entries, for nodes across KV heads that read few entries."""
    candidates: dict[int, int] = {}
    for node in nodes_of([keep]):
        stage = KeepStage.of(node)
        span = None if stage is None else stage.competing(bound, [length])
        if stage is not None and span is not None:
            across = (x for x in _across([stage.score]) if "token" not in x.axes)
            candidates |= {id(x): max(span[0] - span[1], 0) for x in across}
    return candidates


def _query_bytes(bound: Bound, length: int, element: int) -> tuple[int, int]:
    """Bytes of the queries of all heads that a policy reads, of a prompt and of a decode step."""
    shape = bound.shape
    query = shape.heads * shape.head_dim * element
    reach = [tokens for _, tokens in lengths(bound, length)]
    prompt = sum(min(bound.queries(length), tokens) for tokens in reach)
    reads = bound.folded.decode is not None and bound.step_queries(length) > 0
    return query * prompt, query * shape.layers * reads


def _across(roots: Iterable[Node | None]) -> list[Node]:
    return [node for node in nodes_of(roots) if across_heads(node)]


def _bytes(nodes: list[Node], sizes: Sizes) -> int:
    """Bytes of all arguments with the axis `kv`, counted once for each node that reads them.

    At a decode step each has a mask, and selections are told which entries there are.
    """
    arguments = [argument for node in nodes for argument in node.args if "kv" in argument.type.axes]
    argument_bytes = (sizes.elements(x) * (_size(x) + _TRUTH * sizes.step) for x in arguments)
    selections = (node for node in nodes if sizes.step and node.operation.kind is Kind.SELECTION)
    return int(sum(argument_bytes) + sum(sizes.elements(node) * _TRUTH for node in selections))


def _size(x: Node) -> int:
    return _TRUTH if x.type.kind == "truth" else _NUMBER
