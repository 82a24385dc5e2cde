"""`kvpolicy fmt`: one canonical way to write a policy.

Keys come in the order of the table of sections, one name per line, expressions with one spacing,
lines of at most 120 characters if they can be broken. Comments stay above or beside the same keys.
The result is read again and must mean the same; otherwise the file is left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from kvpolicy.dsl.syntax.comments import Comment, Pending, find_comments
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError
from kvpolicy.dsl.syntax.expression import ExpressionError, tokenize
from kvpolicy.dsl.syntax.library import find, read_source, rewrite
from kvpolicy.dsl.syntax.parse import parse
from kvpolicy.dsl.syntax.sections import FILE, Key
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.yaml_nodes import Mapping, Scalar, Sequence, YamlNode, read_yaml

WIDTH = 120

_EXPRESSIONS = ("expression", "default", "either", "expressions", "same")
_PLAIN = re.compile(r"[A-Za-z0-9(][^\n]*|-[^ \n][^\n]*")
_RESOLVER, _STRING = yaml.resolver.Resolver(), "tag:yaml.org,2002:str"


def format_file(path: Path, write: bool = True) -> bool:
    """Formats a file in place; returns whether its text changes. Without `write` it is left alone.

    Raises:
        PolicyError: the file cannot be read or written, or `format_policy` refuses it.
    """
    path = find(path)
    source = read_source(path)
    text = format_policy(source)
    if text == source.text:
        return False
    if write:
        rewrite(path, text, source.name)
    return True


def format_policy(source: Source) -> str:
    """The canonical text of a policy.

    Raises:
        PolicyError: the form of the policy has defects, or its meaning cannot be preserved.
    """
    diagnostics: list[Diagnostic] = []
    block = parse(source, diagnostics.append)
    if diagnostics or block is None:
        raise PolicyError(diagnostics, source)
    root = read_yaml(source, diagnostics.append)
    assert isinstance(root, Mapping)
    comments = find_comments(source, root)
    writer = _PolicyWriter(source, comments, root)
    text = writer.file(root)
    new_source = Source(source.name, text)
    new_root = read_yaml(new_source, diagnostics.append)
    if diagnostics or new_root is None or not _same(root, new_root, new_source, comments):
        message = "the file cannot be formatted without changing its meaning or its comments"
        raise PolicyError([Diagnostic("file", message)], source)
    return text


# Writing


@dataclass
class _Lines:
    """The lines of one entry, and the comments that go above them."""

    above: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    blank: bool = False  # an empty line before it


class _PolicyWriter:
    def __init__(self, source: Source, comments: list[Comment], root: Mapping) -> None:
        self.source = source
        self.comments = Pending(source, comments)
        self.first = root.entries[0][0].span.start if root.entries else 0

    def file(self, root: Mapping) -> str:
        end = len(self.source.text)
        lines = [comment.text for comment in self.comments.before(self.first)]
        lines += self.block(root, FILE, 0, end)
        lines += [comment.text for comment in self.comments.before(end)]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def block(self, node: Mapping, keys: tuple[Key, ...] | Key, indent: int, end: int) -> list[str]:
        """A mapping in block style; `keys` is a tuple, or one key for names the author chose."""
        entries = []
        starts = [key.span.start for key, _ in node.entries[1:]] + [end]
        for (name, value), stop in zip(node.entries, starts, strict=True):
            entries.append((name.text, self.entry(name, value, keys, indent, stop)))
        if isinstance(keys, tuple):
            order = [key.name for key in keys]
            entries.sort(key=lambda entry: order.index(entry[0]))
        lines: list[str] = []
        for _, entry in entries:
            if entry.blank and lines:
                lines.append("")
            lines += entry.above + entry.lines
        return lines

    def entry(
        self, name: Scalar, value: YamlNode, keys: tuple[Key, ...] | Key, indent: int, stop: int
    ) -> _Lines:
        """A key with its value and its comments."""
        key = keys if isinstance(keys, Key) else next(k for k in keys if k.name == name.text)
        entry = _Lines(blank=self._blank_before(name))
        pad = " " * indent
        entry.above += [pad + comment.text for comment in self.comments.before(name.span.start)]
        block_keys = self._expands(value, key, len(pad) + len(name.text) + 2)
        if block_keys is not None:
            assert isinstance(value, Mapping)
            first_key = value.entries[0][0].span.start
            side_comment = self.comments.beside(name.span.end, first_key)
            entry.lines = [f"{pad}{name.text}:{side_comment}"]
            entry.lines += self.block(value, block_keys, indent + 2, stop)
            deeper = self.comments.deeper(name.span.start, stop)
            entry.lines += [f"{pad}  {comment.text}" for comment in deeper]
            return entry
        entry.lines = self.inline(f"{pad}{name.text}: ", value, key, indent)
        comments = self.comments.before(self._line_end(value.span.end, stop))
        entry.above += [pad + comment.text for comment in comments[:-1]]
        if comments and comments[-1].alone:
            entry.above.append(pad + comments[-1].text)
        elif comments:
            line = 0 if entry.lines[0].endswith(": |") else -1
            entry.lines[line] += f"  {comments[-1].text}"
        deeper = self.comments.deeper(name.span.start, stop)
        entry.above += [pad + comment.text for comment in deeper]
        return entry

    def _line_end(self, offset: int, stop: int) -> int:
        newline = self.source.text.find("\n", offset)
        return min(stop, newline if newline >= 0 else stop)

    def _blank_before(self, name: Scalar) -> bool:
        """Whether the author left an empty line above the key and the comments on top of it."""
        lines_above = self.source.text[: name.span.start].split("\n")[:-1]
        while lines_above and lines_above[-1].lstrip().startswith("#"):
            lines_above.pop()
        return bool(lines_above) and not lines_above[-1].strip()

    def _expands(self, value: YamlNode, key: Key, head: int) -> tuple[Key, ...] | Key | None:
        """The keys of a value that is written as a block below its key; else None."""
        if not isinstance(value, Mapping) or not value.entries:
            return None
        if key.form == "named":
            return key.item
        if key.name in ("parameter", "tensor"):
            first = value.entries[0][0].span.start  # a comment before it goes beside the key
            has_comments = self.comments.are_inside(first, value.span.end)
            if not has_comments and head + len(self.flow(value, key)) <= WIDTH:
                return None
        return key.keys

    def inline(self, head: str, value: YamlNode, key: Key, indent: int) -> list[str]:
        """A value on the line of its key, or broken over several."""
        if isinstance(value, Scalar) and key.form in _EXPRESSIONS:
            return _expression_lines(head, value, indent)
        if isinstance(value, Scalar):
            return [head + self._text(value, key, flow=False)]
        line = head + self.flow(value, key)
        if len(line) <= WIDTH or not isinstance(value, Sequence):
            return [line]
        items = [self.flow(item, key) for item in value.items]
        return [head.rstrip(), *(f"{' ' * (indent + 2)}- {item}" for item in items)]

    def flow(self, value: YamlNode, key: Key) -> str:
        """A value on one line."""
        if isinstance(value, Sequence):
            return f"[{', '.join(self.flow(item, key) for item in value.items)}]"
        if isinstance(value, Mapping):
            key_of = {k.name: k for k in key.keys}
            entries = sorted(value.entries, key=lambda entry: list(key_of).index(entry[0].text))
            pairs = [f"{name.text}: {self.flow(item, key_of[name.text])}" for name, item in entries]
            return f"{{{', '.join(pairs)}}}"
        assert isinstance(value, Scalar)
        if key.form in _EXPRESSIONS:
            text = _expression_text(value)
            return json.dumps(text) if set(text) & set("[],{}") else text
        return self._text(value, key, flow=True)

    def _text(self, value: Scalar, key: Key, flow: bool) -> str:
        """Text, in quotes if it needs them or stands in flow style."""
        text = value.text
        if key.form != "text":
            return text
        safe = _PLAIN.fullmatch(text) and ": " not in text and " #" not in text
        safe = safe and text.isprintable()  # some other characters end a line in YAML
        safe = safe and _RESOLVER.resolve(yaml.ScalarNode, text, (True, False)) == _STRING
        if flow or not safe or text != text.strip() or text.endswith(":"):
            return _quoted(text)
        return text


def _quoted(text: str) -> str:
    """Text in double quotes; characters that cannot be shown become YAML's escapes."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(
        x if x.isprintable() else f"\\u{ord(x):04x}" if ord(x) < 1 << 16 else f"\\U{ord(x):08x}"
        for x in quoted
    )


