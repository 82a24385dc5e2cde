"""The saved parser equals that of expr.lark, syntax trees equal its trees, spans are exact."""

from fractions import Fraction
from pathlib import Path

import lark
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy.dsl.ops.table import FUNCTIONS
from kvpolicy.dsl.syntax import grammar
from kvpolicy.dsl.syntax.expression import ExpressionError, parse_expression
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.tree import (
    Argument,
    Axis,
    Call,
    Chain,
    Name,
    Number,
    Operator,
    Then,
    Where,
)
from kvpolicy.dsl.syntax.yaml_nodes import Mapping, Scalar, Sequence, read_yaml
from lark import Lark, Token, Tree, UnexpectedInput
from lark.exceptions import UnexpectedEOF

GOOD = sorted([*(Path(__file__).parent / "good").glob("*.yaml"), *shipped().values()])
WORDS = (
    "a", "b1", "where", "else", "then", "or", "and", "not", "+", "-", "*", "/", "//", "%", "^",
    "(", ")", "[", "]", ",", "=", "<", "<=", "==", "!=", ">=", "1", "0.5", "2e-3", "top",
    "sum[a](x)",
)  # fmt: skip
LARK: Lark = grammar.build()


def scalars(node):
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from scalars(item)
    elif isinstance(node, Mapping):
        for _, value in node.entries:
            yield from scalars(value)


def expressions():
    """All scalars in the good files that parse as expressions, and the derived functions."""
    for path in GOOD:
        source = Source(path.name, path.read_text(encoding="utf-8"))
        for scalar in scalars(read_yaml(source, lambda d: None)):
            try:
                parse_expression(scalar.text, scalar.place)
            except ExpressionError:
                continue
            yield source, scalar
    for function in FUNCTIONS.values():
        if function.body:
            source = Source("functions", function.body)
            span = type("", (), {"start": 0, "end": len(function.body)})
            yield source, Scalar(span, function.body, None, False, source)


EXPRESSIONS = list(expressions())


def as_lark(expr):
    """Our tree in the shape of Lark's, names and numbers as text."""
    comparisons = {
        "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=", "equal": "==",
        "not_equal": "!=",
    }  # fmt: skip
    if isinstance(expr, Number):
        return ("number", expr.text)
    if isinstance(expr, Name):
        return ("name", expr.text)
    if isinstance(expr, Axis):
        return expr.text
    if isinstance(expr, Argument):
        value = as_lark(expr.value)
        return value if expr.name is None else ("named", expr.name, value)
    if isinstance(expr, Call):
        axes = [("axes", *map(as_lark, expr.axes))] if expr.axes else []
        given_ = [("arguments", *map(as_lark, expr.arguments))] if expr.arguments else []
        return ("call", expr.name, *axes, *given_)
    if isinstance(expr, Chain):
        low, middle, high = map(as_lark, expr.operands)
        return ("chain", low, comparisons[expr.first], middle, comparisons[expr.second], high)
    if isinstance(expr, Where):
        parts = [as_lark(part) for part in expr.children]
        return ("choose" if expr.other else "mask", *parts)
    if isinstance(expr, Then):
        return ("then", *map(as_lark, expr.terms))
    assert isinstance(expr, Operator)
    if expr.op in comparisons:
        left, right = map(as_lark, expr.operands)
        return ("compare", left, comparisons[expr.op], right)
    return (expr.op, *map(as_lark, expr.operands))


def plain(tree):
    if isinstance(tree, Token):
        return str(tree)
    return (str(tree.data).rstrip("_"), *(plain(child) for child in tree.children))


def mixed_chain(tree):
    """Whether a tree of Lark has a chain in two directions, which the grammar cannot refuse."""
    if not isinstance(tree, tuple):
        return False
    signs = tree[2][0] + tree[4][0] if tree[0] == "chain" else "<<"
    return signs not in ("<<", ">>") or any(map(mixed_chain, tree))


def rows_by_path(lark):
    """Rows of the parse table by the symbols that lead to their state, as state numbers differ."""
    table = lark.parser.parser._parse_table
    paths = {table.start_states["start"]: ()}
    queue = list(paths)
    for state in queue:
        for symbol, (action, target) in sorted(table.states[state].items()):
            if action.name == "Shift" and target not in paths:
                paths[target] = (*paths[state], symbol)
                queue.append(target)
    return {
        path: {
            symbol: paths[target] if action.name == "Shift" else (target, target.alias)
            for symbol, (action, target) in table.states[state].items()
        }
        for state, path in paths.items()
    } | {"end": paths[table.end_states["start"]]}


def terminals(lark):
    return {t.name: (type(t.pattern), t.pattern.to_regexp(), t.priority) for t in lark.terminals}


def test_saved_parser_is_that_of_the_grammar():
    with grammar.SAVED.open("rb") as file:
        version = file.readline()
        saved = Lark.load(file)
    assert version == f"lark {lark.__version__}\n".encode()
    assert rows_by_path(saved) == rows_by_path(LARK)
    assert [rule.serialize() for rule in saved.rules] == [rule.serialize() for rule in LARK.rules]
    assert terminals(saved) == terminals(LARK)
    assert saved.lexer_conf.ignore == LARK.lexer_conf.ignore
    assert saved.options.options == LARK.options.options


