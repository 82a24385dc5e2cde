"""Expressions and their values in every execution; cases are in the YAML files of this folder.

`x` of a case is put into the values (head size 1), so that `x` is `sum[dim](value)`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cli import EXECUTIONS
from kvpolicy.dsl.tools.commands import execute

FOLDER = Path(__file__).parent


def _cases():
    for path in sorted(FOLDER.glob("*.yaml")):
        group = yaml.safe_load(path.read_text())
        for case in group["cases"]:
            yield pytest.param(group, case, id=f"{path.stem}: {case['expr']}")


def _array(given: object, rank: int) -> np.ndarray:
    """An array with leading dimensions of 1 added up to `rank`."""
    values = np.asarray(given, dtype=np.float64)
    return values.reshape((1,) * (rank - values.ndim) + values.shape)


def _tensors(group: dict):
    if "x" in group:
        v = _array(group["x"], 3)[..., None]
        return np.zeros_like(v), np.zeros_like(v), v
    q, k = _array(group["q"], 4), _array(group["k"], 4)
    return q, k, np.zeros_like(k)


def _expected(given: object, shape: tuple[int, ...]) -> np.ndarray:
    def number(x: object) -> object:
        if isinstance(x, list):
            return [number(each) for each in x]
        return np.nan if x is None else float(x)

    values = np.asarray(number(given), dtype=np.float64)
    return np.broadcast_to(values, shape)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("group", "case"), list(_cases()))
def test_expression(group, case, execution):
    lets = {**({"x": "sum[dim](value)"} if "x" in group else {}), **case.get("let", {})}
    written = "".join(f"  {name}: |\n    {text}\n" for name, text in lets.items())
    text = (
        "policy: a-case\nlanguage: 1\nabout: a case\n"
        + (f"let:\n{written}" if lets else "")
        + f"score: |\n  {case['expr']}\nkeep: all\n"
    )
    program = load(Source("case.yaml", text)).require()
    q, k, v = _tensors(group)
    shape = ModelShape(k.shape[0], q.shape[1], k.shape[1], k.shape[3])
    result = execute(bind(program, shape), execution, q, k, v)
    scores = np.stack(result.scores)
    np.testing.assert_allclose(scores, _expected(case["is"], scores.shape), rtol=1e-12, atol=1e-15)
