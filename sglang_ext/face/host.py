"""Copies of numbers between a device and the host, with at most one wait per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the host: int64, of the same shapes, in one transfer.

    The host waits until the device has come this far.

    Args:
        tensors: whole numbers or truth values, all on one device.
    """
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_device(
    values: Sequence[Any] | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Numbers of the host, or lists of them, on a device; the host does not wait for the copy."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
