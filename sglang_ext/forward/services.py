"""What every forward works with: one scheduler's memory, metrics and current forward.

Attributes are set as SGLang starts: first those that follow from the policies, then those of the
pool, then the rest.
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
from kvpolicy.sglang_ext.memory.tails import Tail, free_tails, no_slot
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.report.reports import Reports
from kvpolicy.sglang_ext.request.decode_rows import DecodeRows
from kvpolicy.sglang_ext.request.queries import QueryBuffer
from kvpolicy.sglang_ext.request.request import RequestState


class Forward(Protocol):
    """The parts of the current forward (step.py), None where it has no such part."""

    prefill: Any
    resume: Any
    propagate: Any
    decode: Any

    @property
    def decoding(self) -> slice | None:
        """Rows of an extend forward that decode, at the current layer; None if there are none."""


class PagesReader(Protocol):
    """A reader of private pages with CUDA graphs of its own (attention/readers.py)."""

    def replays(self, step: Any, rows: torch.Tensor) -> bool:
        """Whether it reads in a step that replays a graph; if so, it has planned for that."""

    def warm(self) -> None:
        """Compile what batches without a graph need."""


class Services:
    """What the forwards of one scheduler share.

    Attributes:
        propagates, shares: whether any policy that the server starts with lets tokens leave the
            prefill, or stores layers in pairs; the server prepares for these at its start only.
        tree: SGLang's radix cache, from the first batch on.
        step: the current forward; None between forwards.
        rows: what is known of the last decode forward's requests; None if that has changed since.
        scratch_rows: rows of SGLang's table of slots for prompts whose tokens leave the prefill.
        ranks: the ranks that divide the model's KV heads.
        stages: the stages that divide its layers, from the pool's allocation on.
        runner: SGLang's model runner; None if no policy propagates.
        layers: unwrapped `forward` of each decoder layer; empty if no policy propagates.
        pages_reader: reader of private pages beside Triton's kernel, if there is one.
        has_room: whether slots have been given up since the scheduler last tried to admit.
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

    @property
    def in_stages(self) -> bool:
        """Whether other stages have other layers (`--pp`)."""
        return self.stages.several

    def join(self, group: TensorGroup, kv_heads: int) -> None:
        """Set this rank's share of the model's `kv_heads` KV heads."""
        if group.size > 1:
            self.ranks = TensorRanks(group, kv_heads)

    def divide(self, group: StageGroup, layers: range) -> None:
        """Set the layers of the model that this stage has."""
        self.stages = PipelineStages(group, layers) if group.size > 1 else Stages(layers)

    def start(self, metrics: Metrics, max_failures: int) -> None:
        """Make the parts that need the pool; the server is about to serve.

        Args:
            max_failures: requests for which a policy may fail before it is disabled; 0: any number.
        """
        self.metrics = metrics
        self.reports = Reports(self.arena, metrics, self.ranks)
        self.failures = Failures(
            self.store, metrics, self.reports, self.ranks, max_failures, self.forget_rows,
            self.detach, in_stages=self.in_stages,
        )  # fmt: skip

    def forget_rows(self) -> None:
        """Give up `rows`: a decoding request has come, gone or changed.

        A decode step under way keeps them for itself, and hands over what it notes.
        """
        if self.rows is not None:
            self.rows.hand_over()
            self.rows = None

    def evict(self, slots: int) -> None:
        """Ask the radix cache to make `slots` slots available."""
        compat.evict(self.tree, slots)

    def detach(self, requests: Sequence[tuple[Any, RequestState]]) -> None:
        """Give up the ordinary slots of entries that have been copied to private pages.

        The prompt is left to the radix cache. A request whose prompt has not been offered there yet
        is skipped: `Runtime.published` detaches it. Requests that have left their prompts earlier
        give up their tails, in one operation.
        """
        offered = [(req, state) for req, state in requests if state.published]
        # Even if nothing is given up yet: kernels launched here still read the table of slots,
        # which `Runtime.published` changes on the scheduler's stream.
        with self.streams.scheduling():
            if not offered:
                return
            tails = [self._tail(req, state) for req, state in offered if state.detached]
            for req, state in offered:
                if not state.detached:
                    self._detach(req, state)
            free_tails(self.tree, tails)
        self.has_room = True

    def _tail(self, req: Any, state: RequestState) -> Tail:
        """The tail of a request that has left its prompt; the request does not own it any more."""
        first, page = req.kv.cache_protected_len, self.tree.page_size
        end = max(state.compressed_copy.tail_start // page * page, first)
        req.kv.cache_protected_len = end
        return Tail(req.kv.req_pool_idx, first, end)

    def _detach(self, req: Any, state: RequestState) -> None:
        tree, private = self.tree, state.compressed_copy
        end = private.tail_start // tree.page_size * tree.page_size
        if req.kv.cache_protected_len < end:
            # The tail, and the part of the prompt that the radix cache, if it is on, has not taken.
            start = req.kv.cache_protected_len
            if private.borrowed:  # they are the first of the prompt's own slots
                start += private.borrowed
                self.store.take_over(private)
            tree.free_kv_row(req.kv, [(start, end)])
            req.kv.cache_protected_len = end
        tree.unlock(req.lock)
        req.lock = None
        # What is decoded from here on is computed from chosen entries; others must not reuse it.
        req.skip_radix_cache_insert = True
        state.detached = True
        # The slots may be someone else's soon; a stray read must not find them.
        tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end] = no_slot(tree)
