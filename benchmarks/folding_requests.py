"""Requests that decode under a policy without a model: real folds over random queries and entries.

Clock and count leave out what a GPU would compute: a call of a kernel in the table counts as one
launch, and its torch reference runs unobserved; a generated kernel returns zeros. As on a GPU, a
fold's numbers have not arrived at the host when the fold is written, unless it waits for them.

Dimensions: L layers, H query heads, G KV heads, D head size, B requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.apply import prefilled
from kvpolicy.dsl.execute.decode.lists import ArrivingNumbers
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools.launches import Observed, StandIns
from kvpolicy.sglang_ext.face.kernels_in_use import KernelsInUse, chosen_for
from kvpolicy.sglang_ext.forward.decode_step import DecodeStep
from kvpolicy.sglang_ext.forward.rotary import Rotary
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.memory.arena import Arena, create_arena
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.request.pending_steps import PendingSteps, wanted
from kvpolicy.sglang_ext.request.queries import QueryBuffer
from kvpolicy.sglang_ext.request.request import Decoding, RequestState

_MOVING = (
    "compact_layers", "place", "compact_in_place", "gather", "rotate", "turn", "entry_ids",
    "take_rows", "put_rows",
)  # fmt: skip
_OWN_STATE = "kv_policy_state"  # attribute of a request


def in_use(watch: StandIns) -> KernelsInUse:
    """The torch references, each call counted as a launch."""
    plain = chosen_for("torch", "cpu")
    moving = {name: watch.kernel(getattr(plain, name)) for name in _MOVING}
    return replace(plain, name="launches", **moving)


@contextmanager
def stand_in(watch: StandIns):
    """A block in which the numbers of folds do not arrive; each transfer is counted."""
    begin = ArrivingNumbers.__init__

    def counts(made: ArrivingNumbers, numbers: torch.Tensor, requests: int, kv: int) -> None:
        begin(made, numbers, requests, kv)
        watch.observed.transfers += 1

    with (
        mock.patch.object(ArrivingNumbers, "__init__", counts),
        mock.patch.object(ArrivingNumbers, "arrived", return_value=False),
    ):
        yield


class Timed(Observed):
    """Also adds up the processor seconds in stand-ins for kernels, inside its block or not."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    @contextmanager
    def launch(self) -> Iterator[None]:
        """See `Observed`."""
        outermost, started = not self.inside, time.thread_time()
        with super().launch():
            yield
        if outermost:
            self.seconds += time.thread_time() - started


class Slots:
    """Stands in for SGLang's allocator and its cache: a list of free slots."""

    page_size = 1

    def __init__(self, size: int) -> None:
        self.size, self.token_to_kv_pool_allocator = size, self
        self.free_slots = torch.arange(1, size + 1)

    def alloc(self, need: int) -> torch.Tensor | None:
        """The first free slots, int64 [need]; None if there are too few."""
        if need > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:need], self.free_slots[need:]
        return taken

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back."""
        self.free_slots = torch.cat([self.free_slots, slots])

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Take back the slots of a request's tokens from a position on."""
        self.free(free_index)

    def unlock(self, lock: Any) -> None:
        """Nothing is cached, and nothing locked."""

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Take back the slots of ranges of a request's tokens."""
        for start, end in ranges:
            self.free(self.req_to_token_pool.req_to_token[kv.req_pool_idx, start:end])

    def available_size(self) -> int:
        """Number of free slots."""
        return len(self.free_slots)

    def evictable_size(self) -> int:
        """Nothing is cached."""
        return 0


@dataclass
class Case:
    """The requests to decode.

    Attributes:
        settings: values of the policy's parameters.
        prompts: length of each request's prompt in tokens.
        interval: decode steps between folds.
    """

    policy: str
    settings: dict[str, str]
    prompts: list[int]
    shape: ModelShape
    interval: int
    seed: int = 0


