"""What `kvpolicy explain` says of kernels: what is generated, what stays with torch, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kernel_values import written_window
from kvpolicy.dsl.codegen.fusion import Bundle, Fusion
from kvpolicy.dsl.execute.layer.across import OF_LAYERS
from kvpolicy.dsl.execute.layer.evaluate import reduces_past
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
    prefill_fusion, *step_fusions = program.fusions
    yield from (f"  {line}" for line in (*_passes(prefill_fusion), *reasons([prefill_fusion])))
    if bound.folded.prefill.merge is not None:
        yield f"  {_MERGE}"
    if bound.folded.share is not None and bound.lowered.share is not None:
        blends = bound.lowered.share.direction.op == "blend"
        yield f"  {_SHARE if blends else _by_torch(bound.folded.share.direction)}"
    if program.steps is None:
        return
    yield f"  {_while_decoding(program.steps)}"
    for fusion in step_fusions:
        yield from (f"    {line}" for line in _passes(fusion))
    yield from (f"    {line}" for line in reasons(step_fusions))
    if program.steps.rules.merge is not None:
        yield f"    {_MERGE}"


_MERGE = "kernel  hand-written: merge, of the rows that are dropped into those that stay"


def _while_decoding(steps: Steps) -> str:
    if not steps.advances:
        return "while decoding"
    how = "of several steps at once" if steps.at_once else "step by step"
    return f"while decoding, states {how}"


def _passes(fusion: Fusion) -> Iterator[str]:
    for bundle in fusion.bundles:
        yield _pass(bundle, fusion.steps)
        for node in _named(bundle):
            yield f"  kernel  {_short(node)}"


def reasons(found: Sequence[Fusion]) -> Iterator[str]:
    """What stays with torch and why, then the operations on small tensors."""
    for fusion in found:
        for node, reason in fusion.reasons.items():
            yield f"torch   {_short(node)}: {reason}"
    names = {pair for fusion in found for pair in _small(fusion)}
    for label, has_kernel in (("kernel  hand-written,", True), ("torch  ", False)):
        matches = sorted(name for name, hand_written in names if hand_written == has_kernel)
        if matches:
            yield f"{label} on small tensors: {', '.join(matches)}"


def _small(fusion: Fusion) -> set[tuple[str, bool]]:
    """Operations outside the generated kernels, and whether each has a hand-written one.

    Nodes that one kernel computes together are one operation.
    """
    torch_nodes = [node for node in fusion.left() if node.when >= When.LAYER]
    arguments = {x for node in torch_nodes if not reduces_past(node) for x in node.args}
    names = set()
    for node in torch_nodes:
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
        elif node.op != "past" or node in arguments:
            names.add((node.op, row.has_small_kernel))
    return names


_SHARE = "kernel  hand-written: share, of directions as sums of two layers' vectors"


def _by_torch(direction: Node) -> str:
    return f"torch   share: {_short(direction)}: it is no sum of two layers' vectors"


_COUNTS = ("", "one pass", "two passes", "three passes")


def _pass(bundle: Bundle, steps: bool) -> str:
    """How often a bundle reads the layer's tensors, in a prefill or at decode steps."""
    roles = {reduction.role for reduction in bundle.reductions}
    rows = [node.operation for reduction in bundle.reductions for node in reduction.node.walk()]
    tensors = {name for row in rows for name in row.tensors}
    if bundle.window is None:
        names = " and ".join(f"{name}s" for name in ("key", "value") if name in tensors)
        return f"one pass over the {names}"
    passes, softmax = len(roles - {"vectors"}), any(row.softmax for row in rows)
    count = _COUNTS[passes + (softmax and steps)]
    also = ", values read once," if "value" in tensors else ""
    text = f"{count} over the keys{also} for {written_window(bundle.window)}"
    if not softmax or steps:
        return text
    return f"{text} ({_COUNTS[passes + 1]} where attention gives no log-sum-exp)"


def _named(bundle: Bundle) -> list[Node]:
    nodes = [*(reduction.node for reduction in bundle.reductions), *bundle.outputs]
    return list(dict.fromkeys(nodes))


def _short(node: Node) -> str:
    return on_one_line(described(node), _LONGEST)
