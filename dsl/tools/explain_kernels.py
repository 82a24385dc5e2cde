"""What `kvpolicy explain` says of kernels: what is generated, what stays with torch, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kernel_values import written_window
from kvpolicy.dsl.codegen.fusion import Bundle, Fusion
from kvpolicy.dsl.execute.layer.across import OF_LAYERS
from kvpolicy.dsl.execute.layer.combination import is_combination
from kvpolicy.dsl.execute.layer.evaluate import reduces_past
from kvpolicy.dsl.execute.layer.share import side_of_share
from kvpolicy.dsl.execute.operations.operands import distribution
from kvpolicy.dsl.execute.planned.compiled import Compiled
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ir.written import described
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.syntax.diagnostics import on_one_line

_LARGE = frozenset(("query", "dim"))  # axes of large values
_LONGEST = 88


def kernels(bound: Bound) -> Iterator[str]:
    """Lines on kernels of the prefill, then of decode steps."""
    program = Compiled(bound)
    of_prefill, *of_steps = program.fusions
    yield from (f"  {line}" for line in (*_passes(of_prefill), *reasons([of_prefill])))
    if bound.folded.prefill.merge is not None:
        yield f"  {_MERGE}"
    if bound.lowered.share is not None:
        yield f"  {_share(bound.lowered.share.direction)}"
    if program.steps is None:
        return
    yield f"  {_while_decoding(program.steps)}"
    for each in of_steps:
        yield from (f"    {line}" for line in _passes(each))
    yield from (f"    {line}" for line in reasons(of_steps))
    if program.steps.rules.merge is not None:
        yield f"    {_MERGE}"


_MERGE = "kernel  hand-written: merge, of the rows that are dropped into those that stay"


def _while_decoding(steps: Steps) -> str:
    if not steps.advances:
        return "while decoding"
    how = "of several steps at once" if steps.at_once else "step by step"
    return f"while decoding, states {how}"


def _passes(found: Fusion) -> Iterator[str]:
    for bundle in found.bundles:
        yield _pass(bundle, found.steps)
        for node in _named(bundle):
            yield f"  kernel  {_short(node)}"


def reasons(found: Sequence[Fusion]) -> Iterator[str]:
    """What stays with torch and why, then the operations on small tensors."""
    for each in found:
        for node, reason in each.reasons.items():
            yield f"torch   {_short(node)}: {reason}"
    names = {pair for each in found for pair in _small(each)}
    for by, has_kernel in (("kernel  hand-written,", True), ("torch  ", False)):
        chosen = sorted(name for name, own in names if own == has_kernel)
        if chosen:
            yield f"{by} on small tensors: {', '.join(chosen)}"


def _small(found: Fusion) -> set[tuple[str, bool]]:
    """Operations outside the generated kernels, and whether each has a hand-written one.

    Nodes that one kernel computes together are one operation.
    """
    left = [node for node in found.left() if node.when >= When.LAYER]
    read = {x for node in left if not reduces_past(node) for x in node.args}
    names = set()
    for node in left:
        row = node.operation
        if distribution(node) is not None:
            names.add(("entropy", True))
        elif reduces_past(node):
            names.add((f"{node.op}[past]", node.op in OF_LAYERS))
        elif row.elementwise or row.reads_tensors or row.kind in (Kind.MERGE, Kind.REMEMBERED):
            continue
        elif row.is_reduction and (
            not row.has_small_kernel
            or _LARGE & set(node.args[0].type.axes)  # listed with its reason
        ):
            continue
        elif node.op != "past" or node in read:
            names.add((node.op, row.has_small_kernel))
    return names


def _share(direction: Node) -> str:
    if is_combination(direction, side_of_share):
        return "kernel  hand-written: share, of directions as sums of two layers' vectors"
    return f"torch   share: {_short(direction)}: it is no sum of two layers' vectors"


_COUNTS = ("", "one pass", "two passes", "three passes")


def _pass(bundle: Bundle, steps: bool) -> str:
    """How often a bundle reads the layer's tensors, in a prefill or at decode steps."""
    roles = {each.role for each in bundle.reductions}
    rows = [node.operation for each in bundle.reductions for node in each.node.walk()]
    read = {name for row in rows for name in row.tensors}
    if bundle.window is None:
        names = " and ".join(f"{name}s" for name in ("key", "value") if name in read)
        return f"one pass over the {names}"
    passes, softmax = len(roles - {"vectors"}), any(row.softmax for row in rows)
    count = _COUNTS[passes + (softmax and steps)]
    also = ", values read once," if "value" in read else ""
    text = f"{count} over the keys{also} for {written_window(bundle.window)}"
    if not softmax or steps:
        return text
    return f"{text} ({_COUNTS[passes + 1]} where attention gives no log-sum-exp)"


def _named(bundle: Bundle) -> list[Node]:
    nodes = [*(each.node for each in bundle.reductions), *bundle.outputs]
    return list(dict.fromkeys(nodes))


def _short(node: Node) -> str:
    return on_one_line(described(node), _LONGEST)
