"""In a scheduler: a thread that makes policies while the scheduler's loop goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


class Background:
    """One thread, which binds policies and compiles their kernels one after the other.

    Args:
        device: the scheduler's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-policies")
        self._state = threading.Condition()
        self._making = self._paused = False
        self._stream: torch.cuda.Stream | None = None

    def begin(self, make: Callable[[], Made]) -> Future[Made]:
        """Begin to make something; the future has it, or the error.

        It never raises: other ranks, which have begun it, wait to hear how this one fares.
        """

        def run() -> Made:
            with self._turn(), self._side_stream():
                return make()

        try:
            return self._thread.submit(run)
        except Exception as error:  # as when no thread can be started
            logger.exception("What a policy needs cannot be made in the background.")
            failed: Future[Made] = Future()
            failed.set_exception(error)
            return failed

    def pause(self) -> None:
        """Wait until nothing is being made, and begin nothing until `resume`."""
        with self._state:
            self._paused = True
            self._state.wait_for(lambda: not self._making)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """A block that begins when it may, and for whose end `pause` waits."""
        with self._state:
            self._state.wait_for(lambda: not self._paused)
            self._making = True
        try:
            yield
        finally:
            with self._state:
                self._making = False
                self._state.notify_all()

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """A block in which the thread's device work and the scheduler's do not await each other."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):  # a new thread begins with the first device
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()
