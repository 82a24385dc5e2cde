"""In a scheduler: a thread that makes policies while the scheduler's loop goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


class Background:
    """One thread, which binds policies and compiles their kernels one after the other.

    Args:
        device: the scheduler's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-policies")

    def begin(self, make: Callable[[], Made]) -> Future[Made]:
        """Begin to make something; the future has it, or the error."""

        def run() -> Made:
            with side_stream(self._device):
                return make()

        return self._thread.submit(run)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A block in which this thread's device work and the scheduler's do not await each other.

    Args:
        device: the scheduler's; a new thread begins with the first device.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
