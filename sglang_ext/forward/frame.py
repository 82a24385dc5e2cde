"""Whose rows a forward holds at the layer that it has reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Frame:
    """Rows of every request of an extend forward at the current layer.

    At first these are the rows that SGLang laid out. When tokens leave the computation, the rows of
    their request are fewer and those of the following requests move.
    """

    def __init__(self, batch: Any) -> None:
        self._rows: dict[int, slice] = {}
        end = 0
        for request, count in zip(batch.reqs, batch.extend_lens, strict=True):
            start, end = end, end + count
            self._rows[id(request)] = slice(start, end)

    def rows(self, request: Any) -> slice | None:
        """Rows of a request; None where it has none at this layer."""
        return self._rows.get(id(request))

    def there(self, request: Any) -> slice:
        """Rows of a request that has some.

        Raises:
            RuntimeError: it has none at this layer.
        """
        rows = self.rows(request)
        if rows is None:
            raise RuntimeError(f"request {request.rid} has no rows at this layer")
        return rows

    def replace(self, rows: Mapping[int, slice]) -> Mapping[int, slice]:
        """Set the rows of every request that has some, by `id`; returns the earlier ones."""
        earlier, self._rows = self._rows, dict(rows)
        return earlier
