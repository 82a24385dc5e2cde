"""Files of the tensors that come with a model (`data`), as options name them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpolicy.dsl.ir.nodes import Delivered, Program
from kvpolicy.dsl.syntax.diagnostics import did_you_mean, refused, why

_MOST_BYTES = 1 << 24


def with_data(
    programs: Sequence[Program], values: Iterable[str], option: str = "--data"
) -> list[Program]:
    """Policies with the tensors of values `NAME=FILE`, each for those that declare one so called.

    A file ends in `.json` (lists of lists), in `.npy`, or is a text with a row of numbers per line,
    between blanks, tabs or commas; `#` begins a comment.

    Args:
        option: in messages.

    Raises:
        PolicyError: a value has another form, no policy declares its name, or a file cannot be
            read.
    """
    tensors: dict[str, Delivered] = {}
    declared = dict.fromkeys(name for program in programs for name in program.data)
    for value in values:
        name, equals, file = value.partition("=")
        if not equals or not name or not file:
            raise refused(option, "arguments", f"`{value}` is not NAME=FILE")
        if name not in declared:
            message = f"`{value}`: no policy here has a tensor `{name}` under `data`"
            raise refused(option, "arguments", message, did_you_mean(name, declared))
        if name in tensors:
            raise refused(option, "arguments", f"`{value}`: `{name}` is given twice")
        tensors[name] = Delivered(_read(file), file)
    return [program.given(tensors) for program in programs]


def _read(file: str) -> object:
    """The numbers of one file.

    Raises:
        PolicyError: it cannot be read.
    """
    path = Path(file)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise refused(file, "data", f"the file is larger than {_MOST_BYTES >> 20} MiB")
        if path.suffix == ".npy":
            import numpy as np  # slow to import, and no other file needs it

            numbers: object = np.load(path, allow_pickle=False).tolist()
            return numbers
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refused(file, "data", why(error, "it cannot be read")) from None
    except (ValueError, EOFError):
        raise refused(file, "data", "no text, and no readable npy of numbers") from None
    if path.suffix != ".json":
        return _rows(file, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise refused(file, "data", "not readable as JSON") from None


def _rows(file: str, text: str) -> list[list[float]]:
    """The numbers of each line that has some."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        try:
            row = [float(word) for word in words]
        except ValueError:
            message = f"line {number} has more than numbers"
            raise refused(file, "data", message, "a row of numbers per line") from None
        if row:
            rows.append(row)
    return rows
