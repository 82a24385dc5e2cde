"""How kernels are declared: one compilation serves arguments of any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import triton
import triton.language as tl

_CONSTANT = (tl.constexpr, "tl.constexpr")


def kernel(*, aligned: Collection[str] = ()) -> Callable[[Callable], Any]:
    """Declare a function as a Triton kernel that is not specialized on sizes.

    By default Triton compiles again when an integer is 1, or when an integer or an address becomes
    divisible by 16. Sizes and addresses of lists do so from prompt to prompt, and a request would
    wait for the compiler. Members of tuples are specialized all the same, so they must be no sizes.

    Args:
        aligned: arguments that are specialized on divisibility by 16, so that several elements are
            read at once: rows of heads, whose layout a model fixes, and newly allocated tensors.

    Raises:
        TypeError: when it decorates a function that lacks an argument named in `aligned`.
    """

    def declared(function: Callable) -> Any:
        parameters = inspect.signature(function).parameters
        unknown = set(aligned) - parameters.keys()
        if unknown:
            raise TypeError(f"{function.__name__} has no argument {', '.join(sorted(unknown))}")
        sizes = [
            name
            for name, parameter in parameters.items()
            if parameter.annotation not in _CONSTANT and name not in aligned
        ]
        return triton.jit(function, do_not_specialize=sizes)

    return declared
