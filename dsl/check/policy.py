"""Checks a policy file and translates it to the intermediate representation.

Every defect of a file is found in one run. Uses of a parameter tell its unit: a bare `window: 32`
used in `recent(window)` is a number of tokens. Units spread from one use to another, so the file is
typed again until nothing new is learned, at most `_PASSES` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from kvpolicy.dsl.check import rules as check_rules
from kvpolicy.dsl.check.arguments import is_of_model
from kvpolicy.dsl.check.fit import does_not_fit
from kvpolicy.dsl.check.names import Context, Uses, sound
from kvpolicy.dsl.check.params import declared_data, declared_params
from kvpolicy.dsl.check.report import report
from kvpolicy.dsl.check.scope import Scope
from kvpolicy.dsl.ir.graph import MAX_DEPTH, MAX_NODES, TooLarge
from kvpolicy.dsl.ir.host import NotStatic, Value, evaluate
from kvpolicy.dsl.ir.nodes import Node, Param, Program, Rules, When
from kvpolicy.dsl.ir.ranges import range_problem
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError, in_order
from kvpolicy.dsl.syntax.library import read_source
from kvpolicy.dsl.syntax.mappings import Item
from kvpolicy.dsl.syntax.parse import parse
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.tree import Expr

_PASSES = 4


@dataclass(frozen=True)
class Checked:
    """The result of checking a policy file."""

    source: Source
    program: Program | None  # None if there is an error
    diagnostics: tuple[Diagnostic, ...]  # by position; warnings included
    unserved: tuple[Diagnostic, ...] = ()  # one per feature that cannot be served yet

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The diagnostics that make the file unusable."""
        return tuple(d for d in self.diagnostics if d.severity == "error")

    def require(self) -> Program:
        """The program; raises PolicyError with every error if there is none."""
        if self.program is None:
            raise PolicyError(self.errors, self.source)
        return self.program

    def executable(self) -> Program:
        """The program; raises PolicyError if there is none or it cannot be served yet."""
        program = self.require()
        if self.unserved:
            raise PolicyError(self.unserved, self.source)
        return program


def load(policy: str | Path | Source) -> Checked:
    """Checks a policy: a path, the name of a shipped policy, or a source already read.

    Raises:
        PolicyError: the file cannot be read at all.
    """
    source = policy if isinstance(policy, Source) else read_source(policy)
    diagnostics: list[Diagnostic] = []
    file = parse(source, diagnostics.append)
    if file is None:
        return Checked(source, None, tuple(in_order(diagnostics)))
    uses: dict[str, Uses] = {}
    for _ in range(_PASSES):
        previous_uses = deepcopy(uses)
        scope = Scope(source, file, uses)
        program = _checked_program(scope, complete=not diagnostics)
        if uses == previous_uses:
            break
    all_diagnostics = in_order([*diagnostics, *scope.diagnostics])
    if any(d.severity == "error" for d in all_diagnostics):
        all_diagnostics = [d for d in all_diagnostics if d.severity == "error"]
        program = None
    return Checked(source, program, tuple(all_diagnostics), tuple(scope.unserved.values()))


def _checked_program(scope: Scope, *, complete: bool) -> Program | None:
    try:
        return _FileChecker(scope, complete=complete).program()
    except TooLarge:
        message = f"the policy is too large: at most {MAX_NODES:,} operations, {MAX_DEPTH} deep"
        scope.error("size", message, Span(0, 0), "write less into one `let`, or use fewer of them")
        return None


