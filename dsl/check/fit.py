"""Whether a selection's sized terms fit its budget: `recent(32)` does not fit a budget of 16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.host import NotStatic, Value, evaluate
from kvpolicy.dsl.ir.nodes import Node, Program
from kvpolicy.dsl.syntax.diagnostics import Diagnostic
from kvpolicy.dsl.syntax.source import Source, Span


def does_not_fit(program: Program, env: Mapping[str, Value]) -> list[Diagnostic]:
    """Diagnostics for every selection that takes more than its budget.

    Args:
        program: a checked policy.
        env: as of `host.evaluate`. With `layers`, every layer is tested. Selections that depend on
            values it lacks are skipped.
    """
    first = program.prefill.keep
    pairs = [(program.prefill.budget, first)]
    if program.propagate:
        pairs.append((program.propagate.budget, program.propagate.tokens))
    if program.decode:
        # What decode inherits from the prefill is reported once.
        budget, keep = program.decode.budget, program.decode.keep
        if budget is not None or (keep and keep.span) != (first and first.span):
            pairs.append((budget or program.prefill.budget, keep))
    diagnostics = []
    for budget, keep in pairs:
        if budget is None or keep is None:
            continue
        for branch in _branches(keep):
            problem = _problem(budget, branch, program.file, env)
            if problem is not None:
                diagnostics.append(problem)
    return diagnostics


def _branches(keep: Node) -> Iterator[Node]:
    """The selections between which `where` chooses."""
    if keep.op == "choose":
        yield from _branches(keep.args[0])
        yield from _branches(keep.args[2])
    else:
        yield keep


def _sized(selection: Node) -> list[tuple[Node, Node]]:
    """Terms that take a number of entries per KV head, each with that number."""
    terms = selection.args if selection.op == "then" else (selection,)
    return [
        (term, term.args[1])
        for term in terms
        if term.op == "top" and term.axes == ("token",) and len(term.args) == 2
    ]


def _problem(
    budget: Node, selection: Node, source: Source | None, env: Mapping[str, Value]
) -> Diagnostic | None:
    sized_terms = _sized(selection)
    if not sized_terms:
        return None
    for layer_env in _layers(env):
        try:
            limit = _count(evaluate(budget, layer_env))
            term_env = {**layer_env, "budget": limit}
            entries = _taken(sized_terms, selection, term_env)
        except NotStatic:
            continue
        if entries > limit:
            span = _place([term for term, _ in sized_terms], selection) if source else None
            text = "keep"
            if source and span:
                text = " ".join(source.text[span.start : span.end].split())
            verb = "take" if source and len(sized_terms) > 1 else "takes"
            message = f"`{text}` {verb} {entries} entries, but the budget is {limit}"
            if "layer" in layer_env and _uses_layer(budget, sized_terms):
                message += f" at layer {layer_env['layer']}"
            return Diagnostic("does-not-fit", message, span, "raise the budget, or keep less")
    return None


def _taken(
    sized_terms: list[tuple[Node, Node]], selection: Node, env: Mapping[str, Value]
) -> Fraction | float:
    """Fewest entries that a head with many takes; a named term may take entries taken before."""
    first = selection.args[0] if selection.op == "then" else selection
    entries: Fraction | float = Fraction(0)
    for term, count in sized_terms:
        number = _count(evaluate(count, env))
        named = term.name is not None and term is not first
        entries = max(entries, number) if named else entries + number
    return entries


def _place(terms: list[Node], selection: Node) -> Span | None:
    """The place of the terms, or of the whole selection if a `let` defines one of them."""
    spans = [term.span for term in terms if term.span]
    span = selection.span
    if span is None or all(span.start <= x.start and x.end <= span.end for x in spans):
        return Span(spans[0].start, spans[-1].end) if spans else span
    return span


def _uses_layer(budget: Node, sized_terms: list[tuple[Node, Node]]) -> bool:
    nodes = [budget, *(count for _, count in sized_terms)]
    return any(n.op == "size" and n.value == "layer" for node in nodes for n in node.walk())


def _layers(env: Mapping[str, Value]) -> Iterator[Mapping[str, Value]]:
    if "layer" in env or "layers" not in env:
        yield env
        return
    for layer in range(int(env["layers"])):
        yield {**env, "layer": Fraction(layer)}


def _count(value: Value) -> Fraction | float:
    """A number of entries: floored, not negative."""
    return max(Fraction(0), counts.floored(value))
