"""Numbers of a device that the host reads later than it asks for them."""

from __future__ import annotations

import numpy as np
import torch


class Arriving:
    """Numbers of a device on their way to the host.

    Args:
        numbers: on any device; they are not written to any more.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._event = numbers, None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """The numbers; the host waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
