"""`kvpolicy explain`: what a policy computes, keeps and costs for a model and a length."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import Bounds, Size
from kvpolicy.dsl.bind.gpu import GPUS, USUAL_GPU, Gpu
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.bind.model_config import ModelConfig, read_config
from kvpolicy.dsl.bind.named import FOLD_INTERVAL
from kvpolicy.dsl.check.policy import Checked, load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.ir.lower import Phase, Phases
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ir.traverse import nodes_of, propagate_roots, state_roots
from kvpolicy.dsl.syntax.diagnostics import PolicyError, on_one_line, refused
from kvpolicy.dsl.tools import explain_sections
from kvpolicy.dsl.tools.commands import overrides
from kvpolicy.dsl.tools.cost import cost
from kvpolicy.dsl.tools.explain_ranks import exchanged
from kvpolicy.dsl.tools.explain_sections import layers_text, runs
from kvpolicy.dsl.tools.units import flops_text, size_text

_WHEN = {
    Phase.PLAN: "when the prompt arrives",
    Phase.LAYER: "at the end of each layer",
    Phase.END: "after the last layer",
}
_BAR = 24
_BATCH, _NEW = 16, 512  # defaults of --batch and --max-new-tokens
_NOTED = 0.001  # smallest share of the policy's cost for which an expression gets a line


def main(args: argparse.Namespace) -> int:
    """Runs the command; raises PolicyError where the input cannot be used."""
    checked = load(args.file)
    [program] = with_data([checked.require()], args.data)
    config = read_config(args.model)
    bound = bind(program, config.shape, overrides(args.set), fold_interval=FOLD_INTERVAL)
    if args.gpu is None:
        _check_options(args)
        print("\n".join(explanation(checked, bound, config, args.length, USUAL_GPU)))
        return 0
    return _on_gpu(args, checked, bound, config)


def _check_options(args: argparse.Namespace) -> None:
    """Refuses options that say nothing without --gpu."""
    for option in ("--batch", "--max-new-tokens", "--json"):
        if getattr(args, option[2:].replace("-", "_")):
            raise refused(option, "arguments", "it belongs to `--gpu`", "add `--gpu`")


def _on_gpu(args: argparse.Namespace, checked: Checked, bound: Bound, config: ModelConfig) -> int:
    """Prints the explanation and the forecast, or the forecast as JSON; returns the exit code."""
    from kvpolicy.dsl.tools import explain_gpu
    from kvpolicy.dsl.tools.forecast import Load, forecast, pool_of

    gpu = GPUS[args.gpu]
    server_load = Load(args.length, args.max_new_tokens or _NEW, args.batch or _BATCH)
    checked.executable()  # refuses what is not served
    if config.unserved:
        raise refused(config.name, "file", config.unserved, "docs/supported.md lists models")
    prediction = forecast(bound, config, gpu, server_load, pool_of(config, gpu))
    if args.json:
        print(explain_gpu.document(prediction, bound, config, gpu, server_load))
        return 0
    print("\n".join(explanation(checked, bound, config, args.length, gpu)))
    print(f"\nExpected on {gpu.name} (estimated; see docs/performance/README.md)")
    print("\n".join(explain_gpu.expected(prediction, server_load.batch)))
    return 0


def explanation(
    checked: Checked, bound: Bound, config: ModelConfig, length: int, gpu: Gpu
) -> Iterator[str]:
    """The lines of the explanation.

    Args:
        gpu: where costs are given, as shares of a prefill's time.
    """
    shape = config.shape
    yield f"{bound.program.name}: {bound.program.about}"
    if bound.program.source:
        yield f"  source  {bound.program.source}"
    yield f"  digest  {bound.digest[:16]}"
    yield (
        f"  model   {config.name}: {shape.layers} layers, {shape.heads} heads, {shape.kv_heads} KV "
        f"heads of size {shape.head_dim}, {config.dtype}"
    )
    yield f"  prompt  {length:,} tokens"
    for diagnostic in checked.unserved:
        yield f"  note    {diagnostic.message}; what follows is the end of the prefill alone"
    if config.unserved:
        yield f"  note    {config.unserved}: no server carries a policy out with it"
    for warning in checked.diagnostics:
        line = (
            "" if warning.span is None else f"line {checked.source.place(warning.span.start)[0]}: "
        )
        yield f"  warning {line}{warning.message}"
    if bound.params:
        yield from ("", "Parameters")
        yield from _parameters(bound)
    yield from ("", "Plan")
    yield from _plan(checked, bound)
    for title, lines in _sections(checked, bound, config, length):
        yield from ("", title, *lines)
    yield from ("", "Kernels, where a server has them generated (`kvpolicy show --triton`)")
    yield from _kernels(bound)
    bounds = Bounds(bound, length)
    # Whether the number of entries that stay does not depend on data.
    exact = bounds.is_exact(keep_of(bound.lowered.prefill))
    yield from ("", "Entries kept per KV head")
    yield from _entries(bounds.kept, shape.kv_heads, length, exact=exact)
    yield from ("", "Memory")
    yield from _memory(bound, config, length, bounds.kept.total, exact=exact)
    yield from ("", "Exchanged between ranks, where the model is divided over them (--tp-size)")
    yield from exchanged(bound, config, length, bounds.kept.head)
    yield from ("", "Cost of deciding, for all layers (generated kernels; see docs/operators.md)")
    yield from _cost(bound, config, length, gpu)


def _kernels(bound: Bound) -> Iterator[str]:
    """What becomes a kernel and what does not; this needs torch."""
    try:
        from kvpolicy.dsl.tools.explain_kernels import kernels
    except ModuleNotFoundError as error:
        yield f"  install {error.name} to see them"
        return
    try:
        yield from kernels(bound)
    except PolicyError as error:  # a policy that no server carries out has no kernels
        yield f"  none: {error.diagnostics[0].message}"


def _sections(
    checked: Checked, bound: Bound, config: ModelConfig, length: int
) -> Iterator[tuple[str, Iterator[str]]]:
    """Title and lines of each section that not every policy has."""
    written = partial(_written, checked)
    propagate = bound.folded.propagate
    if propagate is not None:
        text = explain_sections.propagation(bound, propagate, length, written)
        yield "Tokens that reach a layer", text
    merge = bound.folded.prefill.merge
    if merge is not None:
        yield "What becomes of dropped entries", explain_sections.merging(merge, written)
    if bound.folded.share is not None:
        yield (
            "Layers that share directions",
            explain_sections.sharing(bound, bound.folded.share, written),
        )
    if bound.folded.decode is not None:
        text = explain_sections.decode(bound, bound.folded.decode, config, length, written)
        yield "While decoding", text
    if bound.program.report:
        yield "Reported by `kvpolicy run`", explain_sections.reported(bound, written)


def _parameters(bound: Bound) -> Iterator[str]:
    params = bound.program.params
    width = max(len(name) for name in params)
    values = {
        name: f"{shown(bound.params[name])} {params[name].unit or ''}".strip() for name in params
    }
    room = max(len(value) for value in values.values())
    for name, param in params.items():
        yield f"  {name:<{width}}  {values[name]:<{room}}  {param.about}".rstrip()


def _plan(checked: Checked, bound: Bound) -> Iterator[str]:
    """Named values and sections by the moment at which they are known."""
    phases = Phases(bound.propagates)
    by_phase: dict[Phase, list[tuple[str, Node]]] = {phase: [] for phase in Phase}
    rules = bound.folded.prefill
    decides = (rules.keep, rules.budget, rules.score, *state_roots(rules.states))
    for node in nodes_of([*decides, *propagate_roots(bound.folded.propagate)]):
        if node.name is not None and bound.static.needs(node) != frozenset():
            by_phase[_phase(bound, phases, node)].append((node.name, node))
    keep = keep_of(bound.lowered.prefill)  # whose type has the axes of the budget that it fills
    by_phase[phases.of(keep)].append(("keep", replace(keep_of(rules), type=keep.type)))
    width = max(len(name) for pairs in by_phase.values() for name, _ in pairs)
    for phase, pairs in by_phase.items():
        if pairs:
            yield f"  {_WHEN[phase]}"
        for name, node in pairs:
            yield f"    {name:<{width}}  {_written(checked, node)}  : {node.type}"


def _phase(bound: Bound, phases: Phases, node: Node) -> Phase:
    if node.op == "budget" and bound.folded.prefill.budget is not None:
        return phases.of(bound.folded.prefill.budget)
    # A value that looks back at lower layers is known at its own layer.
    return min(phases.of(node), Phase.LAYER) if node.when <= When.LAYER else phases.of(node)


def _written(checked: Checked, node: Node) -> str:
    """A node's expression as the author wrote it, on one line."""
    if node.span is None:
        return node.op
    return on_one_line(checked.source.text[node.span.start : node.span.end], 72)


