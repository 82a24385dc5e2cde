"""`kvpolicy run`: a policy applied to recorded tensors. The output is described in docs/run.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
import zipfile
from pathlib import Path

import numpy as np
from kvpolicy.dsl.bind import Bound, bind
from kvpolicy.dsl.commands import executable, execute, guarded, overrides
from kvpolicy.dsl.diagnostics import refused
from kvpolicy.dsl.ir import ModelShape
from kvpolicy.dsl.result import Result

_DIMENSIONS = {"q": "[L, H, N, D]", "k": "[L, G, N, D]", "v": "[L, G, N, D]"}


def main(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: `file`, `tensors` (path of an npz), `set` (name=value strings), `execution`
            (`interpreter` or `torch`), `scores` (whether to write them), `out` (path or `-`).

    Returns:
        0, or 2 if the input cannot be used.
    """
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    program = executable(args.file)
    q, k, v = read_tensors(args.tensors)
    shape = ModelShape(q.shape[0], q.shape[1], k.shape[1], q.shape[3])
    bound = bind(program, shape, overrides(args.set))
    check_queries(bound, args.tensors, q, k)
    result = execute(bound, args.execution, q, k, v)
    text = json.dumps(report(result, args.scores), separators=(",", ":")) + "\n"
    if args.out == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise refused(args.out, "data", f"cannot be written: {error.strerror}") from None
    return 0


def read_tensors(path: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of an npz file as float32; never unpickles.

    Raises:
        PolicyError: the file or its arrays cannot be used.
    """
    where = str(path)
    try:
        stored = np.load(path, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise refused(where, "data", "holds a single array, not an npz of q, k and v")
        with stored:
            missing = [name for name in _DIMENSIONS if name not in stored.files]
            if missing:
                have = ", ".join(f"`{name}`" for name in stored.files) or "nothing"
                names = ", ".join(f"`{name}`" for name in missing)
                raise refused(where, "data", f"no array {names}; the file has {have}")
            arrays = {name: stored[name] for name in _DIMENSIONS}
    except FileNotFoundError:
        raise refused(where, "data", "no such file") from None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise refused(where, "data", f"not a readable npz of numbers: {error}") from None
    for name, array in arrays.items():
        _check_array(where, name, array)
    _check_together(where, arrays)
    return tuple(arrays[name].astype(np.float32) for name in _DIMENSIONS)


def _check_array(where: str, name: str, array: np.ndarray) -> None:
    if array.ndim != 4:
        raise refused(
            where, "data", f"`{name}` has shape {list(array.shape)}; it is {_DIMENSIONS[name]}"
        )
    if array.dtype.kind != "f":
        raise refused(
            where,
            "data",
            f"`{name}` is {array.dtype}; it is float32 (or float16, float64, which are converted)",
        )
    if not np.isfinite(array).all():
        layer, head, token, _ = np.argwhere(~np.isfinite(array))[0]
        raise refused(
            where,
            "data",
            f"`{name}` holds NaN or infinity, first at layer {layer}, head {head}, token {token}",
        )


def _check_together(where: str, arrays: dict[str, np.ndarray]) -> None:
    q, k, v = (arrays[name].shape for name in ("q", "k", "v"))
    if k != v:
        raise refused(where, "data", f"`k` is {list(k)} and `v` is {list(v)}; they have one shape")
    if q[0] != k[0] or q[3] != k[3]:
        raise refused(
            where,
            "data",
            f"`q` is {list(q)} and `k` is {list(k)}; layers (first) and head size (last) agree",
        )
    if 0 in (*q[:2], q[3], *k[:2]):
        raise refused(where, "data", f"`q` is {list(q)}; only the number of tokens may be 0")
    if q[1] % k[1]:
        raise refused(
            where,
            "data",
            f"{q[1]} query heads cannot share {k[1]} KV heads; the second divides the first",
        )


def check_queries(bound: Bound, where: str, q: np.ndarray, k: np.ndarray) -> None:
    """Refuses recordings with other queries than all, or at least those that the policy reads."""
    tokens, queries = k.shape[2], q.shape[2]
    needed = bound.queries(tokens)
    if not needed <= queries <= tokens:
        raise refused(
            where,
            "data",
            f"`q` has {queries} queries for {tokens} tokens; the policy needs "
            f"all of them, or at least the last {needed}",
        )


def report(result: Result, scores: bool = False) -> dict[str, object]:
    """The result as JSON values; see docs/run.md."""
    kept = [[np.flatnonzero(head).tolist() for head in layer] for layer in result.kept]
    budgets = result.budgets or [layer.sum(-1) for layer in result.kept]
    output: dict[str, object] = {
        "kept": kept,
        "budgets": [[_number(each) for each in layer.tolist()] for layer in budgets],
    }
    if scores and result.scores is not None:
        output["scores"] = [
            [[_number(each) for each in head] for head in layer.astype(np.float32).tolist()]
            for layer in result.scores
        ]
    return output


def _number(x: float) -> float | int | str | None:
    """A number as JSON: absent ones are null, infinite ones text."""
    if isinstance(x, int) or math.isfinite(x):
        return x
    return None if math.isnan(x) else ("inf" if x > 0 else "-inf")
