"""Keys on their way to a stage, which leave in the order in which they set out.

Where requests of one arm take longer, its keys arrive later, and at any moment fewer of them have:
their share is off though none is lost. So a key counts only when what became of all keys before it
is known, whichever arm they are of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

PATIENCE = 600.0  # seconds after which a key of which nothing is known holds up no others


@dataclass(slots=True)
class _UnderWay:
    """A key: when it set out, and whether it has arrived; None while that is not known."""

    since: float
    arrived: bool | None = None


class WaitingLine:
    """The keys that are under way; as many as keys are given to it, each once."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, _UnderWay] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def set_out(self, key: int, now: float) -> None:
        """A request of a key sets out at a time in seconds."""
        if key not in self._keys:
            self._keys[key] = _UnderWay(now)

    def end(self, key: int, *, arrived: bool) -> None:
        """A request of a key has arrived, or never will."""
        waiting = self._keys.get(key)
        if waiting is not None:
            waiting.arrived = arrived or bool(waiting.arrived)

    def leaving(self, now: float) -> Iterator[int]:
        """The keys that have arrived, in order; they, and those that have not, leave the line."""
        while self._keys:
            key, waiting = next(iter(self._keys.items()))
            if waiting.arrived is None and now - waiting.since <= PATIENCE:
                return
            del self._keys[key]
            if waiting.arrived:
                yield key
