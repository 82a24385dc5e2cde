"""Messages to the author of a policy: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvpolicy.dsl.syntax.source import Source, Span

MAX_LINE = 160  # characters of a source line that a message shows
MAX_SHOWN = 72  # characters of an author's text that a sentence quotes


@dataclass(frozen=True)
class Diagnostic:
    """One defect or warning. `code` is one of the table in docs/language.md, or "test"."""

    code: str
    message: str
    span: Span | None = None
    help: str | None = None
    severity: str = "error"  # "warning" or "note"

    def render(self, source: Source) -> str:
        """The message as `file:line:column: error[code]: message`, the line, a caret and help."""
        head = f"{self.severity}[{self.code}]: {self.message}"
        if self.span is None:
            lines = [f"{source.name}: {head}"]
            margin = ""
        else:
            number, column = source.place(self.span.start)
            margin = " " * len(str(number))
            text, caret = _shortened(source.line(number), column - 1)
            width = max(1, min(self.span.end - self.span.start, len(text) - caret))
            # Tabs are repeated so that the caret stands under its text.
            indent = "".join("\t" if c == "\t" else " " for c in text[:caret])
            lines = [
                f"{source.name}:{number}:{column}: {head}",
                f"{margin} |",
                f"{number} | {text}".rstrip(),
                f"{margin} | {indent}{'^' * width}",
            ]
        if self.help:
            lines.append(f"{margin} = help: {self.help}")
        return "\n".join(lines)


def _shortened(line: str, caret: int) -> tuple[str, int]:
    """A line shortened around its caret, and the caret's index in the result."""
    if len(line) > MAX_LINE and caret > MAX_LINE // 2:
        cut = caret - MAX_LINE // 4
        line, caret = "... " + line[cut:], caret - cut + 4
    if len(line) > MAX_LINE:
        line = line[:MAX_LINE] + " ..."
    return line, caret


def on_one_line(text: str, most: int) -> str:
    """A text without its line breaks, cut to at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."


class PolicyError(Exception):
    """A policy that cannot be used; carries every diagnostic."""

    def __init__(self, diagnostics: Sequence[Diagnostic], source: Source) -> None:
        self.diagnostics = tuple(in_order(diagnostics))
        self.source = source
        super().__init__(render_all(self.diagnostics, source))


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sorted by position, without repetitions; those without a position come first."""
    unique = dict.fromkeys(diagnostics)
    return sorted(unique, key=lambda d: (d.span.start, d.span.end) if d.span else (-1, -1))


def render_all(diagnostics: Iterable[Diagnostic], source: Source) -> str:
    """Every message, with an empty line between two."""
    return "\n\n".join(d.render(source) for d in diagnostics)


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """A help line naming the candidate `closest` to a name; None if there is none."""
    candidate = closest(name, candidates)
    return None if candidate is None else f"did you mean `{candidate}`?"


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to `name`, if one is close or begins alike."""
    from difflib import get_close_matches  # only when something is wrong already

    def begins_alike(candidate: str) -> bool:  # `minimum` and `min`, `errors` and `error_rate`
        pairs = zip(name, candidate, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return len(name) > 3 and shared >= max(3, 0.8 * min(len(name), len(candidate)))

    names = sorted(set(candidates))
    close = get_close_matches(name, names, n=1, cutoff=0.7) or [*filter(begins_alike, names)]
    return close[0] if close else None


def listed(names: Iterable[str], last: str = "or") -> str:
    """`a`, `b` or `c`, each in backticks."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"


def refused(name: str, code: str, message: str, help_: str | None = None) -> PolicyError:
    """The error to raise for a defect of `name` that has no place in a text.

    For example a parameter's value, a file of tensors or a model.
    """
    return PolicyError([Diagnostic(code, message, help=help_)], Source(name, ""))


def why(error: OSError, otherwise: str) -> str:
    """The operating system's reason for an error, or `otherwise` if it gives none."""
    return (error.strerror or otherwise).lower()
