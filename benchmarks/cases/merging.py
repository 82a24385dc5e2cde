"""What costs more than one read of the keys: sums over all queries (H2O, D2O), and D2O's merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Kernels, Slots
from kvpolicy.kernels.merging import merge_rows as reference_rows
from kvpolicy.kernels.merging import nearest as reference
from kvpolicy.kernels.merging.links import Links
from kvpolicy.kernels.merging.merge_rows_triton import merge_rows
from kvpolicy.kernels.merging.nearest_triton import nearest
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON

from cases.case import Bench, Case, Checked, Model, Planned, Target
from cases.scoring import ATTENDED, NAMED, OURS, PROGRAM, Watched, scores

# Longest prompts for which float64 over all pairs, and torch in the model's dtype, are timed.
EXACT, PLAIN = 8192, 32768
# Queries that torch takes at a time.
BLOCK = 256


def _logits(q: torch.Tensor, k: torch.Tensor) -> Iterator[torch.Tensor]:
    """Causal logits [h, b, n]: b queries, n tokens up to the last; q [h, N, D], k [N, D]."""
    tokens, size = k.shape
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        logits = (q[:, start:end] @ k[:end].T) * size**-0.5
        own = torch.ones(end - start, end - start, dtype=torch.bool, device=k.device).triu(1)
        logits[:, :, start:].masked_fill_(own, float("-inf"))
        yield logits


def _columns(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """float64 [N]: attention that each token receives from all queries."""
    total = torch.zeros(k.shape[0], dtype=torch.float64, device=k.device)
    for logits in _logits(q, k):
        total[: logits.shape[2]] += logits.softmax(-1).sum((0, 1))
    return total


def _lse(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """float32 [h, N]: log-sum-exp of each query's logits, as attention gives it."""
    parts = [logits.logsumexp(-1) for logits in _logits(q.float(), k.float())]
    return torch.cat(parts, 1)


def _share(q: torch.Tensor, k: torch.Tensor) -> float:
    """Relative error of column sums in float32: as `scoring.off`, and N more terms."""
    single = torch.finfo(torch.float32).eps
    tokens, size = k.shape
    most = float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()) * size**-0.5
    return single * (2 * size * most + 2 * (tokens / 32 + 32) + 3)


