"""Types the sections of a policy: rules of the prefill and of decode, propagation, merge, share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvpolicy.dsl.check.arguments import check_no_share, check_token_count
from kvpolicy.dsl.check.expressions import UNIT_WORDS, Typer
from kvpolicy.dsl.check.names import Context, Wrong, sound
from kvpolicy.dsl.check.scope import Scope
from kvpolicy.dsl.check.selection import type_selection
from kvpolicy.dsl.ir.nodes import Merge, Node, Propagate, Rules, Share, State, When, brackets
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ir.traverse import nodes_of
from kvpolicy.dsl.syntax.mappings import Block, Item
from kvpolicy.dsl.syntax.tree import Call, Expr, Name


class RulesChecker:
    """Types the rules of one phase."""

    def __init__(self, scope: Scope, phase: str) -> None:
        self.scope = scope
        self.phase = phase
        self.context = Context(phase)
        self.block = scope.file
        decode = scope.file.get("decode")
        self.own = (
            decode if phase == "decode" and isinstance(decode, Block) else Block(scope.file.span)
        )

    def item(self, name: str) -> Item | None:
        """A rule's item: decode's own, or the file's."""
        return self.own.items.get(name) or self.block.items.get(name)

    def rules(self) -> Rules:
        """The rules of this phase; those that are wrong are None."""
        return Rules(
            score=sound(self.score),
            budget=sound(self.budget),
            keep=sound(self.keep),
            merge=sound(self.merge),
            states=self.states(),
            when=sound(self.when),
        )

    def score(self) -> Node | None:
        return self._section("score", self._check_score)

    def _section(self, name: str, check: Callable[[Node, Item], None]) -> Node | None:
        """The node of a section; if it is wrong, its uses report nothing more."""
        item, _ = self.scope.section_item(name, self.phase)
        node = self.scope.section(name, self.phase)
        if node is None or item is None:
            return None
        try:
            check(node, item)
        except Wrong:
            self.scope.refuse_section(name, self.phase)
            raise
        return node

    def _check_score(self, node: Node, item: Item) -> None:
        typer = Typer(self.scope, self.context)
        typer.check_kind(node, "number", item.value, "`score`")
        shape, axes, help = brackets(node.type.axes), node.type.axes, None
        extra_axes = [axis for axis in axes if axis not in ("kv", "token")]
        if not axes:
            message = "score is one number for the layer; it needs one per token"
        elif "token" not in axes:
            message = f"score is {shape}; it needs one number per token"
        elif extra_axes:
            message = f"score is {shape}; only `kv` and `token` may be left"
            help = _reducing(extra_axes)
        else:
            return
        raise typer.error("score-axes", message, item.value.span, help)

    def budget(self) -> Node | None:
        if self.phase == "decode" and "budget" not in self.own:
            return None  # the prefill's numbers stay in force
        _, home = self.scope.section_item("budget", self.phase)
        typer = Typer(self.scope, home)
        return self._section(
            "budget", lambda node, item: check_count(typer, node, item, "budget", ("kv",))
        )

    def keep(self) -> Node | None:
        item = self.item("keep")
        if item is None or not isinstance(item.value, Expr):
            return None
        typer = Typer(self.scope, self.context)
        has_budget = self.scope.section_item("budget", self.phase)[0] is not None
        node = type_selection(typer, item.value, item.path, has_budget)
        return check_set(typer, node, item, "keep", ("kv", "token"))

    def states(self) -> dict[str, State]:
        sections = ("", "decode") if self.phase == "decode" else ("",)
        return dict(self._states(sections))

    def _states(self, sections: tuple[str, ...]) -> Iterator[tuple[str, State]]:
        for section in sections:
            for definition in self.scope.definitions[section].values():
                if definition.kind != "state":
                    continue
                state = sound(partial(self.scope.states.state, definition, self.phase))
                if state is not None:
                    yield definition.name, state

    def when(self) -> Node | None:
        item = self.own.items.get("when")
        if item is None or not isinstance(item.value, Expr):
            return None
        typer = Typer(self.scope, self.context)
        node = typer.truth(item.value, "`when`")
        culprit = next((n for n in node.walk() if not _known_to_host(n)), None)
        if culprit is not None:
            name = culprit.name or culprit.value or culprit.op
            message = f"`decode.when` may use `generated`, `prompt` and parameters, not `{name}`"
            help = "the host decides at which steps entries leave"
            raise typer.error("host", message, item.value.span, help)
        check_present(typer, node, item, "`decode.when`")
        return node

    def merge(self) -> Merge | None:
        item = self.item("merge")
        if item is None or not isinstance(item.value, Block):
            return None
        keep = self.item("keep")
        if keep is None or (isinstance(keep.value, Name) and keep.value.text == "all"):
            what = "without `keep`" if keep is None else "with `keep: all`"
            raise self.scope.error("merge", f"`merge` {what}: nothing is dropped", item.key)
        section = item.path
        block: Block = item.value
        into = sound(partial(self._into, block))
        context = Context(self.phase, section)
        parts = {
            name: check_part(Typer(self.scope, context), block, name, kind, axes)
            for name, (kind, axes) in _MERGE_PARTS.items()
        }
        states = dict(self._states((section,)))
        for name, node in parts.items():
            if name != "divide":
                self._knows_no_mass([node], block.items.get(name))
        for name, state in states.items():
            self._knows_no_mass([state.start, state.next], block.get("state").items[name])
        if into is None:
            return None
        return Merge(into, **parts, apply=_applied(block), states=states)

    def _knows_no_mass(self, nodes: list[Node | None], item: Item | None) -> None:
        """Reports uses of `mass` and `members`, which are known only after what is merged."""
        for node in nodes_of(nodes):
            if node.op == "special" and item is not None:
                message = f"`{node.value}` is known only in `merge.divide`"
                self.scope.error("merge", message, item.span, "it follows from the other parts")

    def _into(self, block: Block) -> Node | None:
        item = block.items.get("into")
        if item is None or not isinstance(item.value, Expr):
            return None
        if not isinstance(item.value, Call) or item.value.name not in ("nearest", "next"):
            message = "`merge.into` is `nearest(x)` or `next(n)`"
            raise self.scope.error("merge", message, item.value.span)
        typer = Typer(self.scope, self.context)
        typer.receivers = True
        return typer.expr(item.value)


