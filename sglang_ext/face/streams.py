"""The order of what the scheduler and the forwards do on a device.

With overlap, SGLang prepares a batch on the scheduler's stream while the forward before it runs on
another. The list of free slots, the radix cache and the table of slots belong to the scheduler,
whose kernels read and write them on the scheduler's stream. But a forward finds out how many
private slots a request needs and which ordinary slots it gives up, so slots have to be taken and
given up in the middle of SGLang's forward.

`scheduling` is the context for that. On entry the scheduler's stream waits for what the forward has
queued so far, so a slot goes back to the list only after the kernels that read it. On exit the
forward's stream waits for the scheduler's, so slots just taken are in the tables before they are
written to. The next owner of a freed slot writes to it in a later forward, whose kernels follow
this one's on the same stream; copies from the host, which SGLang makes on a third stream, wait for
the forward's too. Nothing else writes entries. On a CPU, and where the forward runs on the
scheduler's stream, there is nothing to order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from kvpolicy.sglang_ext.face import compat


class Streams:
    """The scheduler's stream and that of its forwards."""

    def __init__(self) -> None:
        self._scheduler: Any = None

    def bind(self, scheduler: Any) -> None:
        """Take the streams from SGLang's scheduler; it may still replace its own later."""
        self._scheduler = scheduler

    def scheduling(self) -> AbstractContextManager[None]:
        """In this block, work goes to the scheduler's stream, in order with the forward's."""
        return self._on(0)

    def forwarding(self) -> AbstractContextManager[None]:
        """In this block, work goes to the stream of the forwards, in order with the scheduler's."""
        return self._on(1)

    @contextmanager
    def _on(self, index: int) -> Iterator[None]:
        """Work on the scheduler's stream (0) or its forwards' (1), after the current one's work."""
        if self._scheduler is None:
            yield
            return
        module, *streams = compat.streams(self._scheduler)
        current, stream = module.current_stream(), streams[index]
        if current == stream:
            yield
            return
        stream.wait_stream(current)
        with module.stream(stream):
            yield
        current.wait_stream(stream)

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, whose memory is not reused while either stream may still read it."""
        if self._scheduler is not None and tensor.is_cuda:
            for stream in compat.streams(self._scheduler)[1:]:
                tensor.record_stream(stream)
        return tensor
