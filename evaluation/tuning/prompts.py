"""The prompts that `kvpolicy tune` is given: texts or token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import refused
from kvpolicy.evaluation.text_files import half_character, read_text

Prompt = str | list[int]
_FORMS = '`{"text": "..."}`, `{"input_ids": [1, 2, ...]}`, a string or a list of token ids'


def read_prompts(files: Sequence[str | Path]) -> list[tuple[str, Prompt]]:
    """(place, prompt) pairs; a place is `file` or `file:line`.

    A file `*.jsonl` has one prompt per line: an object with `text`, `prompt` or `input_ids`, a
    string, or a list of token ids. Any other file is one text.

    Raises:
        PolicyError: a file that cannot be read, a line of another form, or no prompt at all.
    """
    prompts: list[tuple[str, Prompt]] = []
    for file in files:
        try:
            text = read_text(file)
        except ValueError as error:
            raise refused(str(file), "file", str(error)) from None
        if Path(file).suffix != ".jsonl":
            if text.strip():
                prompts.append((str(file), text))
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                place = f"{file}:{number}"
                prompts.append((place, _prompt(place, line)))
    if not prompts:
        names = ", ".join(str(file) for file in files)
        raise refused("--prompts", "file", f"there is no prompt in {names}")
    return prompts


def _prompt(place: str, line: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise refused(place, "file", "this line is not JSON", f"a line is {_FORMS}") from None
    if isinstance(value, dict):
        keys = [key for key in ("input_ids", "text", "prompt") if key in value]
        value = value[keys[0]] if keys else None
    if isinstance(value, str) and value.strip():
        half = half_character(value)
        if half is not None:
            message = f"the text of this line holds half a character, {half!a}"
            raise refused(place, "file", message, "write the character whole, or leave it out")
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise refused(place, "file", "this line is no prompt", f"a line is {_FORMS}")
