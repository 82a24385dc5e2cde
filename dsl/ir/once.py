"""Methods whose results their object remembers, such as one for each node of a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
# For the static method, which cannot use the type variables of its class.
Q = ParamSpec("Q")
U = TypeVar("U")


class once(Generic[P, T]):
    """A method that an object computes once per arguments; nodes are compared by identity."""

    def __init__(self, method: Callable[Concatenate[Any, P], T], most: int | None = None) -> None:
        self._method, self._most, self.__doc__ = method, most, method.__doc__

    @staticmethod
    def at_most(number: int) -> Callable[[Callable[Concatenate[Any, Q], U]], once[Q, U]]:
        """The same, remembering only the `number` results that were used last."""
        return lambda method: once(method, number)

    def __get__(self, instance: object, owner: type) -> Callable[P, T]:
        method = self._method.__get__(instance)
        remembered = cast(Callable[P, T], lru_cache(maxsize=self._most)(method))
        vars(instance)[self._method.__name__] = remembered  # found before `once` from now on
        return remembered
