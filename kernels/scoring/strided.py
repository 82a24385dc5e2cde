"""Layouts, as kernels take them, of float64 values of any strides and of masks of the present."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Dim = tuple[int, int, int]  # size, stride of the values, stride of the mask


def check(x: torch.Tensor, there: torch.Tensor | None) -> None:
    """Refuse wrong shapes and dtypes; read no values.

    Args:
        x: float64.
        there: bool that broadcasts to x, which values are present; None: all.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"x: expected float64, got {x.dtype}")
    if there is None:
        return
    sizes = zip(reversed(there.shape), reversed(x.shape), strict=False)
    fits = there.dim() <= x.dim() and all(own in (1, size) for own, size in sizes)
    if there.dtype != torch.bool or not fits:
        raise ValueError(
            f"there: expected bool that broadcasts to {list(x.shape)}, got {there.dtype} "
            f"{list(there.shape)}"
        )


def laid_out(
    x: torch.Tensor, there: torch.Tensor | None, *sides: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Describe x and `there` to a kernel: each group of dimensions, `sides`, as three dimensions.

    Args:
        x, there: as of `check`.
        sides: groups of dimensions of x, each dimension in one of them; innermost last.

    Returns:
        x and, as uint8, `there`, both copied only if three dimensions per group cannot describe
        them; and 8 numbers for each group: its two inner sizes, three strides of x and three of
        `there`, outermost first.
    """
    there = None if there is None else there.expand(x.shape)
    found = [_dims(x, there, dims) for dims in sides]
    if any(len(dims) > 3 for dims in found):
        order = [dim for dims in sides for dim in dims]
        x = x.permute(order).contiguous()
        there = None if there is None else there.permute(order).contiguous()
        starts = [sum(map(len, sides[:i])) for i in range(len(sides))]
        found = [
            _dims(x, there, range(start, start + len(dims)))
            for start, dims in zip(starts, sides, strict=True)
        ]
    where = []
    for dims in found:
        full = [(1, 0, 0)] * (3 - len(dims)) + dims
        where += [full[1][0], full[2][0], *(dim[1] for dim in full), *(dim[2] for dim in full)]
    return x, None if there is None else there.view(torch.uint8), where


def _dims(x: torch.Tensor, there: torch.Tensor | None, dims: Sequence[int]) -> list[Dim]:
    """Join neighbouring dimensions where the strides of both x and `there` allow it."""
    made: list[Dim] = []
    for dim in dims:
        size, own = x.shape[dim], x.stride(dim)
        other = 0 if there is None else there.stride(dim)
        if size == 1:
            continue
        if made and made[-1][1] == size * own and made[-1][2] == size * other:
            made[-1] = (made[-1][0] * size, own, other)
        else:
            made.append((size, own, other))
    return made
