"""Text of an expression -> syntax tree, by the LALR tables made from expr.lark."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from kvpolicy.dsl.syntax.expr_table import ACTIONS, END, GOTOS, KEYWORDS, LITERALS, PATTERN, RULES
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.tree import (
    Argument,
    Axis,
    Call,
    Chain,
    Expr,
    Name,
    Number,
    Operation,
    Then,
    Where,
)

MAX_CHARACTERS = 2_000
MAX_DEPTH = 40
MAX_EXPONENT = 300

_TOKEN = re.compile(PATTERN)
_ONE = (True,)  # the one symbol of a rule, which is kept
_COMPARISONS = {
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "==": "equal",
    "!=": "not_equal",
}
# What people write in other languages, and what stands for it here.
_FOREIGN = {
    "&": "sets and conditions are joined with `and`",
    "|": "write `or` for a union, `then` to fill in order",
    "!": "write `not`",
    ".": "there is no attribute access; numbers start with a digit, as in `0.5`",
    '"': "expressions have no strings",
    "'": "expressions have no strings",
    "?": "write `x where condition else y`",
    "{": "use `(` and `)`",
    "}": "use `(` and `)`",
    "\t": "use spaces",
    "#": "a YAML comment needs a space before `#`",
    "\N{MULTIPLICATION SIGN}": "multiplication is written `*`",
    "\N{MIDDLE DOT}": "multiplication is written `*`",
    "\N{DOT OPERATOR}": "multiplication is written `*`",
    "\N{DIVISION SIGN}": "division is written `/`",
    "\N{MINUS SIGN}": "the minus sign is `-`",
    "\N{LESS-THAN OR EQUAL TO}": "write `<=`",
    "\N{GREATER-THAN OR EQUAL TO}": "write `>=`",
    "\N{NOT EQUAL TO}": "write `!=`",
    "\N{LOGICAL AND}": "write `and`",
    "\N{LOGICAL OR}": "write `or`",
    "\N{NOT SIGN}": "write `not`",
    "\N{SUPERSCRIPT TWO}": "write `x ^ 2`",
    "\N{SQUARE ROOT}": "write `sqrt(x)`",
    "\N{HORIZONTAL ELLIPSIS}": "write all of it",
}
# The same for whole kinds of characters, by their Unicode category.
_SPACE = "it looks like a space, or like nothing: type a plain space"
_QUOTE = "a value is put into plain quotes, `'` or `\"`, or into none"
_KINDS = {"Pd": "the minus sign is `-`", "Zs": _SPACE, "Cf": _SPACE, "Pi": _QUOTE, "Pf": _QUOTE}


class ExpressionError(Exception):
    """An expression that cannot be read; offsets count characters of its text."""

    def __init__(self, code: str, message: str, start: int, end: int, help: str | None = None):
        super().__init__(message)
        self.code, self.message, self.start, self.end, self.help = code, message, start, end, help


class Token(NamedTuple):
    """A terminal of the grammar with its text and its place in the expression."""

    kind: str
    text: str
    start: int
    end: int


@dataclass
class _Item:
    """A finished part on the parser's stack: a token, a tree, or a list of parts."""

    value: Any
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """Terminals of the text, ended by `$END`; raises ExpressionError."""
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _foreign(text, at)
        kind = match.lastgroup or ""
        if kind == "NAME":
            kind = KEYWORDS.get(match.group(), kind)
        if kind != "IGNORED":
            tokens.append(Token(kind, match.group(), at, match.end()))
        at = match.end()
    tokens.append(Token("$END", "", len(text.rstrip()), len(text.rstrip())))
    return tokens


def _foreign(text: str, at: int) -> ExpressionError:
    character = text[at]
    if character.isupper():
        help = "names are lower case"
    elif character == "_":
        help = "names start with a letter"
    else:
        help = _FOREIGN.get(character) or _KINDS.get(unicodedata.category(character))
        if unicodedata.east_asian_width(character) == "F":
            help = f"write `{unicodedata.normalize('NFKC', character)}`, without full width"
    shown = f"`{character}`" if character.isprintable() else f"`U+{ord(character):04X}`"
    if character == "`":
        shown, help = "a backtick", "names and numbers stand alone, without quotes"
    return ExpressionError("syntax", f"{shown} is not part of an expression", at, at + 1, help)


