"""Text of an expression -> syntax tree, by Lark from expr.lark."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import MAX_SHOWN, did_you_mean, on_one_line
from kvpolicy.dsl.syntax.grammar import literals, parser
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.tree import (
    Argument,
    Axis,
    Call,
    Chain,
    Expr,
    Name,
    Number,
    Operator,
    Then,
    Where,
)
from lark import (
    Token,
    Transformer_NonRecursive,
    Tree,
    UnexpectedCharacters,
    UnexpectedToken,
    v_args,
)
from lark.exceptions import VisitError
from lark.tree import Meta

MAX_CHARACTERS = 2_000
MAX_DEPTH = 40
_MAX_EXPONENT = 300
NUMBERS = f"numbers are at most 1e{_MAX_EXPONENT}, exponents -{_MAX_EXPONENT} to {_MAX_EXPONENT}"

_COMPARISONS = {
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "==": "equal",
    "!=": "not_equal",
}
# What people write in other languages -> help: what to write here.
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
    "#": "a comment has a space before `#` and stands neither in quotes nor in a `|` block",
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
    """An expression that cannot be read; offsets count characters of its text.

    `unbalanced`: whether a bracket is never closed, or closes nothing.
    """

    def __init__(
        self,
        code: str,
        message: str,
        start: int,
        end: int,
        help: str | None,
        unbalanced: bool = False,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.start, self.end, self.help = code, message, start, end, help
        self.unbalanced = unbalanced


def tokenize(text: str) -> list[Token]:
    """Terminals of the text; raises ExpressionError."""
    try:
        return list(parser().lex(text))
    except UnexpectedCharacters as error:
        raise _foreign(text, error.pos_in_stream) from None


def _foreign(text: str, offset: int) -> ExpressionError:
    character = text[offset]
    help: str | None
    if character.isupper():
        help = "names are lower case"
    elif character == "_":
        help = "names start with a letter"
    else:
        help = _FOREIGN.get(character) or _KINDS.get(unicodedata.category(character))
        if unicodedata.east_asian_width(character) == "F":
            help = f"write `{unicodedata.normalize('NFKC', character)}`, without full width"
    subject = f"`{character}`" if character.isprintable() else f"`U+{ord(character):04X}`"
    if character == "`":
        subject, help = "a backtick", "names and numbers stand alone, without quotes"
    return ExpressionError(
        "syntax", f"{subject} is not part of an expression", offset, offset + 1, help
    )


def parse_expression(text: str, place: Callable[[int], int]) -> Expr:
    """The syntax tree of `text`.

    Args:
        text: the expression.
        place: offset in `text` -> offset in the source file, for the spans of the tree.

    Raises:
        ExpressionError: with one defect: a character that no expression has, else the first from
            the left.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(
            "size",
            f"the expression is {len(text):,} characters long; {MAX_CHARACTERS:,} are allowed",
            0,
            len(text),
            "name parts of it under `let`",
        )
    try:
        tree = parser().parse(text)
    except UnexpectedCharacters as error:
        raise _foreign(text, error.pos_in_stream) from None
    except UnexpectedToken as error:
        tokens = tokenize(text)  # a foreign character is reported first, even if it comes later
        for part in _finished(error):
            _build(part, place)
        raise _unexpected(tokens, error) from None
    return _build(tree, place)


def _build(tree: Tree[Token], place: Callable[[int], int]) -> Expr:
    try:
        expr: Expr = _Builder(place).transform(tree)
        return expr
    except VisitError as error:
        raise error.orig_exc from None


def _finished(error: UnexpectedToken) -> list[Tree[Token]]:
    """What was read completely before the error, in the order of writing."""
    stack = error.interactive_parser.parser_state.value_stack
    parts: list[Any] = []
    for part in stack:
        # A repetition within a rule is a tree of Lark's own.
        parts += part.children if isinstance(part, Tree) and part.data.startswith("_") else [part]
    return [part for part in parts if isinstance(part, Tree)]


