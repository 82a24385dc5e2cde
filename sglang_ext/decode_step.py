"""Compressed requests in one decode forward: which rows are read from private pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.backend import attend
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.request import state_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


class DecodeStep:
    """The rows of one decode forward.

    Attributes:
        compressed, plain: [B'] int64 rows that read compressed entries, and the others.
    """

    def __init__(self, runtime: Runtime, batch: Any) -> None:
        self._arena = runtime.arena
        self._lists: Lists | None = None
        states = [state_of(request) for request in batch.reqs]
        private = {i: s.private for i, s in enumerate(states) if s is not None and s.private}
        if not private:
            return
        table = batch.req_to_token_pool.req_to_token
        lengths = batch.seq_lens_cpu.tolist()
        # There may be more rows than requests: beams of one request follow the others.
        others = [i for i in range(len(lengths)) if i not in private]
        self.compressed = torch.tensor(list(private), device=table.device)
        self.plain = torch.tensor(others, dtype=torch.int64, device=table.device)
        self._lists = Lists(
            runtime.arena, list(private.values()), [lengths[i] for i in private], table
        )

    @property
    def reads(self) -> bool:
        """Whether any row reads compressed entries."""
        return self._lists is not None

    def attend(
        self, layer: Any, heads: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Attention of the compressed rows: [B', H, D] of the queries [B, H, D]."""
        queries = heads[self.compressed].unsqueeze(1)
        return attend(self._arena, self._lists, layer, queries, read)[:, 0]
