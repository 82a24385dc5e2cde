"""Readers of compressed entries in decode forwards: Triton's kernel, or FlashInfer.

Triton's kernel reads private pages and tails of all requests at once, by the device tables.
FlashInfer reads private pages, by plans that are made when lists change
(private_attention_flashinfer.py), and SGLang's own wrapper reads the tails. Triton's reader serves
every batch and is the default. FlashInfer's serves if SGLang decodes by FlashInfer, no request
stores layers in pairs, and it was measured to be faster (see `tuned`) or the operator asked for it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.launch import tuned
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.forward.attend import scales_of

if TYPE_CHECKING:
    from kvpolicy.kernels.attention.decode_attention_triton import Workspace
    from kvpolicy.kernels.attention.private_attention_flashinfer import PrivateAttention
    from kvpolicy.sglang_ext.forward.decode_step import DecodeStep
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.memory.private import Private

logger = logging.getLogger(__name__)

FLASHINFER = "flashinfer"  # in `tuned.READERS`, and the name of the backend that it needs


class Reader(Protocol):
    """Attention of decode forwards in which requests read compressed entries."""

    def reserve(self, requests: int) -> None:
        """Allocate what batches of up to `requests` need, before their graphs are captured."""

    def decode(
        self, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
    ) -> torch.Tensor:
        """[B, H, D] attention of all rows; writes their new keys and values if asked.

        Arguments are those of SGLang's `forward_decode`.
        """


class TritonReader:
    """Reads by Triton's kernel, over the device tables.

    Attributes:
        dtype: of queries.
        requests: B for which `workspace` suffices.
        workspace: that captured graphs write to; None before a capture.
    """

    def __init__(self, services: Services, heads: int, dtype: torch.dtype) -> None:
        self._services, self._heads, self.dtype = services, heads, dtype
        self.requests = 0
        self.workspace: Workspace | None = None

    def reserve(self, requests: int) -> None:
        """As of `Reader`; also the buffer for queries that graphs note."""
        from kvpolicy.kernels.attention.decode_attention_triton import (
            Workspace,
            workspace_elements,
        )

        storage = self._services.arena.storage
        sizes = (self._heads, storage.shape[3], storage.shape[4])
        elements = workspace_elements(requests, *sizes, storage.device)
        self.workspace = Workspace.empty(elements, storage.device)
        self.requests = requests
        queries_shape = (storage.shape[0], requests, self._heads, storage.shape[4])
        self._services.queries.reserve(queries_shape, self.dtype, storage.device)

    def decode(
        self, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
    ) -> torch.Tensor:
        """As of `Reader`."""
        if save_kv_cache and k is not None:
            compat.save_kv(backend, layer, batch, k, v, layer.k_scale, layer.v_scale)
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        table = backend.req_to_token_pool.req_to_token
        return self.attend(heads, layer, batch.req_pool_indices, batch.seq_lens, table)

    def attend(
        self,
        heads: torch.Tensor,
        layer: Any,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> torch.Tensor:
        """[B, H, D] attention of all rows that decode, of compressed requests and others.

        Args:
            heads: [B, H, D] queries.
            rows: int [B] of the table of slots.
            lengths: int [B] tokens of the requests.
            req_to_token: [rows, context] SGLang's table of slots.
        """
        from kvpolicy.kernels.attention import decode_attention_triton

        services = self._services
        key_scale, value_scale = scales_of(services.arena, layer)
        out = decode_attention_triton.decode_attention(
            heads,
            Requests(services.arena.storage, services.tables.tables, rows, lengths, req_to_token),
            layer=services.arena.place_of(layer.layer_id),
            scale=layer.scaling * key_scale,
            workspace=self.workspace if heads.shape[0] <= self.requests else None,
        )
        return out if value_scale == 1.0 else out * value_scale


class _Lists(NamedTuple):
    """Private lists of one request.

    Attributes:
        entries: int64 [l, g] of each list that is here.
        average: mean entries of all lists of the model, so that all ranks have the same number.
    """

    entries: np.ndarray
    average: float


class FlashInferReader:
    """Reads private pages by FlashInfer, and tails by SGLang's own wrapper.

    All ranks replay the same variant of a graph: SGLang's sums over ranks read, in a graph, what
    the same graph of another rank writes.
    """

    def __init__(
        self,
        services: Services,
        attention: PrivateAttention,
        forward: Callable[..., torch.Tensor],
        group: int,
        dtype: torch.dtype,
        *,
        always: bool,
    ) -> None:
        """
        Args:
            forward: the stock `forward_decode`, called with the backend before its arguments.
            group: number of query heads per KV head.
            dtype: of queries.
            always: whether it reads every batch that it can, measured or not.
        """
        self._services, self._attention, self._forward = services, attention, forward
        self._group, self._dtype, self._always = group, dtype, always
        self._sizes: list[int] = []  # of captured batches
        self._failed = self._warned = False
        # The last question to `ready`, its answer, and what is planned.
        self._question: tuple[weakref.ref[DecodeStep], int | None] | None = None
        self._answer = False
        self._planned: tuple[int | None, tuple[int, ...]] | None = None
        # Of the latest batch: layout versions by row, lists by version, entries int64 [l, B, g].
        self._versions: tuple[int, ...] = ()
        self._lists: dict[int, _Lists] = {}
        self._counts = np.empty(0)

    def reserve(self, requests: int) -> None:
        """As of `Reader`."""
        self._sizes, self._planned, self._question = [], None, None
        self._attention.reserve(requests)

    def capture(self, requests: int) -> None:
        """Plan for a graph of `requests` requests that is about to be captured."""
        self._plan_nothing(requests)
        self._sizes = sorted({*self._sizes, requests})

    def replays(self, step: DecodeStep, rows: torch.Tensor) -> bool:
        """Whether a step that replays a graph is to replay one in which this reads.

        If so, its attention is planned.

        Args:
            rows: int [B or more] of the table of slots.
        """
        fitting = [size for size in self._sizes if size >= len(step.private_of_rows)]
        return bool(fitting) and self.ready(step, rows, captured=fitting[0])

    def chosen(self, step: DecodeStep) -> bool:
        """Whether the last answer of `replays` or `ready` was true, and about this step."""
        return self._answer and self._question is not None and self._question[0]() is step

    def ready(self, step: DecodeStep, rows: torch.Tensor, *, captured: int | None = None) -> bool:
        """Whether this is to read a step's batch; if so, its attention is planned.

        It is decided once per step; a batch of the same lists in the same order is planned once.

        Args:
            rows: as of `replays`.
            captured: number of requests of the graph that is replayed; None: no graph.
        """
        if (
            self._question is None
            or self._question[0]() is not step
            or self._question[1] != captured
        ):
            self._answer = self._prepare(step, rows, captured)
            self._question = (weakref.ref(step), captured)
        return self._answer

    def warm(self) -> None:
        """Compile what batches without a graph need."""
        storage, tables = self._services.arena.storage, self._services.tables.tables
        layers, _, _, heads, size = storage.shape
        row = torch.zeros(1, dtype=torch.int64, device=storage.device)
        counts = np.zeros((layers, 1, heads), dtype=np.int64)
        self._planned = None
        self._attention.plan(tables, row, counts, captured=None)
        q = storage.new_zeros((1, heads * self._group, size), dtype=self._dtype)
        state = self._attention.attend(q, layer=0, scale=1.0)
        self._attention.merged(state, state)

    def _plan_nothing(self, captured: int) -> None:
        """Plan a graph of `captured` requests, of which none reads private pages."""
        storage = self._services.arena.storage
        no_rows = torch.zeros(0, dtype=torch.int64, device=storage.device)
        counts = np.zeros((storage.shape[0], 0, storage.shape[3]), dtype=np.int64)
        self._planned = None
        self._attention.plan(self._services.tables.tables, no_rows, counts, captured=captured)

    def _prepare(self, step: DecodeStep, rows: torch.Tensor, captured: int | None) -> bool:
        if self._failed:
            return False
        try:
            if not self._wants(step):
                return False
            plan_key = (captured, self._versions)
            if self._planned != plan_key:
                self._planned = None
                tables = self._services.tables.tables
                arguments = (tables, rows[: len(self._versions)], self._counts)
                self._attention.plan(*arguments, captured=captured)
                self._planned = plan_key
        except Exception as error:  # of another library: no request need fail for it
            several_ranks = self._services.ranks.size > 1
            if several_ranks and captured is not None:
                # Other ranks may have planned: the same graph is replayed here.
                step.fail_reading(error)
                self._plan_nothing(captured)
                return True
            if not self._warned:
                self._warned = True
                logger.exception(
                    "FlashInfer could not plan for KV-cache policies%s; Triton's kernel reads "
                    "instead.",
                    " at a step" if several_ranks else "",
                )
            # Without a graph, ranks may differ at a step; the graphs that they replay may not.
            self._failed = not several_ranks
            return False
        return True

    def _wants(self, step: DecodeStep) -> bool:
        """Whether this is to read the step's batch; notes the lists of the batch."""
        private_of_rows = step.private_of_rows
        if not step.reads or any(
            private is not None and private.shared is not None for private in private_of_rows
        ):
            return False
        tables, storage = self._services.tables, self._services.arena.storage
        versions = tuple(
            0 if private is None else tables.version(private.row) for private in private_of_rows
        )
        if versions != self._versions:
            lists_by_version, pairs = self._lists, zip(versions, private_of_rows, strict=True)
            self._lists = {
                version: lists_by_version[version]
                if version in lists_by_version
                else self._lists_of(private)
                for version, private in pairs
            }
            self._counts = np.stack([self._lists[version].entries for version in versions], 1)
            self._versions = versions
        if self._always:
            return True
        list_count = len(private_of_rows) * storage.shape[3]
        private_entries = sum(self._lists[version].average for version in versions)
        entries = int(private_entries + step.tail) // len(private_of_rows)
        key = (self._dtype, storage.shape[4], self._group, list_count, max(entries, 1))
        return tuned.choice("decode_reader", storage.device, *key).get("reader") == FLASHINFER

    def _lists_of(self, private: Private | None) -> _Lists:
        if private is None:
            layers, heads = (self._services.arena.storage.shape[i] for i in (0, 3))
            return _Lists(np.zeros((layers, heads), dtype=np.int64), 0.0)
        layout = private.layout
        return _Lists(np.array(layout.laid_out_here), float(np.mean(layout.laid_out)))

    def decode(
        self, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
    ) -> torch.Tensor:
        """As of `Reader`."""
        out, lse = compat.decode_with_lse(
            self._forward, backend, q, k, v, layer, batch, save_kv_cache
        )
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        key_scale, value_scale = scales_of(self._services.arena, layer)
        place = self._services.arena.place_of(layer.layer_id)
        private = self._attention.attend(
            heads, layer=place, scale=layer.scaling * key_scale, value_scale=value_scale
        )
        return self._attention.merged(private, (out.view(heads.shape), lse))


