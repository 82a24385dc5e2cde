"""Attention backends that can read compressed entries.

A stock backend instance is kept and its class replaced by a subclass, so that its name, its type
checks and its attributes stay what SGLang expects. Prefills run in the stock backend; where it can
(flashinfer, fa3) and policies need it, it hands over the log-sum-exp of its logits, so that their
kernels go over the keys once instead of twice. Decode batches in which nothing is compressed run
in the stock backend, too, with its own kernel and its own CUDA graph; the others are read either
row by row through lists of entries (torch_native, the reference) or all at once, by a reader
(readers.py). The decoding rows of a mixed batch are read in the same way after the stock backend
has run, whose attention of these rows is wrong: it read slots that they have given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.attention import graphs
from kvpolicy.sglang_ext.attention.readers import (
    FLASHINFER,
    Reader,
    TritonReader,
    by_flashinfer,
)
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.forward.attend import attend
from kvpolicy.sglang_ext.request.request import Queries

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.decode_step import DecodeStep
    from kvpolicy.sglang_ext.forward.services import Services

logger = logging.getLogger(__name__)

REFERENCE = "torch_native"


def attach(
    backend: Any,
    name: str,
    services: Services,
    heads: int,
    dtype: torch.dtype,
    *,
    decodes: bool = True,
) -> Any:
    """Make a stock backend instance read compressed entries.

    Args:
        backend: instance of one of `refusals.SERVED_BACKENDS`.
        name: its name in SGLang's registry.
        heads: H of this rank.
        dtype: of its queries.
        decodes: whether decode steps run on it, not only prefills.

    Returns:
        The same instance.

    Raises:
        Refused: as `readers.by_flashinfer`.
    """
    stock, notes_lse = type(backend), compat.gives_lse(name, backend)
    if notes_lse:
        logger.info("KV-cache policies read the log-sum-exp that %s finds in prefills.", name)
    attention: _ByLists | _ByTables
    if name == REFERENCE:
        attention = _ByLists(services)
    else:
        attention = _ByTables(services, name, backend, heads, dtype, decodes=decodes)
    if name == FLASHINFER:
        compat.begin_at_tails(backend, partial(_tails, services))
    members = {
        "forward_extend": _forward_extend(stock, services, attention, name if notes_lse else None),
        "forward_decode": _forward_decode(stock, services, attention),
        **attention.members(stock),
    }
    backend.__class__ = type(f"KVPolicy{stock.__name__}", (stock,), members)
    return backend


def _forward_extend(
    stock: Any, services: Services, attention: _ByLists | _ByTables, gives_lse: str | None
) -> Callable[..., Any]:
    """The backend's `forward_extend`; `gives_lse` names a backend that hands over its LSE."""

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any,
        save_kv_cache: bool = True, **options: Any,
    ) -> Any:  # fmt: skip
        step, lse = services.step, None
        prefill = None if step is None else step.prefill
        arguments = (self, q, k, v, layer, batch, save_kv_cache)
        if prefill is not None and gives_lse is not None and lse_wanted(prefill, q, layer):
            out, lse = compat.extend_with_lse(
                gives_lse, stock.forward_extend, *arguments, **options
            )
        else:
            out = stock.forward_extend(*arguments, **options)
        # If SGLang replays a prefill's graph in pieces, attention runs between them: once per
        # layer, without padding rows, with this forward's step.
        if step is not None and prefill is not None:
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            prefill.observe(layer, Queries(heads, lse))
            out_rows = out.view(heads.shape)
            step.resume.overwrite(layer, heads, out_rows, attention.of_lists)
            step.resume.observe(layer, heads)
            if step.decoding is not None:
                decode(self, heads[step.decoding], out_rows[step.decoding], layer, batch)
        return out

    def lse_wanted(prefill: Any, q: Any, layer: Any) -> bool:
        """Whether policies need the log-sum-exp, and attention has the logits that they see."""
        same_logits = q.dtype == services.arena.storage.dtype and compat.scale(layer) == 1.0
        return same_logits and prefill.reads_lse

    def decode(self: Any, heads: Any, out: Any, layer: Any, batch: Any) -> None:
        """Attention of the last rows of a mixed forward: [B, H, D] queries `heads`, to `out`."""
        step = _step(services)
        if step is not None and step.reads:
            with step.reading():
                attention.overwrite(self, step, heads, out, layer, batch)
        if graphs.notes_queries(services):
            services.queries.write(layer, heads, services.arena.span)

    return forward_extend


def _forward_decode(
    stock: Any, services: Services, attention: _ByLists | _ByTables
) -> Callable[..., Any]:
    def forward_decode(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any,
        save_kv_cache: bool = True, **options: Any,
    ) -> Any:  # fmt: skip
        arguments = (self, q, k, v, layer, batch, save_kv_cache)
        out = attention.decode(*arguments)
        if out is None:
            out = stock.forward_decode(*arguments, **options)
        if graphs.notes_queries(services):
            heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            services.queries.write(layer, heads, services.arena.span)
        return out

    return forward_decode


