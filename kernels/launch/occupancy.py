"""How many programs of a kernel run at once on a streaming multiprocessor: its occupancy.

The rules are CUDA's, for compute capabilities from 8.0 on ("Technical Specifications per Compute
Capability" of the CUDA C++ Programming Guide): registers are allocated per warp in units of 256,
from the quarter of the multiprocessor in which the warp runs; shared memory per program in units of
128 bytes, with 1 KiB more per program for the system.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_QUARTERS, _WARP = 4, 32
_REGISTERS_AT_ONCE, _BYTES_AT_ONCE, _OF_SYSTEM = 256, 128, 1 << 10
# Most programs at once by compute capability; 32 for all others.
_PROGRAMS = {(8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}


@dataclass(frozen=True)
class Processor:
    """Resources of a streaming multiprocessor.

    Attributes:
        registers: number of 32-bit registers.
        shared: bytes of shared memory.
        warps, programs: most that run at once.
    """

    registers: int
    shared: int
    warps: int
    programs: int

    def programs_at_once(self, registers: int, shared: int, warps: int) -> int:
        """Number of programs of a kernel that run on it at once.

        Args:
            registers: registers of a thread.
            shared: bytes of shared memory of a program.
            warps: warps of a program.
        """
        warp_registers = _up(max(registers, 1) * _WARP, _REGISTERS_AT_ONCE)
        warp_limit = self.registers // _QUARTERS // warp_registers * _QUARTERS
        shared_limit = self.shared // _up(shared + _OF_SYSTEM, _BYTES_AT_ONCE)
        return min(warp_limit // warps, self.warps // warps, shared_limit, self.programs)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, whose matrix products take whole warp groups."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9


@lru_cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU; 1 without one."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@lru_cache
def processor(device: torch.device) -> Processor:
    """Resources of a GPU's multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return Processor(
        properties.regs_per_multiprocessor,  # type: ignore[attr-defined]
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor // _WARP,
        _PROGRAMS.get((properties.major, properties.minor), 32),
    )


def programs_at_once(device: torch.device, compiled: Any) -> int | None:
    """Number of programs of a compiled kernel that run at once on a multiprocessor of the GPU.

    Args:
        compiled: what Triton returned from a launch.

    Returns:
        None where no code was loaded, as in Triton's interpreter.
    """
    registers = getattr(compiled, "n_regs", None)
    if registers is None:
        return None
    metadata = compiled.metadata
    return processor(device).programs_at_once(registers, metadata.shared, metadata.num_warps)
