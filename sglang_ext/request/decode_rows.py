"""What is known of the requests of a decode batch, kept from one forward to the next.

Between two folds a decode step needs to know of each request only whether its policy will read the
queries and whether entries leave. Both are known ahead, so arrays by row of the batch hold the
lengths in tokens at which they happen, and a step compares all of them with the requests' lengths
at once. They are found anew when a request joins, folds, fails or ends, not at every step.

Queries are kept here too, one tensor per step of all rows that are noted. As long as these rows
stay the same, steps gather here; each request takes its queries when its policy is taken through
the steps, or when the rows change.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.request.pending_steps import LONGEST
from kvpolicy.sglang_ext.request.queries import QueryBuffer
from kvpolicy.sglang_ext.request.request import Decoding, state_of

_NEVER = np.iinfo(np.int64).max  # a length that no request has


class DecodeRows:
    """B requests that decode, one in each row.

    Attributes:
        states: by row, the request's state; None where no policy applies to it.
        private: row -> the request's compressed copy.
    """

    def __init__(self, requests: Sequence[Any], queries: QueryBuffer, device: torch.device) -> None:
        """Each row needs `renew` and `hold` first.

        Args:
            device: of the queries.
        """
        self.requests = list(requests)
        self.states = [state_of(request) for request in self.requests]
        self.private: dict[int, Private] = {}
        self._queries, self._device = queries, device
        self._decoding: dict[int, Decoding] = {}
        number = len(self.requests)
        # Lengths of the request in tokens, this forward's included: at which entries leave next;
        # from which queries are noted; at the first step that its policy has not been taken
        # through. Then whether its policy takes the queries of all steps.
        self._leaves, self._noted_from = np.full((2, number), _NEVER)
        self._first_pending = np.zeros(number, np.int64)
        self._takes_all = np.zeros(number, bool)
        self._live_rows = np.zeros(0, np.int64)
        self._live_index: torch.Tensor | None = None
        self._live: list[torch.Tensor] = []
        self._lengths = self._first_pending

    def of(self, requests: Sequence[Any]) -> bool:
        """Whether these are the requests, in this order."""
        same = len(requests) == len(self.requests)
        return same and all(map(operator.is_, self.requests, requests))

    def renew(self, row: int, length: int) -> None:
        """Find anew at which lengths, from `length` on, a row notes queries and entries leave."""
        state = self.states[row]
        self._leaves[row] = self._noted_from[row] = _NEVER
        self._takes_all[row] = False
        self._decoding.pop(row, None)
        decoding = None if state is None else state.decoding
        if state is None or decoding is None:
            return
        memory, last_steps, first_step = (
            decoding.memory,
            decoding.pending.wanted,
            length - state.prompt,
        )
        # Where entries leave later than that, the row is renewed in time to note queries.
        step = state.next_leaving(first_step, LONGEST + (last_steps or 0))
        self._takes_all[row] = last_steps is None and not memory.not_finite
        self._first_pending[row] = state.prompt + memory.generated + 1
        if self._takes_all[row]:
            self._noted_from[row] = length
        elif last_steps and step is not None and not memory.not_finite:
            self._noted_from[row] = state.prompt + step - last_steps + 1
        self._leaves[row] = state.prompt + (first_step + LONGEST if step is None else step)
        self._decoding[row] = decoding

    def hold(self, row: int) -> None:
        """Take the compressed copy that a request has now, if it has one."""
        state = self.states[row]
        self.private.pop(row, None)
        if state is not None and state.private is not None:
            self.private[row] = state.private

    def noted(self, lengths: np.ndarray) -> np.ndarray:
        """Rows whose policies will read the queries of a step; `lengths` are those after it."""
        return np.flatnonzero(self._noted_from <= lengths)

    def leaving(self, lengths: np.ndarray) -> np.ndarray:
        """Rows whose entries may leave at a step; `lengths` as in `noted`."""
        return np.flatnonzero(self._leaves <= lengths)

    def must_advance(self, lengths: np.ndarray, most: int) -> np.ndarray:
        """Rows whose policies have to be taken through steps before more than `most` gather."""
        return np.flatnonzero(self._takes_all & (lengths - self._first_pending >= most - 1))

    def note(self, rows: np.ndarray, lengths: np.ndarray, batch: int) -> None:
        """Keep the queries of the step that is over.

        Args:
            rows: what `noted` returned for `lengths`.
            batch: rows of the forward, those of beams included.
        """
        if self._live_index is None or not np.array_equal(rows, self._live_rows):
            self.hand_over()
            index = to_device(rows.tolist(), torch.int64, self._device)
            self._live_rows, self._live_index = rows, index
        self._live.append(self._queries.take(self._live_index, batch))
        self._lengths = lengths

    def hand_over(self) -> None:
        """Let each request take the noted queries of its pending steps."""
        steps, self._live = self._live, []
        if not steps:
            return
        steps_by_number = {len(steps): steps}  # number of the last steps -> these steps
        pending = self._lengths - self._first_pending + 1
        rows = self._live_rows.tolist()
        for place, (row, number) in enumerate(zip(rows, pending[rows].tolist(), strict=True)):
            decoding, number = self._decoding.get(row), min(number, len(steps))
            if decoding is not None and number > 0:
                if number not in steps_by_number:
                    steps_by_number[number] = steps[-number:]
                decoding.pending.add(steps_by_number[number], place)
