"""Whether a selection's sized terms fit its budget: `recent(32)` does not fit a budget of 16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
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
        env: as of `host.evaluate`. With `layers`, every layer is tested. Budgets that depend on
            values it lacks are skipped, and such terms are taken to take nothing.
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
        problem = _problem(budget, keep, program.file, env)
        if problem is not None:
            diagnostics.append(problem)
    return diagnostics


def _problem(
    budget: Node, selection: Node, source: Source | None, env: Mapping[str, Value]
) -> Diagnostic | None:
    for layer_env in _layers(env):
        try:
            limit = _count(evaluate(budget, layer_env))
        except NotStatic:
            continue
        entries, terms = _taken(selection, {**layer_env, "budget": limit})
        if entries > limit:
            span = _place(terms, selection) if source else None
            text = "keep"
            if source and span:
                text = " ".join(source.text[span.start : span.end].split())
            verb = "take" if source and len(terms) > 1 else "takes"
            message = f"`{text}` {verb} {entries} entries, but the budget is {limit}"
            if "layer" in layer_env and _uses_layer(budget, selection):
                message += f" at layer {layer_env['layer']}"
            return Diagnostic("does-not-fit", message, span, "raise the budget, or keep less")
    return None


def _taken(selection: Node, env: Mapping[str, Value]) -> tuple[Fraction | float, list[Node]]:
    """Fewest entries that a head with many takes, and the terms that take them.

    Where data choose, of the branch that takes more. A term that is no `top` written in its place
    may take entries taken before.
    """
    if selection.op == "top" and selection.axes == ("token",) and len(selection.args) == 2:
        with suppress(NotStatic):
            return _count(evaluate(selection.args[1], env)), [selection]
    if selection.op == "choose":
        branches = selection.args[::2]
        with suppress(NotStatic):
            branches = branches[:1] if evaluate(selection.args[1], env) else branches[1:]
        return max((_taken(branch, env) for branch in branches), key=lambda taken: taken[0])
    entries: Fraction | float = Fraction(0)
    terms: list[Node] = []
    for i, term in enumerate(selection.args if selection.op == "then" else ()):
        number, of_term = _taken(term, env)
        among_all = i > 0 and (term.op != "top" or term.name is not None)
        entries = max(entries, number) if among_all else entries + number
        terms += of_term
    return entries, terms


def _place(terms: list[Node], selection: Node) -> Span | None:
    """The place of the terms, or of the whole selection if some are not written side by side."""
    spans = [term.span for term in terms if term.span]
    span = selection.span
    if len(terms) > 1 and not {*terms} <= {*selection.args}:
        return span
    if span is None or all(span.start <= x.start and x.end <= span.end for x in spans):
        return Span(spans[0].start, spans[-1].end) if spans else span
    return span


def _uses_layer(budget: Node, selection: Node) -> bool:
    """Whether the budget, or what a selection counts and chooses by, differs between layers."""
    nodes = selection.walk()
    counts_of = [x.args[1] for x in nodes if x.op in ("top", "choose") and len(x.args) > 1]
    return any(node.counts_layers for node in (budget, *counts_of))


def _layers(env: Mapping[str, Value]) -> Iterator[Mapping[str, Value]]:
    if "layer" in env or "layers" not in env:
        yield env
        return
    for layer in range(int(env["layers"])):
        yield {**env, "layer": Fraction(layer)}


def _count(value: Value) -> Fraction | float:
    """A number of entries: floored, not negative."""
    return max(Fraction(0), counts.floored(value))
