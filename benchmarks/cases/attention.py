"""Decode attention: ragged private pages with a tail, beside paged decode over uniform lengths.

All calls read one pool: ours and those in `RAGGED` a ragged list per (layer, KV head), the others
as many entries in lists of one length, and one FlashInfer call the whole cache.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache as once
from functools import partial

import numpy as np
import torch
from kvpolicy.kernels.attention.decode_attention_triton import decode_attention
from kvpolicy.kernels.attention.private_attention_flashinfer import PrivateAttention
from kvpolicy.kernels.entries.requests import Requests
from timing import Times

from cases.attention_pool import LAYERS, PAGE, TAIL, Cache
from cases.case import Bench, Case, Checked, Planned, Target

# Largest pool that is built with room for the whole cache.
POOL_BYTES = 32 << 30
# Tokens and requests of the target against the whole cache.
NAMED = (65536, 16)
OURS = "ours, ragged"
PAGES = "FlashInfer, ragged, private pages and tails"
ROWS = "FlashAttention 3, ragged, a list per KV head"
RAGGED = (PAGES, ROWS)
WHOLE = "FlashInfer, whole cache"
PAGED = ((1, "FlashInfer, page 1"), (PAGE, f"FlashInfer, page {PAGE}"))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple:
    """Attention in float64 and a kernel's allowed error: [R, D] from q [R, D], k, v [M, D].

    A logit is a float32 sum of D products. A weight may be rounded to the dtype for the second
    product. The output is a float32 sum of M terms, rounded to the dtype. `eps` of torch is twice
    the unit roundoff, so each of these errors is counted at least twice.
    """
    single, half = torch.finfo(torch.float32).eps, torch.finfo(q.dtype).eps
    q, k, v = q.double(), k.double(), v.double()
    logits = q @ k.T * scale
    off = single * (k.shape[1] * (q.abs() @ k.abs().T * scale).amax(-1) + logits.abs().amax(-1))
    weights = logits.softmax(-1)
    size = weights @ v.abs()
    share = half + 2 * off[:, None] + single * k.shape[0]
    return weights @ v, size * share + half * (weights @ v).abs()


def checked(cache: Cache, calls: dict[str, Callable]) -> str:
    """Checks every call on two lists, the first and the last; says how far each is off."""
    group = cache.model.shape.group
    held = Checked()
    for name, call in calls.items():
        out = call()
        for layer, request, head in ((0, 0, 0), (LAYERS - 1, -1, -1)):
            request, head = request % cache.batch, head % cache.model.shape.kv_heads
            if name.startswith("ours") or name in RAGGED:
                k, v = cache.entries(request, layer, head)
            else:
                length = cache.tokens + TAIL if name == WHOLE else cache.uniform
                k, v = _uniform_entries(cache, length, request, layer, head, "SDPA" in name)
            rows = slice(head * group, (head + 1) * group)
            q = cache.q[layer, request, rows]
            wanted, bound = exact(q, k, v, cache.scale)
            held.within(out[layer][request, rows], wanted, bound, name)
    return f"{held} (float64, two lists of each)"


def _uniform_entries(
    cache: Cache, length: int, request: int, layer: int, head: int, dense: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if dense:
        rows = slice(request * length, (request + 1) * length)
        return cache.storage[layer, 0, rows, head], cache.storage[layer, 1, rows, head]
    pages = cache.slots_of_uniform(length)[request].long()
    slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()[:length]
    return cache.storage[layer, 0, slots, head], cache.storage[layer, 1, slots, head]


def ours(cache: Cache, **options) -> list[torch.Tensor]:
    """Decode attention of every layer, [B, H, D] each."""
    requests = Requests(cache.storage, cache.tables, cache.rows, cache.lengths, cache.req_to_token)
    return [
        decode_attention(cache.q[at], requests, layer=at, scale=cache.scale, **options)
        for at in range(LAYERS)
    ]


# The alternatives: each gives a call that returns [B, H, D] of every layer.


def _torch(cache: Cache) -> Callable:
    """torch's SDPA over dense lists of one length: no indices to follow."""
    length, batch = cache.uniform, cache.batch

    def call():
        made = []
        for layer in range(LAYERS):
            k, v = (
                each[: batch * length].unflatten(0, (batch, length)).transpose(1, 2)
                for each in cache.storage[layer]
            )
            out = torch.nn.functional.scaled_dot_product_attention(
                cache.q[layer, :, :, None], k, v, scale=cache.scale, enable_gqa=True
            )
            made.append(out[:, :, 0])
        return made

    return call


