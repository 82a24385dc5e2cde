"""Kernels of a fold, each launched once for all lists of all layers and requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from kvpolicy.kernels.table import REFERENCE as REFERENCES
from kvpolicy.kernels.table_triton import TRITON

from cases.case import Bench, Case, Model, Planned
from cases.scoring import OURS

REFERENCE = "the reference"
KERNELS = (
    "best", "carry", "draws", "finite", "following", "links", "means", "means_of_columns",
    "merge_entries", "nearest", "inner_products", "tally", "target", "then",
    "updated_where_left", "whole",
)  # fmt: skip
# Entries that come, and leave, between two folds; receivers of each leaving entry.
STEPS, REACH = 16, 16
# References that wait for numbers from the device.
WAITING = ("carry", "finite", "merge_entries", "nearest")


def arguments(model: Model, entries: int, batch: int) -> dict[str, tuple[tuple, dict]]:
    """Arguments of each kernel, positional and named, for lists of `entries` entries."""
    shape, device = model.shape, model.device
    layers, kv_heads, width = batch * shape.layers, shape.kv_heads, entries + STEPS
    lists = layers * kv_heads
    pool = model.random(lists * width, shape.head_dim, seed=1)
    ids = model.permutation(len(pool), seed=2).view(lists, width)
    score = model.random(lists, width, seed=3).double()
    there = torch.ones(lists, width, dtype=torch.bool, device=device)
    limits = torch.tensor([[4, 4, entries]], device=device)
    kept = TRITON["best"](score, None, there, limits)
    positions = torch.arange(width, device=device).repeat(layers, 1)
    newest = torch.full((batch,), 2 * width, device=device)
    used = TRITON["tally"](kept, there, None, None, kv_heads)[0][:, 0]
    carried = {"steps": STEPS, "width": int(used.max()) + STEPS}
    dropped, present, receivers, receivers_present = TRITON["following"](kept, there, STEPS, REACH)
    to, found = TRITON["nearest"](pool, dropped, present, kept, ids)
    cosines = TRITON["inner_products"](pool, dropped, present, to, found, ids)[3]
    made = TRITON["links"](dropped, to[..., None], found[..., None], present, cosines.exp(), width)
    one = torch.ones(lists, width, dtype=torch.float64, device=device)
    proceed = torch.ones(batch, 1, dtype=torch.bool, device=device)
    return {
        "carry": ((kept, None, positions, used, newest, [score[:, None]], [0.0]), carried),
        "best": ((score, None, there, limits), {}),
        "then": ((kept, score, None, there, score[:, 0].abs() * entries), {"in_all": False}),
        "whole": ((score[:, 0].contiguous(),), {}),
        "tally": ((kept, there, None, None, kv_heads), {}),
        "finite": ((pool, pool, ids, there), {}),
        "draws": ((0, positions, newest, kv_heads), {}),
        "following": ((kept, there, STEPS, REACH), {}),
        "target": ((score, receivers, receivers_present), {}),
        "nearest": ((pool, dropped, present, kept, ids), {}),
        "inner_products": ((pool, dropped, present, to, found, ids), {}),
        "means": ((cosines, present, kv_heads), {}),
        "means_of_columns": ((cosines, present, kv_heads), {}),
        "updated_where_left": ((cosines[:, 0], cosines[:, 1], present, kv_heads), {}),
        "links": ((dropped, to[..., None], found[..., None], present, cosines, width), {}),
        "merge_entries": ((pool, ids, made, None, one, proceed), {}),
    }


def flat(made: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(made, torch.Tensor):
        return [made]
    return [x for each in made for x in flat(each)]


def same(name: str, given: tuple, more: dict) -> str:
    """Compares both results; sums may be added in another order."""
    results = []
    for kernel in (TRITON[name], REFERENCES[name]):
        if name == "merge_entries":  # in place
            pool = given[0].clone()
            kernel(pool, *given[1:], **more)
            made = [pool]
        else:
            made = flat(kernel(*given, **more))
        results.append(made[2:] if name == "links" else made)  # undefined behind the last link
    for mine, its in zip(*results, strict=True):
        if mine.dtype.is_floating_point:
            # Sums of few terms in another order, rounded once.
            close = max(4 * torch.finfo(mine.dtype).eps, 1e-12)
            torch.testing.assert_close(mine, its, rtol=close, atol=close)
        else:
            assert torch.equal(mine, its), f"{name}: others"
    return "as the reference"


def _case(bench: Bench, name: str, entries: int, batch: int) -> Case:
    given, more = arguments(bench.model, entries, batch)[name]
    calls: dict[str, Callable[[], object]] = {
        OURS: partial(TRITON[name], *given, **more),
        REFERENCE: partial(REFERENCES[name], *given, **more),
    }
    waits = (REFERENCE,) if name in WAITING else ()
    about = (inspect.getdoc(REFERENCES[name]) or "").splitlines()[0].rstrip(".")
    return Case(
        "folds", f"`{name}`, all layers of all requests", entries, batch, calls,
        partial(same, name, given, more), layers=bench.model.shape.layers, waits=waits, note=about,
    )  # fmt: skip


def planned(entries: int, batches: Sequence[int]) -> list[Planned]:
    """Every kernel for every batch size."""
    return [
        Planned(f"{name} {batch}", partial(_case, name=name, entries=entries, batch=batch))
        for batch in batches
        for name in KERNELS
    ]
