"""Makes SGLang and Triton's interpreter faster in tests, with the same results."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any


def hooks() -> None:
    """Makes SGLang look for a hook's target only in modules that may hold it.

    SGLang searches all modules for each of a scheduler's 25 hooks, which takes a second. Modules
    imported now are indexed once; later ones are searched.
    """
    from sglang.srt.plugins import hook_registry

    imported = dict(sys.modules)
    holders: dict[int, list[str]] = {}
    for name, module in imported.items():
        for value in getattr(module, "__dict__", {}).values():
            holders.setdefault(id(value), []).append(name)
    propagate = hook_registry._propagate_patch

    def propagate_patch(original: object, wrapped: object, source: object) -> int:
        searched = {name: sys.modules[name] for name in sys.modules.keys() - imported.keys()}
        searched |= {name: imported[name] for name in holders.get(id(original), ())}
        hook_registry.sys = SimpleNamespace(modules=searched)
        return propagate(original, wrapped, source)

    hook_registry._propagate_patch = propagate_patch


def starts() -> None:
    """Makes SGLang's warm-up look for its server at once, instead of after whole seconds."""
    sleep, looks = time.sleep, itertools.count(1)

    def sleep_less(seconds: float) -> None:
        if sys._getframe(1).f_code.co_name == "_execute_server_warmup":
            seconds = min(seconds, 0.05 * next(looks))
        sleep(seconds)

    time.sleep = sleep_less


def kernels() -> None:
    """Makes Triton's interpreter cache its work per call, and skip unused checks."""
    import triton.language as tl
    from triton.runtime import interpreter

    _launch_one_at_a_time(interpreter)
    _replace_once(interpreter, tl)
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.core.block_type) else of
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = numpy_type
    _remember_types(tl.core)
    _see_what_is_equal(tl.core, interpreter.TritonSemantic)
    _remember_operands(tl.core, interpreter.TritonSemantic)
    # Overflow of 32 bits is checked at each sum and product, for an assertion that is off.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _launch_one_at_a_time(interpreter: Any) -> None:
    """Serializes launches, as threads share the interpreter's current program."""
    launch, one = interpreter.GridExecutor.__call__, threading.RLock()

    def launch_alone(self: Any, *given: Any, **named: Any) -> Any:
        with one:
            return launch(self, *given, **named)

    interpreter.GridExecutor.__call__ = launch_alone


def _replace_once(interpreter: Any, tl: Any) -> None:
    """Replaces the language's functions once per process, at the first launch.

    The interpreter does so at each launch and at each call of a device function.
    """
    semantic = interpreter.interpreter_semantic
    replace_all, replaced = interpreter._patch_lang, []

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # A builtin only checks that `_semantic` is given before it calls the wrapped function.
        function = getattr(member, "__wrapped__", member)

        def call(*values: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*values, **named)

        scope.set_attr(owner, name, call)

    def patch_lang(_: Any) -> Any:
        if not replaced:
            replaced.append(replace_all(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_attr, interpreter._patch_lang = patch_attr, patch_lang


def _see_what_is_equal(core: Any, semantic: Any) -> None:
    """Adds fast paths for plain values, equal shapes and equal types."""
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    broadcast, convert = semantic.broadcast_impl_value, semantic.cast
    plain = {core.tensor, core.dtype, int, float, bool}

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def broadcast_impl_value(self: Any, one: Any, other: Any) -> Any:
        same = one.type.sizes == other.type.sizes
        return (one, other) if same else broadcast(self, one, other)

    def cast(self: Any, of: Any, to: Any, fp_downcast_rounding: str | None = None) -> Any:
        return of if of.dtype is to else convert(self, of, to, fp_downcast_rounding)

    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.broadcast_impl_value, semantic.cast = broadcast_impl_value, cast


def _remember_operands(core: Any, semantic: Any) -> None:
    """Caches the common type of two types, and numbers converted for a tensor."""
    of_operation, tensor = semantic.binary_op_type_checking_impl, core.tensor
    plain, numbers, common = {int, float, bool}, {}, {}

    def operands(
        self: Any, one: Any, other: Any, one_ptr: bool = False, other_ptr: bool = False,
        arithmetic: bool = True, division: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        rules = one_ptr, other_ptr, arithmetic, division
        if type(one) is tensor and type(other) is tensor:
            first, second = one.dtype, other.dtype
            if first is not second or first.is_ptr() or division:
                key = (first.name, second.name, rules)
                if key not in common:
                    made = of_operation(self, one, other, *rules)
                    common[key] = tuple(x.dtype for x in made)
                    return made
                one, other = map(self.cast, (one, other), common[key])
            return self.broadcast_impl_value(one, other)
        left = type(one) in plain
        if left == (type(other) in plain):
            return of_operation(self, one, other, *rules)
        number, beside = (one, other) if left else (other, one)
        key = (type(number), number, left, beside.dtype.name, beside.type.sizes, rules)
        if key not in numbers:
            made = of_operation(self, one, other, *rules)
            if made[left] is not beside:  # the tensor was converted
                return made
            made[not left].handle.data.flags.writeable = False
            numbers[key] = made[not left]
        return (numbers[key], beside) if left else (beside, numbers[key])

    semantic.binary_op_type_checking_impl = operands


def _remember_types(core: Any) -> None:
    """Caches the attributes of block types and tensors, once per shape."""
    make_block, blocks = core.block_type.__init__, {}
    scalar = core.constexpr(1), core.tuple([])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            sizes = [core.constexpr(size) for size in self.shape]
            self.sizes = key[1:]
            self.of_tensors = core.constexpr(prod(self.shape)), core.tuple(sizes)
            self.of_others = {}  # block types of this shape, by name of the element type
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalar

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        if element_ty.name not in self.of_others:
            self.of_others[element_ty.name] = core.block_type(element_ty, self.shape)
        return self.of_others[element_ty.name]

    core.dtype.sizes = ()  # a scalar's
    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    core.block_type.with_element_ty = with_element_ty
    core.block_type.to_ir = lambda self, _: self  # the interpreter's types are the language's own