def by_flashinfer(cache: Cache, length: int, page: int) -> Callable:
    """FlashInfer's paged decode over `length` entries of every list, `page` slots a page."""
    import flashinfer

    shape, device = cache.model.shape, cache.model.device
    pages = cache.slots_of_uniform(length)
    if page == 1:
        inside = torch.arange(PAGE, device=device, dtype=torch.int32)
        indices = (pages[:, :, None] * PAGE + inside).flatten(1)[:, :length]
        last = 1
    else:
        indices, last = pages, length - (pages.shape[1] - 1) * PAGE
    work = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    # As SGLang asks for it with four or more query heads per KV head.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        work, "NHD", use_tensor_cores=True, backend="fa2"
    )
    indptr = torch.arange(cache.batch + 1, dtype=torch.int32, device=device) * indices.shape[1]
    wrapper.plan(
        indptr,
        indices.flatten().contiguous(),
        torch.full((cache.batch,), last, dtype=torch.int32, device=device),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        page,
        sm_scale=cache.scale,
        q_data_type=cache.model.dtype,
        kv_data_type=cache.model.dtype,
    )
    paged = cache.storage.unflatten(2, (-1, page))

    def call():
        return [
            wrapper.run(cache.q[layer], (paged[layer, 0], paged[layer, 1]))
            for layer in range(LAYERS)
        ]

    return call


def by_pages(cache: Cache) -> Callable:
    """The ragged lists as a server with FlashInfer reads them, planned once."""
    import flashinfer

    shape, device, dtype = cache.model.shape, cache.model.device, cache.model.dtype
    work = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    cores = shape.group >= 4  # as SGLang asks for 16-bit entries
    private = PrivateAttention(cache.storage, shape.heads, dtype, work, tensor_cores=cores)
    private.plan(cache.tables, cache.rows, cache.counts.transpose(1, 0, 2), captured=None)
    tails = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        work, "NHD", use_tensor_cores=cores, backend="fa2"
    )
    tails.plan(
        torch.arange(cache.batch + 1, dtype=torch.int32) * TAIL,
        cache.req_to_token[1:, cache.tokens :].flatten().contiguous(),
        torch.ones(cache.batch, dtype=torch.int32),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        1,
        sm_scale=cache.scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )

    def call():
        made = []
        for layer, q in enumerate(cache.q):
            tail = tails.run(q, tuple(cache.storage[layer].unsqueeze(2)), return_lse=True)
            own = private.attend(q, layer=layer, scale=cache.scale)
            made.append(private.merged(own, tail))
        return made

    return call


@once
def flash_attention() -> Callable[..., torch.Tensor]:
    """FlashAttention 3 for a paged cache, from SGLang's kernels or its own package.

    Raises:
        ImportError: neither is installed.
    """
    for name in ("sgl_kernel.flash_attn", "flash_attn_interface"):
        try:
            return importlib.import_module(name).flash_attn_with_kvcache
        except ImportError:
            continue
    raise ImportError("neither sglang-kernel nor flash-attn-3 is installed")


def by_rows(cache: Cache) -> Callable:
    """The ragged lists by FlashAttention 3: each list is a sequence, in pages of one slot."""
    shape, device, decode = cache.model.shape, cache.model.device, flash_attention()
    heads = range(shape.kv_heads)
    tables = []
    for layer in range(LAYERS):
        lists = [cache.numbers(b, layer, head) for b in range(cache.batch) for head in heads]
        table = np.zeros((len(lists), max(map(len, lists))), dtype=np.int32)
        for row, own in zip(table, lists, strict=True):
            row[: len(own)] = own
        lengths = np.array([len(own) for own in lists], dtype=np.int32)
        tables.append([torch.from_numpy(each).to(device) for each in (table, lengths)])
    pool = cache.storage.view(-1, 1, 1, shape.head_dim)
    pools = pool[: -cache.value_offset], pool[cache.value_offset :]

    def call():
        return [
            decode(
                q.reshape(-1, 1, shape.group, shape.head_dim), *pools, page_table=table,
                cache_seqlens=lengths, softmax_scale=cache.scale, causal=True,
            ).view(q.shape)
            for q, (table, lengths) in zip(cache.q, tables, strict=True)
        ]  # fmt: skip

    return call


