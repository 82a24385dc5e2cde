"""GPUs for which costs are estimated.

Memory is what the driver reports. Rates per second are from NVIDIA's data sheets: bytes of memory,
dense bfloat16 operations of tensor cores, and float32 operations of other cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.dsl.bind.work import Work

# Shares of these rates that large kernels reach; assumed.
MATRIX_REACHED, MEMORY_REACHED = 0.65, 0.8


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: as on its data sheet.
        memory: bytes.
        bandwidth: bytes per second.
        matrix, vector: operations per second, of tensor cores and of other cores.
        gap: seconds from the end of a small kernel to the next one's start, in a CUDA graph;
            assumed.
    """

    name: str
    memory: int
    bandwidth: float
    matrix: float
    vector: float
    gap: float

    def seconds(self, work: Work) -> float:
        """Seconds for work that is large enough to fill the GPU."""
        computed = work.matrix / self.matrix + work.vector / self.vector
        moved = work.moved / self.bandwidth
        return max(computed / MATRIX_REACHED, moved / MEMORY_REACHED)


GPUS = {
    "h200": Gpu("H200 SXM", 143_771 << 20, 4.8e12, 989e12, 67e12, 1.5e-6),
    "h100": Gpu("H100 SXM", 81_559 << 20, 3.35e12, 989e12, 67e12, 1.5e-6),
    "a100": Gpu("A100 SXM 80 GB", 81_920 << 20, 2.039e12, 312e12, 19.5e12, 2e-6),
    "l40s": Gpu("L40S", 46_068 << 20, 864e9, 362e12, 91.6e12, 2e-6),
}
# The GPU for cost limits and shares of a prefill, unless another is named.
USUAL_GPU = GPUS["h200"]
