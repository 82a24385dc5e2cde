"""How much memory a request may need while it decodes under a policy that goes on.

SGLang admits requests as if all their output stayed in memory. If a policy bounds the size of the
cache, that is far too much, and long generations would run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import Size
from kvpolicy.dsl.bind.steady import is_steady
from kvpolicy.sglang_ext.memory.arena import Arena


class Growth:
    """Slots that the requests of a policy may hold.

    Args:
        kept: bounds on what the prefill keeps of a prompt of N tokens.
        page_size: slots that SGLang's allocator hands out at once.
    """

    def __init__(
        self, bound: Bound, kept: Callable[[int], Size], arena: Arena, page_size: int
    ) -> None:
        self._bound, self._kept, self._arena = bound, kept, arena
        # The tail until the next fold, and partly used pages, of the tail and of private slots.
        self._slack = bound.fold_interval + 2 * page_size + arena.kv_heads
        self._steady = is_steady(bound)
        self.most = lru_cache(maxsize=4096)(self._most)

    def _most(self, prompt: int, output: int) -> int | None:
        """Most slots that a request holds beside a prompt in the radix cache.

        Args:
            output: most tokens that it generates.

        Returns:
            None if that grows with the output, as in stock SGLang.
        """
        if not self._steady:
            return None
        slots = (self._most_of(layers, prompt, output) for layers in self._arena.spans)
        return max(slots) + self._slack

    def _most_of(self, layers: range, prompt: int, output: int) -> int:
        """Most slots that the lists of one stage's layers take."""
        entries = self._kept(prompt).of(layers)
        if entries >= len(layers) * self._bound.shape.kv_heads * prompt:
            # Nothing leaves the prompt yet: the cache may grow as large as that of a longer prompt.
            entries = self._kept(prompt + output).of(layers)
        return slots_of_rank(entries, layers, self._bound, self._arena, prompt + output)


def slots_of_rank(entries: int, layers: range, bound: Bound, arena: Arena, tokens: int) -> int:
    """Slots that one rank reserves for a request's entries in the layers of a stage.

    For an even share of them. If KV heads compete, a rank may come to hold more; it then takes
    these slots when that is known, or the request is served in full. If tokens leave the prefill,
    the request cannot be served in full: slots are reserved for the most that one rank may hold.

    Args:
        entries: of all KV heads.
        tokens: number of the request's tokens.
    """
    total = bound.shape.kv_heads
    share = -(-entries * arena.kv_heads // total)
    if arena.kv_heads < total and bound.propagates:
        share = min(entries, len(layers) * arena.kv_heads * tokens)
    return arena.most_slots(share, len(layers))
