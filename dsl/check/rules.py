"""Types the sections of a policy: rules of the prefill and of decode, propagation, merge, share."""

from __future__ import annotations

from collections.abc import Iterator

from kvpolicy.dsl.check.arguments import is_no_share, is_token_count
from kvpolicy.dsl.check.expressions import Typer
from kvpolicy.dsl.check.names import Context
from kvpolicy.dsl.check.scope import Scope
from kvpolicy.dsl.check.selection import type_selection
from kvpolicy.dsl.ir.nodes import Merge, Node, Propagate, Rules, Share, State, When, brackets
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of
from kvpolicy.dsl.syntax.blocks import Block, Item
from kvpolicy.dsl.syntax.tree import Call, Expr, Name


class RulesChecker:
    """Types one phase's rules."""

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
        """The rules of this phase; what is wrong is None."""
        return Rules(
            score=self.score(),
            budget=self.budget(),
            keep=self.keep(),
            merge=self.merge(),
            states=self.states(),
            lets={},
            when=self.when(),
        )

    def score(self) -> Node | None:
        item = self.item("score")
        node = self.scope.section("score", self.phase)
        if node is None or item is None:
            return None
        if not self._is_score(node, item):
            self.scope.refuse_section("score", self.phase)
            return None
        return node

    def _is_score(self, node: Node, item: Item) -> bool:
        typer = Typer(self.scope, self.context)
        if not typer.is_kind(node, "number", item.value, "`score`"):
            return False
        extra = [axis for axis in node.type.axes if axis not in ("kv", "token")]
        if "token" not in node.type.axes:
            message = f"score is {brackets(node.type.axes)}; it needs one number per token"
            if not node.type.axes:
                message = "score is one number for the layer; it needs one per token"
            typer.error("score-axes", message, item.value.span)
            return False
        if extra:
            message = f"score is {brackets(node.type.axes)}; only `kv` and `token` may be left"
            help = f"reduce `{extra[0]}`, for example with `sum[{extra[0]}](...)`"
            typer.error("score-axes", message, item.value.span, help)
            return False
        return True

    def budget(self) -> Node | None:
        item, home = self.scope.section_item("budget", self.phase)
        if self.phase == "decode" and "budget" not in self.own:
            return None  # the prefill's numbers stay in force
        node = self.scope.section("budget", self.phase)
        if node is None or item is None:
            return None
        checked = check_count(Typer(self.scope, home), node, item, "budget", ("kv",))
        if checked is None:
            self.scope.refuse_section("budget", self.phase)
        return checked

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
                state = self.scope.states.state(definition, self.phase)
                if state is not None:
                    yield definition.name, state

    def when(self) -> Node | None:
        item = self.own.items.get("when")
        if item is None or not isinstance(item.value, Expr):
            return None
        typer = Typer(self.scope, self.context)
        node = typer.truth(item.value, "`when`")
        if node is None:
            return None
        culprit = next((n for n in node.walk() if not _known_to_host(n)), None)
        if culprit is not None:
            shown = culprit.name or culprit.value or culprit.op
            message = f"`decode.when` may use `generated`, `prompt` and parameters, not `{shown}`"
            typer.error(
                "host", message, item.value.span, "the host decides at which steps entries leave"
            )
            return None
        return check_present(typer, node, item, "`decode.when`")

    def merge(self) -> Merge | None:
        item = self.item("merge")
        if item is None or not isinstance(item.value, Block):
            return None
        keep = self.item("keep")
        if keep is None or (isinstance(keep.value, Name) and keep.value.text == "all"):
            what = "without `keep`" if keep is None else "with `keep: all`"
            self.scope.error("merge", f"`merge` {what}: nothing is dropped", item.key)
            return None
        section = item.path
        block: Block = item.value
        into = self._into(block)
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
        """Reports what is known only when it is known what is merged."""
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
            self.scope.error("merge", message, item.value.span)
            return None
        typer = Typer(self.scope, self.context)
        typer.receivers = True
        return typer.expr(item.value)


# Parts of a merge, and the axes that they may have: a receiver has one weight of its own.
_MERGE_PARTS = {
    "accept": ("truth", ("kv", "dropped")),
    "weight": ("number", ("kv", "dropped")),
    "own": ("number", ("kv",)),
    "divide": ("number", ("kv", "token")),
}
# Parts of `share`, and where they are typed.
_SHARE_PARTS = {
    "when": ("truth", (), "static"),
    "direction": ("number", ("kv", "token", "dim"), "prefill"),
    "except": ("truth", ("kv", "token"), "prefill"),
}


def _applied(block: Block) -> tuple[str, ...]:
    chosen = tuple(item.value for item in block.get("apply") or () if item.value)
    return chosen or ("key", "value")


def _known_to_host(node: Node) -> bool:
    if node.op == "size":
        return node.value != "cached" and node.value != "layer"
    row = node.operation
    return (row.known_to_host or row.elementwise) and not node.type.axes


# What every deciding value must satisfy


