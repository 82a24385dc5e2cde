"""The rotary embedding of the served model, which moves cached keys to later positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rotate import rotate
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused


@dataclass(frozen=True)
class Rotary:
    """Rotation of keys by position.

    Attributes:
        inv_freq: [R / 2] float64, radians per position of each pair of dimensions.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + R / 2).
        placed: `inv_freq` on each device that has needed it for `turn`.
    """

    inv_freq: torch.Tensor
    interleaved: bool
    placed: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def move(
        self, k: torch.Tensor, shift: torch.Tensor, rotate: Callable[..., torch.Tensor] = rotate
    ) -> torch.Tensor:
        """Keys [G, M, D] as if they stood `shift` [G, M] int64 positions later, dtype of k.

        Args:
            rotate: the kernel `rotate`, of torch or Triton.
        """
        inv_freq = self.inv_freq.to(k.device, non_blocking=True)
        return rotate(k, shift, inv_freq, interleaved=self.interleaved)

    def turn(self, turn: Callable[..., None], where: Requests, *arguments: Any) -> None:
        """Turn keys in place by the kernel `turn`; `arguments` are its further ones."""
        key = where.storage.device
        if key not in self.placed:
            self.placed[key] = self.inv_freq.to(key)
        turn(where, *arguments, self.placed[key], interleaved=self.interleaved)


def of_model(model: Any) -> Rotary:
    """The rotation of a loaded model's keys.

    Raises:
        Refused: it differs between layers, or does not depend on position alone, or there is none.
    """
    embeddings = compat.rotary_embeddings(model)
    if not embeddings or None in embeddings:
        raise _refused(f"{type(model).__name__} has layers whose keys SGLang does not turn last")
    rotations = [_of_embedding(embedding) for embedding in dict.fromkeys(embeddings)]
    for rotation in rotations[1:]:
        same = torch.equal(rotation.inv_freq, rotations[0].inv_freq)
        if not same or rotation.interleaved != rotations[0].interleaved:
            raise _refused("the model's layers turn their keys differently")
    return rotations[0]


def _of_embedding(embedding: Any) -> Rotary:
    inv_freq = compat.frequencies(embedding)
    if inv_freq is None:
        raise _refused(f"{type(embedding).__name__} does not turn keys by position alone")
    return Rotary(inv_freq.double().cpu(), not embedding.is_neox_style)


def _refused(why: str) -> Refused:
    return Refused(
        f"--kv-policy: a policy with `positions: slots` cannot be served with this model: {why}."
    )
