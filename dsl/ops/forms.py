"""Functions that compute operations, found by the paths in their rows.

They are imported when they are asked for: a file is checked without numpy and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

LIBRARIES = ("numpy", "torch", "operator")


@cache
def form(path: str, package: str) -> Callable[..., Any]:
    """A function by its path, `module.name`, in a package of `dsl` or in a library."""
    module, _, name = path.rpartition(".")
    module_path = module if module in LIBRARIES else f"kvpolicy.dsl.{package}.{module}"
    function: Callable[..., Any] = getattr(import_module(module_path), name)
    return function
