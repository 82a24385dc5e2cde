"""Rows that `make test` keeps of a long table are rows of it."""

from __future__ import annotations

import pytest


def test_rows_that_are_named_are_there(request):
    rows, named = {}, {}
    for item in request.session.items:
        mark = item.get_closest_marker("thorough")
        if mark is not None and hasattr(item, "callspec"):
            function = item.nodeid.partition("[")[0]
            rows.setdefault(function, []).append(f"-{item.callspec.id}-")
            named[function] = mark.kwargs.get("besides", ())
    if not rows:
        pytest.skip("no table was collected")
    absent = {
        (function, words)
        for function, ids in rows.items()
        for words in named[function]
        if not any(f"-{words}-" in each for each in ids)
    }
    assert absent == set()
