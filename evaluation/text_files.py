"""Reads texts of users, and checks the places of results."""

from __future__ import annotations

import os
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import refused, why


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


def half_character(text: str) -> str | None:
    """The first lone surrogate of a text, which JSON can hold and no tokenizer takes, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def check_place(path: Path) -> None:
    """Checks, before long work, that a result can be written to a path.

    Raises:
        PolicyError: its folder does not exist, or it is a folder itself.
    """
    if not os.path.isdir(path.absolute().parent):
        raise refused(str(path), "file", "there is no such folder")
    if os.path.isdir(path):
        raise refused(str(path), "file", "this is a folder; name a file")
