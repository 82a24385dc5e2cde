"""Methods whose results an object remembers, such as what it says of each node of a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class once(Generic[P, T]):
    """A method that an object computes once for the same arguments; nodes are told by identity."""

    def __init__(self, method: Callable[Concatenate[Any, P], T]) -> None:
        self._method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, T]:
        remembered = cast(Callable[P, T], cache(self._method.__get__(instance)))
        vars(instance)[self._method.__name__] = remembered  # found first from now on
        return remembered