def _entries(size: Size, kv_heads: int, length: int, *, exact: bool) -> Iterator[str]:
    mean = size.total / (len(size.layer) * kv_heads)
    # Where layers compete, the total is exact while `size.layer` is only a bound.
    if exact and sum(size.layer) == size.total:
        alike = kv_heads * sum(size.head) == size.total
        means = [n / kv_heads for n in size.layer]
        top = max(1, *means)
        for first, last in runs(means):
            name, number = layers_text(first, last), means[first]
            bar = "#" * max(1, round(_BAR * number / top)) if number else ""
            yield f"  {name:<14} {number:>9,.{0 if alike else 1}f}  {bar}".rstrip()
        if not alike:
            yield "  on average over the KV heads of a layer, which keep different numbers"
        yield f"  {'mean':<14} {mean:>9,.1f}  {mean / length:.2%} of the prompt"
        return
    if mean == length:
        yield "  The numbers depend on the prompt's content; everything may stay."
        return
    yield "  The numbers depend on the prompt's content. Before it is seen, it is certain that"
    yield f"  - on average over layers and KV heads at most {mean:,.1f} stay ({mean / length:.2%})"
    yield from _limits(size, kv_heads, length)


def _limits(size: Size, kv_heads: int, length: int) -> Iterator[str]:
    """Bounds on one KV head and on one layer, if a layer's is below the prompt's length."""
    shares = [n / kv_heads for n in size.layer]
    for what, bounds in (("one KV head", size.head), ("one layer, per KV head,", shares)):
        low, high = min(bounds), max(bounds)
        if low < length:
            text = f"{high:,.1f}" if low == high else f"{low:,.1f} to {high:,.1f} by layer"
            yield f"  - {what} keeps at most {text}"


