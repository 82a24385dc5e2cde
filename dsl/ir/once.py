"""Methods whose results an object remembers, such as what it says of each node of a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
# Of a static method, which does not know those of its class.
Q = ParamSpec("Q")
U = TypeVar("U")


class once(Generic[P, T]):
    """A method that an object computes once for the same arguments; nodes are told by identity."""

    def __init__(self, method: Callable[Concatenate[Any, P], T], most: int | None = None) -> None:
        self._method, self._most, self.__doc__ = method, most, method.__doc__

    @staticmethod
    def at_most(number: int) -> Callable[[Callable[Concatenate[Any, Q], U]], once[Q, U]]:
        """The same, where an object remembers only so many results: those it was asked for last."""
        return lambda method: once(method, number)

    def __get__(self, instance: object, owner: type) -> Callable[P, T]:
        method = self._method.__get__(instance)
        remembered = cast(Callable[P, T], lru_cache(maxsize=self._most)(method))
        vars(instance)[self._method.__name__] = remembered  # found first from now on
        return remembered
