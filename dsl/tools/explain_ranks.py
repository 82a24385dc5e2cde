"""What ranks exchange where a model is divided over them (`--tp`), for `kvpolicy explain`.

Every rank gets what enters operations across KV heads from all the others (execute/gathered.py).
Bytes are those of all KV heads of a model, whatever the number of ranks, beside what the ranks
exchange for the model itself: two sums of all hidden states per layer. Where several ranks hold the
same KV head, each gets the queries of the others besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import Bounds
from kvpolicy.dsl.bind.entries import foreseen
from kvpolicy.dsl.bind.kept import heads_differ
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.bind.work import Sizes
from kvpolicy.dsl.execute.stages import Stage
from kvpolicy.dsl.ir.heads import across_heads, heads_last
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.traverse import nodes_of, propagate_roots, rules_roots
from kvpolicy.dsl.tools.units import size_text

_NUMBER, _TRUTH = 8, 1  # bytes
_SUMS = 2  # of hidden states per layer of a model
_COLUMNS = 2  # per list after a fold: how many entries there were and how many stay


def exchanged(bound: Bound, config: ModelConfig, length: int) -> Iterator[str]:
    """Bytes of a prompt and of a fold."""
    prompt = prefill_bytes(bound, length, config.kv_bytes)
    model = _SUMS * config.shape.layers * length * config.hidden * config.kv_bytes
    yield f"  {'prefill':<10} {size_text(prompt):>10}  {_share(prompt, model)} a prefill"
    if bound.folded.decode is not None:
        fold = fold_bytes(bound, length, config.kv_bytes)
        model = _SUMS * config.shape.layers * config.hidden * config.kv_bytes
        yield f"  {'fold':<10} {size_text(fold):>10}  {_share(fold, model)} a decode step"
    prompt, step = query_bytes(bound, length, config.kv_bytes)
    if prompt or step:
        more = f", and {size_text(step)} of a decode step that it reads" if step else ""
        why = f"of a prefill besides, where there are more ranks than KV heads{more}"
        yield f"  {'queries':<10} {size_text(prompt):>10}  {why}"


def _share(own: int, model: int) -> str:
    return f"{own / model:.3%} of what the model itself exchanges in"


def prefill_bytes(bound: Bound, length: int, element: int) -> int:
    """What is exchanged of a prompt: what is compared, and what the hosts have to know."""
    sections = heads_last(bound.lowered)
    rules = sections.prefill
    roots = [*rules_roots(rules), rules.budget, *propagate_roots(sections.propagate)]
    kept = Bounds(bound, length).kept.head
    nodes, total = _across(roots), _known_to_hosts(bound, length, roots)
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
    if foreseen(bound, length) is not None and not (goes_on and heads_differ(bound.lowered)):
        return finite
    return finite + shape.layers * shape.kv_heads * _NUMBER


def fold_bytes(bound: Bound, length: int, element: int) -> int:
    """What is exchanged when entries leave of one request, all layers at once where it can be."""
    rules = heads_last(bound.lowered).decode
    if rules is None:
        return 0
    nodes = _across(rules_roots(rules))
    among = _competing(bound, rules.keep, length)
    kept = Bounds(bound, length).kept.head
    total = bound.shape.layers * bound.shape.kv_heads * _said(bound, nodes)
    for layer, most in enumerate(kept):
        held = most + bound.fold_interval
        for node in nodes:
            tokens = min(among.get(id(node), held), held)
            sizes = Sizes(bound, length, layer, tokens, most, element, step=True)
            total += _bytes([node], sizes)
    return total


def _said(bound: Bound, nodes: list[Node]) -> int:
    """Bytes per list of a fold besides what is compared."""
    if heads_differ(bound.lowered):
        return _COLUMNS * _NUMBER
    return _TRUTH if nodes else 0  # whether what was read is finite


def _competing(bound: Bound, keep: Node | None, length: int) -> dict[int, int]:
    """Of nodes that look across KV heads for few entries alone: for how many."""
    found: dict[int, int] = {}
    for node in nodes_of([keep]):
        stage = Stage.of(node)
        among = None if stage is None else stage.competing(bound, [length])
        if stage is not None and among is not None:
            across = (x for x in _across([stage.score]) if "token" not in x.axes)
            found |= {id(x): max(among[0] - among[1], 0) for x in across}
    return found


def query_bytes(bound: Bound, length: int, element: int) -> tuple[int, int]:
    """Queries of all heads that a policy reads of a prompt, and those of a decode step."""
    shape = bound.shape
    query = shape.heads * shape.head_dim * element
    reach = [tokens for _, tokens in lengths(bound, length)]
    prompt = sum(min(bound.queries(length), tokens) for tokens in reach)
    reads = bound.folded.decode is not None and bound.step_queries(length) > 0
    return query * prompt, query * shape.layers * reads


def _across(roots: Iterable[Node | None]) -> list[Node]:
    return [node for node in nodes_of(roots) if across_heads(node)]


def _bytes(nodes: list[Node], sizes: Sizes) -> int:
    """Of all arguments with KV heads, those that several nodes read once for each."""
    given = [each for node in nodes for each in node.args if "kv" in each.type.axes]
    each = (sizes.of(x) * (_TRUTH if x.type.kind == "truth" else _NUMBER) for x in given)
    return int(sum(each))
