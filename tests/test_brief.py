"""Rows that `make test` keeps of a long table are rows of it."""

from __future__ import annotations

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
