"""Choices that were measured: a file per kind of GPU, read once, asked by the kernels' wrappers.

`tuned/<name of the GPU>.json` is written by the command of COMMAND, which says there on what and
how it measured. Where there is no file, or nothing in it of a kernel, the wrappers take the values
that were reasoned when they were written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

COMMAND = "python benchmarks/kernels.py --topics tuning --write"
# A folder that is read instead of the one beside this file.
FOLDER_VARIABLE = "KVPOLICY_TUNED_KERNELS"

READERS = ("triton", "flashinfer")  # the first one where nothing was measured
_REMEMBERED = 4096  # calls whose choice is known without looking for it
_NOTHING: Mapping[str, Any] = {}
_POWERS = frozenset(2**n for n in range(17))
_TILE = frozenset({16, 32, 64, 128, 256})
_SPLIT_KV = {
    "entries": _TILE,
    "warps": frozenset({1, 2, 4, 8, 16}),
    "stages": range(1, 9),
    "splits": range(1, 257),
    "programs": range(1, 17),
}


class TunedError(ValueError):
    """A file of measured choices cannot be used; the message names it and says what to do."""


@dataclass(frozen=True)
class Kernel:
    """Of which calls a choice is made, and what is chosen.

    Attributes:
        exact: a choice is good only for calls that are equal in these.
        near: sizes; of several choices the one that was measured nearest is taken.
        knobs: by name the values that each may have. What a choice leaves out stays as reasoned.
    """

    exact: tuple[str, ...]
    near: tuple[str, ...]
    knobs: Mapping[str, Collection[int | str]]


KERNELS = {
    # The attentions in Triton; `rows`: query rows of a program.
    "decode_attention": Kernel(("dtype", "head_dim", "rows"), ("lists",), _SPLIT_KV),
    "paged_attention": Kernel(("dtype", "head_dim", "rows"), ("lists",), _SPLIT_KV),
    # What reads a decode batch; `entries`: of a list, on average.
    "decode_reader": Kernel(
        ("dtype", "head_dim", "group"), ("lists", "entries"), {"reader": READERS}
    ),
    "compact_layers": Kernel(("row_bytes",), ("positions",), {"part": _POWERS, "tile": _POWERS}),
    "gather": Kernel(("row_bytes",), ("candidates",), {"tile": _POWERS}),
    "place": Kernel(("row_bytes",), ("candidates",), {"tile": _POWERS}),
    "compact_in_place": Kernel(
        ("row_bytes",),
        ("lists", "candidates"),
        {"piece": _POWERS, "tile": _POWERS - {2**15, 2**16}},
    ),
    "top": Kernel((), ("rows", "keys"), {"block": _POWERS, "programs": range(1, 1 << 16)}),
    "rows": Kernel((), ("row_bytes",), {"block": _POWERS}),
    "nearest": Kernel(("dtype", "head_dim"), ("dropped",), {"rows": _TILE, "columns": _TILE}),
    "merge_rows": Kernel(
        ("dtype", "head_dim"), ("tokens",), {"receivers": range(1, 257), "tile": _POWERS}
    ),
}


@dataclass
class Tuned:
    """The choices for one kind of GPU.

    Attributes:
        device: name of the GPU.
        path: of the file; None if there is none.
        choices: by kernel (where, choice) of each shape that was measured.
        remembered: what `choice` has found, by its arguments.
    """

    device: str
    path: Path | None
    choices: Mapping[str, list[tuple[dict[str, Any], dict[str, Any]]]]
    remembered: dict[tuple, Mapping[str, Any]] = field(default_factory=dict)

    def choice(self, kernel: str, where: tuple) -> Mapping[str, Any]:
        """As the function `choice`."""
        if kernel not in self.choices:
            return _NOTHING
        key = (kernel, where)
        if key not in self.remembered:
            if len(self.remembered) == _REMEMBERED:  # prompts are of any length
                self.remembered.clear()
            self.remembered[key] = self._nearest(kernel, where)
        return self.remembered[key]

    def _nearest(self, kernel: str, where: tuple) -> Mapping[str, Any]:
        exact, near = KERNELS[kernel].exact, KERNELS[kernel].near
        asked = dict(zip(exact + near, map(plain, where), strict=True))

        def distance(measured: Mapping[str, Any]) -> float:
            return sum(abs(math.log2(max(asked[n], 1) / measured[n])) for n in near)

        fitting = [
            (distance(measured), choice)
            for measured, choice in self.choices[kernel]
            if all(measured[name] == asked[name] for name in exact)
        ]
        return min(fitting, key=lambda each: each[0])[1] if fitting else _NOTHING

    @property
    def said(self) -> str:
        """For the log: whether the kernels are tuned, and if not how they can be."""
        if self.path is None:
            return f"not tuned for {self.device}; run `{COMMAND}`"
        return f"tuned for {self.device} by {self.path}"


def choice(kernel: str, device: torch.device, *where: Any) -> Mapping[str, Any]:
    """What was measured to be best for such a call: knobs and their values, perhaps none.

    Args:
        kernel: a name of KERNELS.
        where: what its `exact` and then its `near` name, sizes or a dtype.

    Raises:
        TunedError: as `load`.
    """
    return load(device).choice(kernel, where)


@lru_cache
def load(device: torch.device) -> Tuned:
    """The choices for a device; read once per process.

    Raises:
        TunedError: the file, or the folder that was asked for, cannot be used.
    """
    name = device_name(device)
    path = path_of(name)
    if not path.exists():
        return Tuned(name, None, {})
    return Tuned(name, path, read(path, name))


def device_name(device: torch.device) -> str:
    """The GPU's name as CUDA gives it; of other devices, and where there is no GPU, their type."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def path_of(name: str, folder: Path | None = None) -> Path:
    """The file of a kind of GPU.

    Raises:
        TunedError: the folder that the environment names is not there.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if folder is None and given and not Path(given).is_dir():
        raise TunedError(f"{FOLDER_VARIABLE}: there is no folder {given}; make it or unset this.")
    folder = folder or Path(given or Path(__file__).parent.with_name("tuned"))
    return folder / f"{name.replace(' ', '_').replace('/', '_')}.json"


def read(path: Path, name: str) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The choices of a file, every one checked.

    Args:
        name: of the GPU that it is to be of.

    Raises:
        TunedError: names the file, the place in it, and what was expected.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["device"] != name:
            raise _Wrong(f"device: expected {name}, got {facts['device']}")
        made: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for at, run in enumerate(facts["runs"]):
            for number, each in enumerate(run["choices"]):
                place = f"runs[{at}].choices[{number}]"
                _add(made, each["kernel"], each["where"], each["choice"], place)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, _Wrong) as error:
        raise TunedError(_sentence(path, str(error))) from None
    except (KeyError, TypeError, AttributeError) as error:
        what = f"not as `--write` writes it ({type(error).__name__}: {error})"
        raise TunedError(_sentence(path, what)) from None
    return made


class _Wrong(Exception):
    """What is wrong in a file."""


def _sentence(path: Path, what: str) -> str:
    return f"{path}: {what}; correct or remove the file, or measure anew: `{COMMAND}`."


def _add(made: dict, kernel: str, where: dict, values: dict, place: str) -> None:
    """One more choice, checked."""
    if kernel not in KERNELS:
        raise _Wrong(f"{place}.kernel: expected one of {', '.join(KERNELS)}, got {kernel}")
    known = KERNELS[kernel]
    if where.keys() != {*known.exact, *known.near}:
        names = ", ".join(known.exact + known.near)
        raise _Wrong(f"{place}.where: expected {names}, got {', '.join(where)}")
    for name, value in where.items():
        if name == "dtype" and not isinstance(getattr(torch, value, None), torch.dtype):
            raise _Wrong(f"{place}.where.dtype: torch has no dtype {value!r}")
        if name != "dtype" and (type(value) is not int or value < 1):
            raise _Wrong(f"{place}.where.{name}: expected a whole number from 1, got {value!r}")
    for name, value in values.items():
        if name not in known.knobs:
            raise _Wrong(f"{place}.choice: expected {', '.join(known.knobs)}, got {name}")
        if type(value) not in (int, str) or value not in known.knobs[name]:
            raise _Wrong(f"{place}.choice.{name}: {value!r} is not possible")
    if any(where == other for other, _ in made.get(kernel, ())):
        raise _Wrong(f"{place}: a choice of {kernel} for the same sizes stands before")
    made.setdefault(kernel, []).append((where, values))


def plain(value: Any) -> Any:
    """As it stands in a file: a dtype by its name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
