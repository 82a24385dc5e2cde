"""Malformed programs never reach an execution."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.ir.nodes import ModelShape, Node, Program, Rules, Type, When
from kvpolicy.dsl.ir.verify import MalformedProgram, verify
from kvpolicy.dsl.syntax.library import shipped
from shipped_policies import shipped_program

TOKEN = Type("number", ("token",))
SET = Type("truth", ("token",))
ONE = Node("number", value=Fraction(1))
POSITION = Node("position", type=TOKEN, when=When.LAYER)
ALL = Node("all", type=SET, when=When.LAYER)


def program(keep: Node) -> Program:
    return Program("a-test", "", "", {}, (), {}, Rules(keep=keep))


def top(**changes) -> Node:
    node = Node("top", (POSITION, ONE), ("token",), type=SET, when=When.LAYER)
    return replace(node, **changes)


def test_well_formed():
    verify(program(top()))
    verify(program(Node("and", (ALL, top()), type=SET, when=When.LAYER)))


@pytest.mark.parametrize("name", shipped())
def test_shipped_policies_are_well_formed(name):
    verify(shipped_program(name))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (Node("best", type=SET), "no such operation"),
        (top(args=()), "has 0 arguments"),
        (top(args=(POSITION, ONE, ONE)), "has 3 arguments"),
        (top(axes=()), "is over"),
        (top(axes=("kv",)), "which its argument lacks"),
        (top(axes=("token", "token")), "names an axis twice"),
        (top(axes=("here",)), "is over"),
        (top(args=(ALL, ONE)), "takes numbers"),
        (top(type=TOKEN), "must be a truth value"),
        (top(when=When.LOAD), "known before its arguments"),
        (top(value=True), "has the value True"),
        (replace(ALL, type=Type("set", ("token",))), "is a set"),
        (replace(ALL, type=Type("truth", ("token", "kv"))), "out of order"),
        (Node("and", (ALL, POSITION), type=SET, when=When.LAYER), "takes truth values"),
        (Node("not", (ALL,), type=Type("truth"), when=When.LAYER), "has the axes"),
        (Node("param", value="window", type=Type("truth")), "has the value 'window'"),
        (Node("any", (ALL,), ("kv",), type=Type("truth"), when=When.LAYER), "argument lacks"),
        (Node("attn", value="recent", type=SET), "must be a number"),
        (POSITION, "`keep` of `a-test` is number[token]"),
        (replace(ALL, type=Type("truth", ("query", "token"))), "`keep` of `a-test`"),
    ],
)
def test_malformed(keep, message):
    with pytest.raises(MalformedProgram, match=message.replace("[", r"\[")):
        verify(program(keep))
    with pytest.raises(MalformedProgram):
        bind(program(keep), ModelShape(1, 1, 1, 1))
