"""Measured choices of kernels' knobs: a file per GPU model, read once, asked by the wrappers.

`tuned/<name of the GPU>.json` is written by COMMAND and names the command and the machine of each
measurement. Without the file, or a choice for the kernel in it, the wrappers take values that were
reasoned, not measured.
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
# Where `--write` puts a file, and servers find it: `kernels/tuned`.
SHIPPED = Path(__file__).parent.with_name("tuned")
# Environment variable: the folder to read instead.
FOLDER_VARIABLE = "KVPOLICY_TUNED_KERNELS"

READERS = ("triton", "flashinfer")  # of a decode batch; the first if nothing was measured
_REMEMBERED = 4096  # most choices that `Tuned.remembered` holds
_NOTHING: Mapping[str, Any] = {}
_POWERS = frozenset(2**n for n in range(17))
# The parts of a prompt are programs on the second axis of a grid, which has 65,535.
_PARTS = frozenset(x for x in _POWERS if x >= 256)
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
    """What a choice for a kernel depends on, and what it sets.

    Attributes:
        exact: properties of a call in which it must equal the measured one.
        near: sizes of a call; of the choices equal in `exact` the one measured nearest is taken.
        knobs: name -> values that it may have. A knob that a choice omits stays as reasoned.
    """

    exact: tuple[str, ...]
    near: tuple[str, ...]
    knobs: Mapping[str, Collection[int | str]]


KERNELS = {
    # Attention in Triton; `rows`: query rows of a program.
    "decode_attention": Kernel(("dtype", "head_dim", "rows"), ("lists",), _SPLIT_KV),
    "paged_attention": Kernel(("dtype", "head_dim", "rows"), ("lists",), _SPLIT_KV),
    # The reader of a decode batch; `entries`: average length of a list.
    "decode_reader": Kernel(
        ("dtype", "head_dim", "group"), ("lists", "entries"), {"reader": READERS}
    ),
    "compact_layers": Kernel(("row_bytes",), ("positions",), {"part": _PARTS, "tile": _POWERS}),
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
        path: the file; None if there is none.
        choices: kernel -> (where, choice) of each shape that was measured.
        remembered: results of `choice` by its arguments.
    """

    device: str
    path: Path | None
    choices: Mapping[str, list[tuple[dict[str, Any], dict[str, Any]]]]
    remembered: dict[tuple, Mapping[str, Any]] = field(default_factory=dict)

    def choice(self, kernel: str, where: tuple) -> Mapping[str, Any]:
        """As the function `choice`, for this GPU."""
        if kernel not in self.choices:
            return _NOTHING
        key = (kernel, where)
        choice = self.remembered.get(key)
        if choice is None:
            if len(self.remembered) >= _REMEMBERED:  # prompts are of any length
                self.remembered.clear()
            choice = self.remembered[key] = self._nearest(kernel, where)
        return choice

    def _nearest(self, kernel: str, where: tuple) -> Mapping[str, Any]:
        exact, near = KERNELS[kernel].exact, KERNELS[kernel].near
        call = dict(zip(exact + near, map(plain, where), strict=True))

        def distance(measured: Mapping[str, Any]) -> float:
            return sum(abs(math.log2(max(call[n], 1) / measured[n])) for n in near)

        candidates = [
            (distance(measured), choice)
            for measured, choice in self.choices[kernel]
            if all(measured[name] == call[name] for name in exact)
        ]
        return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else _NOTHING

    @property
    def summary(self) -> str:
        """For the log: whether the kernels are tuned, and if not how to tune them."""
        if self.path is None:
            return f"not tuned for {self.device}; run `{COMMAND}`"
        return f"tuned for {self.device} by {self.path}"


def choice(kernel: str, device: torch.device, *where: Any) -> Mapping[str, Any]:
    """The knobs, by name, that were measured to be best for a call; empty if none were.

    Args:
        kernel: a name of KERNELS.
        where: the call's values of the kernel's `exact`, then of its `near`: sizes or a dtype.

    Raises:
        TunedError: as `load`.
    """
    return load(device).choice(kernel, where)


