"""`kvpolicy test`: runs the tests beside policies, on every execution."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.model_config import USUAL
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.recording import Recording
from kvpolicy.dsl.ir.nodes import Delivered, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError, did_you_mean, refused, why
from kvpolicy.dsl.syntax.library import TEST_SUFFIX, find, read_source, shipped
from kvpolicy.dsl.tools.cli import EXECUTIONS
from kvpolicy.dsl.tools.commands import execute, overrides
from kvpolicy.dsl.tools.reading_tests import Numbers, PolicyTest, Seed, read_cases
from kvpolicy.dsl.tools.run import add_merged, propagation, report
from kvpolicy.dsl.tools.units import positions_text


def main(args: argparse.Namespace) -> int:
    """Runs the command: 0 if every test passes, else 1; raises PolicyError for unusable input."""
    executions = EXECUTIONS if args.execution is None else (args.execution,)
    passed = failed = tried = 0
    for path, policy in _test_files(args.files):
        name, cases = read_cases(read_source(path))
        program = _tested(path, policy, name)
        if args.execution is None:
            refusal = _trial(program, cases)
            tried += 1
            failed += refusal is not None
            if refusal is not None:
                print(refusal)
        for case in cases:
            for execution in executions:
                problems = check_case(program, case, execution)
                passed += not problems
                failed += bool(problems)
                for problem in problems:
                    print(f"{path}:{case.line}: {case.name} ({execution}): {problem}")
    policies = f"; {tried} {'policy' if tried == 1 else 'policies'} tried" if tried else ""
    print(f"{passed} passed, {failed} failed ({' and '.join(executions)}){policies}")
    return 1 if failed else 0


def _trial(program: Program, cases: Sequence[PolicyTest]) -> PolicyError | None:
    """The error of a policy's trial; None if there is none.

    The policy is tried with its defaults on the usual model or, if it is made for other models,
    with model and settings of the first test for which it can be bound.
    """
    from kvpolicy.dsl.tools.trial import trial
    from kvpolicy.dsl.tools.trial_cases import sampled

    settings = [(USUAL, {}), *((x.shape, overrides(x.settings)) for x in cases if not x.refused)]
    for shape, values in settings:
        try:
            bound = bind(sampled(program, shape), shape, values)
        except PolicyError:
            continue
        try:
            trial(bound)
        except PolicyError as error:
            return error
        return None
    return None


def _test_files(files: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    """The test files that the arguments name, each with the file of its policy.

    Raises:
        PolicyError: an argument names no test file.
    """
    paths = [Path(file) for file in files] or list(shipped().values())
    for path in paths:
        if os.path.isdir(path):
            tests = _in_folder(path)
            if not tests:
                raise refused(str(path), "file", f"no file *{TEST_SUFFIX} in this folder")
            yield from ((test, _beside(test)) for test in tests)
            continue
        if path.name.endswith(TEST_SUFFIX):
            test, policy = path, _beside(path)
        else:
            policy = find(path)
            test = policy.with_suffix(TEST_SUFFIX)
        if not os.path.exists(test):
            raise refused(str(path), "file", f"there are no tests: `{test.name}` is missing")
        yield test, policy


def _in_folder(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise refused(str(folder), "file", why(error, "it cannot be read")) from None
    return [folder / name for name in sorted(names) if name.endswith(TEST_SUFFIX)]


def _beside(test: Path) -> Path:
    return test.with_name(f"{test.name.removesuffix(TEST_SUFFIX)}.yaml")


def _tested(test: Path, policy: Path, name: str) -> Program:
    """The policy of a test file, which has to say that it tests this one."""
    if name != policy.stem:
        message = f"`policy` is `{name}`, but the file tests `{policy.stem}`"
        raise refused(str(test), "test", message)
    return load(policy).executable()


def check_case(program: Program, case: PolicyTest, execution: str) -> list[str]:
    """How an execution differs from what a test expects; empty if it does not."""
    try:
        for name in case.data:
            if name not in program.data:
                message = f"the policy has no tensor `{name}` under `data`"
                raise refused("data", "test", message, did_you_mean(name, program.data))
        program = program.given({x: Delivered(case.data[x], program.name) for x in case.data})
        bound = bind(
            program, case.shape, overrides(case.settings), fold_interval=case.fold_interval
        )
        if case.refused is not None:
            return [f"should be refused with `{case.refused}`, but is accepted"]
        inputs = recording(case)
        result = execute(
            bound, execution, inputs.q, inputs.k, inputs.v, inputs.steps, inputs.inv_freq
        )
    except PolicyError as error:
        message = str(error)
        if case.refused is None:
            return [f"refused: {message}"]
        if case.refused in message:
            return []
        return [f"should be refused with `{case.refused}`, but is refused otherwise: {message}"]
    output = {**report(result), **propagation(result)}
    add_merged(output, result, inputs)
    if result.budgets is None:
        del output["budgets"]
    problems = list(_differences(case.expected, output))
    for step, expected in case.after.items():
        differences = _differences(expected, output["steps"][step - 1])
        problems += [f"after step {step}: {problem}" for problem in differences]
    total = sum(int(layer.sum()) for layer in result.kept)
    if total > max_entries(bound, case.tokens):
        problems.append(
            f"keeps {total} entries, more than the bound {max_entries(bound, case.tokens)}"
        )
    return problems


def _differences(expected: Mapping[str, Any], output: Mapping[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        if name == "reported" and isinstance(value, Mapping):
            yield from _differences(value, output)
        elif name not in output:
            yield f"the policy has no {name} to compare"
        elif name == "kept":
            yield from _kept_differences(value, output[name])
        elif not _equal(value, output[name]):
            are = "are" if name.endswith("s") else "is"
            yield f"{name} {are} {output[name]}, not {value}"


def _equal(expected: object, actual: object) -> bool:
    """Whether JSON values are equal, numbers to 1e-5."""
    if isinstance(expected, float) and isinstance(actual, int | float):
        return abs(actual - expected) <= 1e-5 * max(1.0, abs(expected))
    if isinstance(expected, list) and isinstance(actual, list):
        pairs = zip(expected, actual, strict=False)
        return len(expected) == len(actual) and all(_equal(a, b) for a, b in pairs)
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(
            _equal(expected[key], actual[key]) for key in expected
        )
    return expected == actual


def _kept_differences(expected: list[Any], actual: list[Any]) -> Iterator[str]:
    for layer, heads in enumerate(expected):
        for head, positions in enumerate(heads):
            if actual[layer][head] != positions:
                problem = _difference(actual[layer][head], positions)
                yield f"layer {layer}, KV head {head}: {problem}"


def _difference(kept: list[int], expected: list[int]) -> str:
    extra = sorted(set(kept) - set(expected))
    lost = sorted(set(expected) - set(kept))
    parts = [f"kept {positions_text(kept)}"]
    if extra:
        parts.append(f"{positions_text(extra)} should not be there")
    if lost:
        are = "is" if len(lost) == 1 else "are"
        parts.append(f"{positions_text(lost)} {are} missing")
    return "; ".join(parts)


def recording(case: PolicyTest) -> Recording:
    """The tensors of a test, float32.

    Raises:
        PolicyError: numbers that do not fit the model's sizes.
    """
    shape, tensors = case.shape, {}
    for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        size = (shape.layers, heads, case.tokens, shape.head_dim)
        tensors[name] = _tensor(name, case, size)
        size = (case.steps, shape.layers, heads, shape.head_dim)
        tensors[f"{name}_step"] = _tensor(f"{name}_step", case, size)
    inv_freq = None if case.inv_freq is None else np.asarray(case.inv_freq)
    if inv_freq is not None and 2 * len(inv_freq) != shape.head_dim:
        raise refused("inv_freq", "test", f"it has half the head size, {shape.head_dim}, numbers")
    steps = (tensors["q_step"], tensors["k_step"], tensors["v_step"]) if case.steps else None
    return Recording(case.name, tensors["q"], tensors["k"], tensors["v"], steps, inv_freq)


def _tensor(name: str, case: PolicyTest, size: tuple[int, ...]) -> np.ndarray:
    spec = case.tensors[name]
    if not isinstance(spec, Seed):
        return _written(name, spec, size)
    if not name.endswith("_step"):
        return _seeded(spec, size)
    steps = [_seeded(replace(spec, seed=spec.seed + step), size[1:]) for step in range(size[0])]
    return np.stack(steps) if steps else np.zeros(size, np.float32)


def _seeded(seed: Seed, size: tuple[int, ...]) -> np.ndarray:
    layers = [
        generated(seed.seed + seed.stride * layer, size[1:])
        * np.float32(seed.scale + seed.step * layer)
        for layer in range(size[0])
    ]
    return np.stack(layers)


def _written(name: str, numbers: Numbers | None, size: tuple[int, ...]) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # a number beyond float32 is infinite
            values = np.asarray(0.0 if numbers is None else numbers, dtype=np.float32)
    except ValueError:
        raise refused(name, "test", f"lists in `{name}` differ in their lengths") from None
    try:
        return np.ascontiguousarray(np.broadcast_to(values, size))
    except ValueError:
        message = (
            f"`{name}` has the sizes {list(values.shape)}, not {list(size)} or the last of them"
        )
        raise refused(name, "test", message) from None


def generated(seed: int, size: Sequence[int]) -> np.ndarray:
    """Numbers between -2 and 2 that any program can make again, float32.

    With k the flat index (last dimension fastest):
    ((((37 + 2 seed) k^2 + (17 + 4 seed) k + 29 seed + 7) mod 1009) - 504) / 252.
    """
    k = np.arange(int(np.prod(size)), dtype=np.int64) % 1009
    values = ((37 + 2 * seed) * k * k + (17 + 4 * seed) * k + 29 * seed + 7) % 1009
    return ((values - 504) / 252).astype(np.float32).reshape(size)
