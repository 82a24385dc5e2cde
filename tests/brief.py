"""What `make test` leaves to `make test-all`: long tests, and most rows of long tables."""

from __future__ import annotations

import pytest


def leaves_out(item: pytest.Item) -> bool:
    """Whether a test is marked `thorough` and is no row that the mark names."""
    thorough = item.get_closest_marker("thorough") is not None
    return thorough and not any(is_row(item, words) for words in named(item))


def named(item: pytest.Item) -> tuple[str, ...]:
    """What a test's mark names, as `@pytest.mark.thorough(besides=["h2o", "retracted"])`."""
    mark = item.get_closest_marker("thorough")
    return () if mark is None else tuple(mark.kwargs.get("besides", ()))


def is_row(item: pytest.Item, words: str) -> bool:
    """Whether a test is a row that is named by words of its id, between hyphens or its ends."""
    return hasattr(item, "callspec") and f"-{words}-" in f"-{item.callspec.id}-"
