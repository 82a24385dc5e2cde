"""What the names of a policy mean: parameters, tensors, states, lets, `score` and `budget`.

A let is typed in the context of its use: in decode it is computed from decode's data, inside
`merge` it is read at the dropped entries. It is typed once per context.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvpolicy.dsl.check.calls import type_call
from kvpolicy.dsl.check.expressions import Typer
from kvpolicy.dsl.check.instead import INSTEAD
from kvpolicy.dsl.check.names import SECTIONS, Context, Definition, Key, Names, Uses, Wrong, sound
from kvpolicy.dsl.check.states import States
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ops.table import BUILTINS, FUNCTIONS, OPERATIONS, RESERVED
from kvpolicy.dsl.syntax.diagnostics import did_you_mean
from kvpolicy.dsl.syntax.mappings import TRUTHS, Block, Item
from kvpolicy.dsl.syntax.parse import MAX_NAMES
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.tree import Call, Chain, Expr, Name, Operator, Where

_KINDS = {"params": "parameter", "data": "tensor", "state": "state", "let": "let"}


class Scope(Names):
    """Names and their nodes, for one pass of the checker over a file."""

    def __init__(self, source: Source, file: Block, uses: dict[str, Uses]) -> None:
        super().__init__(source, uses, propagates="propagate" in file)
        self.file = file
        self.states = States(self)
        self.used: set[tuple[str, str]] = set()
        self._nodes: dict[Key, Node | None] = {}
        # Lets that decode has named -> the prefill's node; None if decode computes them itself.
        self.decided: dict[str, Node | None] = {}
        self._refused: set[str] = set()  # names whose definition was refused; uses stay silent
        for section, block in self._blocks():
            self._define(section, block)

    # Definitions

    def _blocks(self) -> Iterator[tuple[str, Block]]:
        yield "", self.file
        for section in SECTIONS[1:]:
            block: object = self.file
            for key in section.split("."):
                block = block.get(key) if isinstance(block, Block) else None
            if isinstance(block, Block):
                yield section, block

    def _define(self, section: str, block: Block) -> None:
        for key, kind in _KINDS.items():
            names = block.get(key)
            for name, item in (names.items if isinstance(names, Block) else {}).items():
                if name in RESERVED:
                    message = f"`{name}` is {RESERVED[name]} and cannot be a {kind}"
                    self.error("name", message, item.key, "choose another name")
                    self._refused.add(name)
                    continue
                definition = self._visible(name, section)
                if definition:
                    line, _ = self.source.place(definition.item.key.start)
                    message = f"`{name}` is already a {definition.kind} (line {line})"
                    self.error("name", message, item.key, "choose another name")
                    continue
                self.definitions[section][name] = Definition(name, kind, section, item)

    def _visible(self, name: str, section: str) -> Definition | None:
        """The innermost definition of a name that is seen inside a section."""
        visible_sections = {
            "": ("",),
            "merge": ("merge", "decode", ""),
            "decode.merge": ("decode.merge", "decode", ""),
        }
        for place in visible_sections.get(section, (section, "")):
            if name in self.definitions[place]:
                return self.definitions[place][name]
        return None

    def find(self, name: str, context: Context) -> Definition | None:
        """The definition of a name in a context."""
        if context.inside in self.definitions and name in self.definitions[context.inside]:
            return self.definitions[context.inside][name]
        if context.phase == "decode" and name in self.definitions["decode"]:
            return self.definitions["decode"][name]
        return self.definitions[""].get(name)

    def knows(self, name: str, context: Context) -> bool:
        """Whether a name without parentheses means something in a context."""
        return self.find(name, context) is not None or (name in RESERVED and name not in FUNCTIONS)

    def unknown(self, expr: Name, context: Context) -> Wrong:
        """Reports a name that means nothing in a context."""
        name = expr.text
        message, help = f"unknown name `{name}`", None
        if name in FUNCTIONS:
            message = f"`{name}` is a function and needs arguments"
            help = f"write `{FUNCTIONS[name].signature}`"
        elif RESERVED.get(name) == "an axis":
            message = f"`{name}` is an axis, not a value"
            help = f"axes stand in brackets, as in `sum[{name}](x)`"
        elif name == "budget":
            message, help = "the file has no `budget`", "add one"
        elif name == "score":
            message, help = "the file has no `score`", "add one"
        else:
            if context.inside == "default":
                return self._unknown_default(expr)
            places = [s for s, names in self.definitions.items() if name in names]
            if places:
                message = f"`{name}` is defined under `{places[0]}` and exists only there"
            elif name in TRUTHS:
                help = f"write `{'true' if TRUTHS[name] else 'false'}`"
            else:
                values = [
                    n for n, what in RESERVED.items() if what not in ("an axis", "a function")
                ]
                policy_names = (n for names in self.definitions.values() for n in names)
                help = INSTEAD.get(name) or did_you_mean(name, [*values, *policy_names])
        return self.error("name", message, expr.span, help)

    def _unknown_default(self, expr: Name) -> Wrong:
        sizes = [name for name, builtin in BUILTINS.items() if builtin.where == "always"]
        params = [n for n, x in self.definitions[""].items() if x.kind == "parameter"]
        help = did_you_mean(expr.text, [*sizes, *params])
        help = (
            help or "a default is a number, `true`, `false`, or follows from parameters and sizes"
        )
        return self.error("name", f"unknown name `{expr.text}`", expr.span, help)

    # Nodes

    def lets(self, phase: str) -> dict[str, Node]:
        """The lets that were used in a phase, by name."""
        return {
            key[2]: node
            for key, node in self._nodes.items()
            if key[0] == "let" and key[3] == Context(phase) and node is not None
        }

    def resolve(self, expr: Name, context: Context) -> Node | None:
        """The node of a name in a context; None if the policy does not define it."""
        if expr.text in ("score", "budget"):
            return self._section(expr, context)
        if expr.text in self._refused:
            raise Wrong
        definition = self.find(expr.text, context)
        if definition is None:
            return None
        self.used.add((definition.section, definition.name))
        if context.phase == "static" and definition.kind != "parameter":
            message = f"`{expr.text}` is a {definition.kind}; only parameters and model sizes "
            raise self.error("phase", message + "are known here", expr.span)
        local = definition.section == context.inside
        home = context if local else Context(context.phase)
        node = self.node(definition, home, expr.span)
        return node if local else Typer(self, context).at_dropped(node)

    def node(self, definition: Definition, context: Context, span: Span) -> Node:
        """The value of a name in a context; `span` is the use, for the report of a cycle."""
        if definition.kind == "parameter":
            return self.parameter(definition)
        if definition.kind == "tensor":
            return self._tensor(definition)
        if definition.kind == "state":
            return self.states.value(definition, context, span)
        if context.phase == "decode" and definition.section == "":
            decided = self._decided(definition, span)
            if decided is not None:
                return decided
        return self._once(("let", definition.section, definition.name, context), definition, span)

    def _decided(self, definition: Definition, span: Span) -> Node | None:
        """A let's value from the prefill, for decode; None if decode computes the let itself.

        A decode step sees one layer. A let that reads other layers keeps the value that it had in
        the prefill, unless it has a value per entry or query: these come and go.
        """
        name = definition.name
        if name not in self.decided:
            self.decided[name] = None
            if self._looks_across(definition.item.value, {name}):
                self.decided[name] = sound(partial(self._of_prefill, definition, span))
        node = self.decided[name]
        if node is None:
            return None
        return self.graph.make(
            "decided", kind=node.type.kind, axes=node.type.axes, unit=node.type.unit,
            absent=node.type.absent, value=name, when=When.STEP, span=definition.item.key,
        )  # fmt: skip

    def _of_prefill(self, definition: Definition, span: Span) -> Node | None:
        """The prefill's node of a let; None, without a report, if decode cannot keep its value.

        The let may use names that only decode has, so its errors are dropped.
        """
        backup = self.diagnostics, self._nodes, self.states
        self.diagnostics, self._nodes, self.states = [], dict(self._nodes), States(self)
        try:
            node = sound(partial(self.node, definition, Context("prefill"), span))
            failed = any(d.severity == "error" for d in self.diagnostics)
        finally:
            self.diagnostics, self._nodes, self.states = backup
        if failed or node is None or node.when < When.LAYER:
            return None
        if set(node.type.axes) - {"kv", "group", "dim"} or not any(
            part.across_layers for part in node.walk()
        ):
            return None
        return self.node(definition, Context("prefill"), span)

    def _looks_across(self, value: object, seen: set[str]) -> bool:
        """Whether an expression, or one that it names, is written to read other layers."""
        if isinstance(value, Name):
            item = self.file.items.get(value.text) if value.text in ("score", "budget") else None
            definition = self.definitions[""].get(value.text)
            item = definition.item if definition is not None else item
            if item is None or value.text in seen:
                return False
            seen.add(value.text)
            return self._looks_across(item.value, seen)
        if isinstance(value, Call):
            axes = {axis.text for axis in value.axes or ()}
            if "layer" in axes or value.name in ("past", "at"):
                return True
        children = value.children if isinstance(value, Expr) else ()
        return any(self._looks_across(child, seen) for child in children)

    def _once(self, key: Key, definition: Definition, span: Span) -> Node:
        """The node of a let or section, made at its first use; reports one that uses itself."""
        if key not in self._nodes:
            if key in self.open:
                names = [k[2] for k in self.open[self.open.index(key) :]]
                raise self._cycle(definition.name, names, span)
            try:
                self._nodes[key] = self._typed(key, definition)
            except Wrong:
                self._nodes[key] = None
        node = self._nodes[key]
        if node is None:
            raise Wrong
        return node

    def _typed(self, key: Key, definition: Definition) -> Node:
        expr = definition.item.value
        if not isinstance(expr, Expr):
            raise Wrong
        typer = Typer(self, key[3])
        self.open.append(key)
        try:
            node = typer.expr(expr)
        finally:
            self.open.pop()
        typer.check_reduced(node, expr)
        return self.graph.relabel(node, name=definition.name)

    def _cycle(self, name: str, names: list[str], span: Span) -> Wrong:
        if len(names) == 1:
            return self.error("name", f"`{name}` is defined by itself", span, "a `state` may be")
        path = " -> ".join(f"`{n}`" for n in [*names, name])
        return self.error("name", f"`{name}` is defined by itself: {path}", span)

    def _section(self, expr: Name, context: Context) -> Node | None:
        """The value of the section `score` or `budget`, used by its name."""
        name = expr.text
        if context.phase == "static":
            raise self.error("phase", f"`{name}` is not known before the prefill", expr.span)
        if context.inside == "propagate" and name == "budget":
            block = self.file.get("propagate")
            item = block.items.get("budget") if isinstance(block, Block) else None
            home = context
        else:
            item, home = self.section_item(name, context.phase)
        if item is None:
            return None
        node = self._of_section(name, item, home, expr.span)
        if name == "score":
            return Typer(self, context).at_dropped(node)
        decoding = context.phase == "decode"
        return self.graph.make(
            "budget", value="propagate" if home.inside == "propagate" else None,
            axes=node.type.axes, unit="tokens", when=When.STEP if decoding else node.when,
            exact=node.type.exact and not decoding, span=expr.span,
        )  # fmt: skip

    def _of_section(self, name: str, item: Item, home: Context, span: Span) -> Node:
        definition = Definition(name, "section", item.path, item)
        return self._once(("section", item.path, name, home), definition, span)

    def section_item(self, name: str, phase: str) -> tuple[Item | None, Context]:
        """A section's item in a phase, decode's own or inherited, and the context of its typing."""
        if phase == "decode":
            decode = self.file.get("decode")
            if isinstance(decode, Block) and name in decode:
                return decode.items[name], Context("decode")
            if name == "budget":  # decided in prefill, in force while decoding
                return self.file.items.get(name), Context("prefill")
        return self.file.items.get(name), Context(phase)

    def section(self, name: str, phase: str) -> Node | None:
        """The node of `score` or `budget`; None if the file has none."""
        item, home = self.section_item(name, phase)
        if item is None or not isinstance(item.value, Expr):
            return None
        return self._of_section(name, item, home, item.span)

    def refuse_section(self, name: str, phase: str) -> None:
        """Marks a section as refused, so that its uses report nothing more."""
        item, home = self.section_item(name, phase)
        if item is not None:
            self._nodes[("section", item.path, name, home)] = None

    def parameter(self, definition: Definition) -> Node:
        """A parameter's node; its unit is given by the file, or else by its uses."""
        value = definition.item.value
        unit = value.get("unit") if isinstance(value, Block) else None
        kind = "truth" if self._is_condition(self._default(definition), 0) else "number"
        uses = self.uses.get(definition.name)
        if unit is None and uses and kind == "number":
            unit = uses.unit
        return self.graph.make(
            "param", kind=kind, axes=(), unit=unit, value=definition.name,
            span=definition.item.key,
        )  # fmt: skip

    @staticmethod
    def _default(definition: Definition) -> object:
        value = definition.item.value
        return value.get("default") if isinstance(value, Block) else value

    def _is_condition(self, default: object, level: int) -> bool:
        """Whether a default is a truth value, by its syntax alone."""
        if isinstance(default, bool):
            return True
        if isinstance(default, Operator):
            return OPERATIONS[default.op].result == "truth"
        if isinstance(default, Where):
            return self._is_condition(default.value, level)
        if isinstance(default, Name) and default.text not in ("true", "false"):
            definition = self.definitions[""].get(default.text)
            if definition is None or definition.kind != "parameter" or level >= MAX_NAMES:
                return False
            return self._is_condition(self._default(definition), level + 1)
        return isinstance(default, Chain | Name)

    def _tensor(self, definition: Definition) -> Node:
        block = definition.item.value
        axes = block.get("axes") if isinstance(block, Block) else None
        names = [item.value for item in axes or []]
        if not isinstance(block, Block) or None in names:
            raise Wrong
        shape = tuple(axis for axis in ("kv", "group") if axis in names)
        return self.graph.make(
            "data", axes=shape, value=definition.name, exact=False, span=definition.item.key
        )

    def type_call(self, typer: Typer, call: Call) -> Node:
        """The node of a call."""
        return type_call(typer, call)
