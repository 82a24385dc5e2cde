"""Mutants of policies: of their characters, words, expressions and sections.

Mutants of characters or words are mostly refused, without a crash of the check. Those of
expressions or sections mostly stay policies: parts are replaced by parts of like kind, wrapped, or
taken from other policies with the names that they need. The same seed gives the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random

import grammar
from kvpolicy.dsl.ops.table import BUILTINS, FUNCTIONS
from kvpolicy.dsl.syntax.expression import ExpressionError, tokenize
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.mappings import Block, Item
from kvpolicy.dsl.syntax.parse import parse
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.tree import Call, Expr, Name, Number, Operator

GOOD = Path(__file__).parents[1] / "dsl" / "good"
EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"
SNIPPETS = (
    "[token]", "[layer]", "[head, query]", "(", ")", ",", " where ", " else ", " then ", " not ",
    "-", " / ", " ^ ", "0", "1e300", "all", "new", "budget", "score", ": ", "\n", "  ", "#", "'",
    '"', "|", ">", "&a", "*a", "!!x", "<<", "{", "}", "- ", "\t", "\x00", "\ufeff", "\u2028", "😀",
    "params:\n", "decode: same\n", "merge:\n  into: nearest(key)\n", "state:\n  s: s + 1\n", "%",
    "20%", "0.2", "\N{MINUS SIGN}", "\N{NO-BREAK SPACE}", "  # a comment\n", "keep: ", "let:\n",
    *BUILTINS, *(f"{name}(" for name in FUNCTIONS),
)  # fmt: skip
# Names that may replace each other: they take the same arguments and axes.
ALIKE = (
    ("sum", "mean", "max", "min", "var", "count"), ("norm1", "norm2"), ("attn", "logits"),
    ("recent", "sinks"), ("maxpool", "avgpool"), ("rank", "softmax", "minmax", "normalize"),
    ("abs", "exp", "log", "sqrt", "cos", "sin", "floor", "ceil", "round", "acos"),
    ("split", "cascade"), ("key", "value"), ("prompt", "length"), ("true", "false"),
    ("layer", "layers"), ("new", "all"),
)  # fmt: skip
SIGNS = (("+", "-", "*", "/", "^", "//", "%"), ("<", "<=", ">", ">=", "==", "!="), ("and", "or"))
NUMBERS = ("0", "1", "2", "3", "0.5", "-1", "7", "0.1", "1e-9", "1e9", "prompt", "layer * 1")
WRAPPERS = (
    "-({x})", "abs({x})", "({x}) + 1", "2 * ({x})", "floor({x})", "sqrt({x})", "({x}) ^ 2",
    "maxpool({x}, 3)", "avgpool({x}, 3)", "max({x}, 0)", "min({x}, 3)",
    "softmax[token]({x})", "({x}) - max[layer]({x})", "({x}) / sum[layer]({x})", "not ({x})",
    "({x} where layer < 1 else 2 * ({x}))", "(1 where layer == 1 else {x})", "({x}) and not new",
    "({x} where not recent(1))", "({x} where position % 2 == 0 else 0)", "top({x}, 2)",
    "sum[token]({x})", "mean[kv]({x})", "max[group]({x})", "({x}) % 2", "({x}) / 0",
    "({x}) > 0.1", "1 where {x} else 0", "max[past](past({x}, 2))", "at(0, {x})", "({x}) * layer",
    "({x} where prompt > 5 else {x} + 1)", "recent({x})", "uniform({x})",
    *(f"{f.name}[token]({{x}})" for f in FUNCTIONS.values() if f.rule == "along"),
)  # fmt: skip
AXES = (
    grammar.ENTRY, grammar.ENTRY, grammar.SCALAR, grammar.ENTRY | {"group"}, grammar.MAP,
    frozenset(("kv",)), frozenset(("token",)), grammar.VECTOR,
)  # fmt: skip


@cache
def good() -> tuple[str, ...]:
    """Texts of accepted policies: the shipped ones, those of the tests, the examples."""
    paths = [*shipped().values(), *sorted(GOOD.glob("*.yaml")), *sorted(EXAMPLES.glob("*.yaml"))]
    return tuple(path.read_text() for path in paths if not path.name.endswith(".test.yaml"))


@cache
def _lengths() -> tuple[int, ...]:
    return tuple(accumulate(10_000 // (200 + len(text)) for text in good()))


def _good(random: Random) -> str:
    """One of the good texts; short ones are more likely, as long ones take longer."""
    return random.choices(good(), cum_weights=_lengths())[0]


def characters(random: Random) -> str:
    """A good text with a few edits: pieces removed, repeated, replaced or inserted."""
    text = _good(random)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(text))
        end = min(len(text), at + random.randint(0, 30))
        kind = random.randrange(5)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:end] + text[at:end] + text[end:]
        elif kind == 2:
            text = text[:at] + random.choice(SNIPPETS) + text[at:]
        elif kind == 3:
            text = text[:at] + random.choice(SNIPPETS) + text[end:]
        else:
            text = text[:at] + random.choice(good())[at:end] + text[end:]
    return text


def words(random: Random) -> str:
    """A policy with words of its expressions replaced, removed or joined by others."""
    text = _start(random)
    found = {expression.span.start: expression.span for expression in expressions_of(text)}
    some = random.sample(sorted(found), min(len(found), random.randint(1, 3)))
    for span in (found[start] for start in sorted(some, reverse=True)):
        try:
            tokens = tokenize(text[span.start : span.end])
        except ExpressionError:  # has comments inside, or is quoted
            continue
        one, other = random.choice(tokens), random.choice(tokens)
        made = random.choice((str(other), "", f"{one} {other}", random.choice(SNIPPETS)))
        at = span.start + one.start_pos
        text = f"{text[:at]}{made}{text[at + len(one) :]}"
    return text


def expressions(random: Random) -> str:
    """A policy with parts of its expressions replaced by others of like kind."""
    text = _start(random)
    for _ in range(random.randint(1, 3)):
        text = _changed(random, text)
    return text


def sections(random: Random) -> str:
    """A policy with sections of another one, and the names that they need."""
    one, other = sections_of(_start(random)), sections_of(_start(random))
    keys = "merge decode propagate keep budget score positions state share".split()
    for key in random.sample(keys, random.randint(1, 3)):
        if key in other:
            one[key] = other[key]
        elif random.random() < 0.3:
            one.pop(key, None)
    for key in ("params", "let", "state"):  # names that the taken sections may use
        if key in other and key in one:
            names = set(re.findall(r"^  (\w+):", one[key], re.M))
            entries = _entries(other[key])
            one[key] += "".join(text for name, text in entries.items() if name not in names)
        elif key in other:
            one[key] = other[key]
    text = "".join(one.values())
    return _changed(random, text) if random.random() < 0.4 else text


def made(random: Random) -> str:
    """A policy made by the rules of the language."""
    return grammar.policy(random)


KINDS: dict[str, Callable[[Random], str]] = {
    "characters": characters,
    "words": words,
    "expressions": expressions,
    "sections": sections,
    "made": made,
}


def _start(random: Random) -> str:
    return grammar.policy(random) if random.random() < 0.25 else _good(random)


# Parts of files.


@lru_cache(maxsize=512)
def _parsed(text: str) -> Block | None:
    return parse(Source("any.yaml", text), lambda diagnostic: None)


def expressions_of(text: str) -> list[Expr]:
    """Expressions of a file that have a place in its text."""
    block = _parsed(text)
    found = [] if block is None else list(_inside(block))
    return [x for x in found if 0 <= x.span.start < x.span.end <= len(text)]


def _inside(value: object):
    if isinstance(value, Expr):
        yield value
    elif isinstance(value, Block):
        for item in value.items.values():
            yield from _inside(item)
    elif isinstance(value, Item):
        yield from _inside(value.value)
    elif isinstance(value, list):
        for each in value:
            yield from _inside(each)


def sections_of(text: str) -> dict[str, str]:
    """Texts of a file by top-level key; text before the first key belongs to that key."""
    keys = list(re.finditer(r"^([a-z]+):", text, re.M))
    starts = [0, *(match.start() for match in keys[1:])]
    ends = [*starts[1:], len(text)]
    return {
        match.group(1): text[start:end].rstrip("\n") + "\n"
        for match, start, end in zip(keys, starts, ends, strict=False)
    }


def _entries(section: str) -> dict[str, str]:
    """Texts of a block-style section by name."""
    parts = re.split(r"^(?=  \w+:)", section, flags=re.M)
    return {part[2 : part.index(":")]: part for part in parts[1:]}


def _changed(random: Random, text: str) -> str:
    """The text with one change of an expression."""
    found = expressions_of(text)
    if not found:
        return text
    parts = list(random.choice(found).walk())
    part = random.choice(parts)
    change = random.choice(_CHANGES)(random, text, part, parts)
    if change is None:
        return text
    return f"{text[: part.span.start]}{' '.join(change.split())}{text[part.span.end :]}"


# Changes of a part of an expression: (random, file, part, all parts) -> its new text, or None.


def _text(text: str, span: Span) -> str:
    return text[span.start : span.end]


def _child(random: Random, text: str, part: Expr, parts: list[Expr]) -> str | None:
    return _text(text, random.choice(part.children).span) if part.children else None


def _sibling(random: Random, text: str, part: Expr, parts: list[Expr]) -> str | None:
    return f"({_text(text, random.choice(parts).span)})"


def _stranger(random: Random, text: str, part: Expr, parts: list[Expr]) -> str | None:
    """A part of any expression of this file."""
    other = list(random.choice(expressions_of(text)).walk())
    return f"({_text(text, random.choice(other).span)})"


def _wrapped(random: Random, text: str, part: Expr, parts: list[Expr]) -> str | None:
    return f"({random.choice(WRAPPERS).format(x=_text(text, part.span))})"


def _new(random: Random, text: str, part: Expr, parts: list[Expr]) -> str | None:
    return f"({grammar.expression(random, random.choice(AXES), random.randint(0, 2))})"


def _alike(random: Random, text: str, part: Expr, parts: list[Expr]) -> str | None:
    """Another function, name, number, axis or operator in the same place."""
    own = _text(text, part.span)
    if isinstance(part, Call):
        for names in ALIKE:
            if part.name in names and random.random() < 0.6:
                return random.choice(names) + own[len(part.name) :]
        if part.axes:
            axis = random.choice(part.axes).span
            start, end = axis.start - part.span.start, axis.end - part.span.start
            other = random.choice((*grammar.ORDER, "layer", "head", "past", "dropped"))
            return own[:start] + other + own[end:]
    if isinstance(part, Name):
        for names in ALIKE:
            if part.text in names:
                return random.choice(names)
        return random.choice(tuple(BUILTINS)) if random.random() < 0.2 else None
    if isinstance(part, Number):
        return random.choice(NUMBERS)
    if isinstance(part, Operator) and len(part.operands) == 2:
        between = Span(part.operands[0].span.end, part.operands[1].span.start)
        for signs in SIGNS:
            if _text(text, between).strip() in signs:
                left, right = (_text(text, each.span) for each in part.operands)
                return f"{left} {random.choice(signs)} {right}"
    return None


_CHANGES = (_child, _sibling, _stranger, _wrapped, _wrapped, _new, _alike, _alike, _alike)
