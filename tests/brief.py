"""What `make test` leaves to `make test-all`: long tests, and most rows of long tables."""

from __future__ import annotations

import pytest


def leaves_out(item: pytest.Item) -> bool:
    """Whether a test is marked `thorough` and is no row that the mark names.

    `@pytest.mark.thorough(besides=["h2o", "retracted"])` names rows by words of the ids that
    pytest gives them: all words of an id between two of its hyphens, or its ends.
    """
    mark = item.get_closest_marker("thorough")
    if mark is None:
        return False
    row = f"-{item.callspec.id}-" if hasattr(item, "callspec") else ""
    return not any(f"-{words}-" in row for words in mark.kwargs.get("besides", ()))