class Crowd:
    """B requests of one policy after their prefills, decoding by the plugin's own decode step.

    Attributes:
        goes_on: whether the policy has `decode:`.
    """

    def __init__(self, case: Case, most_steps: int) -> None:
        """
        Args:
            most_steps: the most calls of `step`.
        """
        self.case, shape = case, case.shape
        self.random = torch.Generator().manual_seed(case.seed)
        self.watch = StandIns()
        self.bound = bind(
            load(case.policy).require(), shape, case.settings, fold_interval=case.interval
        )
        self.goes_on = self.bound.folded.decode is not None
        longest, number = max(case.prompts) + most_steps, len(case.prompts)
        slots = number * (2 * longest + case.interval)
        self.arena: Arena = create_arena(
            shape.layers, slots + 1, shape.kv_heads, shape.head_dim, torch.float32, "cpu"
        )
        self.arena.storage.normal_(generator=self.random)
        self.tables = DeviceTables(self.arena, number + 1, slots)
        self.slots = Slots(slots)
        self.slots.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(number + 1, longest, dtype=torch.int32)
        )
        self.store = Store(self.arena, self.slots, tables=self.tables)
        self.services = self._services()
        self.requests: list[SimpleNamespace] = []
        with stand_in(self.watch):
            self._begin()

    def _services(self) -> Services:
        services, half = Services([self.bound.program]), self.case.shape.head_dim // 2
        services.arena, services.store, services.tables = self.arena, self.store, self.tables
        services.queries, services.tree = QueryBuffer([self.bound.program]), self.slots
        services.rotary = Rotary(
            10000.0 ** (-torch.arange(half) / half).double(), interleaved=False
        )
        services.start(Metrics(None, []), 0)
        services.detach, services.evict = self._detach, lambda slots: None
        return services

    def _detach(self, requests: Sequence[tuple[Any, RequestState]]) -> None:
        """Gives slots back to SGLang's allocator, whose work is not counted."""
        observed = self.watch.observed
        inside, observed.inside = observed.inside, True
        Services.detach(self.services, requests)
        observed.inside = inside

    @property
    def folds(self) -> int:
        """Number of folds of all requests so far."""
        return sum(getattr(each, _OWN_STATE).reported.folded for each in self.requests)

    def _begin(self) -> None:
        kernels, shape = in_use(self.watch), self.case.shape
        plain = TorchProgram(self.bound)  # prefills
        program = self.watch.program(self.bound, kernels.table)
        served = SimpleNamespace(
            name=self.case.policy, bound=self.bound, kernels=kernels, program=program
        )
        tensors = torch.randn(
            max(self.case.prompts), shape.layers, shape.heads, shape.head_dim,
            generator=self.random,
        )  # fmt: skip
        memories = {}
        for row, prompt in enumerate(self.case.prompts, 1):
            if prompt not in memories:
                q = tensors[:prompt].permute(1, 2, 0, 3).numpy()
                finished = prefilled(plain, q, *[q[:, : shape.kv_heads]] * 2).finished
                memory = None
                if self.goes_on:
                    block, _ = Memory.after(finished).block
                    memory = Memory(self.bound, prompt, block, program.steps)
                memories[prompt] = (finished.kept, memory)
            kept, memory = memories[prompt]
            state = RequestState(served, prompt, 0)
            if memory is not None:
                pending = PendingSteps(wanted(self.bound, prompt))
                state.folds, state.decoding = True, Decoding(copy(memory), pending)
            kv = SimpleNamespace(req_pool_idx=row, cache_protected_len=0)
            state.published = True
            request = SimpleNamespace(
                rid=str(row), kv=kv, length=0, lock=None, output_ids=[], send_token_offset=0,
                customized_info={"kv_policy": [state.reported.facts]},
            )  # fmt: skip
            setattr(request, _OWN_STATE, state)
            self._grow(request, prompt)
            self._compress(request, state, torch.stack(kept))
            self.requests.append(request)

    def _grow(self, request: SimpleNamespace, tokens: int) -> None:
        table, row = self.slots.req_to_token_pool.req_to_token, request.kv.req_pool_idx
        table[row, request.length : request.length + tokens] = self.slots.alloc(tokens)
        request.length += tokens

    def _compress(self, request: Any, state: RequestState, kept: torch.Tensor) -> None:
        """Compresses as at the end of a prompt, if any entry leaves."""
        counts = kept.sum(-1)
        if bool(kept.all()):
            return
        row = request.kv.req_pool_idx
        slots = self.slots.req_to_token_pool.req_to_token[row, : state.prompt].long()
        need = self.store.slots_for(counts)
        private = self.store.allocate(row, state.served.name, need, state.prompt, lambda n: None)
        self.store.fill(private, counts)
        compact = state.served.kernels.compact_layers
        compact(self.arena.storage, slots, kept, private.slots, private.first_page)
        state.private = private
        self._detach([(request, state)])

    def step(self, *, counting: bool = False) -> tuple[Observed, float]:
        """One decode step of all requests.

        Returns:
            What was observed after the forward, and processor seconds of the host's own work.
        """
        for request in self.requests:
            self._grow(request, 1)
        shape = self.case.shape
        heads = torch.randn(len(self.requests), shape.heads, shape.head_dim, generator=self.random)
        if self.services.queries.needed:
            for number in range(shape.layers):
                layer = SimpleNamespace(
                    layer_id=number, scaling=shape.head_dim**-0.5, qk_head_dim=shape.head_dim
                )
                self.services.queries.write(layer, heads, range(shape.layers))
        batch = SimpleNamespace(
            req_to_token_pool=self.slots.req_to_token_pool,
            seq_lens_cpu=torch.tensor([each.length for each in self.requests]),
            reqs=self.requests,
        )
        observed = self.watch.observed = Timed()
        with stand_in(self.watch):
            started = time.thread_time()
            with observed if counting else nullcontext():
                self.tables.write()
                DecodeStep(self.services, batch, batch.reqs).finish()
            seconds = time.thread_time() - started - observed.seconds
        return observed, seconds

    def check(self, entries: int) -> None:
        """Exit unless slots are consistent and all lists together hold `entries` entries."""
        self.tables.write()
        self.store.check_integrity(self.slots.free_slots)
        held = sum(sum(map(sum, private.laid_out)) for private in self.store.by_row.values())
        if held != entries:
            raise SystemExit(f"fold_host: lists hold {held} entries, not {entries}")