# Parts of a merge: kind, and axes that they may have. A KV head's receivers share one own weight.
_MERGE_PARTS = {
    "accept": ("truth", ("kv", "dropped")),
    "weight": ("number", ("kv", "dropped")),
    "own": ("number", ("kv",)),
    "divide": ("number", ("kv", "token")),
}
# Parts of `share`: kind, axes that they may have, and the phase in which they are typed.
_SHARE_PARTS = {
    "when": ("truth", (), "static"),
    "direction": ("number", ("kv", "token", "dim"), "prefill"),
    "except": ("truth", ("kv", "token"), "prefill"),
}


def _applied(block: Block) -> tuple[str, ...]:
    names = tuple(item.value for item in block.get("apply") or () if item.value)
    return names or ("key", "value")


def _known_to_host(node: Node) -> bool:
    if node.op == "size":
        return node.value != "cached" and node.value != "layer"
    row = node.operation
    return (row.known_to_host or row.elementwise) and not node.type.axes


# Checks of the values that decide


def require(scope: Scope, item: Item) -> Node:
    """A condition of the section `require`."""
    typer = Typer(scope, Context("static"))
    node = typer.truth(item.value, "`require`")
    check_axes(typer, node, item, ())
    return node


def check_axes(typer: Typer, node: Node, item: Item, allowed: tuple[str, ...]) -> None:
    """Checks that a value has only allowed axes."""
    extra_axes = [axis for axis in node.type.axes if axis not in allowed]
    if not extra_axes:
        return
    names = " and ".join(f"`{axis}`" for axis in allowed)
    needed = f"it may have the axes {names}" if allowed else "one value for the layer is needed"
    message = f"`{item.path}` is {brackets(node.type.axes)}; {needed}"
    help = _reducing(extra_axes, "any" if node.type.kind == "truth" else "sum")
    if extra_axes == ["dropped"] and item.path.endswith("merge.own"):
        help = "weigh entries against their receiver by `weight`, as in `weight: x / target(x)`"
    raise typer.error("axis", message, item.value.span, help)


def _reducing(axes: Sequence[str], verb: str = "sum") -> str:
    """Advice to reduce axes."""
    names = " and ".join(f"`{axis}`" for axis in axes)
    return f"reduce {names}, for example with `{verb}[{', '.join(axes)}](...)`"


def check_part(
    typer: Typer, block: Block, name: str, kind: str, allowed: tuple[str, ...]
) -> Node | None:
    """A part of a section: a number or truth value with the allowed axes, never absent.

    None if the section lacks it, or it is wrong.
    """
    item = block.items.get(name)
    if item is None or not isinstance(item.value, Expr):
        return None
    return sound(partial(_part, typer, item, kind, allowed))


def _part(typer: Typer, item: Item, kind: str, allowed: tuple[str, ...]) -> Node:
    what = f"`{item.path}`"
    node = (typer.truth if kind == "truth" else typer.number)(item.value, what)
    check_axes(typer, node, item, allowed)
    check_present(typer, node, item, what)
    return node


def check_present(typer: Typer, node: Node, item: Item, what: str) -> None:
    """Checks that a value can never be absent."""
    if node.type.absent:
        raise typer.absent(node, item.value, what)