@v_args(inline=True, meta=True)
class _Builder(Transformer_NonRecursive):
    """Lark's tree -> syntax tree, with one method for each rule that is not an operation."""

    def __init__(self, place: Callable[[int], int]) -> None:
        super().__init__()
        self._place = place
        self._depths: dict[int, int] = {}

    def number(self, meta: Meta, token: Token) -> Expr:
        return Number(self._span(meta), _number(token), str(token))

    def name(self, meta: Meta, token: Token) -> Expr:
        return Name(self._span(meta), str(token))

    def call(self, meta: Meta, name: Token, *parts: tuple[Any, ...]) -> Expr:
        axes = next((part for part in parts if isinstance(part[0], Axis)), None)
        arguments = next((part for part in parts if isinstance(part[0], Argument)), ())
        call = Call(self._span(meta), str(name), self._span(name), axes, arguments)
        return self._nested(meta, call)

    def axes(self, meta: Meta, *names: Token) -> tuple[Axis, ...]:
        return tuple(Axis(self._span(name), str(name)) for name in names)

    def arguments(self, meta: Meta, *values: Expr | Argument) -> tuple[Argument, ...]:
        return tuple(v if isinstance(v, Argument) else Argument(None, None, v) for v in values)

    def named(self, meta: Meta, name: Token, value: Expr) -> Argument:
        return Argument(str(name), self._span(name), value)

    def mask(self, meta: Meta, value: Expr, condition: Expr) -> Expr:
        return self._nested(meta, Where(self._span(meta), value, condition, None))

    def choose(self, meta: Meta, value: Expr, condition: Expr, other: Expr) -> Expr:
        return self._nested(meta, Where(self._span(meta), value, condition, other))

    def then(self, meta: Meta, *terms: Expr) -> Expr:
        return self._nested(meta, Then(self._span(meta), terms))

    def compare(self, meta: Meta, left: Expr, sign: Token, right: Expr) -> Expr:
        return self._nested(meta, Operator(self._span(meta), _COMPARISONS[sign], (left, right)))

    def chain(
        self, meta: Meta, low: Expr, first: Token, middle: Expr, second: Token, high: Expr
    ) -> Expr:
        if first[0] != second[0] or first[0] not in "<>":
            message = f"`{first}` and `{second}` do not form a chain"
            help = (
                "a chain has one direction, as in `1 <= x < 4`; otherwise join comparisons "
                "with `and`"
            )
            raise _error(message, second, help)
        operands = (low, middle, high)
        chain = Chain(self._span(meta), _COMPARISONS[first], _COMPARISONS[second], operands)
        return self._nested(meta, chain)

    def __default__(self, data: str, children: list[Expr], meta: Meta) -> Expr:
        operation = Operator(self._span(meta), str(data).rstrip("_"), tuple(children))
        return self._nested(meta, operation)

    def _nested(self, meta: Meta, tree: Expr) -> Expr:
        """The tree; an error if it is too deep."""
        depth = 1 + max((self._depths.get(id(child), 1) for child in tree.children), default=0)
        if depth > MAX_DEPTH:
            message = f"the expression is nested more than {MAX_DEPTH} deep"
            help = "name parts of it under `let`"
            raise ExpressionError("size", message, meta.start_pos, meta.end_pos, help)
        self._depths[id(tree)] = depth
        return tree

    def _span(self, part: Meta | Token) -> Span:
        return Span(self._place(part.start_pos), self._place(part.end_pos - 1) + 1)


def _error(message: str, token: Token, help: str) -> ExpressionError:
    return ExpressionError("syntax", message, token.start_pos, token.end_pos, help)


def number_of(text: str) -> Fraction | None:
    """The value of a number as written; None if it is out of range (`NUMBERS`) or too long."""
    exponent = text.partition("e")[2]
    if len(text) > MAX_CHARACTERS or abs(int(exponent or 0)) > _MAX_EXPONENT:
        return None
    value = Fraction(text)
    return value if abs(value) <= 10**_MAX_EXPONENT else None


def _number(token: Token) -> Fraction:
    value = number_of(token)
    if value is None:
        raise _error(f"`{on_one_line(token, MAX_SHOWN)}` is out of range", token, NUMBERS)
    return value


