"""Log lines about kernels that Triton compiles, before the server is ready and after.

Where torch computes, Triton need not be installed and nothing is logged.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.kernels.launch.compilations import Compilations, Made

logger = logging.getLogger(__name__)

_EVERY = 5.0  # seconds between two lines about one policy


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """A block in which kernels are compiled on purpose; the log shows its progress."""
    compilations = _compilations()
    if compilations is None:
        yield
        return
    started = logged = time.monotonic()

    def progress(kernels: Made) -> None:
        nonlocal logged
        if time.monotonic() - logged > _EVERY:
            logged = time.monotonic()
            logger.info("%s: %d kernels ready so far.", what, len(kernels.names))

    with compilations.expected(progress) as kernels:
        yield
    if kernels.names:
        seconds, all_seconds = sum(kernels.seconds), time.monotonic() - started
        logger.info(
            "%s: %d kernels ready in %.1f s, %.1f s of it for compiling them or reading them from "
            "Triton's cache.", what, len(kernels.names), all_seconds, seconds,
        )  # fmt: skip


def watch_late() -> None:
    """From now on, warn of each kernel that is compiled outside of `compiling`."""
    compilations = _compilations()
    if compilations is not None:
        compilations.watch(_late)


def _late(name: str, seconds: float) -> None:
    logger.warning(
        "KV-cache policies: the kernel %s was compiled in %.1f s while requests waited; it should "
        "have been when the server started. Please report this line with the prompt's length.",
        name,
        seconds,
    )


def _compilations() -> Compilations | None:
    if "triton" not in sys.modules:
        return None
    from kvpolicy.kernels.launch.compilations import COMPILATIONS

    return COMPILATIONS
