"""What is copied of layers that wait to be scored together.

Dimensions: l layers, H query heads, T queries, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class WaitingLayers:
    """Queries of layers that wait to be scored together.

    Attributes:
        layers: the layers so far.
        tokens: n tokens reach each of them.
        most: number of layers that may come, these included.
        copies: name -> [most, H, T, *], queries [D] and log-sum-exp.
        attended: whether all layers so far came with their log-sum-exp.
    """

    layers: range
    tokens: int
    most: int
    copies: dict[str, torch.Tensor]
    attended: bool = True

    def add(self, q: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Adds the next layer; [H, T, D] and [H, T]."""
        self.attended &= lse is not None
        for name, x in (("query", q), ("lse", lse)):
            if x is not None:
                if name not in self.copies:
                    self.copies[name] = x.new_empty(self.most, *x.shape)
                self.copies[name][len(self.layers)] = x
        self.layers = range(self.layers.start, self.layers.stop + 1)

    @property
    def queries(self) -> torch.Tensor:
        """[l, H, T, D] of the layers so far."""
        return self.copies["query"][: len(self.layers)]

    def of_all_heads(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [l * H, T, D], and their log-sum-exp [l * H, T]; None: a layer had none."""
        lse = self.copies["lse"][: len(self.layers)].flatten(0, 1) if self.attended else None
        return self.queries.flatten(0, 1), lse