@lru_cache
def load(device: torch.device) -> Tuned:
    """The choices for a device; read once per process.

    Raises:
        TunedError: the file, or the folder that FOLDER_VARIABLE names, cannot be used.
    """
    name = device_name(device)
    path = path_of(name)
    if not path.exists():
        return Tuned(name, None, {})
    return Tuned(name, path, read(path, name))


def device_name(device: torch.device) -> str:
    """The GPU's name as CUDA gives it; for other devices, and without a GPU, the device type."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def path_of(name: str, folder: Path | None = None) -> Path:
    """Path of the file of a GPU model, whether it exists or not.

    Args:
        name: as of `device_name`.
        folder: None: the one that FOLDER_VARIABLE names, else `kernels/tuned`.

    Raises:
        TunedError: the folder that FOLDER_VARIABLE names does not exist.
    """
    setting = os.environ.get(FOLDER_VARIABLE)
    if folder is None and setting and not Path(setting).is_dir():
        raise TunedError(f"{FOLDER_VARIABLE}: there is no folder {setting}; make it or unset this.")
    folder = folder or Path(setting or SHIPPED)
    return folder / f"{name.replace(' ', '_').replace('/', '_')}.json"


def read(path: Path, name: str) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The choices of a file by kernel, every one checked.

    Args:
        name: expected name of the GPU.

    Raises:
        TunedError: names the file, the place in it, and what was expected.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["device"] != name:
            raise _Wrong(f"device: expected {name}, got {facts['device']}")
        choices: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for run_index, run in enumerate(facts["runs"]):
            for choice_index, record in enumerate(run["choices"]):
                place = f"runs[{run_index}].choices[{choice_index}]"
                _add(choices, record["kernel"], record["where"], record["choice"], place)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, _Wrong) as error:
        raise TunedError(_sentence(path, str(error))) from None
    except (KeyError, TypeError, AttributeError) as error:
        defect = f"not as `--write` writes it ({type(error).__name__}: {error})"
        raise TunedError(_sentence(path, defect)) from None
    return choices


class _Wrong(Exception):
    """A defect of a file, and its place."""


def _sentence(path: Path, defect: str) -> str:
    return f"{path}: {defect}; correct or remove the file, or measure anew: `{COMMAND}`."


def _add(choices: dict, kernel: str, where: dict, values: dict, place: str) -> None:
    """Check a choice and add it to `choices`."""
    if kernel not in KERNELS:
        raise _Wrong(f"{place}.kernel: expected one of {', '.join(KERNELS)}, got {kernel}")
    definition = KERNELS[kernel]
    if where.keys() != {*definition.exact, *definition.near}:
        names = ", ".join(definition.exact + definition.near)
        raise _Wrong(f"{place}.where: expected {names}, got {', '.join(where)}")
    for name, value in where.items():
        if name == "dtype" and not isinstance(getattr(torch, value, None), torch.dtype):
            raise _Wrong(f"{place}.where.dtype: torch has no dtype {value!r}")
        if name != "dtype" and (type(value) is not int or value < 1):
            raise _Wrong(f"{place}.where.{name}: expected a whole number from 1, got {value!r}")
    for name, value in values.items():
        if name not in definition.knobs:
            raise _Wrong(f"{place}.choice: expected {', '.join(definition.knobs)}, got {name}")
        if type(value) not in (int, str) or value not in definition.knobs[name]:
            raise _Wrong(f"{place}.choice.{name}: {value!r} is not possible")
    if any(where == earlier_where for earlier_where, _ in choices.get(kernel, ())):
        raise _Wrong(f"{place}: a choice of {kernel} for the same sizes stands before")
    choices.setdefault(kernel, []).append((where, values))


def plain(value: Any) -> Any:
    """A value as a file has it: a dtype by its name, any other unchanged."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
