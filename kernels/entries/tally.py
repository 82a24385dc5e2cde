"""Numbers of entries that each list holds and keeps, as one table for the host."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_tensors

BEFORE = 3  # columns for a whole layer, before those for each KV head


def tally(
    kept: torch.Tensor,
    holds: torch.Tensor,
    finite: torch.Tensor | None,
    expected: torch.Tensor | None,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the entries of S layers with G KV heads each.

    Args:
        kept, holds: bool [S * G, M], entries that each list keeps and holds; `kept` counts only
            where `holds` is True.
        finite: bool [S * G], whether a list was chosen by finite numbers; None: all were.
        expected: int64 [S, 3 + 2 * G], expected numbers; only those of kept entries are compared.
            None: not known.
        kv_heads: G.

    Returns:
        int64 [S, 3 + 2 * G] and bool [S]. The columns are: number of positions at which some KV
        head keeps an entry; whether all KV heads keep the same; whether all were chosen by finite
        numbers; entries held, per KV head; entries kept, per KV head. The bool is whether all
        lists of a layer are finite and keep as many entries as expected.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(kept, holds, finite, expected, kv_heads)
    layers = len(kept) // kv_heads
    stays, held = (x.view(layers, kv_heads, x.shape[1]) for x in (kept & holds, holds))
    any_kept = stays.any(1)
    heads_agree = (stays == any_kept[:, None]).all(2).all(1)
    good = torch.ones(layers, dtype=torch.bool, device=kept.device)
    if finite is not None:
        good = finite.view(layers, kv_heads).all(1)
    layer_columns = torch.stack([any_kept.sum(1), heads_agree.long(), good.long()], 1)
    numbers = torch.cat([layer_columns, held.sum(2), stays.sum(2)], 1)
    if expected is not None:
        good = good & (numbers == expected)[:, BEFORE + kv_heads :].all(1)
    return numbers, good


def check(
    kept: torch.Tensor,
    holds: torch.Tensor,
    finite: torch.Tensor | None,
    expected: torch.Tensor | None,
    kv_heads: int,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    if kept.dim() != 2 or len(kept) % kv_heads:
        raise ValueError(f"kept: expected bool [S * {kv_heads}, M], got {list(kept.shape)}")
    lists, layers = len(kept), len(kept) // kv_heads
    arguments = (
        ("kept", kept, torch.bool, kept.shape),
        ("holds", holds, torch.bool, kept.shape),
        ("finite", finite, torch.bool, (lists,)),
        ("expected", expected, torch.int64, (layers, BEFORE + 2 * kv_heads)),
    )
    check_tensors(arguments)