def by_sglang(cache: Cache) -> Callable:
    """SGLang's Triton kernel as its backend calls it, with its own number of splits."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    shape, device, batch, length = cache.model.shape, cache.model.device, cache.batch, cache.uniform
    if device.type == "cuda" and cache.q.dtype == torch.float32:
        raise TypeError("it multiplies float32 as TF32, which no bound here allows for")
    inside = torch.arange(PAGE, device=device)
    pages = cache.slots_of_uniform(length).long()
    indices = (pages[:, :, None] * PAGE + inside).flatten(1)[:, :length].flatten().contiguous()
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    most = 8  # the default of --triton-attention-num-kv-splits
    splits = torch.empty(batch, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int64, device=device)
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    get_num_kv_splits_triton[(1,)](
        splits, lengths, batch, 1, shape.heads, shape.kv_heads, most, cores, MAX_NUM_SEQ=256
    )
    partial = torch.empty(batch, shape.heads, most, shape.head_dim, device=device)
    lse = torch.empty(batch, shape.heads, most, device=device)
    out = torch.empty_like(cache.q)

    def call():
        for layer in range(LAYERS):
            decode_attention_fwd(
                cache.q[layer], cache.storage[layer, 0], cache.storage[layer, 1], out[layer],
                indptr, indices, partial, lse, splits, most, cache.scale, 1.0, 1.0,
            )  # fmt: skip
        return out

    return call


def by_flash_attention(cache: Cache) -> Callable:
    """FlashAttention 3, SGLang's default on Hopper, over the uniform lists."""
    decode = flash_attention()
    pages = cache.slots_of_uniform(cache.uniform).contiguous()
    lengths = torch.full((cache.batch,), cache.uniform, dtype=torch.int32, device=pages.device)
    paged = cache.storage.unflatten(2, (-1, PAGE))

    def call():
        return [
            decode(
                cache.q[layer].unsqueeze(1), paged[layer, 0], paged[layer, 1],
                page_table=pages, cache_seqlens=lengths, softmax_scale=cache.scale, causal=True,
            )[:, 0]
            for layer in range(LAYERS)
        ]  # fmt: skip

    return call


def _alternatives(cache: Cache) -> tuple[dict[str, Callable], list[str]]:
    """Calls by name, and the alternatives that cannot run, with the reason."""
    calls = {"torch SDPA, dense": _torch(cache)}
    if cache.model.device.type != "cuda":
        return calls, []
    offered = {name: partial(by_flashinfer, cache, cache.uniform, page) for page, name in PAGED}
    if cache.whole:
        offered[WHOLE] = partial(by_flashinfer, cache, cache.tokens + TAIL, 1)
    offered |= {PAGES: partial(by_pages, cache), ROWS: partial(by_rows, cache)}
    offered["SGLang's Triton kernel"] = partial(by_sglang, cache)
    offered["FlashAttention 3, page 16"] = partial(by_flash_attention, cache)
    missing = []
    for name, make in offered.items():
        try:
            call = make()
            call()
            torch.cuda.synchronize()
        except Exception as error:  # of another library; the report states it
            why = (str(error).splitlines() or [""])[0][:120]
            missing.append(f"{name} ({type(error).__name__}: {why})")
        else:
            calls[name] = call
    return calls, missing


def _build(bench: Bench, tokens: int, batch: int, kept: float) -> Case:
    model, mean = bench.model, max(1, int(kept * tokens))
    slots = batch * (tokens + TAIL + PAGE)
    pool = slots * LAYERS * 2 * model.shape.kv_heads * model.entry_bytes
    cache = Cache(model, tokens, batch, mean, pool <= POOL_BYTES)

    others, missing = _alternatives(cache)
    calls = {OURS: partial(ours, cache), **others}
    return Case(
        "decode attention",
        f"{100 * kept:g} % kept",
        tokens,
        batch,
        calls,
        lambda: checked(cache, calls),
        counted=cache.ragged_bytes,
        layers=LAYERS,
        targets=tuple(_targets(tokens, batch, kept)),
        note=f"not here: {'; '.join(missing)}" if missing else "",
    )


def _targets(tokens: int, batch: int, kept: float) -> list[Target]:
    size = f"{100 * kept:g} % of {tokens} tokens kept, batch {batch}"

    def median(times: dict[str, Times], *names: str) -> float | None:
        found = [float(np.median(times[name].kernels)) for name in names if name in times]
        return min(found) if found else None

    def beside_uniform(times: dict[str, Times]) -> float | None:
        other = median(times, *(name for _, name in PAGED))
        return None if other is None else median(times, OURS) / other

    def beside_whole(times: dict[str, Times]) -> float | None:
        other = median(times, WHOLE)
        return None if other is None else other / median(times, OURS)

    equal = f"ragged pages / FlashInfer over as many entries in lists of one length, {size}"
    made = [Target(equal, 1.1, False, "x", beside_uniform)]
    if (tokens, batch) == NAMED and math.isclose(kept, 0.125):
        what = f"FlashInfer over the whole cache / ragged pages, {size}"
        made.append(Target(what, 6, True, "x", beside_whole))
    return made


def planned(lengths: Sequence[int], batches: Sequence[int], kept: float) -> list[Planned]:
    """All sizes; the one with the target first."""

    def one(tokens: int, batch: int) -> Planned:
        return Planned(
            f"decode attention {tokens} x {batch}",
            lambda bench: _build(bench, tokens, batch, kept),
            0 if (tokens, batch) == NAMED else 1,
        )

    return [one(tokens, batch) for tokens in lengths for batch in batches]
