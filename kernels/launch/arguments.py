"""The check of dtypes and shapes that all kernels use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def check_tensors(
    given: Iterable[tuple[str, torch.Tensor | None, torch.dtype, Sequence[int]]],
) -> None:
    """Refuse tensors of another dtype or shape than expected; read none.

    Args:
        given: name, tensor (None: not given, not checked), expected dtype and expected shape.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    for name, x, dtype, shape in given:
        if x is not None and (x.dtype != dtype or tuple(x.shape) != tuple(shape)):
            raise ValueError(
                f"{name}: expected {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}"
            )
