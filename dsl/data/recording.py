"""Recorded tensors of one prompt, and of decode steps after it: the npz files of `kvpolicy run`.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, W recorded queries, T
decode steps, D head size.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.result import Steps
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import listed, refused, why

_PROMPT = {"q": "[L, H, N, D]", "k": "[L, G, N, D]", "v": "[L, G, N, D]"}
_STEPS = {"q_step": "[T, L, H, D]", "k_step": "[T, L, G, D]", "v_step": "[T, L, G, D]"}
_OTHERS = {"inv_freq": "[D / 2]"}


@dataclass(frozen=True)
class Recording:
    """The arrays of a file, float32 (`inv_freq` as stored).

    Attributes:
        path: the file, for messages.
        q: [L, H, W, D], the last W queries of the prompt.
        k, v: [L, G, N, D].
        steps: queries, keys and values of decode steps, or None.
        inv_freq: [D / 2], or None.
    """

    path: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    steps: Steps | None
    inv_freq: np.ndarray | None

    @property
    def shape(self) -> ModelShape:
        """Sizes of the recorded model."""
        return ModelShape(self.q.shape[0], self.q.shape[1], self.k.shape[1], self.q.shape[3])

    def check_queries(self, bound: Bound) -> None:
        """Refuses fewer last queries than the policy reads, or more than tokens."""
        tokens, queries = self.k.shape[2], self.q.shape[2]
        needed = bound.queries(tokens)
        if not needed <= queries <= tokens:
            amount = f"all of them, or at least the last {needed}"
            message = f"`q` has {queries} queries for {tokens} tokens; the policy needs {amount}"
            raise refused(self.path, "data", message)


def check_layer_queries(bound: Bound, prompt: int, layer: int, known: int, tokens: int) -> None:
    """Refuses a recording without the last queries of the tokens that reached a layer.

    Args:
        prompt: N tokens.
        layer: from 0.
        known: number of the layer's last queries that were recorded.
        tokens: number of tokens that reached it.
    """
    needed = min(bound.queries(prompt), tokens)
    if known < needed:
        message = f"layer {layer} needs its last {needed} queries, `q` has {known} of them"
        raise refused(bound.program.name, "data", message, "give the queries of all tokens")


def read_recording(path: str | Path) -> Recording:
    """Reads an npz file; never unpickles.

    Raises:
        PolicyError: the file or its arrays cannot be used.
    """
    file_name = str(path)
    arrays = _stored(file_name)
    problem = next(_problems(arrays), None)
    if problem is not None:
        raise refused(file_name, "data", problem)
    steps = None
    if arrays.keys() & _STEPS.keys():
        q_step, k_step, v_step = (arrays[name].astype(np.float32) for name in _STEPS)
        steps = (q_step, k_step, v_step)
    q, k, v = (arrays[name].astype(np.float32) for name in _PROMPT)
    return Recording(file_name, q, k, v, steps, arrays.get("inv_freq"))


def _stored(file_name: str) -> dict[str, np.ndarray]:
    try:
        archive = np.load(file_name, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise refused(file_name, "data", "holds a single array, not an npz of q, k and v")
        with archive:
            shapes = {**_PROMPT, **_STEPS, **_OTHERS}
            arrays = {name: archive[name] for name in archive.files if name in shapes}
            return arrays or {name: np.empty(0) for name in archive.files}
    except FileNotFoundError:
        raise refused(file_name, "data", "no such file") from None
    except ValueError:  # numpy proposes to unpickle it
        raise refused(file_name, "data", "not a readable npz of numbers") from None
    except OSError as error:
        raise refused(file_name, "data", why(error, "cannot be read")) from None
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise refused(file_name, "data", f"not a readable npz of numbers: {error}") from None


def _problems(arrays: dict[str, np.ndarray]) -> Iterator[str]:
    """What is wrong with the arrays of a file; after the first problem, the rest may raise."""
    missing = [name for name in _PROMPT if name not in arrays]
    if missing:
        names = ", ".join(f"`{name}`" for name in arrays) or "nothing"
        yield f"no array {', '.join(f'`{name}`' for name in missing)}; the file has {names}"
    for name, array in arrays.items():
        yield from _array_problems(name, array)
    yield from _prompt_problems(arrays)
    if arrays.keys() & _STEPS.keys():
        yield from _step_problems(arrays)
    size, inv_freq = arrays["k"].shape[3], arrays.get("inv_freq")
    if inv_freq is not None and (size % 2 or inv_freq.shape != (size // 2,)):
        yield f"`inv_freq` is {list(inv_freq.shape)}; half the head size {size} is needed"


def _array_problems(name: str, array: np.ndarray) -> Iterator[str]:
    expected = {**_PROMPT, **_STEPS, **_OTHERS}[name]
    if array.ndim != expected.count(",") + 1:
        yield f"`{name}` has shape {list(array.shape)}; it is {expected}"
    if array.dtype.kind != "f":
        other_types = "float16, float64, which are converted"
        yield f"`{name}` is {array.dtype}; it is float32 (or {other_types})"
    if not np.isfinite(array).all():
        yield f"`{name}` holds NaN or infinity, first {_place(name, array)}"
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32, copy=False)
    if name not in _OTHERS and not np.isfinite(converted).all():
        yield f"`{name}` holds what float32 cannot, first {_place(name, converted)}"


def _prompt_problems(arrays: dict[str, np.ndarray]) -> Iterator[str]:
    q, k, v = (arrays[name].shape for name in _PROMPT)
    if k != v:
        yield f"`k` is {list(k)} and `v` is {list(v)}; they have one shape"
    if q[0] != k[0] or q[3] != k[3]:
        agree = "layers (first) and head size (last) agree"
        yield f"`q` is {list(q)} and `k` is {list(k)}; {agree}"
    if 0 in (*q[:2], q[3], *k[:2]):
        yield f"`q` is {list(q)}; only the number of tokens may be 0"
    if q[1] % k[1]:
        yield f"{q[1]} query heads cannot share {k[1]} KV heads; the second divides the first"


def _step_problems(arrays: dict[str, np.ndarray]) -> Iterator[str]:
    missing = [name for name in _STEPS if name not in arrays]
    if missing:
        yield f"decode steps need {listed(missing, 'and')} too"
    steps = arrays["q_step"].shape[0]
    for name, source in zip(_STEPS, _PROMPT, strict=True):
        layers, heads, _, size = arrays[source].shape
        shape, needed = list(arrays[name].shape), [steps, layers, heads, size]
        if shape != needed:
            yield f"`{name}` is {shape}; for {steps} steps and this `{source}` it is {needed}"


def _place(name: str, array: np.ndarray) -> str:
    """Where the first number that is not finite stands."""
    words = {4: ("layer", "head", "token"), 1: ("place",)}[array.ndim]
    words = ("step", "layer", "head") if name in _STEPS else words
    first = np.argwhere(~np.isfinite(array))[0]
    return "at " + ", ".join(f"{word} {i}" for word, i in zip(words, first, strict=False))
