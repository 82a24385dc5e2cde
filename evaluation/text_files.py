"""Reads texts of users."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import why


def read_text(file: str | Path) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        ValueError: the file cannot be read, or is none of text; the message is the reason.
    """
    try:
        return decoded(Path(file).read_bytes())
    except OSError as error:
        raise ValueError(why(error, "it cannot be read")) from None


def decoded(raw: bytes) -> str:
    """The text in UTF-8, without a byte order mark.

    Raises:
        ValueError: it is no such text.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("this is not UTF-8 text") from None
