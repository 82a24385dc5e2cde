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
    fits = present.dim() <= x.dim() and all(own in (1, size) for own, size in sizes)
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
    found = [_dims(x, present, dims) for dims in sides]
    if any(len(dims) > 3 for dims in found):
        order = [dim for dims in sides for dim in dims]
        x = x.permute(order).contiguous()
        present = None if present is None else present.permute(order).contiguous()
        starts = [sum(map(len, sides[:i])) for i in range(len(sides))]
        found = [
            _dims(x, present, range(start, start + len(dims)))
            for start, dims in zip(starts, sides, strict=True)
        ]
    where = []
    for dims in found:
        full = [(1, 0, 0)] * (3 - len(dims)) + dims
        where += [full[1][0], full[2][0], *(dim[1] for dim in full), *(dim[2] for dim in full)]
    return x, None if present is None else present.view(torch.uint8), where


def _dims(x: torch.Tensor, present: torch.Tensor | None, dims: Sequence[int]) -> list[Dim]:
    """Join neighbouring dimensions where the strides of both x and `present` allow it."""
    made: list[Dim] = []
    for dim in dims:
        size, own = x.shape[dim], x.stride(dim)
        other = 0 if present is None else present.stride(dim)
        if size == 1:
            continue
        if made and made[-1][1] == size * own and made[-1][2] == size * other:
            made[-1] = (made[-1][0] * size, own, other)
        else:
            made.append((size, own, other))
    return made