def _memory(
    bound: Bound, config: ModelConfig, length: int, kept: int, *, exact: bool
) -> Iterator[str]:
    full = bound.shape.layers * bound.shape.kv_heads * length
    note = "" if exact else "at most "
    yield f"  KV cache before  {size_text(config.kv_size(full)):>10}  {full:,} entries"
    share = kept / full if full else 1
    yield f"  KV cache after   {size_text(config.kv_size(kept)):>10}  {note}{kept:,} ({share:.2%})"
    if bound.upper_layers:
        yield f"  {'':27}  layers that share a direction hold less, as their data say"


def _cost(bound: Bound, config: ModelConfig, length: int, gpu: Gpu) -> Iterator[str]:
    costs = cost(bound, config, length, gpu)
    large_parts = [part for part in costs.parts if costs.share_of(part) >= _NOTED * costs.share]
    for part in large_parts:
        yield _costs(part.name, part.work.operations, costs.share_of(part), part.squared)
    if len(large_parts) < len(costs.parts):
        rest = costs.parts[len(large_parts) :]
        operations = sum(part.work.operations for part in rest)
        yield _costs("other expressions", operations, sum(map(costs.share_of, rest)))
    yield _costs("in all", costs.operations, costs.share)
    yield f"  {'reads':<26} {size_text(costs.bytes_read):>12}  per layer"
    yield f"  {'memory at once':<26} {size_text(costs.peak):>12}  within a layer, then freed"
    if costs.held:
        yield f"  {'held until the end':<26} {size_text(costs.held):>12}  for all layers"
    queries = bound.queries(length)
    if queries:
        noun = "query" if queries == 1 else "queries"
        yield f"  {'observation window':<26} {queries:>12,}  last {noun}"


def _costs(name: str, operations: float, share: float, squared: str = "") -> str:
    note = f"; {squared}" if squared else ""
    return f"  {name:<26} {flops_text(operations):>12}  {share:.3%} of the prefill's time{note}"
