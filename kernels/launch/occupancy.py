"""How many programs of a kernel run at once on a streaming multiprocessor: its occupancy.

The rules are CUDA's, for compute capabilities from 8.0 on ("Technical Specifications per Compute
Capability" of the CUDA C++ Programming Guide): registers are handed out to warps, 256 at a time,
from the quarter of the processor in which a warp runs; shared memory to programs, 128 bytes at a
time, with 1 KiB more of each for the system.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_QUARTERS, _WARP = 4, 32
_REGISTERS_AT_ONCE, _BYTES_AT_ONCE, _OF_SYSTEM = 256, 128, 1 << 10
# Programs at once, whatever they need; 32 where nothing else is said.
_PROGRAMS = {(8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}


@dataclass(frozen=True)
class Processor:
    """What a streaming multiprocessor has for the programs on it.

    Attributes:
        registers: of 32 bits.
        shared: bytes of shared memory.
        warps, programs: at once, at most.
    """

    registers: int
    shared: int
    warps: int
    programs: int

    def holds(self, registers: int, shared: int, warps: int) -> int:
        """How many programs of a kernel it holds.

        Args:
            registers: of a thread; shared: bytes of a program; warps: of a program.
        """
        of_warp = _up(max(registers, 1) * _WARP, _REGISTERS_AT_ONCE)
        fit = self.registers // _QUARTERS // of_warp * _QUARTERS
        kept = self.shared // _up(shared + _OF_SYSTEM, _BYTES_AT_ONCE)
        return min(fit // warps, self.warps // warps, kept, self.programs)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of that generation, whose products take whole warp groups."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9


@lru_cache
def processor(device: torch.device) -> Processor:
    """That of a GPU."""
    found = torch.cuda.get_device_properties(device)
    return Processor(
        found.regs_per_multiprocessor,  # type: ignore[attr-defined]
        found.shared_memory_per_multiprocessor,
        found.max_threads_per_multi_processor // _WARP,
        _PROGRAMS.get((found.major, found.minor), 32),
    )


def held(device: torch.device, compiled: Any) -> int | None:
    """How many programs of a compiled kernel a processor of the GPU holds.

    Args:
        compiled: what Triton returns of a launch.

    Returns:
        None where it was not loaded, as in Triton's interpreter.
    """
    registers = getattr(compiled, "n_regs", None)
    if registers is None:
        return None
    made = compiled.metadata
    return processor(device).holds(registers, made.shared, made.num_warps)
