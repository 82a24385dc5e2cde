"""How many entries of each list there are and stay, as one table of numbers for the host."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_tensors

BEFORE = 3  # columns of a layer's numbers before those of its KV heads


def tally(
    kept: torch.Tensor,
    there: torch.Tensor,
    finite: torch.Tensor | None,
    expected: torch.Tensor | None,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of S layers with G KV heads each.

    Args:
        kept, there: bool [S * G, M], what stays of what there is.
        finite: bool [S * G], whether a list was chosen by finite numbers; None: all were.
        expected: int64 [S, 3 + 2 * G], numbers as they should be; None: nobody knows.
        group: G.

    Returns:
        int64 [S, 3 + 2 * G]: at how many positions of a layer some KV head keeps an entry, whether
        all of them keep the same, whether all were chosen by finite numbers, how many entries
        there are of each, how many each keeps. And bool [S], whether all of a layer is finite, and
        each KV head keeps what is expected.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(kept, there, finite, expected, group)
    layers = len(kept) // group
    stays, held = (x.view(layers, group, x.shape[1]) for x in (kept & there, there))
    some = stays.any(1)
    alike = (stays == some[:, None]).all(2).all(1)
    good = torch.ones(layers, dtype=torch.bool, device=kept.device)
    if finite is not None:
        good = finite.view(layers, group).all(1)
    first = torch.stack([some.sum(1), alike.long(), good.long()], 1)
    numbers = torch.cat([first, held.sum(2), stays.sum(2)], 1)
    if expected is not None:
        good = good & (numbers == expected)[:, BEFORE + group :].all(1)
    return numbers, good


def check(
    kept: torch.Tensor,
    there: torch.Tensor,
    finite: torch.Tensor | None,
    expected: torch.Tensor | None,
    group: int,
) -> None:
    """Refuses wrong shapes and dtypes; reads no tensor.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    if kept.dim() != 2 or len(kept) % group:
        raise ValueError(f"kept: expected bool [S * {group}, M], got {list(kept.shape)}")
    lists, layers = len(kept), len(kept) // group
    given = (
        ("kept", kept, torch.bool, kept.shape),
        ("there", there, torch.bool, kept.shape),
        ("finite", finite, torch.bool, (lists,)),
        ("expected", expected, torch.int64, (layers, BEFORE + 2 * group)),
    )
    check_tensors(given)
