"""Compilations that Triton makes of this package's kernels, those that are expected and others.

Triton tells a listener when a kernel's machine code is there, from its cache on disk or compiled.
One that others have set goes on being told. Triton has hooks around launches that compile, too, but
with one of them set, 3.6.0 fails on kernels that are given functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs

_OWN = "kvpolicy"  # modules of this package, and of what it generates


@dataclass
class Made:
    """Kernels that were made ready.

    Attributes:
        names: of each, in their order; several of one name are compiled for different types.
        seconds: that it took, disk included.
    """

    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Compilations:
    """What Triton compiles in this process, from the first `watch` or `expected` on."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._late: Callable[[str, float], None] = lambda name, seconds: None
        self._listens = False

    def watch(self, late: Callable[[str, float], None]) -> None:
        """Have compilations noted that are not expected.

        Args:
            late: is told the name and the seconds of each.
        """
        self._listen()
        self._late = late

    def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            knobs.compilation.listener = self._listener(knobs.compilation.listener)

    @contextmanager
    def expected(self, progress: Callable[[Made], None] = lambda made: None) -> Iterator[Made]:
        """A block of one thread in which kernels are to be compiled.

        Args:
            progress: called after each.
        """
        self._listen()
        earlier = getattr(self._thread, "expecting", None)
        made = Made()
        self._thread.expecting = (made, progress)
        try:
            yield made
        finally:
            self._thread.expecting = earlier

    def _listener(self, other: Callable[..., Any] | None) -> Callable[..., Any]:
        def ready(**facts: Any) -> None:
            if other is not None:
                other(**facts)
            function = getattr(facts["src"], "fn", None)  # none where a text of Triton is compiled
            if function is not None and function.module.split(".")[0] == _OWN:
                self._note(function.__name__, facts["times"].total / 1e6)

        return ready

    def _note(self, name: str, seconds: float) -> None:
        expecting = getattr(self._thread, "expecting", None)
        if expecting is None:
            self._late(name, seconds)
            return
        made, progress = expecting
        made.names.append(name)
        made.seconds.append(seconds)
        progress(made)


COMPILATIONS = Compilations()
