"""Types selections (`keep`, `propagate.tokens`), where `top` without a count fills the budget."""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.check.calls import type_call
from kvpolicy.dsl.check.expressions import Typer
from kvpolicy.dsl.check.names import sound
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.syntax.tree import Call, Expr, Name, Then, Where


def type_selection(typer: Typer, expr: Expr, section: str, has_budget: bool) -> Node:
    """The node of a selection; branches of `where` are selections of their own."""
    if isinstance(expr, Where) and expr.other is not None:
        value, other = (
            partial(type_selection, typer, branch, section, has_budget)
            for branch in (expr.value, expr.other)
        )
        return typer.chosen(expr, value, other)
    if isinstance(expr, Then):
        _report_unreachable(typer, expr)
        terms = [partial(_term, typer, term, section, has_budget) for term in expr.terms]
        return typer.then(expr, list(map(sound, terms)))
    return _term(typer, expr, section, has_budget)


def _term(typer: Typer, expr: Expr, section: str, has_budget: bool) -> Node:
    if not _fills(expr):
        node = typer.expr(expr)
        _check_of_entries(typer, node, expr)
        return node
    assert isinstance(expr, Call)
    if not has_budget:
        budget = section.replace("tokens", "budget") if "." in section else "budget"
        text = typer.shown(expr)
        message = f"`{text}` fills the budget, but the file has no `{budget}`"
        help = f"add `{budget}`, or write a count, as in `{text.removesuffix(')')}, n)`"
        raise typer.error("no-budget", message, expr.span, help)
    node = type_call(typer, expr, fills=True)
    _check_of_entries(typer, node, expr)
    if "token" not in node.axes:
        message = f"`{typer.shown(expr)}` fills the budget, so tokens must compete"
        help = "add the axis `token`, or write a count"
        raise typer.error("competition", message, expr.span, help)
    return node


def _check_of_entries(typer: Typer, node: Node, expr: Expr) -> None:
    """Checks that entries, heads or layers compete in a `top` that selects."""
    other_axes = [axis for axis in node.axes if axis not in ("layer", "kv", "token")]
    if isinstance(expr, Call) and expr.name == "top" and other_axes:
        message = f"`{typer.shown(expr)}` chooses along `{other_axes[0]}`, not among entries"
        help = f"reduce `{other_axes[0]}` first; `top(x, n)` then chooses tokens of a head"
        raise typer.error("competition", message, expr.span, help)


def _fills(expr: Expr) -> bool:
    """Whether this is `top` without a count."""
    return isinstance(expr, Call) and expr.name == "top" and len(expr.arguments) == 1


def _report_unreachable(typer: Typer, expr: Then) -> None:
    greedy: Expr | None = None
    for term in expr.terms:
        if greedy is not None:
            message = (
                f"`{typer.shown(term)}` comes after `{typer.shown(greedy)}`, "
                "which leaves nothing to choose from"
            )
            typer.error("unreachable", message, term.span, "put it first, or leave it out")
            return
        if _fills(term) or (isinstance(term, Name) and term.text == "all"):
            greedy = term
