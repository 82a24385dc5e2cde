"""A version of an experiment that was sent to a server, and takes the place of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Put:
    """A version by `PUT`, which holds until the file changes.

    Attributes:
        text: its text, YAML or JSON.
        file: digest of the file's content, as it was seen last before.
    """

    text: str
    file: str

    def saved(self) -> dict[str, Any]:
        """The part of the state file that keeps it over a restart."""
        return {"put": {"text": self.text, "file": self.file}}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Put | None:
        """The version in a state file; None if there is none.

        Raises:
            ValueError: this part of the file is damaged.
        """
        put = saved.get("put")
        if put is None:
            return None
        text, file = (put.get("text"), put.get("file")) if isinstance(put, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(file, str):
            raise ValueError("what it holds under `put` is damaged")
        return cls(text, file)