def check_count(typer: Typer, node: Node, item: Item, name: str, allowed: tuple[str, ...]) -> None:
    """Checks that a value is a number of tokens with only allowed axes, never absent."""
    typer.check_kind(node, "number", item.value, f"`{item.path}`")
    unit = node.type.unit
    if unit not in (None, "tokens"):
        message = f"{name} is {UNIT_WORDS[unit]}; a number of tokens is needed"
        help = "`1 * layer` is a number without a unit" if unit == "layers" else None
        if unit == "ratio":
            help = f"for example `{typer.shown(item.value)} * prompt`"
        raise typer.error("unit", message, item.value.span, help)
    check_token_count(typer, node, item.value, name)
    value = typer.graph.literal(node)
    if value is not None and value <= 0:
        message = f"`{item.path}` is {shown(value)}: `top` without a count takes nothing"
        typer.scope.warn("zero", message, item.value.span)
    check_no_share(typer, value, item.value, f"`{item.path}`")
    check_axes(typer, node, item, allowed)
    check_present(typer, node, item, f"`{item.path}`")


def check_set(typer: Typer, node: Node, item: Item, name: str, allowed: tuple[str, ...]) -> Node:
    """The node, if it is a token set with only allowed axes, never absent."""
    typer.check_set(node, item.value, f"`{name}`")
    check_axes(typer, node, item, allowed)
    check_present(typer, node, item, f"`{item.path}`")
    return node


# Propagation, sharing, reading


def propagate(scope: Scope) -> Propagate | None:
    """The section `propagate`; None if it is missing or wrong."""
    block = scope.file.get("propagate")
    if not isinstance(block, Block):
        return None
    item = scope.file.items["propagate"]
    if ("first" in block) == ("every" in block):
        message = "say `first` (one layer) or `every` (each such layer)"
        message += ", not both" if "first" in block else ""
        scope.error("once", message, item.key)
    if "restart" in block and "every" in block:
        scope.error(
            "once", "`restart` goes with `first`, not with `every`", block.items["restart"].key
        )
    parts = {
        name: sound(partial(_propagate_part, scope, block, name))
        for name in ("tokens", "first", "every", "budget", "restart")
    }
    tokens, moment = parts["tokens"], parts["first"] or parts["every"]
    if tokens is None or moment is None:
        return None
    return Propagate(tokens, moment, "every" in block, parts["budget"], parts["restart"])


def _propagate_part(scope: Scope, block: Block, name: str) -> Node | None:
    item = block.items.get(name)
    if item is None or not isinstance(item.value, Expr):
        return None
    context = Context("static") if name == "restart" else Context("prefill", "propagate")
    typer = Typer(scope, context)
    if name == "tokens":
        node = type_selection(typer, item.value, item.path, "budget" in block)
        check_set(typer, node, item, "propagate.tokens", ("token",))
    elif name == "budget":
        node = typer.number(item.value, "`propagate.budget`")
        check_count(typer, node, item, "propagate.budget", ())
    else:
        node = _part(typer, item, "truth", ())
    if node.when >= When.END:
        culprit = next(n for n in node.walk() if "layer" in n.axes and n.when >= When.END)
        text = scope.shown(culprit.span) if culprit.span else culprit.op
        message = f"`{item.path}` needs every layer through `{text}`, but acts at its own"
        help = "`past` and `at` look at the layers before"
        raise scope.error("later-layer", message, item.value.span, help)
    return node


def _may_share(scope: Scope) -> bool:
    """Whether no other section moves or drops entries; reports one that does."""
    for key in ("keep", "propagate", "decode", "merge"):
        item = scope.file.items.get(key)
        if item is None or (key == "keep" and isinstance(item.value, Name)):
            if item is None or item.value.text == "all":
                continue
        message = f"`share` with `{key}`: two layers that share entries must keep the same ones"
        scope.error("share", message, item.key, "only `keep: all` goes with `share`")
        return False
    return True


def share(scope: Scope) -> Share | None:
    """The section `share`; None if it is missing or wrong."""
    block = scope.file.get("share")
    if not isinstance(block, Block):
        return None
    if not _may_share(scope):
        return None
    when, direction, exceptions = (
        check_part(Typer(scope, Context(phase, "share")), block, name, kind, axes)
        for name, (kind, axes, phase) in _SHARE_PARTS.items()
    )
    if when is None or direction is None:
        return None
    nodes = nodes_of([direction, exceptions])
    gone = (x for x in nodes if x.across_layers or x.operation.gone_after_layer)
    scope.note_unserved_nodes(gone, "`share`")
    return Share(when, direction, exceptions, _applied(block))


def read(scope: Scope) -> Node | None:
    """The section `read`; None if it is missing or wrong."""
    item = scope.file.items.get("read")
    if item is None or not isinstance(item.value, Expr):
        return None
    scope.note_unserved("`read`", item.key)
    typer = Typer(scope, Context("decode"))
    return sound(lambda: check_set(typer, typer.expr(item.value), item, "read", ("kv", "token")))
