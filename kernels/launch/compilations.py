"""Compilations that Triton makes of this package's kernels, those that are expected and others.

Triton calls one hook before it looks for a kernel's machine code, in its cache on disk or by
compiling it, and one when the code is there. Hooks that others have set go on being called.
"""

from __future__ import annotations

import threading
import time
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
        self._hooked = False

    def watch(self, late: Callable[[str, float], None]) -> None:
        """Have compilations noted that are not expected.

        Args:
            late: is told the name and the seconds of each.
        """
        self._hook()
        self._late = late

    def _hook(self) -> None:
        if not self._hooked:
            self._hooked, runtime = True, knobs.runtime
            runtime.jit_cache_hook = self._before(runtime.jit_cache_hook)
            runtime.jit_post_compile_hook = self._after(runtime.jit_post_compile_hook)

    @contextmanager
    def expected(self, progress: Callable[[Made], None] = lambda made: None) -> Iterator[Made]:
        """A block of one thread in which kernels are to be compiled.

        Args:
            progress: called after each.
        """
        self._hook()
        earlier = getattr(self._thread, "expecting", None)
        made = Made()
        self._thread.expecting = (made, progress)
        try:
            yield made
        finally:
            self._thread.expecting = earlier

    def _before(self, other: Callable[..., Any] | None) -> Callable[..., Any]:
        def begins(**facts: Any) -> Any:
            self._thread.began = time.perf_counter()
            return None if other is None else other(**facts)

        return begins

    def _after(self, other: Callable[..., Any] | None) -> Callable[..., Any]:
        def ends(**facts: Any) -> Any:
            kernel = facts["fn"]
            if kernel.module.split(".")[0] == _OWN:
                self._note(kernel.name, time.perf_counter() - self._thread.began)
            return None if other is None else other(**facts)

        return ends

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
