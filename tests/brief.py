"""What `make test` leaves to `make test-all`: long tests, most rows and random examples."""

from __future__ import annotations

import zlib

import pytest


def leaves_out(item: pytest.Item) -> bool:
    """Whether a test is marked `thorough` and is no row that the mark keeps."""
    mark = item.get_closest_marker("thorough")
    if mark is None:
        return False
    kept = _is_drawn(item, mark.kwargs.get("every"))
    return not (kept or any(is_row(item, words) for words in named(item)))


def _is_drawn(item: pytest.Item, every: int | None) -> bool:
    """Whether a test is one of so many rows that stay; its id decides, not its place."""
    if every is None or not hasattr(item, "callspec"):
        return False
    return zlib.crc32(item.callspec.id.encode()) % every == 0


def named(item: pytest.Item) -> tuple[str, ...]:
    """What a test's mark names, as `@pytest.mark.thorough(besides=["h2o", "retracted"])`."""
    mark = item.get_closest_marker("thorough")
    return () if mark is None else tuple(mark.kwargs.get("besides", ()))


def is_row(item: pytest.Item, words: str) -> bool:
    """Whether a test is a row that is named by words of its id, between hyphens or its ends."""
    return hasattr(item, "callspec") and f"-{words}-" in f"-{item.callspec.id}-"