class _FileChecker:
    """Checks the sections and puts them together.

    Args:
        complete: whether all of the file could be read; else a section may only seem to be missing.
    """

    def __init__(self, scope: Scope, *, complete: bool) -> None:
        self.scope, self.file, self._complete = scope, scope.file, complete

    def program(self) -> Program | None:
        scope, file = self.scope, self.file
        params = declared_params(scope)
        data = declared_data(scope)
        requires = self.requires()
        prefill = check_rules.RulesChecker(scope, "prefill").rules()
        decode = self.decode()
        propagate = check_rules.propagate(scope)
        share = check_rules.share(scope)
        read = check_rules.read(scope)
        positions = file.get("positions") or "original"
        reported_items = report(scope)
        self.unused(reported_items)
        acts = {"keep", "propagate", "decode", "share", "read"} & set(file.items)
        if self._complete and not acts:
            message = "the file has no `keep`: nothing would be dropped"
            scope.error("key", message, file.span, "for example `keep: recent(1024)`")
        if any(d.severity == "error" for d in scope.diagnostics):
            return None
        decided = {name: node for name, node in scope.decided.items() if node is not None}
        program = Program(
            file.get("policy") or "", (file.get("about") or "").strip(),
            (file.get("source") or "").strip(), params, (*requires, *self.conditions()),
            data, replace(prefill, lets=scope.lets("prefill"), decided=decided),
            replace(decode, lets=scope.lets("decode")) if decode else None,
            propagate, share, read, positions, tuple(reported_items), scope.source,
        )  # fmt: skip
        self.test_defaults(program)
        return program

    def requires(self) -> tuple[Node, ...]:
        nodes = []
        for item in self.file.get("require") or ():
            if isinstance(item.value, Expr):
                nodes.append(sound(partial(check_rules.require, self.scope, item)))
        return tuple(node for node in nodes if node is not None)

    def decode(self) -> Rules | None:
        if self.file.get("decode") is None:
            return None
        rules = check_rules.RulesChecker(self.scope, "decode").rules()
        nodes = nodes_of([rules.keep, rules.budget, *merge_roots(rules.merge)])
        # A decode step decides layer by layer.
        self.scope.note_unserved_nodes((x for x in nodes if x.across_layers), "`decode`")
        return rules

    def unused(self, reported_items: Mapping[str, Item]) -> None:
        """Warns of names that nothing uses, and checks their definitions too."""
        definitions = [x for names in self.scope.definitions.values() for x in names.values()]
        used_names = set(self.scope.used)
        for definition in (x for x in definitions if (x.section, x.name) not in used_names):
            node, item = None, None
            if definition.kind == "let" and isinstance(definition.item.value, Expr):
                phase = "decode" if definition.section.startswith("decode") else "prefill"
                inside = definition.section if definition.section not in ("", "decode") else None
                item = None if inside else reported_items.get(definition.name)
                context = Context(phase, inside)
                span = definition.item.span
                node = sound(partial(self.scope.node, definition, context, span))
            if item is not None:
                self._never_computed(definition.name, node, item)
            elif definition.kind != "state":
                message = f"`{definition.name}` is never used"
                self.scope.warn("unused", message, definition.item.key)

    def _never_computed(self, name: str, node: Node | None, item: Item) -> None:
        """Warns of a reported name that no rule uses, if its value needs a prefill or decode."""
        if node is not None and node.when > When.PROMPT:
            message = f"`{name}` is reported, but no rule uses it: it has no value"
            help = "what is reported is not computed for that alone"
            self.scope.warn("unused", message, item.span, help)

    def conditions(self) -> tuple[Node, ...]:
        """Conditions on numbers that are neither literals nor parameters.

        Pooling widths are odd; windows have at least one query and `past` at least one layer, if
        their number is known when the policy is loaded.
        """
        graph = self.scope.graph
        one, two = (graph.make("number", value=Fraction(n)) for n in (1, 2))
        nodes = []
        for node, span in self.scope.widths:
            if node.op not in ("number", "param"):
                remainder = graph.make("modulo", (node, two))
                odd = graph.make("equal", (remainder, one), kind="truth", span=span)
                nodes.append(graph.relabel(odd, origin="width"))
        for node, span, _ in self.scope.counts:
            if node.op not in ("number", "param") and is_of_model(node):
                at_least_one = graph.make("greater_equal", (node, one), kind="truth", span=span)
                nodes.append(graph.relabel(at_least_one, origin="count"))
        return tuple(dict.fromkeys(nodes))

    def test_defaults(self, program: Program) -> None:
        """Tests what can be tested without a model: ranges, widths, `require`, the budget."""
        scope = self.scope
        env = default_env(program.params)
        for param in program.params.values():
            if param.default.operation.kind is Kind.LITERAL:
                continue  # tested where it was read
            value = env.get(f"param:{param.name}")
            problem = None if value is None else range_problem(param, value)
            if problem and param.default.span:
                scope.error("range", problem, param.default.span)
        for node, span in scope.widths:
            value = _static(node, env)
            if node.op != "param" and value is not None and (value % 2 != 1 or value < 1):
                text = scope.shown(span)
                message = f"`{text}` is {value}; a pooling width is odd"
                if node.op == "number":
                    message = f"a pooling width is odd; {value} is not"
                scope.error("range", message, span)
        for node, span, message in scope.counts:
            value = _static(node, env)
            if node.op != "param" and value is not None and value < 1:
                scope.error("range", message, span)
        for node in program.requires:
            if node.origin is None and _static(node, env) is False and node.span:
                message = f"`{scope.shown(node.span)}` does not hold for the defaults"
                scope.error("range", message, node.span)
        scope.diagnostics.extend(does_not_fit(program, env))
        when = None if program.share is None else program.share.when
        if when is not None and _static(when, {**env, "layer": Fraction(0)}):
            message = "`share.when` holds at layer 0, but there is no layer below"
            scope.error("share", message, when.span or Span(0, 0), "for example `layer % 2 == 1`")


def default_env(params: Mapping[str, Param]) -> dict[str, Value]:
    """The values of the defaults that do not depend on the model, for `host.evaluate`."""
    env: dict[str, Value] = {}
    for _ in params:  # a default may use other parameters
        for name, param in params.items():
            if f"param:{name}" not in env:
                value = _static(param.default, env)
                if value is not None:
                    env[f"param:{name}"] = value
    return env


def _static(node: Node, env: Mapping[str, Value]) -> Value | None:
    try:
        return evaluate(node, env)
    except NotStatic:
        return None
