"""Which rows of an extend forward are which request's, at the current layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RowLayout:
    """Rows of every request of an extend forward at the current layer.

    At first these are the rows that SGLang laid out. When tokens leave the prefill, their request
    has fewer rows and those of the following requests move.
    """

    def __init__(self, batch: Any) -> None:
        self._rows: dict[int, slice] = {}
        end = 0
        for request, count in zip(batch.reqs, batch.extend_lens, strict=True):
            start, end = end, end + count
            self._rows[id(request)] = slice(start, end)

    def rows(self, request: Any) -> slice | None:
        """Rows of a request; None if it has none at this layer."""
        return self._rows.get(id(request))

    def required_rows(self, request: Any) -> slice:
        """Rows of a request that must have some.

        Raises:
            RuntimeError: it has none at this layer.
        """
        rows = self.rows(request)
        if rows is None:
            raise RuntimeError(f"request {request.rid} has no rows at this layer")
        return rows

    def replace(self, rows: Mapping[int, slice]) -> Mapping[int, slice]:
        """Set the rows of all requests that have any, by `id`; return the earlier ones."""
        earlier, self._rows = self._rows, dict(rows)
        return earlier
