"""A batch for decode attention, and the error allowed to its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.tables import Tables


@dataclass
class Case:
    """Requests in a pool where every entry outside their lists is NaN."""

    q: torch.Tensor  # [B, H, D]
    storage: torch.Tensor  # [L, 2, padded, G, D]
    tables: Tables
    rows: torch.Tensor
    lengths: torch.Tensor
    req_to_token: torch.Tensor
    layer: int
    lists: list  # [B][G] of float64 [2, n, D], on the CPU

    def run(self, attention, order=None, **options) -> torch.Tensor:
        order = range(len(self.rows)) if order is None else order
        order = torch.tensor(order, dtype=torch.int64, device=self.q.device)
        own = (self.rows[order], self.lengths[order])
        return attention(
            self.q[order],
            Requests(self.storage, self.tables, *own, self.req_to_token),
            layer=self.layer,
            scale=self.q.shape[2] ** -0.5,
            **options,
        )


def exact(given: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 and the error allowed in float32, both float64 [B, H, D].

    A weight has twice the error of a score, from its own and from the sum. Relative to
    A = sum of weight x |value|, the errors are:
      scores: (D + 4) roundings of float32 relative to scale x |q|.|k|, through exp, twice;
      sums over n entries, in tiles: 512 + n / 64 roundings of float32 in any implementation;
      weights and result rounded to the dtype: 2 eps.
    Weights in float16 also underflow: 2^-25 each against a largest one of 1.
    """
    heads, size = given.q.shape[1:]
    kv_heads = given.storage.shape[3]
    q, scale = given.q.double().cpu(), size**-0.5
    out, bound = torch.zeros_like(q), torch.zeros_like(q)
    rounding = torch.finfo(torch.float32).eps / 2
    eps = torch.finfo(given.q.dtype).eps
    for b, written in enumerate(given.lists):
        for head in range(heads):
            keys, values = written[head // (heads // kv_heads)]
            if not len(keys):
                continue
            weights = (keys @ q[b, head] * scale).softmax(0)
            out[b, head] = weights @ values
            score = (size + 4) * rounding * scale * (keys.abs() @ q[b, head].abs()).max()
            sums = (512 + len(keys) / 64) * rounding
            bound[b, head] = (2 * score + sums + 2 * eps) * (weights @ values.abs())
            if given.q.dtype == torch.float16:
                bound[b, head] += 2**-25 * weights.max() * values.abs().sum(0)
    return out, bound


def assert_exact(got: torch.Tensor, given: Case) -> None:
    wanted, bound = exact(given)
    error = (got.double().cpu() - wanted).abs()
    assert got.dtype == given.q.dtype
    assert bool((error <= bound).all()), f"{(error / bound).nan_to_num(9e9).max()} of the bound"
