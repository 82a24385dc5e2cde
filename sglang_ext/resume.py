"""Retracted requests: their earlier output is computed again on their compressed copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.backend import attend
from kvpolicy.sglang_ext.frame import Frame
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.request import iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


@dataclass
class _Resumed:
    """A request whose rows in an extend forward are output."""

    request: Any
    lists: Lists


class ResumeStep:
    """The resumed requests of one extend forward."""

    def __init__(self, runtime: Runtime, batch: Any, frame: Frame) -> None:
        self._arena, self._frame = runtime.arena, frame
        self._resumed: list[_Resumed] = []
        table = batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            if state.private is not None and state.private.ready and prefix >= state.prompt:
                length = prefix + rows.stop - rows.start
                lists = Lists(self._arena, [state.private], [length], table)
                self._resumed.append(_Resumed(request, lists))

    def overwrite(
        self, layer: Any, heads: torch.Tensor, out: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> None:
        """Replace the attention of resumed rows, which the stock backend read from freed slots.

        Args:
            heads, out: [rows, H, D] queries and attention of the forward; out is written in place.
        """
        for each in self._resumed:
            rows = self._frame.rows(each.request)
            if rows is not None:
                queries = heads[rows].unsqueeze(0)
                out[rows] = attend(self._arena, each.lists, layer, queries, read)[0]