def _sums(bench: Bench, tokens: int) -> Case:
    model, shape = bench.model, bench.model.shape
    one = type(shape)(1, shape.heads, shape.kv_heads, shape.head_dim)
    part = max(1, min(1024, tokens // 8))
    policy = bind(load("h2o").require(), one, {"heavy": str(part), "window": str(part)})
    q = model.random(shape.heads, tokens, shape.head_dim, seed=1)
    pool = model.random(tokens + 1, shape.kv_heads, shape.head_dim, seed=2)
    keys = Slots(pool[None], 1 + model.permutation(tokens, seed=3))
    dense = keys.dense.contiguous()

    def with_kernels(
        kernels: Kernels, report: bool = False, lse: torch.Tensor | None = None
    ) -> Callable[[], Run]:
        program = TorchProgram(policy, report=report, kernels=kernels)

        def call() -> Run:
            run = program.start(tokens)
            run.observe(0, q, keys if kernels else dense, None, lse=lse)
            return run

        return call

    def group(head: int) -> slice:
        return slice(head * shape.group, (head + 1) * shape.group)

    def plain() -> list[torch.Tensor]:
        return [_columns(q[group(head)], dense[head]) for head in range(shape.kv_heads)]

    lse = torch.cat([_lse(q[group(head)], own) for head, own in enumerate(dense)])
    # ATTENDED: as served by a backend that returns the log-sum-exp.
    calls = {ATTENDED: with_kernels(TRITON, lse=lse), OURS: with_kernels(TRITON)}
    if tokens <= EXACT:
        calls[PROGRAM] = with_kernels(REFERENCE)
    if tokens <= PLAIN:
        calls["torch, 256 queries at a time"] = plain

    def check() -> str:
        last, worst = shape.kv_heads - 1, 0.0
        rows = q[group(last)]
        exact = _columns(rows.double(), dense[last].double())
        share = _share(rows, dense[last])
        for given in (None, lse):
            run = with_kernels(watched := Watched(), report=True, lse=given)()
            assert watched.asked, "no kernel was generated for these sums"
            error = (scores(run.finish(), 0)[last] - exact).abs()
            assert bool((error <= share * exact).all()), "column sums are off"
            worst = max(worst, float((error / (share * exact)).max()))
        return f"sums of one KV head at most {100 * worst:.0f} % of the bound off float64"

    case = Case(
        "sums over all queries", "one layer of h2o, with selection", tokens, 1, calls, check,
        prefill=True,
    )  # fmt: skip
    if tokens != NAMED:
        return case
    what = f"sums over all queries of all layers, {tokens} tokens, as called / prefill"
    return case.aiming(
        Target(what, 0.35, False, "%", lambda times: bench.share_of_prefill(case, times[ATTENDED]))
    )


def lists_of(model: Model, tokens: int, number: int) -> tuple[torch.Tensor, ...]:
    """Columns of dropped entries [G, P], bool [G, P] which are real, bool [G, N] which are kept."""
    heads = model.shape.kv_heads
    order = torch.stack([model.permutation(tokens, seed=seed) for seed in range(heads)])
    kept, dropped = (x.sort(-1).values for x in order.split((number, tokens - number), -1))
    nothing = torch.zeros(heads, tokens, dtype=torch.bool, device=model.device)
    return dropped, torch.ones_like(dropped, dtype=torch.bool), nothing.scatter(1, kept, True)


def _plain_nearest(x: torch.Tensor, dropped: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Matmul and argmax in the dtype of the keys, all pairs of a head at once."""
    unit = torch.nn.functional.normalize(x, dim=-1)
    made = []
    for head in range(x.shape[0]):
        rows = kept[head].nonzero()[:, 0]
        made.append(rows[(unit[head, dropped[head]] @ unit[head, rows].T).argmax(-1)])
    return torch.stack(made)


def _nearest(bench: Bench, tokens: int, number: int) -> Case:
    model, shape = bench.model, bench.model.shape
    x = model.random(shape.kv_heads, tokens, shape.head_dim, seed=1)
    lists = lists_of(model, tokens, number)
    calls = {OURS: lambda: nearest(x, *lists)}
    if tokens <= EXACT:
        calls["torch, float64 in tiles"] = lambda: reference.nearest(x, *lists)
    if tokens <= PLAIN:
        calls["torch, matmul and argmax"] = lambda: _plain_nearest(x, lists[0], lists[2])

    def check() -> str:
        # The reference in float64, for some of the dropped entries of every head.
        part = slice(0, min(512, tokens - number))
        few = (lists[0][:, part], lists[1][:, part], lists[2])
        wanted, _ = reference.nearest(x, *few)
        assert torch.equal(nearest(x, *lists)[0][:, part], wanted), "others chosen"
        return "the same receivers as in float64, of up to 512 dropped entries per head"

    return Case(
        "merge", f"nearest of {number}, one layer of d2o", tokens, 1, calls, check, prefill=True,
        waits=("torch, float64 in tiles",),
    )  # fmt: skip


def links_of(model: Model, tokens: int, number: int) -> tuple[Links, torch.Tensor, torch.Tensor]:
    """Links to random receivers; `own` and `divide` of `merge_rows`, float64 [G, N]."""
    dropped, _, stays = lists_of(model, tokens, number)
    kept = stays.nonzero()[:, 1].view(len(stays), number)
    heads, device = model.shape.kv_heads, model.device
    generator = torch.Generator(device).manual_seed(4)
    size = dropped.shape
    chosen = torch.randint(number, size, generator=generator, device=device)
    receivers, order = kept.gather(1, chosen).sort(dim=-1, stable=True)
    many = torch.zeros(heads, tokens + 1, dtype=torch.int64, device=device)
    many.scatter_add_(1, receivers + 1, torch.ones_like(receivers))
    weights = torch.rand(size, generator=generator, device=device, dtype=torch.float64).exp()
    own = torch.full((heads, tokens), math.e, dtype=torch.float64, device=device)
    offsets = many.cumsum(-1).int()
    links = (dropped.gather(1, order).contiguous(), weights, offsets)
    return links, own, reference_rows.merge_mass(links, own)


def _rows(bench: Bench, tokens: int, number: int) -> Case:
    model, shape = bench.model, bench.model.shape
    x = model.random(shape.kv_heads, tokens, shape.head_dim, seed=1)
    sums = links_of(model, tokens, number)
    calls = {
        OURS: lambda: merge_rows(x, *sums),
        "torch, float64": lambda: reference_rows.merge_rows(x, *sums),
    }

    def check() -> str:
        wanted = reference_rows.merge_rows(x, *sums)
        assert not torch.equal(wanted, x.double()), "nothing was merged"
        # Sums of this many float64 terms, in another order.
        terms = int(sums[0][2].diff(dim=-1).max()) + 3
        size = reference_rows.merge_rows(x.double().abs(), *sums)
        bound = terms * torch.finfo(torch.float64).eps * size
        return str(Checked().within(merge_rows(x, *sums), wanted, bound, "merged rows"))

    counted = shape.kv_heads * tokens * (model.entry_bytes + 8 * shape.head_dim)
    return Case(
        "merge", f"sums of {number} receivers, keys of one layer of d2o", tokens, 1, calls, check,
        counted=counted, prefill=True, waits=("torch, float64",),
        note="the values of a layer take as long as its keys",
    )  # fmt: skip


def planned(lengths: Sequence[int], kept: int) -> list[Planned]:
    """Every length; the longest ones, which grow with the square, last."""
    made = []
    for tokens in lengths:
        number = min(kept, tokens // 2)

        def sums(bench: Bench, tokens=tokens) -> Case:
            return _sums(bench, tokens)

        def merge(bench: Bench, tokens=tokens, number=number) -> Case:
            return _nearest(bench, tokens, number)

        def rows(bench: Bench, tokens=tokens, number=number) -> Case:
            return _rows(bench, tokens, number)

        rank = 2 if tokens > PLAIN else 1
        first = 0 if tokens == NAMED else rank
        made.append(Planned(f"sums over all queries {tokens}", sums, first))
        made.append(Planned(f"nearest {tokens}", merge, rank))
        made.append(Planned(f"merged rows {tokens}", rows))
    return made
