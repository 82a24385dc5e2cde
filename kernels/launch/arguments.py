"""What the checks of kernels' arguments have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def check_tensors(
    given: Iterable[tuple[str, torch.Tensor | None, torch.dtype, Sequence[int]]],
) -> None:
    """Refuses tensors of another dtype or shape than expected; reads none.

    Args:
        given: name, tensor or None where none was given, dtype and shape of each.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    for name, x, dtype, shape in given:
        if x is not None and (x.dtype != dtype or tuple(x.shape) != tuple(shape)):
            raise ValueError(
                f"{name}: expected {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}"
            )