class _ByLists:
    """Reads request by request through lists of entries: the reference."""

    def __init__(self, services: Services) -> None:
        from kvpolicy.kernels.attention.paged_attention import paged_attention

        self._services, self.of_lists = services, paged_attention

    def members(self, stock: Any) -> dict[str, Callable[..., Any]]:
        return {}

    def decode(
        self, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
    ) -> Any:
        """The attention of a decode forward, like `q`; None: stock attention is right."""
        step = _step(self._services)
        if step is None or not step.reads:
            return None
        with step.reading():
            if save_kv_cache and k is not None:
                compat.save_kv(backend, layer, batch, k, v)
            heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out, plain = torch.empty_like(heads), step.plain
            if plain.numel():
                out[plain] = compat.stock_decode_rows(backend, layer, batch, heads, plain)
            self.overwrite(backend, step, heads, out, layer, batch)
        return out.view(q.shape)

    def overwrite(
        self, backend: Any, step: DecodeStep, heads: Any, out: Any, layer: Any, batch: Any
    ) -> None:
        """Writes the attention of the rows that read compressed entries to `out` [B, H, D]."""
        step.overwrite(heads, out, partial(attend, self._services.arena, layer, self.of_lists))


class _ByTables:
    """Reads all requests at once through the device tables.

    Args:
        backend, name, heads, dtype, decodes: as of `attach`.

    Raises:
        Refused: as `readers.by_flashinfer`.
    """

    def __init__(
        self,
        services: Services,
        name: str,
        backend: Any,
        heads: int,
        dtype: torch.dtype,
        *,
        decodes: bool,
    ) -> None:
        # Triton decides when kernels are declared whether they are interpreted; the reference
        # needs none.
        from kvpolicy.kernels.attention.paged_attention_triton import paged_attention

        self._services, self.of_lists = services, paged_attention
        self._tables = TritonReader(services, heads, dtype)
        self._pages = None
        if decodes:
            stock = type(backend).forward_decode
            self._pages = by_flashinfer(services, name, backend, stock, heads, dtype)
            services.pages_reader = self._pages

    def decode(
        self, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
    ) -> Any:
        """The attention of a decode forward, like `q`; None: stock attention is right."""
        if not graphs.reads_tables(self._services):
            return None
        step = _step(self._services)  # None while a graph is captured
        with nullcontext() if step is None else step.reading():
            reader = self._reader(step, batch)
            return reader.decode(backend, q, k, v, layer, batch, save_kv_cache).view(q.shape)

    def _reader(self, step: DecodeStep | None, batch: Any) -> Reader:
        """The reader of this forward, or of the graph that is being captured."""
        captured, pages = compat.captured_attention(), self._pages
        if pages is None or (captured is not None and captured != graphs.PAGES):
            return self._tables
        if captured is None and (step is None or not pages.ready(step, batch.req_pool_indices)):
            return self._tables
        return pages

    def overwrite(
        self, backend: Any, step: DecodeStep, heads: Any, out: Any, layer: Any, batch: Any
    ) -> None:
        """Writes the attention of the last rows of a forward to `out` [B, H, D]."""
        last = slice(-heads.shape[0], None)
        rows, lengths = batch.req_pool_indices[last], batch.seq_lens[last]
        table = backend.req_to_token_pool.req_to_token
        out.copy_(self._tables.attend(heads, layer, rows, lengths, table))

    def members(self, stock: Any) -> dict[str, Callable[..., Any]]:
        """Functions of the backend by which CUDA graphs are captured, planned and replayed."""
        services, tables, pages = self._services, self._tables, self._pages
        wrappers: dict[int, Any] = {}

        def create_decode_wrappers(self: Any, bs: int, num_tokens: int) -> Any:
            # SGLang plans a replay in the wrappers of the last capture of its batch size. Two
            # variants have stock attention, and find their plans in the same wrappers.
            if bs not in wrappers:
                wrappers[bs] = stock._create_decode_wrappers(self, bs, num_tokens)
            return wrappers[bs]

        def init_cuda_graph_state(self: Any, max_bs: int, *arguments: Any, **options: Any) -> None:
            stock.init_cuda_graph_state(self, max_bs, *arguments, **options)
            wrappers.clear()
            tables.reserve(max_bs)
            if pages is not None:
                pages.reserve(max_bs)

        def init_forward_metadata_out_graph(
            self: Any, batch: Any, in_capture: bool = False, **options: Any
        ) -> None:
            step = _step(services)
            if in_capture and pages is not None and compat.captured_attention() == graphs.PAGES:
                pages.capture(batch.batch_size)
            # A replay in which Triton reads runs no stock attention: there is nothing to plan.
            # Eager steps may fall back to stock attention.
            replays = not in_capture and batch.forward_mode.is_decode()
            if replays and step is not None and graphs.reads_tables(services):
                if pages is None or not pages.chosen(step):
                    return
            stock.init_forward_metadata_out_graph(self, batch, in_capture, **options)

        def shared_read_ends(self: Any, mode: Any) -> Any:
            declared = stock.shared_read_ends(self, mode)
            # The scheduler may write to its table of slots after these reads; our attention reads
            # the table in every layer.
            reads = graphs.reads_tables(services)
            return compat.read_during_layers(declared) if reads else declared

        members: dict[str, Callable[..., Any]] = {
            "init_cuda_graph_state": init_cuda_graph_state,
            "init_forward_metadata_out_graph": init_forward_metadata_out_graph,
            "shared_read_ends": shared_read_ends,
        }
        if pages is not None:
            members["_create_decode_wrappers"] = create_decode_wrappers
        return members


def _tails(services: Services) -> tuple[torch.Tensor, list[int]] | None:
    """Where the tails begin that stock attention reads in a decode forward.

    Earlier tokens are in private pages or dropped: their slots are gone.

    Returns:
        Positions by row of the table of slots, int32; positions by row of the forward, on the host.
        None: no row reads compressed entries.
    """
    step = _step(services)
    if step is None or not step.reads:
        return None
    return services.tables.tables.tail_start, step.tail_starts


def _step(services: Services) -> DecodeStep | None:
    return None if services.step is None else services.step.decode