# Expressions

_TIGHT_AFTER = ("LPAR", "LSQB", "UNARY")
_TIGHT_BEFORE = ("RPAR", "RSQB", "COMMA")
_OPERANDS = ("NAME", "NUMBER", "RPAR", "RSQB")


@dataclass(frozen=True)
class _Piece:
    """A token as written: whether a space precedes it, and its line."""

    text: str
    space: bool
    line: int


def _pieces(text: str) -> Iterator[_Piece]:
    previous_kind = ""  # kind of the token before; a sign without a left operand is UNARY
    for token in tokenize(text):
        kind = token.type
        if kind == "MINUS" and previous_kind not in _OPERANDS:
            kind = "UNARY"
        call = kind in ("LPAR", "LSQB") and previous_kind in ("NAME", "RSQB")
        tight = call or not previous_kind or previous_kind in _TIGHT_AFTER or kind in _TIGHT_BEFORE
        yield _Piece(str(token), not tight, text.count("\n", 0, token.start_pos))
        previous_kind = kind


def _joined(pieces: Iterable[_Piece]) -> str:
    return "".join(f" {piece.text}" if piece.space else piece.text for piece in pieces).strip()


def _expression_text(value: Scalar) -> str:
    """An expression, number or word on one line in canonical spacing."""
    return _joined(_pieces(value.text))


