"""The checks of dtypes and shapes that all kernels use.

What is refused raises a ValueError, which names the argument, what was expected and what was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def check_tensors(
    given: Iterable[tuple[str, torch.Tensor | None, torch.dtype, Sequence[int]]],
) -> None:
    """Refuse tensors of another dtype or shape than expected; read none.

    Args:
        given: name, tensor (None: not given, not checked), expected dtype and expected shape.
    """
    for name, x, dtype, shape in given:
        if x is not None and (x.dtype != dtype or tuple(x.shape) != tuple(shape)):
            raise refused(name, x, f"{dtype} {list(shape)}")


def check_axes(name: str, x: torch.Tensor | None, dtype: torch.dtype, axes: str) -> None:
    """Refuse a tensor (None: not given) of another dtype or number of dimensions; read no values.

    Args:
        axes: names of the dimensions, such as `[R, M]`.
    """
    if x is not None and (x.dtype != dtype or x.dim() != axes.count(",") + 1):
        raise refused(name, x, f"{str(dtype).removeprefix('torch.')} {axes}")


def refused(name: str, x: torch.Tensor, expected: str) -> ValueError:
    """The error about a tensor of another dtype or shape than expected."""
    return ValueError(f"{name}: expected {expected}, got {x.dtype} {list(x.shape)}")
