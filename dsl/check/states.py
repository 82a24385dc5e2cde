"""Types the states of a policy: values that are remembered between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpolicy.dsl.check.expressions import Typer
from kvpolicy.dsl.check.names import Context, Definition, Names, Wrong
from kvpolicy.dsl.ir.nodes import Node, State, Type
from kvpolicy.dsl.ir.traverse import nodes_of
from kvpolicy.dsl.syntax.mappings import Block
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.tree import Expr


class States:
    """The states of one pass over a file, typed when they are first used."""

    def __init__(self, scope: Names) -> None:
        self.scope = scope
        self._known: dict[tuple[str, str], State | None] = {}
        # States being typed: section and name, assumed type, number of open lets (-1: in `start`).
        self._open: list[tuple[tuple[str, str], Type, int]] = []

    def value(self, definition: Definition, context: Context, span: Span) -> Node:
        """A state's value: inside its own `next` before the step's update, elsewhere after it."""
        mark = (definition.section, definition.name)
        if self._open and self._open[-1][::2] == (mark, len(self.scope.open)):
            type_ = self._open[-1][1]
        elif any(mark == open_mark for open_mark, _, _ in self._open):
            message = f"`{definition.name}` is needed for its own next value"
            help = "only `next` itself may name the state, not a let or a state that it uses"
            raise self.scope.error("name", message, span, help)
        else:
            type_ = self.state(definition, context.phase).type
        return self.scope.graph.make(
            "state", kind=type_.kind, axes=type_.axes, unit=type_.unit, value=definition.name,
            absent=False, when=context.base, span=definition.item.key,
        )  # fmt: skip

    def state(self, definition: Definition, phase: str) -> State:
        """The state of a definition in one phase; raises `Wrong` if it is wrong."""
        key = (f"{definition.section}.{definition.name}", phase)
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._typed_state(definition, phase)
        state = self._known[key]
        if state is None:
            raise Wrong
        return state

    def _typed_state(self, definition: Definition, phase: str) -> State:
        value = definition.item.value
        start = value.get("start") if isinstance(value, Block) else None
        next_ = value.get("next") if isinstance(value, Block) else value
        if start is None and next_ is None:
            if isinstance(value, Block) and not value.items:
                message = f"`{definition.item.path}` needs `next`"
                self.scope.error("key", message, definition.item.key)
            raise Wrong
        context = Context(phase, definition.section if "merge" in definition.section else None)
        typer = Typer(self.scope, context)
        first, update = None, None
        pairs: list[tuple[Node, Expr]] = []
        mark = (definition.section, definition.name)
        if start is not None:
            with self._opened(mark, Type("number"), -1):
                first = typer.number(start, "a state")
            pairs.append((first, start))
        type_ = first.type if first is not None else Type("number")
        if next_ is not None:
            update = self._update(typer, mark, next_, type_)
            if set(type_.axes) - set(update.type.axes):
                message = f"the state `{definition.name}` changes its axes from step to step"
                raise self.scope.error("axis", message, definition.item.key)
            type_ = update.type
            pairs.append((update, next_))
        for axis, what in (("query", "queries"), ("dropped", "dropped entries")):
            if axis in type_.axes:
                message = f"the state `{definition.name}` has the axis `{axis}`"
                help = f"the next step has other {what}: reduce `{axis}`"
                raise self.scope.error("axis", message, definition.item.key, help)
        # A state advances at every step, layer by layer.
        nodes = nodes_of([node for node, _ in pairs])
        self.scope.note_unserved_nodes((x for x in nodes if x.across_layers), "a state")
        for node, expr in pairs:
            if node.type.absent:
                raise typer.absent(node, expr, f"the state `{definition.name}`")
        type_ = Type("number", type_.axes, type_.unit)
        inherited = phase == "decode" and definition.section in ("", "merge")
        return State(definition.name, first, update, type_, inherited)

    @contextmanager
    def _opened(self, mark: tuple[str, str], type_: Type, lets: int) -> Iterator[None]:
        """Marks a state as being typed, with an assumed type, inside `lets` open lets."""
        self._open.append((mark, type_, lets))
        try:
            yield
        finally:
            self._open.pop()

    def _update(self, typer: Typer, mark: tuple[str, str], expr: Expr, assumed_type: Type) -> Node:
        """A state's next value, typed twice: the first time gives the state's type."""
        for _ in range(2):
            type_ = Type("number", assumed_type.axes, assumed_type.unit)
            with self._opened(mark, type_, len(self.scope.open)):
                update = typer.number(expr, "a state")
            typer.check_reduced(update, expr)
            if set(assumed_type.axes) - set(update.type.axes):
                break
            assumed_type = update.type
        return update
