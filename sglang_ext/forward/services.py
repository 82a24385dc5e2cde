"""What every forward works with: one scheduler's memory, metrics, and the forward that goes on.

The parts come as SGLang starts: first what the policies' files say, then the pool, then the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from kvpolicy.dsl.ir.nodes import Program
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.compat import StageGroup, TensorGroup
from kvpolicy.sglang_ext.face.ranks import PipelineStages, Ranks, Stages, TensorRanks
from kvpolicy.sglang_ext.face.streams import Streams
from kvpolicy.sglang_ext.forward.failures import Failures
from kvpolicy.sglang_ext.forward.rotary import Rotary
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.memory.tails import Tail, free_tails
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.report.reports import Reports
from kvpolicy.sglang_ext.request.decode_rows import DecodeRows
from kvpolicy.sglang_ext.request.queries import QueryBuffer
from kvpolicy.sglang_ext.request.request import State


class Forward(Protocol):
    """The parts of the forward that goes on (step.py), None where it has none of them."""

    prefill: Any
    resume: Any
    propagate: Any
    decode: Any

    @property
    def decoding(self) -> slice | None:
        """Rows that decode in an extend forward, at its current layer; None where it has none."""


class PagesReader(Protocol):
    """Reads private pages in CUDA graphs of their own (attention/readers.py)."""

    def replays(self, step: Any, rows: torch.Tensor) -> bool:
        """Whether it reads in this step, which replays a graph; if so, it is ready to."""

    def warm(self) -> None:
        """Compile what batches without a graph need."""


class Services:
    """The parts of one scheduler that forwards share.

    Attributes:
        propagates, shares: whether any policy of the start lets tokens leave the prefill, or stores
            layers in pairs: what the server is prepared for.
        tree: SGLang's radix cache, from the first batch on.
        step: the forward that goes on.
        rows: what the last decode forward knew of its requests; None: something of them has
            changed since.
        scratch_rows: of SGLang's table of slots, for policies by which tokens leave the prefill.
        ranks: those among which the model's heads are divided.
        stages: those among which its layers are, from the pool's allocation on.
        runner: SGLang's model runner, where there are such policies.
        layers: forwards of the model's decoder layers, where there are such policies.
        pages_reader: what may read private pages in place of Triton's kernel.
        has_room: whether prompts have been given up since the scheduler last tried to admit.
    """

    arena: Arena
    tables: DeviceTables
    store: Store
    rotary: Rotary
    metrics: Metrics
    reports: Reports
    failures: Failures

    def __init__(self, programs: Sequence[Program]) -> None:
        self.propagates = any(program.propagate is not None for program in programs)
        self.shares = any(program.share is not None for program in programs)
        self.streams = Streams()
        self.ranks = Ranks()
        self.stages = Stages(range(0))
        self.queries = QueryBuffer(programs, options.fold_interval())
        self.tree: Any = None
        self.step: Forward | None = None
        self.rows: DecodeRows | None = None
        self.scratch_rows = range(0)
        self.runner: Any = None
        self.layers: list[Callable[..., Any]] = []
        self.pages_reader: PagesReader | None = None
        self.has_room = False

    def join(self, group: TensorGroup, kv_heads: int) -> None:
        """Say which of the model's KV heads this rank has of so many in all."""
        if group.size > 1:
            self.ranks = TensorRanks(group, kv_heads)

    def divide(self, group: StageGroup, layers: range) -> None:
        """Say which of the model's layers this stage has."""
        self.stages = PipelineStages(group, layers) if group.size > 1 else Stages(layers)

    def start(self, metrics: Metrics, max_failures: int) -> None:
        """The server is about to serve.

        Args:
            max_failures: requests for which a policy may fail before it is disabled; 0: any number.
        """
        self.metrics = metrics
        self.reports = Reports(self.arena, metrics, self.ranks)
        self.failures = Failures(
            self.store, metrics, self.reports, self.ranks, max_failures, self.forget_rows,
            in_stages=self.stages.size > 1,
        )  # fmt: skip

    def forget_rows(self) -> None:
        """A request that decodes has come or gone, or goes on in another way."""
        if self.rows is not None:
            self.rows.hand_over()
            self.rows = None

    def evict(self, slots: int) -> None:
        """Ask the radix cache to make so many slots available."""
        compat.evict(self.tree, slots)

    def detach(self, requests: Sequence[tuple[Any, State]]) -> None:
        """Give up the slots of what has been copied to private pages, the prompt's among them.

        The prompt is left to the radix cache. Before it has been offered there, nothing is done:
        `Runtime.published` comes back to it. Of all others only the tails are given up, together.
        """
        offered = [(req, state) for req, state in requests if state.published]
        # Where nothing is given up yet, too: what has been launched here still reads the table of
        # slots, which `Runtime.published` changes on the scheduler's stream.
        with self.streams.scheduling():
            if not offered:
                return
            tails = [self._tail(req, state) for req, state in offered if state.detached]
            for req, state in offered:
                if not state.detached:
                    self._detach(req, state)
            free_tails(self.tree, tails)
        self.has_room = True

    def _tail(self, req: Any, state: State) -> Tail:
        """What a request gives up whose prompt has been left; from here on it is not its own."""
        first, page = req.kv.cache_protected_len, self.tree.page_size
        end = max(state.compressed_copy.tail_start // page * page, first)
        req.kv.cache_protected_len = end
        return Tail(req.kv.req_pool_idx, first, end)

    def _detach(self, req: Any, state: State) -> None:
        tree, private = self.tree, state.compressed_copy
        end = private.tail_start // tree.page_size * tree.page_size
        if req.kv.cache_protected_len < end:
            # The tail; and of the prompt what the cache, if it is on, has not taken.
            start = req.kv.cache_protected_len
            if private.borrowed:  # the first slots of the prompt's own
                start += private.borrowed
                self.store.own(private)
            tree.free_kv_row(req.kv, [(start, end)])
            req.kv.cache_protected_len = end
        tree.unlock(req.lock)
        req.lock = None
        # What is decoded from here on was computed from chosen entries; others must not reuse it.
        req.skip_radix_cache_insert = True
        state.detached = True
        # The slots may be someone else's soon; a stray read must not find them.
        tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end] = 0
