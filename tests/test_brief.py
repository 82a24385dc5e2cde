"""Rows that `make test` keeps of a long table are rows of it."""

from __future__ import annotations

from types import SimpleNamespace

import brief
import pytest


def test_rows_that_are_named_are_there(request):
    found = {}
    for item in request.session.items:
        for words in brief.named(item):
            key = item.nodeid.partition("[")[0], words
            found[key] = found.get(key, False) or brief.is_row(item, words)
    if not found:
        pytest.skip("no table was collected")
    assert {key for key, there in found.items() if not there} == set()


def test_rows_are_drawn_by_their_ids():
    ids = [f"row-{number}" for number in range(400)]
    rows = [SimpleNamespace(callspec=SimpleNamespace(id=each)) for each in ids]
    mark = SimpleNamespace(kwargs={"every": 4})
    for row in rows:
        row.get_closest_marker = lambda name: mark
    kept = [row.callspec.id for row in rows if not brief.leaves_out(row)]
    assert 70 < len(kept) < 130
    assert kept == [row.callspec.id for row in reversed(rows) if not brief.leaves_out(row)][::-1]
