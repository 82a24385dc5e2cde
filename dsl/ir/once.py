"""Methods whose results their object remembers, such as one for each node of a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
# For the function that makes a class's object, which cannot use its type variables.
Q = ParamSpec("Q")
U = TypeVar("U")

PROMPTS = 4096  # lengths of prompts for which an object that lives long remembers results


def once(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that an object computes once per arguments; nodes are compared by identity.

    What is remembered does not hold its object. So both are freed when the object is used no
    longer, and not in Python's next full collection, for which a server stands still.
    """
    name = f"_{method.__qualname__}_once"

    @wraps(method)
    def remembering(self: S, *args: P.args, **options: P.kwargs) -> T:
        key = (*args, *sorted(options.items())) if options else args
        try:
            result: T = self.__dict__[name][key]
        except KeyError:
            result = method(self, *args, **options)
            self.__dict__.setdefault(name, {})[key] = result
        return result

    return cast(Callable[Concatenate[S, P], T], remembering)


class _Last(Generic[P, T]):
    """A method whose last results are remembered; see `once_at_most`."""

    def __init__(self, method: Callable[Concatenate[Any, P], T], most: int) -> None:
        self._method, self._most, self.__doc__ = method, most, method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, T]:
        method = self._method.__get__(instance)
        cached_method = cast(Callable[P, T], lru_cache(maxsize=self._most)(method))
        vars(instance)[self._method.__name__] = cached_method  # found before this from now on
        return cached_method


def once_at_most(number: int) -> Callable[[Callable[Concatenate[Any, Q], U]], _Last[Q, U]]:
    """As `once`, for objects that live long: the `number` results used last are remembered."""
    return lambda method: _Last(method, number)
