"""Which kernels compute in this server: Triton's, or the torch references that define them.

The reader of compressed entries in decode steps is chosen in attention/readers.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from kvpolicy.dsl.execute.tensors.kernels import Kernels
from kvpolicy.kernels.launch import tuned
from kvpolicy.sglang_ext.face import options
from kvpolicy.sglang_ext.face.errors import Refused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelsInUse:
    """One implementation of everything that moves entries, and of what policies compute.

    Attributes:
        name: `torch` or `triton`.
        table: functions that policies' programs call, see `dsl/execute/tensors/kernels.py`.
        compact_layers, place, compact_in_place, gather, rotate, turn, entry_ids, take_rows,
            put_rows: as in `kernels`.
    """

    name: str
    table: Kernels
    compact_layers: Callable[..., None]
    place: Callable[..., Any]
    compact_in_place: Callable[..., torch.Tensor]
    gather: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotate: Callable[..., torch.Tensor]
    turn: Callable[..., None]
    entry_ids: Callable[..., torch.Tensor]
    take_rows: Callable[..., list[torch.Tensor]]
    put_rows: Callable[..., None]

    @property
    def read_the_pool(self) -> bool:
        """Whether programs take keys and values where they lie, as `Slots`."""
        return self.name == "triton"


def in_use(device: torch.device) -> KernelsInUse:
    """The kernels of a server whose pool is on a device.

    Raises:
        Refused: the operator asked for what the device cannot compute.
    """
    return chosen_for(options.kernels(), device.type)


@cache
def chosen_for(asked: str, device: str) -> KernelsInUse:
    """As `in_use`, from one of `options.KERNELS` and a device type; the choice is logged once."""
    check(asked, device)
    name = asked
    if asked == "auto":
        name = "triton" if device == "cuda" else "torch"
    note = _tuned(device)
    logger.info("KV-cache policy kernels: %s.", f"{name}, {note}" if name == "triton" else name)
    return _triton() if name == "triton" else _torch()


def _tuned(device: str) -> str:
    """What the log says of measured choices for this GPU, which attention uses too.

    Raises:
        Refused: they exist and cannot be used.
    """
    try:
        return tuned.load(torch.device(device)).summary
    except tuned.TunedError as error:
        raise Refused(f"--kv-policy: {error}") from None


def check(asked: str, device: str) -> None:
    """Refuse Triton where it cannot run.

    Args:
        asked: one of `options.KERNELS`.
        device: device type, such as `cuda`.

    Raises:
        Refused: says what to do.
    """
    if asked != "triton" or device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return
    raise Refused(
        f"--kv-policy-kernels triton: there is no CUDA device ({device}), and without one Triton "
        f"runs only in its interpreter; choose torch, or set TRITON_INTERPRET=1 for tests."
    )


def _torch() -> KernelsInUse:
    from kvpolicy.kernels.attention.entry_ids import entry_ids
    from kvpolicy.kernels.entries.compact_in_place import compact_in_place
    from kvpolicy.kernels.entries.compact_layers import compact_layers
    from kvpolicy.kernels.entries.gather import gather
    from kvpolicy.kernels.entries.place import place
    from kvpolicy.kernels.entries.rotate import rotate
    from kvpolicy.kernels.entries.rows import put_rows, take_rows
    from kvpolicy.kernels.entries.turn import turn
    from kvpolicy.kernels.table import REFERENCE

    return KernelsInUse(
        "torch", REFERENCE, compact_layers, place, compact_in_place, gather, rotate, turn,
        entry_ids, take_rows, put_rows,
    )  # fmt: skip


def _triton() -> KernelsInUse:
    # Imported late: Triton decides when kernels are declared whether they are interpreted, and need
    # not be installed where torch computes.
    from kvpolicy.kernels.attention.entry_ids_triton import entry_ids
    from kvpolicy.kernels.entries.compact_in_place_triton import compact_in_place
    from kvpolicy.kernels.entries.compact_layers_triton import compact_layers
    from kvpolicy.kernels.entries.gather_triton import gather
    from kvpolicy.kernels.entries.place_triton import place
    from kvpolicy.kernels.entries.rotate_triton import rotate
    from kvpolicy.kernels.entries.rows_triton import put_rows, take_rows
    from kvpolicy.kernels.entries.turn_triton import turn
    from kvpolicy.kernels.table_triton import TRITON

    return KernelsInUse(
        "triton", TRITON, compact_layers, place, compact_in_place, gather, rotate, turn, entry_ids,
        take_rows, put_rows,
    )  # fmt: skip