def parse_expression(text: str, place: Callable[[int], int]) -> Expr:
    """The syntax tree of `text`.

    Args:
        text: the expression.
        place: offset in `text` -> offset in the source file, for the spans of the tree.

    Raises:
        ExpressionError: with one defect; the first one met from the left.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(
            "size",
            f"the expression is {len(text):,} characters long; {MAX_CHARACTERS:,} are allowed",
            0,
            len(text),
            "name parts of it under `let`",
        )
    return _Parser(tokenize(text), place).run()


class _Parser:
    """The stack machine that the tables drive."""

    def __init__(self, tokens: list[Token], place: Callable[[int], int]) -> None:
        self.tokens = tokens
        self.place = place
        self.states = [0]
        self.items: list[_Item] = []
        self.depths: dict[int, int] = {}

    def run(self) -> Expr:
        at = 0
        while True:
            token = self.tokens[at]
            action = ACTIONS[self.states[-1]].get(token.kind)
            if action is None:
                raise unexpected(self.tokens, at, set(ACTIONS[self.states[-1]]))
            if action >= 0:
                self.states.append(action)
                self.items.append(_Item(token, token.start, token.end))
                at += 1
                continue
            self.reduce(-1 - action)
            if token.kind == "$END" and self.states[-1] == END:
                return self.items[0].value

    def reduce(self, number: int) -> None:
        origin, name, transparent, kept = RULES[number]
        if transparent and kept == _ONE and not isinstance(self.items[-1].value, list):
            self.states[-1] = GOTOS[self.states[-2]][origin]  # from one level to the next, as it is
            return
        taken = self.items[-len(kept) :]
        del self.items[-len(kept) :], self.states[-len(kept) :]
        children: list[_Item] = []
        for item, keep in zip(taken, kept, strict=True):
            if keep:
                children.extend(item.value if isinstance(item.value, list) else [item])
        start, end = taken[0].start, taken[-1].end
        value: Any
        if name.startswith("_"):
            value = children
        elif len(children) == 1 and (transparent or name == "start"):
            value = children[0].value
        else:
            value = self.build(name, children, start, end)
        self.items.append(_Item(value, start, end))
        self.states.append(GOTOS[self.states[-1]][origin])

    def build(self, name: str, children: list[_Item], start: int, end: int) -> Any:
        span = self.span(start, end)
        values = [child.value for child in children]
        if name == "axes":
            return tuple(Axis(self.span(t.start, t.end), t.text) for t in values)
        if name == "arguments":
            return tuple(v if isinstance(v, Argument) else Argument(None, None, v) for v in values)
        if name == "named":
            token = values[0]
            return Argument(token.text, self.span(token.start, token.end), values[1])
        tree = self.tree(name, values, span)
        depth = 1 + max((self.depths[id(child)] for child in tree.children), default=0)
        if depth > MAX_DEPTH:
            message = f"the expression is nested more than {MAX_DEPTH} deep"
            raise ExpressionError("size", message, start, end, "name parts of it under `let`")
        self.depths[id(tree)] = depth
        return tree

    def tree(self, name: str, values: list[Any], span: Span) -> Expr:
        if name == "number":
            return Number(span, _number(values[0]), values[0].text)
        if name == "name":
            return Name(span, values[0].text)
        if name == "call":
            axes = next((v for v in values[1:] if v and isinstance(v[0], Axis)), None)
            arguments = next((v for v in values[1:] if v and isinstance(v[0], Argument)), ())
            token = values[0]
            name_span = self.span(token.start, token.end)
            return Call(span, token.text, name_span, axes, arguments)
        if name in ("mask", "choose"):
            return Where(span, values[0], values[1], values[2] if name == "choose" else None)
        if name == "then":
            return Then(span, tuple(values))
        if name == "compare":
            return Operation(span, _COMPARISONS[values[1].text], (values[0], values[2]))
        if name == "chain":
            return self.chain(values, span)
        return Operation(span, name.rstrip("_"), tuple(values))

    def chain(self, values: list[Any], span: Span) -> Expr:
        first, second = values[1], values[3]
        if first.text[0] != second.text[0] or first.text[0] not in "<>":
            raise ExpressionError(
                "syntax",
                f"`{first.text}` and `{second.text}` do not form a chain",
                second.start,
                second.end,
                "a chain has one direction, as in `1 <= x < 4`; otherwise join comparisons "
                "with `and`",
            )
        operands = (values[0], values[2], values[4])
        return Chain(span, _COMPARISONS[first.text], _COMPARISONS[second.text], operands)

    def span(self, start: int, end: int) -> Span:
        return Span(self.place(start), self.place(end - 1) + 1 if end > start else self.place(end))


def _number(token: Token) -> Fraction:
    _, _, exponent = token.text.partition("e")
    if exponent and (len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT):
        message = f"`{token.text}` is out of range"
        help = f"the exponent may be -{MAX_EXPONENT} to {MAX_EXPONENT}"
        raise ExpressionError("syntax", message, token.start, token.end, help)
    return Fraction(token.text)


def unexpected(tokens: list[Token], at: int, expected: set[str]) -> ExpressionError:
    """The error for a token that cannot stand where it does."""
    token = tokens[at]
    before = f"after `{tokens[at - 1].text}`" if at else "at the start"
    at_end = token.kind == "$END"
    start, end = (token.start, token.end) if not at_end else _last(tokens)
    help = None
    if at_end and at == 0:
        message = "the expression is empty"
    elif "NUMBER" in expected:
        message = f"expected an operand {before}"
        if not at_end:
            message += f", not `{token.text}`"
        if token.kind == "STAR" and tokens[at - 1].kind == "STAR":
            help = "the power operator is `^`"
        elif at > 1 and tokens[at - 1].text == "%" and tokens[at - 2].kind == "NUMBER":
            share = float(_number(tokens[at - 2]) / 100)
            message = f"`{tokens[at - 2].text}%` is no number; `%` is the rest of a division"
            start, end = tokens[at - 2].start, tokens[at - 1].end
            help = f"a share is a number such as `{share:g}`, of the prompt `{share:g} * prompt`"
    elif expected <= {"NAME"}:
        message = f"expected the name of an axis {before}"
    elif "RSQB" in expected and not at_end:
        message = f"expected `,` or `]` {before}, not `{token.text}`"
    elif at_end and ("RPAR" in expected or "RSQB" in expected):
        opening = _open_bracket(tokens)
        message = f"`{opening.text}` is never closed"
        start, end = opening.start, opening.end
    elif token.kind == "LSQB":
        message = "`[` may follow only the name of a function, as in `sum[query](x)`"
    elif expected == {"LPAR"}:
        message = f"expected `(` {before}"
        help = "axes belong to a function call, as in `sum[query](x)`"
    elif token.kind in ("RPAR", "RSQB"):
        message = f"`{token.text}` closes nothing"
    elif token.kind == "EQUAL":
        message = "`=` is not part of an expression here"
        help = "comparison is `==`; a name before `=` gives an argument of a function"
    elif token.kind in ("NAME", "NUMBER", "LPAR", "NOT"):
        message = f"expected an operator between `{tokens[at - 1].text}` and `{token.text}`"
        help = _operator_help(tokens, at)
    else:
        message = f"`{token.text}` cannot follow `{tokens[at - 1].text}`"
        help = _follow_help(token, expected)
    return ExpressionError("syntax", message, start, end, help)


def _operator_help(tokens: list[Token], at: int) -> str | None:
    word, before = tokens[at].text, tokens[at - 1].text
    if word in ("if", "in", "is") or before in ("if", "in", "is"):
        return "the only conditional is `x where condition else y`"
    if word == "(" and tokens[at - 1].kind == "NUMBER":
        return "multiplication is written `*`"
    return None


def _follow_help(token: Token, expected: set[str]) -> str | None:
    if token.kind == "RELATION":
        return "a chain has at most two comparisons; join more with `and`"
    if token.kind in ("WHERE", "THEN", "ELSE"):
        return f"put what stands before `{token.text}` in parentheses"
    signs = sorted(LITERALS[kind] for kind in expected if kind in LITERALS)
    return f"expected one of {' '.join(f'`{s}`' for s in signs)}" if len(signs) < 4 else None


def _last(tokens: list[Token]) -> tuple[int, int]:
    """The last token before the end, for a caret under something."""
    return (tokens[-2].start, tokens[-2].end) if len(tokens) > 1 else (0, 0)


def _open_bracket(tokens: list[Token]) -> Token:
    opened = []
    for token in tokens:
        if token.kind in ("LPAR", "LSQB"):
            opened.append(token)
        elif token.kind in ("RPAR", "RSQB") and opened:
            opened.pop()
    return opened[-1]