def check_axes(typer: Typer, node: Node, item: Item, allowed: tuple[str, ...]) -> bool:
    """Whether a value has no axes but those allowed; otherwise reports."""
    extra = [axis for axis in node.type.axes if axis not in allowed]
    if not extra:
        return True
    only = " and ".join(f"`{axis}`" for axis in allowed) or "none"
    message = f"`{item.path}` is {brackets(node.type.axes)}; it may have the axes {only}"
    if not allowed:
        message = f"`{item.path}` is {brackets(node.type.axes)}; one value for the layer is needed"
    verb = "any" if node.type.kind == "truth" else "sum"
    help = f"reduce `{extra[0]}`, for example with `{verb}[{extra[0]}](...)`"
    typer.error("axis", message, item.value.span, help)
    return False


def check_part(
    typer: Typer, block: Block, name: str, kind: str, allowed: tuple[str, ...]
) -> Node | None:
    """A part of a section: a number or truth value with the allowed axes, never absent."""
    item = block.items.get(name)
    if item is None or not isinstance(item.value, Expr):
        return None
    what = f"`{item.path}`"
    node = (typer.truth if kind == "truth" else typer.number)(item.value, what)
    if node is None or not check_axes(typer, node, item, allowed):
        return None
    return check_present(typer, node, item, what)


def check_present(typer: Typer, node: Node, item: Item, what: str) -> Node | None:
    """The node if its value can never be absent; otherwise reports."""
    if node.type.absent:
        typer.absent(node, item.value, what)
        return None
    return node


def check_count(
    typer: Typer, node: Node, item: Item, name: str, allowed: tuple[str, ...]
) -> Node | None:
    """A number of tokens, for each of the allowed axes."""
    if not typer.is_kind(node, "number", item.value, f"`{item.path}`"):
        return None
    if node.type.unit not in (None, "tokens"):
        shown = typer.shown(item.value)
        words = {"ratio": "a ratio", "layers": "a number of layers"}[node.type.unit]
        message = f"{name} is {words}; a number of tokens is needed"
        help = f"for example `{shown} * prompt`" if node.type.unit == "ratio" else None
        typer.error("unit", message, item.value.span, help)
        return None
    is_token_count(typer, node, item.value, name)
    if not _is_some(typer, node, item):
        return None
    if not check_axes(typer, node, item, allowed):
        return None
    return check_present(typer, node, item, f"`{item.path}`")


def _is_some(typer: Typer, node: Node, item: Item) -> bool:
    """Whether a budget is not a share below one entry; warns where it is none at all."""
    value = typer.graph.literal(node)
    if value is None:
        return True
    if value <= 0:
        message = f"`{item.path}` is {shown(value)}: `top` without a count takes nothing"
        typer.scope.warn("zero", message, item.value.span)
        return True
    return is_no_share(typer, value, item.value, f"`{item.path}`")


def check_set(
    typer: Typer, node: Node | None, item: Item, name: str, allowed: tuple[str, ...]
) -> Node | None:
    """A token set that decides."""
    if node is None or not typer.is_set(node, item.value, f"`{name}`"):
        return None
    if not check_axes(typer, node, item, allowed):
        return None
    return check_present(typer, node, item, f"`{item.path}`")


# Propagation, sharing, reading


def propagate(scope: Scope) -> Propagate | None:
    """The section `propagate`."""
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
        name: _propagate_part(scope, block, name)
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
        node = check_set(typer, node, item, "propagate.tokens", ("token",))
    elif name == "budget":
        node = typer.number(item.value, "`propagate.budget`")
        node = check_count(typer, node, item, "propagate.budget", ()) if node else None
    else:
        node = check_part(typer, block, name, "truth", ())
    if node is not None and node.when >= When.END:
        _report_later_layer(scope, node, item)
        return None
    return node


def _report_later_layer(scope: Scope, node: Node, item: Item) -> None:
    across = next(n for n in node.walk() if "layer" in n.axes and n.when >= When.END)
    shown = scope.shown(across.span) if across.span else across.op
    message = f"`{item.path}` needs every layer through `{shown}`, but acts at its own"
    scope.error(
        "later-layer", message, item.value.span, "`past` and `at` look at the layers before"
    )


def _may_share(scope: Scope) -> bool:
    """Whether nothing else in the file moves or drops entries; otherwise reports."""
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
    """The section `share`."""
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
    for node in nodes_of([direction, exceptions]):
        if node.across_layers or node.operation.fleeting:
            scope.unserved(f"`{'[layer]' if 'layer' in node.axes else node.op}` in `share`")
    return Share(when, direction, exceptions, _applied(block))


def read(scope: Scope) -> Node | None:
    """The section `read`."""
    item = scope.file.items.get("read")
    if item is None or not isinstance(item.value, Expr):
        return None
    scope.unserved("`read`")
    typer = Typer(scope, Context("decode"))
    node = typer.expr(item.value)
    return check_set(typer, node, item, "read", ("kv", "token"))


def note_unserved(scope: Scope, decode: Rules) -> None:
    """Notes what a decode step cannot decide: it is asked layer by layer."""
    for node in nodes_of([decode.keep, decode.budget, *merge_roots(decode.merge)]):
        if "layer" in node.axes:
            scope.unserved("`[layer]` in `decode`")
        elif node.across_layers:
            scope.unserved(f"`{node.op}` in `decode`")
