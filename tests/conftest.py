"""Without a GPU, Triton's kernels run in its interpreter: it is chosen before they are made."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that take minutes: first, so that no process ends long after the others.
_LONG = ("test_benchmarks.py", "test_folds.py", "test_served.py", "test_scheduler.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, in the order in which they stand above."""
    order = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
