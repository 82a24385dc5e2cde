"""The torch program on recorded tensors: for `kvpolicy run`, `test`, `diff`, and for tests."""

from __future__ import annotations

import numpy as np
import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.diagnostics import refused
from kvpolicy.dsl.interpret import Result
from kvpolicy.dsl.torch_program import TorchProgram
from kvpolicy.dsl.torch_values import Value, aligned, snapped


def apply(bound: Bound, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Result:
    """What `interpret` does, by the torch program on the CPU; the same arguments and result."""
    program = TorchProgram(bound, report=True)
    layers, kv, tokens, _ = k.shape
    run = program.start(tokens)
    for layer in range(layers):
        tensors = [torch.tensor(x[layer]) for x in (q, k, v)]
        run.observe(layer, *tensors)
    kept = [each.numpy() for each in run.finish()]
    if run.not_finite:
        raise refused(bound.program.name, "data", "the tensors hold NaN or infinity")
    if tokens == 0:
        return Result(kept, None, None)
    budgets = scores = None
    if bound.lowered.budget is not None:
        budgets = [
            np.floor(snapped(_spread(x, ("kv",), (kv,))).numpy()).astype(np.int64)
            for x in run.result(bound.lowered.budget)
        ]
    if bound.lowered.score is not None:
        scores = [
            _spread(x, ("kv", "token"), (kv, tokens)).numpy()
            for x in run.result(bound.lowered.score)
        ]
    return Result(kept, budgets, scores)


def _spread(x: Value, axes: tuple[str, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Data repeated along missing axes, NaN where absent."""
    data = torch.as_tensor(x.data, dtype=torch.float64)
    data = aligned(data, x.axes, axes).expand(shape)
    if x.mask is None:
        return data
    return torch.where(aligned(x.mask, x.mask_axes, axes), data, torch.nan)
