"""The file of an experiment as it was last seen, and the version by `PUT` that takes its place."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class VersionFile:
    """Which text says what the experiment is: the file's, or one that was put until it changes.

    Attributes:
        path: the file.
        in_use: whether its content, as it was last seen, is in use.
        problem: what is wrong with it otherwise; empty if nothing is.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: the file cannot be read.
        """
        self.path = path
        self.in_use, self.problem = True, ""
        self._seen = _digest(path.read_bytes())
        self._put: dict[str, str] | None = None  # `text`, and `file`: the digest it was put over
        self._try_again = False  # whether to look at the content although it is as it was

    def restored(self, saved: Mapping[str, Any]) -> str | None:
        """The text that was put before a restart, if the file is as it was then.

        Args:
            saved: the content of the state file.

        Raises:
            ValueError: this part of it is damaged.
        """
        put = saved.get("put")
        if put is None:
            return None
        text, file = (put.get("text"), put.get("file")) if isinstance(put, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(file, str):
            raise ValueError("what it holds under `put` is damaged")
        return text if file == self._seen else None

    def put(self, text: str) -> None:
        """Lets a text take the file's place until the file has another content."""
        self._put = {"text": text, "file": self._seen}

    def saved(self) -> dict[str, Any]:
        """The part of the state file that keeps the text that was put."""
        return {} if self._put is None else {"put": self._put}

    def changed(self, content: bytes) -> str | None:
        """The file's text, if it is another than it was and is to be taken up."""
        digest = _digest(content)
        if digest == self._seen and not self._try_again:
            return None
        self._seen, self._try_again = digest, False
        if self._put is not None and self._put["file"] == digest:
            self.in_use, self.problem = True, ""
            return None
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            self.failed(str(error))
            return None

    def taken_up(self) -> None:
        """The text that `changed` gave is in use."""
        self._put = None
        self.in_use, self.problem = True, ""

    def failed(self, problem: str, *, try_again: bool = False) -> None:
        """The file cannot be used; the last good version stays.

        Args:
            try_again: whether it may be usable later as it is.
        """
        if problem != self.problem:
            logger.error("The experiment stays as it was:\n%s", problem)
        self.in_use, self.problem, self._try_again = False, problem, try_again


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
