"""Watches Triton compile this package's kernels, and tells expected compilations from late ones.

Triton calls a listener when a kernel's machine code is ready, compiled or from its cache on disk. A
listener that was set earlier is still called. Triton also has hooks around launches that compile,
but with one of them set Triton 3.6.0 fails on kernels that take functions as arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs

_OWN = "kvpolicy"  # first part of the names of its modules, generated ones included


@dataclass
class Made:
    """Kernels that were compiled or loaded.

    Attributes:
        names: name of each, in order; a name recurs for each set of argument types.
        seconds: time that each took, access to the disk included.
    """

    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Compilations:
    """Compilations of this process, noted from the first `watch` or `expected` on."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._late: Callable[[str, float], None] = lambda name, seconds: None
        self._listens = False

    def watch(self, late: Callable[[str, float], None]) -> None:
        """Report compilations outside of `expected`.

        Args:
            late: called with the kernel's name and the seconds of each.
        """
        self._listen()
        self._late = late

    def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            knobs.compilation.listener = self._listener(knobs.compilation.listener)

    @contextmanager
    def expected(self, progress: Callable[[Made], None] = lambda kernels: None) -> Iterator[Made]:
        """Context in which the calling thread is expected to compile kernels.

        Args:
            progress: called after each compilation with all of the context so far.

        Yields:
            The compilations of the context, appended as they happen.
        """
        self._listen()
        outer_context = getattr(self._thread, "expecting", None)
        kernels = Made()
        self._thread.expecting = (kernels, progress)
        try:
            yield kernels
        finally:
            self._thread.expecting = outer_context

    def _listener(self, earlier_listener: Callable[..., Any] | None) -> Callable[..., Any]:
        def ready(**facts: Any) -> None:
            if earlier_listener is not None:
                earlier_listener(**facts)
            function = getattr(facts["src"], "fn", None)  # none if compiled from Triton's IR
            if function is not None and function.module.split(".")[0] == _OWN:
                self._note(function.__name__, facts["times"].total / 1e6)

        return ready

    def _note(self, name: str, seconds: float) -> None:
        context = getattr(self._thread, "expecting", None)
        if context is None:
            self._late(name, seconds)
            return
        kernels, progress = context
        kernels.names.append(name)
        kernels.seconds.append(seconds)
        progress(kernels)


COMPILATIONS = Compilations()
