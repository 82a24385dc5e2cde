"""Shipped policies, read once per process: many tests bind the same ones."""

from functools import cache

from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import Program


@cache
def shipped_program(name: str) -> Program:
    """The checked program of a shipped policy."""
    return load(name).require()
