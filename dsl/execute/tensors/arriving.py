"""Numbers of a device that the host requests now and reads later."""

from __future__ import annotations

import numpy as np
import torch


class Arriving:
    """Numbers of a device on their way to the host.

    Args:
        numbers: on any device; must not be written to afterwards.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._event = numbers, None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """The numbers; the host waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