def test_saved_parser_is_loaded(monkeypatch):
    monkeypatch.setattr(grammar, "build", lambda: pytest.fail("made from the grammar"))
    assert rows_by_path(grammar.parser.__wrapped__()) == rows_by_path(LARK)


def test_another_version_of_lark_makes_the_parser_anew(monkeypatch):
    monkeypatch.setattr(grammar, "_HEADER", b"lark 0.0\n")
    monkeypatch.setattr(grammar, "build", lambda: "made from the grammar")
    assert grammar.parser.__wrapped__() == "made from the grammar"


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_trees_are_larks(number):
    _, scalar = EXPRESSIONS[number]
    tree = LARK.parse(scalar.text)
    assert isinstance(tree, Tree)
    assert as_lark(parse_expression(scalar.text, scalar.place)) == plain(tree)


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_accepts_what_lark_accepts(words):
    text = " ".join(words)
    try:
        expected = plain(LARK.parse(text))
    except (UnexpectedInput, UnexpectedEOF):
        with pytest.raises(ExpressionError):
            parse_expression(text, lambda offset: offset)
        return
    if not mixed_chain(expected):
        assert as_lark(parse_expression(text, lambda offset: offset)) == expected
        return
    with pytest.raises(ExpressionError, match="do not form a chain"):
        parse_expression(text, lambda offset: offset)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 < a > 2 )", "do not form a chain"),  # before what cannot follow
        ("f(a, " + "-" * 40 + "b, c", "nested more than 40 deep"),
        ("1e999 + )", "out of range"),
        ("a ) + 1 < a > 2", "closes nothing"),
        ("a ) #", "`#` is not part"),  # a foreign character before all else
        ("1e999 + #", "`#` is not part"),
    ],
)
def test_which_of_two_defects_is_reported(text, message):
    with pytest.raises(ExpressionError, match=message):
        parse_expression(text, lambda offset: offset)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 301 + ".5", "9e300", "a * " + "9" * 1900])
def test_numbers_out_of_range(text):
    with pytest.raises(ExpressionError, match=r"`9[^`]*` is out of range") as error:
        parse_expression(text, lambda offset: offset)
    assert len(error.value.message) < 100


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_spans_cover_the_text(number):
    source, scalar = EXPRESSIONS[number]
    expr = parse_expression(scalar.text, scalar.place)
    for part in expr.walk():
        written = source.text[part.span.start : part.span.end]
        if isinstance(part, Name | Number):
            assert written == part.text
        elif isinstance(part, Call):
            assert written.startswith(part.name)
            assert written.endswith(")")


@pytest.mark.parametrize(
    ("yaml", "written"),
    [
        ("x: a + bad", "bad"),
        ("x: 'a + bad'", "bad"),
        ('x: "a + bad"', "bad"),
        ('x: "\\x61 + bad"', "bad"),
        ("x: |\n  a +\n    bad\n", "bad"),
        ("x: |2-\n   a +\n   bad\n", "bad"),
        ("x: |  # comment with bad in it\n  a\n\n  + bad\n", "bad"),
        ("x: a\n  +\n  bad", "bad"),
        ("x: 'a\n\n  + bad'", "bad"),
        ("x: {y: a + bad}", "bad"),
        ("x: [1, a + bad]", "bad"),
    ],
)
def test_place_of_a_name_in_every_kind_of_scalar(yaml, written):
    source = Source("x.yaml", yaml)
    scalar = list(scalars(read_yaml(source, lambda d: None)))[-1]
    name = list(parse_expression(scalar.text, scalar.place).walk())[-1]
    assert source.text[name.span.start : name.span.end] == written
    assert name.span.start == yaml.rindex("bad")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("-a ^ 2", ("negate", ("power", "a", "2"))),
        ("a ^ -b ^ c", ("power", "a", ("negate", ("power", "b", "c")))),
        ("a - b - c", ("subtract", ("subtract", "a", "b"), "c")),
        ("not a and b or c", ("or", ("and", ("not", "a"), "b"), "c")),
        ("a where b else c where d else e", ("choose", "a", "b", ("choose", "c", "d", "e"))),
        ("a then b where c else d", ("choose", ("then", "a", "b"), "c", "d")),
        ("a then b or c", ("then", "a", ("or", "b", "c"))),
        ("1 <= a < 4", ("chain", "1", "<=", "a", "<", "4")),
    ],
)
def test_precedence(text, tree):
    def short(node):
        if node[0] in ("name", "number"):
            return node[1]
        return tuple(short(part) if isinstance(part, tuple) else part for part in node)

    assert short(as_lark(parse_expression(text, lambda offset: offset))) == tree


def test_numbers_are_exact():
    expr = parse_expression("0.1", lambda offset: offset)
    assert expr.value == Fraction(1, 10)
