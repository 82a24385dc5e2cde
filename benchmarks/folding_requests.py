"""Requests that decode under a policy without a model: real folds over random queries and entries.

What kernels would compute on a GPU is left out of clock and count: an entry of the kernels table is
one launch, whose torch reference runs unobserved; a generated kernel gives zeros. As on a GPU, the
numbers of a fold have not arrived when it is written, where it does not wait for them.

Dimensions: L layers, H query heads, G KV heads, D head size, B requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.codegen.source import Source
from kvpolicy.dsl.execute.apply import prefilled
from kvpolicy.dsl.execute.block import Counts
from kvpolicy.dsl.execute.decode import Memory
from kvpolicy.dsl.execute.generated import Generated
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face.kernels_in_use import KernelsInUse, chosen_for
from kvpolicy.sglang_ext.forward.decode_step import DecodeStep
from kvpolicy.sglang_ext.forward.rotary import Rotary
from kvpolicy.sglang_ext.memory.arena import Arena, create_arena
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.notes import Notes, wanted
from kvpolicy.sglang_ext.request.queries import QueryBuffer
from kvpolicy.sglang_ext.request.request import Decoding, State
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_MOVING = (
    "compact_layers", "place", "settle", "gather", "rotate", "turn", "entry_ids", "take_rows",
    "put_rows",
)  # fmt: skip
_OWN_STATE = "kv_policy_state"  # of a request


class Observed(TorchDispatchMode):
    """Counts torch operations and launches, and the seconds between launches.

    Attributes:
        operations: dispatched by torch outside kernels; `views` of them only look at memory
            otherwise, and a GPU does nothing.
        launches: of kernels; transfers: to the device, and of a fold's numbers from it.
        kernels: seconds spent in what stands for kernels.
    """

    def __init__(self, *, counting: bool) -> None:
        super().__init__()
        self.operations = self.views = self.launches = self.transfers = 0
        self._sending = _Transfers(self)
        self.kernels = 0.0
        self.counting = counting
        self._inside = False

    def __enter__(self) -> Observed:
        if self.counting:
            self._sending.__enter__()
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.counting:
            super().__exit__(*error)
            self._sending.__exit__(*error)

    @property
    def device(self) -> int:
        """What a GPU would be asked to do."""
        return self.operations - self.views + self.launches + self.transfers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not self._inside:
            self.operations += 1
            self.views += func.is_view
        return func(*args, **(kwargs or {}))

    @contextmanager
    def launch(self):
        """A block that stands for a kernel."""
        if self._inside:
            yield
            return
        self._inside, started = True, time.perf_counter()
        self.launches += 1
        try:
            yield
        finally:
            self._inside = False
            self.kernels += time.perf_counter() - started


class _Transfers(TorchFunctionMode):
    """Notes copies to the device, which on a CPU nobody makes."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self._observed = observed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        sends = getattr(func, "__name__", "") == "to" and (kwargs or {}).get("non_blocking")
        self._observed.transfers += bool(sends and not self._observed._inside)
        return func(*args, **(kwargs or {}))


class Watch:
    """Hands out the kernels; who observes may change."""

    def __init__(self) -> None:
        self.observed = Observed(counting=False)

    def kernel(self, function: Callable) -> Callable:
        """The function as a launch."""

        def run(*args: Any, **more: Any) -> Any:
            with self.observed.launch():
                return function(*args, **more)

        return run

    def generated(self, made: Generated, source: Source) -> Callable:
        """A generated kernel that gives zeros."""

        def run(*given: Any) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
            (q, _), (_, ids) = given[:2]
            sizes = {
                "kv": ids.shape[0], "token": ids.shape[1], "group": made.bound.shape.group,
                "query": 0 if q is None else q.shape[1],
            }  # fmt: skip
            with self.observed.launch():
                results = tuple(
                    torch.zeros(
                        [1] * each.splits + [sizes[axis] for axis in each.axes],
                        dtype=torch.int8 if each.truth else torch.float32,
                    )
                    for each in source.results
                    if not each.stage
                )
                finite = [torch.ones(len(ids), dtype=torch.bool)]
                return results, finite

        return run

    def in_use(self) -> KernelsInUse:
        """The torch references, as launches."""
        plain = chosen_for("torch", "cpu")
        table = {name: self.kernel(each) for name, each in plain.table.items()}
        # What is compiled is replaced in `stand_in`.
        table["generated"] = lambda name, text: None
        moving = {name: self.kernel(getattr(plain, name)) for name in _MOVING}
        return replace(plain, name="launches", table=table, **moving)

    @contextmanager
    def stand_in(self):
        """A block in which generated kernels are not compiled, and numbers are on their way."""
        original, begin = Generated._source, Counts.__init__

        def source(made: Generated, bundle: Any, single: bool) -> tuple[Source, Callable]:
            text, _ = original(made, bundle, single)
            return text, self.generated(made, text)

        def counts(made: Counts, numbers: torch.Tensor, requests: int) -> None:
            begin(made, numbers, requests)
            self.observed.transfers += 1

        with (
            mock.patch.object(Generated, "_source", source),
            mock.patch.object(Counts, "__init__", counts),
            mock.patch.object(Counts, "arrived", return_value=False),
        ):
            yield