def _unexpected(tokens: list[Token], error: UnexpectedToken) -> ExpressionError:
    """The error for a token that cannot stand where it does."""
    token, expected = error.token, error.expected
    at_end = token.type == "$END"
    read_tokens = [t for t in tokens if at_end or t.start_pos < token.start_pos]
    last = read_tokens[-1] if read_tokens else None
    context = f"after `{last}`" if last else "at the start"
    place, help, unbalanced = token, None, False
    if at_end:  # a caret needs something to stand under
        place = last or Token("$END", "", start_pos=0, end_pos=0)
    if at_end and not last:
        message = "the expression is empty"
    elif "NUMBER" in expected:
        message = f"expected an operand {context}"
        if not at_end:
            message += f", not `{token}`"
        if token.type == "STAR" and last and last.type == "STAR":
            help = "the power operator is `^`"
        elif len(read_tokens) > 1 and last == "%" and read_tokens[-2].type == "NUMBER":
            return _percent(read_tokens[-2], last)
    elif expected <= {"NAME"}:
        message = f"expected the name of an axis {context}"
    elif "RSQB" in expected and not at_end:
        message = f"expected `,` or `]` {context}, not `{token}`"
    elif at_end and ("RPAR" in expected or "RSQB" in expected):
        opening = _open_bracket(tokens)
        message = f"`{opening}` is never closed"
        place, unbalanced = opening, True
    elif token.type == "LSQB":
        message = "`[` may follow only the name of a function, as in `sum[query](x)`"
    elif expected == {"LPAR"}:
        message = f"expected `(` {context}"
        help = "axes belong to a function call, as in `sum[query](x)`"
    elif token.type in ("RPAR", "RSQB"):
        message, unbalanced = f"`{token}` closes nothing", True
    elif token.type == "EQUAL":
        message = "`=` is not part of an expression here"
        help = "comparison is `==`; a name before `=` gives an argument of a function"
    elif token.type in ("NAME", "NUMBER", "LPAR", "NOT"):
        message = f"expected an operator between `{last}` and `{token}`"
        help = _operator_help(last, token)
    else:
        message = f"`{token}` cannot follow `{last}`"
        help = _follow_help(token, expected)
    start, end = place.start_pos, place.end_pos
    return ExpressionError("syntax", message, start, end, help, unbalanced=unbalanced)


def _percent(number: Token, sign: Token) -> ExpressionError:
    share = float(_number(number) / 100)
    message = f"`{number}%` is no number; `%` is the rest of a division"
    help = f"a share is a number such as `{share:g}`, of the prompt `{share:g} * prompt`"
    return ExpressionError("syntax", message, number.start_pos, sign.end_pos, help)


def _operator_help(last: Token, token: Token) -> str | None:
    if token in ("if", "in", "is") or last in ("if", "in", "is"):
        return "the only conditional is `x where condition else y`"
    if token == "(" and last.type == "NUMBER":
        return "multiplication is written `*`"
    if last.type == "NAME" and token.type == "NUMBER":
        return "arguments of a function stand in parentheses, as in `recent(4)`"
    if last.type == "NUMBER" and token.type == "NAME":
        return "numbers have no units; multiplication is written `*`"
    return did_you_mean(str(token), ("then", "where", "else", "and", "or"))


def _follow_help(token: Token, expected: set[str]) -> str | None:
    if token.type == "RELATION":
        return "a chain has at most two comparisons; join more with `and`"
    if token.type == "ELSE":
        return "each `else` belongs to a `where` before it: `x where c else y`"
    if token.type in ("WHERE", "THEN"):
        return f"put what stands before `{token}` in parentheses"
    if token.type == "COMMA":
        return "`,` stands between arguments; join sets with `then`, write `2048` for 2,048"
    signs = sorted(text for name, text in literals().items() if name in expected)
    return f"expected one of {' '.join(f'`{s}`' for s in signs)}" if 0 < len(signs) < 4 else None


def _open_bracket(tokens: list[Token]) -> Token:
    open_brackets = []
    for token in tokens:
        if token.type in ("LPAR", "LSQB"):
            open_brackets.append(token)
        elif token.type in ("RPAR", "RSQB") and open_brackets:
            open_brackets.pop()
    return open_brackets[-1]
