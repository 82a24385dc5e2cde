"""Spares the tests what others compute again and again; what comes out is the same."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any


def hooks() -> None:
    """Has SGLang look for what a hook replaces only where it may be.

    It looks through all modules for each of a scheduler's 25 hooks, which takes a second. What
    those hold that are imported now is known.
    """
    from sglang.srt.plugins import hook_registry

    imported = dict(sys.modules)
    holders: dict[int, list[str]] = {}
    for name, module in imported.items():
        for value in getattr(module, "__dict__", {}).values():
            holders.setdefault(id(value), []).append(name)
    propagate = hook_registry._propagate_patch

    def propagate_patch(original: object, wrapped: object, source: object) -> int:
        searched = {name: x for name, x in sys.modules.items() if imported.get(name) is not x}
        searched |= {name: imported[name] for name in holders.get(id(original), ())}
        hook_registry.sys = SimpleNamespace(modules=searched)
        return propagate(original, wrapped, source)

    hook_registry._propagate_patch = propagate_patch


def starts() -> None:
    """Has SGLang's warm-up look for its server at once; it does so after each whole second."""
    sleep, looks = time.sleep, itertools.count(1)

    def sleep_less(seconds: float) -> None:
        if sys._getframe(1).f_code.co_name == "_execute_server_warmup":
            seconds = min(seconds, 0.05 * next(looks))
        sleep(seconds)

    time.sleep = sleep_less


def kernels() -> None:
    """Has Triton's interpreter list its functions once, and not compute what nobody reads."""
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
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.core.block_type) else of
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = numpy_type
    _remember_types(tl.core)
    # Whether 32 bits overflow is computed at each sum and product, for an assertion that is off.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types(core: Any) -> None:
    """Has Triton make what its types and tensors say of a shape once for each shape."""
    make_block, blocks = core.block_type.__init__, {}
    scalar = core.constexpr(1), core.tuple([])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            sizes = [core.constexpr(size) for size in self.shape]
            self.of_tensors = core.constexpr(prod(self.shape)), core.tuple(sizes)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
