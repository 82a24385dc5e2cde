"""Options that say how to ask a running server: its key; imports nothing heavy."""

from __future__ import annotations

import os

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused


def api_key(variable: str | None, option: str = "--api-key-env") -> str | None:
    """The key in an environment variable, without space at its ends; None without a variable.

    Raises:
        PolicyError: the variable is not set, or HTTP cannot carry what it holds.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        help_ = f"export {variable}=KEY"
        raise refused(option, "arguments", f"the variable `{variable}` is not set", help_)
    if not key.isprintable() or any(ord(character) > 0xFF for character in key):
        message = f"the key in `{variable}` has a line break or a character that HTTP cannot carry"
        raise refused(option, "arguments", message, "a key is one line of Latin characters")
    return key


def belongs_to_url(option: str) -> PolicyError:
    """The refusal of an option about a running server where a server is started."""
    return refused(option, "arguments", "this belongs to --url, which is not given")
