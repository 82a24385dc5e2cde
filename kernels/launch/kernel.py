"""How kernels are declared: one compilation serves arguments of any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import triton
import triton.language as tl

_CONSTANT = (tl.constexpr, "tl.constexpr")


def kernel(*, aligned: Collection[str] = ()) -> Callable[[Callable], Any]:
    """A function as a Triton kernel.

    Triton compiles anew where a whole number is 1 or where it, or an address, becomes divisible by
    16. Sizes and addresses of lists do so from prompt to prompt, and a request would wait for the
    compiler. What tuples hold Triton looks at all the same: they are to hold no sizes.

    Args:
        aligned: arguments that are compiled for being divisible by 16 if they are, so that several
            elements are read at once: rows of heads, which a model lays out once, and what is
            allocated anew.
    """

    def declared(function: Callable) -> Any:
        parameters = inspect.signature(function).parameters
        unknown = set(aligned) - parameters.keys()
        if unknown:
            raise TypeError(f"{function.__name__} has no argument {', '.join(sorted(unknown))}")
        sizes = [
            name
            for name, each in parameters.items()
            if each.annotation not in _CONSTANT and name not in aligned
        ]
        return triton.jit(function, do_not_specialize=sizes)

    return declared
