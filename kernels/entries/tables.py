"""Where the compressed entries of all requests lie, as tensors on the device.

A decode step reads only these, so that a captured CUDA graph stays valid when requests come and go:
the tensors keep their addresses, and rows are rewritten when requests are admitted, fold or end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tables:
    """Private pages and tails by row of SGLang's request pool; row 0 is for padding.

    Attributes:
        counts: int32 [R, L, G], entries in the private pages of each (layer, KV head); all 0 if the
            request has no private pages.
        first_page: int32 [R, L, G], the list's first page among the request's pages.
        tail_start: int32 [R], position from which tokens lie in ordinary slots; 0 if the request
            has no private pages.
        slots_start: int32 [R], index in `slots` of the row's first private slot.
        slots: int32 [C], the private slots of all requests.
        paired: int32 [R, L]; 0: the layer's lists hold its own entries; 1: they are shared with the
            layer above, 2: with the layer below (see `layer_pairs`), and `counts` are numbers of
            tokens. [0, L] where no request may store layers in pairs.
    """

    counts: torch.Tensor
    first_page: torch.Tensor
    tail_start: torch.Tensor
    slots_start: torch.Tensor
    slots: torch.Tensor
    paired: torch.Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in vars(self).values())

    @classmethod
    def empty(
        cls,
        rows: int,
        layers: int,
        kv_heads: int,
        slots: int,
        device: torch.device | str,
        *,
        pairs: bool = False,
    ) -> Tables:
        """Tables in which no row has private pages.

        Args:
            rows: R, rows of SGLang's request pool, its padding row included.
            layers, kv_heads: L and G.
            slots: C, private slots that all requests together may hold.
            pairs: whether a request may store layers in pairs.
        """

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        lists, paired = (rows, layers, kv_heads), zeros(rows if pairs else 0, layers)
        return cls(zeros(*lists), zeros(*lists), zeros(rows), zeros(rows), zeros(slots), paired)