def _expression_lines(head: str, value: Scalar, indent: int) -> list[str]:
    """An expression after its key; one that the author wrote in a `|` block keeps its lines."""
    text = value.text.strip()
    if value.style == "|" and "\n" in text:
        pieces = list(_pieces(text))
        lines = [
            f"{' ' * (indent + 2)}{_joined(piece for piece in pieces if piece.line == number)}"
            for number in sorted({piece.line for piece in pieces})
        ]
        return [f"{head}|", *lines]
    return _wrapped(head, _expression_text(value), indent + 4)


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    """An expression broken where the fewest brackets are open, if it is too long for one line."""
    lines = []
    while len(head) + len(text) > WIDTH:
        spaces = [index for index, character in enumerate(text) if character == " "]
        candidates = [index for index in spaces if len(head) + index <= WIDTH] or spaces[:1]
        if not candidates:
            break
        cut = min(candidates, key=lambda index: (_open_brackets(text[:index]), -index))
        lines.append(head + text[:cut])
        head, text = " " * indent, text[cut + 1 :]
    return [*lines, head + text]


def _open_brackets(text: str) -> int:
    return sum(text.count(c) for c in "([") - sum(text.count(c) for c in ")]")


# Sameness


def _same(old: YamlNode, new: YamlNode, source: Source, comments: list[Comment]) -> bool:
    texts = sorted(comment.text for comment in comments)
    new_texts = sorted(comment.text for comment in find_comments(source, new))
    return texts == new_texts and _said(old) == _said(new)


def _said(node: YamlNode) -> object:
    """The content of a node, without the order of its keys and the spacing of expressions."""
    if isinstance(node, Mapping):
        return {name.text: _said(value) for name, value in node.entries}
    if isinstance(node, Sequence):
        return [_said(item) for item in node.items]
    assert isinstance(node, Scalar)
    try:
        return tuple(str(token) for token in tokenize(node.text))
    except ExpressionError:
        return node.text
