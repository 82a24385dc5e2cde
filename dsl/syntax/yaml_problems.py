"""PyYAML's errors in words of a policy's author: what is wrong, where, what to do."""

from __future__ import annotations

import re

import yaml
from kvpolicy.dsl.syntax.diagnostics import Diagnostic
from kvpolicy.dsl.syntax.source import Source, Span

# Part of what PyYAML says -> message and help.
_MESSAGES = {
    "sequence entries are not allowed": (
        "a list cannot begin on its key's line",
        "the minus sign has no space after it, as in `-c`; a list begins on the next line",
    ),
    "while scanning a block scalar": (
        "text stands behind `|` or `>`",
        "the text of a `|` block begins on the next line",
    ),
    "found unknown escape character": (
        "`\\` begins no escape that YAML knows",
        "use single quotes, or write `\\\\` for a backslash",
    ),
}
_COLUMN = "keys of one mapping begin in one column, those below a key further to the right"


def yaml_diagnostic(error: yaml.YAMLError, source: Source) -> Diagnostic:
    """The one message for a text that is not YAML."""
    if isinstance(error, yaml.reader.ReaderError):
        message = f"the character U+{ord(source.text[error.position]):04X} may not stand in YAML"
        return Diagnostic("yaml", message, Span(error.position, error.position + 1))
    if not isinstance(error, yaml.MarkedYAMLError):
        return Diagnostic("yaml", "this is not YAML", Span(0, 0))
    return _Marked(error, source).diagnostic()


class _Marked:
    """An error with the place of the problem, and the beginning of what was being read."""

    def __init__(self, error: yaml.MarkedYAMLError, source: Source) -> None:
        self.text = source.text
        self.context, self.problem = error.context or "", error.problem or "this is not YAML"
        self.at = self._index(error.problem_mark or error.context_mark)
        self.begin = self._index(error.context_mark or error.problem_mark)

    def _index(self, mark: yaml.Mark | None) -> int:
        return min(mark.index, len(self.text)) if mark else 0

    def diagnostic(self) -> Diagnostic:
        """The message, by what PyYAML says of the text."""
        if "expected ',' or" in self.problem:
            return self._flow()
        if "expected '<document start>'" in self.problem:
            help = "a file holds one mapping, and nothing after `...`"
            return self._message_at(
                self.at, "this stands after the end of the file's mapping", help
            )
        if "expected <block end>" in self.problem:
            return self._block()
        if "mapping values are not allowed" in self.problem:
            return self._colon()
        if "found unexpected end of stream" in self.problem and "quoted" in self.context:
            return self._message_at(self.begin, f"`{self.text[self.begin]}` is never closed")
        if "could not find expected ':'" in self.problem:
            help = "a key and its value are parted by a colon and a space"
            return self._message_at(self.begin, "this is no key with a value", help)
        if " tag" in f"{self.context}: {self.problem}":
            help = "`!` is written `not`; a text that begins with `!` stands in quotes"
            return self._message_at(self.begin, "`!` begins a tag, and tags are not used", help)
        if "cannot start any token" in self.problem:
            return self._character()
        for words, (message, help) in _MESSAGES.items():
            if words in f"{self.context}: {self.problem}":
                return self._message_at(self.at, message, help)
        even = self.problem.count("'") % 2 == 0
        return self._message_at(self.at, self.problem.replace("'", "`") if even else self.problem)

    def _message_at(self, offset: int, message: str, help: str | None = None) -> Diagnostic:
        return Diagnostic("yaml", message, Span(offset, min(offset + 1, len(self.text))), help)

    def _flow(self) -> Diagnostic:
        """The message for an error inside `{}` or `[]`."""
        if "\n" in self.text[self.begin : self.at]:  # the next key was read as part of it
            return self._message_at(self.begin, f"`{self.text[self.begin]}` is never closed")
        help = "expressions with `[`, `{` or `,` must stand in quotes or in block style"
        return self._message_at(self.at, self.problem.replace("'", "`"), help)

    def _block(self) -> Diagnostic:
        """The message for a line that cannot continue the mapping or list before it."""
        if self.problem.endswith("'-'"):
            return self._message_at(self.at, "a list begins where a key is expected", _COLUMN)
        return self._message_at(self.at, "this line is indented unlike the lines above it", _COLUMN)

    def _colon(self) -> Diagnostic:
        line = self.text[self.text.rfind("\n", 0, self.at) + 1 : self.at]
        key = re.fullmatch(r" +([A-Za-z0-9_]+)", line)
        if key is None:
            help = "text with `: ` in it must stand in quotes"
            return self._message_at(self.at, "this text has a colon, which ends a key", help)
        start = self.at - len(key[1])
        message = f"`{key[1]}` is indented further than the key that it follows"
        return Diagnostic("yaml", message, Span(start, self.at), _COLUMN)

    def _character(self) -> Diagnostic:
        character = self.text[self.at : self.at + 1]
        if character == "\t":
            line = self.text[self.text.rfind("\n", 0, self.at) + 1 : self.at]
            if line.strip():
                return self._message_at(self.at, "a tab stands where a space is expected")
            return self._message_at(
                self.at, "a tab stands where a line is indented", "indent by spaces"
            )
        subject = "a backtick" if character == "`" else f"`{character}`"
        return self._message_at(self.at, f"no value begins with {subject}", "put it into quotes")
