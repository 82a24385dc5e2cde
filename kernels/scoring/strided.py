"""Layouts, as kernels take them, of float64 values of any strides and of masks of the present."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Dim = tuple[int, int, int]  # size, stride of the values, stride of the mask


def check(x: torch.Tensor, present: torch.Tensor | None) -> None:
    """Refuse wrong shapes and dtypes; read no values.

    Args:
        x: float64.
        present: bool that broadcasts to x, which values are present; None: all.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"x: expected float64, got {x.dtype}")
    if present is None:
        return
    sizes = zip(reversed(present.shape), reversed(x.shape), strict=False)
    fits = present.dim() <= x.dim() and all(mask_size in (1, size) for mask_size, size in sizes)
    if present.dtype != torch.bool or not fits:
        raise ValueError(
            f"present: expected bool that broadcasts to {list(x.shape)}, got {present.dtype} "
            f"{list(present.shape)}"
        )


def laid_out(
    x: torch.Tensor, present: torch.Tensor | None, *sides: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Describe x and `present` to a kernel: each group of dimensions, `sides`, as three dimensions.

    Args:
        x, present: as of `check`.
        sides: groups of dimensions of x, each dimension in one of them; innermost last.

    Returns:
        x and, as uint8, `present`, both copied only if three dimensions per group cannot describe
        them; and 8 numbers for each group: its two inner sizes, three strides of x and three of
        `present`, outermost first.
    """
    present = None if present is None else present.expand(x.shape)
    groups = [_dims(x, present, dims) for dims in sides]
    if any(len(dims) > 3 for dims in groups):
        order = [dim for dims in sides for dim in dims]
        x = x.permute(order).contiguous()
        present = None if present is None else present.permute(order).contiguous()
        starts = [sum(map(len, sides[:i])) for i in range(len(sides))]
        groups = [
            _dims(x, present, range(start, start + len(dims)))
            for start, dims in zip(starts, sides, strict=True)
        ]
    layout = []
    for dims in groups:
        padded = [(1, 0, 0)] * (3 - len(dims)) + dims
        layout += [
            padded[1][0],
            padded[2][0],
            *(dim[1] for dim in padded),
            *(dim[2] for dim in padded),
        ]
    return x, None if present is None else present.view(torch.uint8), layout


def _dims(x: torch.Tensor, present: torch.Tensor | None, dims: Sequence[int]) -> list[Dim]:
    """Join neighbouring dimensions where the strides of both x and `present` allow it."""
    joined: list[Dim] = []
    for dim in dims:
        size, stride = x.shape[dim], x.stride(dim)
        mask_stride = 0 if present is None else present.stride(dim)
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride and joined[-1][2] == size * mask_stride:
            joined[-1] = (joined[-1][0] * size, stride, mask_stride)
        else:
            joined.append((size, stride, mask_stride))
    return joined
