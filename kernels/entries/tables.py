"""Where the compressed entries of all requests lie, as tensors on the device.

A decode step reads only these, so that a captured CUDA graph stays right when requests come and go:
the tensors keep their addresses and whoever admits, folds or frees a request writes its row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tables:
    """Private pages and tails by row of SGLang's request pool; row 0 is for padding.

    Attributes:
        counts: int32 [R, L, G] entries in the private pages of each (layer, KV head); 0 in all of
            them where a request has none.
        first_page: int32 [R, L, G]; the list's first page among those of the request.
        tail_start: int32 [R] position from which tokens lie in ordinary slots; 0 where there are no
            private pages.
        slots_start: int32 [R], where the row's private slots begin in `slots`.
        slots: int32 [C], the private slots of all requests.
        paired: int32 [R, L]; 0: the layer's lists hold its entries. 1: they are those of a pair in
            which it is the lower layer, 2: the upper one (see `pairs`); `counts` are then the N
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
        """Memory of all of them."""
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
        """Tables that say of every row that it has no private pages.

        Args:
            rows: R, of SGLang's request pool with its padding row.
            slots: C, private slots that all requests together may hold.
            pairs: whether any may store layers in pairs.
        """

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        lists, paired = (rows, layers, kv_heads), zeros(rows if pairs else 0, layers)
        return cls(zeros(*lists), zeros(*lists), zeros(rows), zeros(rows), zeros(slots), paired)