def may_read(name: str, device: torch.device) -> bool:
    """Whether FlashInfer is to read some batches of a stock backend, if it can.

    Args:
        name: of the backend in SGLang's registry.
    """
    option = options.attention()
    if name != FLASHINFER or option != "auto":
        return option == name == FLASHINFER
    measurements = tuned.load(device).choices.get("decode_reader", ())
    return any(choice.get("reader") == FLASHINFER for _, choice in measurements)


def by_flashinfer(
    services: Services,
    name: str,
    backend: Any,
    forward: Callable[..., torch.Tensor],
    heads: int,
    dtype: torch.dtype,
) -> FlashInferReader | None:
    """FlashInfer's reader for a stock backend; None if it is not to read, or cannot.

    Args:
        name: of the backend in SGLang's registry.
        forward: its `forward_decode`.
        heads: H of this rank; dtype: of queries.

    Raises:
        Refused: the operator asked for it, and it cannot read.
    """
    option, storage = options.attention(), services.arena.storage
    if not may_read(name, storage.device):
        return None
    from kvpolicy.kernels.attention.private_attention_flashinfer import PrivateAttention

    try:
        workspace, tensor_cores = compat.flashinfer_decode(backend)
        attention = PrivateAttention(storage, heads, dtype, workspace, tensor_cores=tensor_cores)
    except (ImportError, ValueError) as error:
        if option == FLASHINFER:
            help_ = "leave the option out, and Triton's kernel reads"
            raise Refused(f"--kv-policy-attention flashinfer: {error}; {help_}.") from error
        logger.warning("Measured to be fastest by FlashInfer, but %s.", error)
        return None
    logger.info("KV-cache policies: FlashInfer reads private pages of decode batches.")
    arguments = (services, attention, forward, heads // storage.shape[3], dtype)
    return FlashInferReader(*arguments, always=option == FLASHINFER)
