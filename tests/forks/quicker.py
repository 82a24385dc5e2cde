"""Spares the tests what others compute again and again; what comes out is the same."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any


def hooks() -> None:
    """Has SGLang look for what a hook replaces only where it may be.

    It looks through all modules for each of a scheduler's 25 hooks, which takes a second. What
    those hold that are imported now is known.
    """
    from sglang.srt.plugins import hook_registry

    imported = dict(sys.modules)
    modules = [getattr(module, "__dict__", {}) for module in imported.values()]
    held = {id(value) for names in modules for value in names.values()}
    propagate = hook_registry._propagate_patch

    def propagate_patch(original: object, wrapped: object, source: object) -> int:
        later = {name: x for name, x in sys.modules.items() if imported.get(name) is not x}
        searched = sys.modules if id(original) in held else later
        hook_registry.sys = SimpleNamespace(modules=searched)
        return propagate(original, wrapped, source)

    hook_registry._propagate_patch = propagate_patch


def kernels() -> None:
    """Has Triton's interpreter list once what it replaces at every call of a kernel or a helper."""
    import triton.language as tl
    from triton.runtime import interpreter

    def builtins(owner: Any) -> list[tuple[str, Any]]:
        return [(name, x) for name, x in inspect.getmembers(owner) if tl.core.is_builtin(x)]

    owners = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    listed = {id(owner): builtins(owner) for owner in owners}

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in listed[id(owner)]:
            if getattr(owner, name) is member:  # not replaced already
                interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
