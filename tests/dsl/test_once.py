"""Methods that are computed once: by their arguments, and without keeping their object."""

import gc
from weakref import ref

import pytest
from kvpolicy.dsl.ir.once import once, once_at_most


class Adder:
    def __init__(self, start):
        self.start, self.computed = start, []

    @once
    def plus(self, x, *, twice=False):
        """Adds."""
        self.computed.append((x, twice))
        return self.start + x * (1 + twice)

    @once
    def fails(self):
        self.computed.append("fails")
        raise ValueError("always")

    @once_at_most(2)
    def lately(self, x):
        self.computed.append(x)
        return self.start + x


def test_each_object_computes_once_per_arguments():
    one, other = Adder(1), Adder(2)
    for _ in range(2):
        assert (one.plus(3), one.plus(3, twice=True), one.plus(4), other.plus(3)) == (4, 7, 5, 5)
    assert one.computed == [(3, False), (3, True), (4, False)]
    assert Adder(5).plus(1) == 6
    assert Adder.plus.__doc__ == "Adds."


def test_a_method_may_ask_the_one_that_it_replaces():
    class Doubling(Adder):
        @once
        def plus(self, x):
            return 2 * super().plus(x)

    one = Doubling(1)
    assert [one.plus(3), one.plus(3), super(Doubling, one).plus(3)] == [8, 8, 4]
    assert one.computed == [(3, False)]


def test_a_failure_is_no_result():
    one = Adder(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="always"):
            one.fails()
    assert one.computed == ["fails"] * 2


def test_the_last_results_are_remembered():
    one = Adder(1)
    assert [one.lately(x) for x in (1, 2, 1, 3, 1, 2)] == [2, 3, 2, 4, 2, 3]
    assert one.computed == [1, 2, 3, 2]


def test_an_object_is_freed_with_its_last_user():
    gc.disable()
    try:
        one = Adder(1)
        one.plus(3)
        seen = ref(one)
        del one
        assert seen() is None
    finally:
        gc.enable()
