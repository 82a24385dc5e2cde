"""When Python looks for objects that refer to each other in circles (garbage collection)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off() -> Iterator[None]:
    """A block in which Python does not look for circles; it does so afterwards if need be.

    What a policy computes with is freed when that is done, as nothing of it is in a circle
    (tests/sglang_ext/test_freed.py). If Python looks before, it finds all of it in use and takes it
    for objects that live long; enough of these make it look through all objects there are, for
    which the scheduler stands still for some tenths of a second.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