class Slots:
    """Stands in for SGLang's allocator and its cache: a list of free slots."""

    page_size = 1

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = torch.arange(1, size + 1)

    def alloc(self, need: int) -> torch.Tensor | None:
        """The first free slots."""
        if need > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:need], self.free_slots[need:]
        return taken

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back."""
        self.free_slots = torch.cat([self.free_slots, slots])

    def available_size(self) -> int:
        """How many are free."""
        return len(self.free_slots)

    def evictable_size(self) -> int:
        """Nothing is cached."""
        return 0


@dataclass
class Case:
    """What decodes.

    Attributes:
        settings: of the policy's parameters.
        prompts: tokens of each request's prompt.
    """

    policy: str
    settings: dict[str, str]
    prompts: list[int]
    shape: ModelShape
    interval: int
    seed: int = 0


class Crowd:
    """B requests of one policy, whose prompts are over, in the plugin's own decode step."""

    def __init__(self, case: Case, most_steps: int) -> None:
        """
        Args:
            most_steps: decode steps that will be asked for.
        """
        self.case, shape = case, case.shape
        self.random = torch.Generator().manual_seed(case.seed)
        self.watch = Watch()
        self.bound = bind(
            load(case.policy).require(), shape, case.settings, fold_interval=case.interval
        )
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
        self.folds = self.dropped = 0
        self.services = self._services()
        self.requests: list[SimpleNamespace] = []
        with self.watch.stand_in():
            self._begin()

    def _services(self) -> SimpleNamespace:
        queries, half = QueryBuffer([self.bound.program]), self.case.shape.head_dim // 2

        @contextmanager
        def contained(request: Any, stage: str):
            yield

        return SimpleNamespace(
            arena=self.arena, store=self.store, tables=self.tables, tree=self.slots,
            queries=queries, evict=lambda slots: None, detach=self._detach,
            failures=SimpleNamespace(contained=contained),
            reports=SimpleNamespace(finished_fold=self._finished),
            rotary=Rotary(10000.0 ** (-torch.arange(half) / half).double(), interleaved=False),
        )  # fmt: skip

    def _finished(self, request: Any, state: State, dropped: int, seconds: float) -> None:
        self.folds, self.dropped = self.folds + 1, self.dropped + dropped

    def _detach(self, request: Any, state: State) -> None:
        row, table = request.kv.req_pool_idx, self.slots.req_to_token_pool.req_to_token
        with self.watch.observed.launch():  # SGLang's own work
            self.slots.free(table[row, request.freed : state.private.tail_start].long())
        self.watch.observed.launches -= 1
        request.freed = state.private.tail_start

    def _begin(self) -> None:
        kernels, shape = self.watch.in_use(), self.case.shape
        plain = TorchProgram(self.bound)  # prefills
        program = TorchProgram(self.bound, kernels=kernels.table)
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
                run = prefilled(plain, q, *[q[:, : shape.kv_heads]] * 2).run
                memory = Memory(self.bound, prompt, Memory.after(run).block[0], program.steps)
                memories[prompt] = (run.finish(), memory)
            kept, memory = memories[prompt]
            state = State(served, prompt, 0)
            state.folds = True
            state.decoding = Decoding(memory.clone(), Notes(wanted(self.bound, prompt)))
            request = SimpleNamespace(
                rid=str(row), kv=SimpleNamespace(req_pool_idx=row), freed=0, length=0
            )
            setattr(request, _OWN_STATE, state)
            self._grow(request, prompt)
            self._compress(request, state, torch.stack(kept))
            self.requests.append(request)

    def _grow(self, request: SimpleNamespace, tokens: int) -> None:
        table, row = self.slots.req_to_token_pool.req_to_token, request.kv.req_pool_idx
        table[row, request.length : request.length + tokens] = self.slots.alloc(tokens)
        request.length += tokens

    def _compress(self, request: Any, state: State, kept: torch.Tensor) -> None:
        """As at the end of a prompt, where anything leaves."""
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
        self._detach(request, state)

    def step(self, *, counting: bool = False) -> tuple[Observed, float]:
        """One decode step of all requests.

        Returns:
            What was observed after the forward, and the seconds of the host's own work.
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
                self.services.queries.write(layer, heads, shape.layers)
        batch = SimpleNamespace(
            req_to_token_pool=self.slots.req_to_token_pool,
            seq_lens_cpu=torch.tensor([each.length for each in self.requests]),
            reqs=self.requests,
        )
        observed = self.watch.observed = Observed(counting=counting)
        with self.watch.stand_in():
            started = time.perf_counter()
            with observed:
                self.tables.write()
                DecodeStep(self.services, batch, batch.reqs).finish()
            seconds = time.perf_counter() - started - observed.kernels
        return observed, seconds

    def check(self, entries: int) -> None:
        """Stop unless slots are right and all lists together hold so many entries."""
        self.tables.write()
        self.store.check_integrity(self.slots.free_slots)
        held = sum(sum(map(sum, private.laid_out)) for private in self.store.by_row.values())
        if held != entries:
            raise SystemExit(f"fold_host: lists hold {held} entries, not {entries}")
