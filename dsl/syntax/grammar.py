"""The parser of expr.lark; `python -m kvpolicy.dsl.syntax.grammar` writes its file in the package.

Lark takes fifteen times as long to make the parser as to load it, so the file that `Lark.save`
writes is delivered beside the grammar.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import lark
from lark import Lark
from lark.lexer import PatternStr

GRAMMAR = Path(__file__).with_name("expr.lark")
SAVED = Path(__file__).with_name("expr.lark.saved")

# Only the same version of Lark reads what `Lark.save` wrote.
_HEADER = f"lark {lark.__version__}\n".encode()


@cache
def parser() -> Lark:
    """The parser of expressions: the saved one, or a new one if another Lark is installed."""
    with SAVED.open("rb") as file:
        return Lark.load(file) if file.readline() == _HEADER else build()


def build() -> Lark:
    """The parser made from the grammar, which takes longer than loading it."""
    text = GRAMMAR.read_text(encoding="utf-8")
    return Lark(text, parser="lalr", lexer="basic", propagate_positions=True)


def save() -> None:
    """Writes the parser's file anew."""
    buffer = io.BytesIO(_HEADER)
    buffer.seek(0, io.SEEK_END)
    build().save(buffer)
    SAVED.write_bytes(buffer.getvalue())


def literals() -> dict[str, str]:
    """Keywords and signs as they are written, by the name of their terminal."""
    patterns = {terminal.name: terminal.pattern for terminal in parser().terminals}
    return {name: p.value for name, p in patterns.items() if isinstance(p, PatternStr)}


if __name__ == "__main__":
    save()
