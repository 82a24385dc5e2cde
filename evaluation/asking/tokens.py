"""A model's tokenizer, loaded from a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import refused


class Tokens:
    """Text to token ids and back.

    Args:
        folder: folder of a checkpoint, or of a tokenizer alone.

    Raises:
        PolicyError: the folder has no tokenizer that can be loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        if not os.path.isdir(folder):
            raise refused(str(folder), "file", "there is no such folder with a tokenizer")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            message = f"its tokenizer cannot be loaded: {reason}"
            raise refused(str(folder), "file", message) from None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds the tokens that begin a prompt."""
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens such as the end of an answer."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def positions(self, text: str, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ranges [start, stop) of parts of a text, as a prompt.

        Args:
            parts: [start, stop) characters of each part.

        Returns:
            A range per part that has tokens; empty if the tokenizer gives no character offsets.
        """
        if not parts or not self.tokenizer.is_fast:
            return []
        offsets = self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        ranges = []
        for start, stop in parts:
            indices = [i for i, (first, end) in enumerate(offsets) if first < stop and end > start]
            if indices:
                ranges.append([indices[0], indices[-1] + 1])
        return ranges

    def count(self, text: str) -> int:
        """Number of tokens of a text as a prompt."""
        return len(self.encode(text))
