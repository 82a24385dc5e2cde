"""How much a policy asks of a GPU: operations of torch that compute, and launches of kernels.

Both are counted while the policy's own program runs on the tensors of a trial, with stand-ins for
kernels. Neither depends on how many entries leave. How many layers are scored together depends on
the length of a prompt.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.codegen.fusion import Bundle
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.decode.requests import follow_together
from kvpolicy.dsl.execute.drive import InPools, drive
from kvpolicy.dsl.execute.layer.generated import Generated, Run
from kvpolicy.dsl.execute.planned.compiled import DEFERRED_BYTES
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries, Kernels, Slots, installed
from kvpolicy.dsl.tools.trial_cases import TrialCase, deepest
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FOLDS, _STEPS = 3, 129  # most folds that are carried out, all before this decode step


@dataclass(frozen=True)
class DeviceWork:
    """How much the host asks of the device, or a mean of that.

    Attributes:
        device: what a GPU does one after the other: operations of torch that compute, launches of
            kernels, and copies of small tensors from and to the host.
        views: operations of torch that only make a view; only the host spends time on them.
    """

    device: float = 0
    views: float = 0

    @property
    def host(self) -> float:
        """All that costs the host time."""
        return self.device + self.views

    def __add__(self, other: DeviceWork) -> DeviceWork:
        return DeviceWork(self.device + other.device, self.views + other.views)

    def __sub__(self, other: DeviceWork) -> DeviceWork:
        return self + other * -1

    def __mul__(self, number: float) -> DeviceWork:
        return DeviceWork(self.device * number, self.views * number)


class Observed(TorchDispatchMode):
    """Counts what a `with` block asks of a device.

    Attributes:
        operations: torch operations outside stand-ins, views included.
        views: operations that only make a view, for which a GPU does nothing.
        launches: launches of kernels.
        transfers: copies to the device, and of a fold's numbers from it.
        inside: whether a stand-in is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.views = self.launches = self.transfers = 0
        self._sending = _Transfers(self)
        self.inside = False

    def __enter__(self) -> Observed:
        self._sending.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sending.__exit__(*error)

    @property
    def device(self) -> int:
        """`DeviceWork.device` so far."""
        return self.operations - self.views + self.launches + self.transfers

    @property
    def work(self) -> DeviceWork:
        """What has been asked so far."""
        return DeviceWork(self.device, self.views)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.inside:
            self.operations += 1
            self.views += func.is_view
        return func(*args, **(kwargs or {}))

    @contextmanager
    def launch(self) -> Iterator[None]:
        """A block that stands for a kernel; blocks within it are part of the same launch."""
        if self.inside:
            yield
            return
        self.inside = True
        self.launches += 1
        try:
            yield
        finally:
            self.inside = False


class _Transfers(TorchFunctionMode):
    """Counts calls that copy to a device; on a CPU they copy nothing."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self._observed = observed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        sends = getattr(func, "__name__", "") == "to" and (kwargs or {}).get("non_blocking")
        self._observed.transfers += bool(sends and not self._observed.inside)
        return func(*args, **(kwargs or {}))


class StandIns:
    """Makes stand-ins for kernels, whose launches `observed` counts; callers may set it anew."""

    def __init__(self) -> None:
        self.observed = Observed()

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, each call of which is a launch."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.observed.launch():
                return function(*args, **kwargs)

        return run

    def program(
        self,
        bound: Bound,
        table: Kernels,
        *,
        make: Callable[..., TorchProgram] = TorchProgram,
        keys_stay: bool = True,
        deferred_bytes: int = DEFERRED_BYTES,
    ) -> TorchProgram:
        """A policy's program: each kernel of `table` is a launch, generated ones give zeros.

        Args:
            make, keys_stay, deferred_bytes: a `TorchProgram`, and as of `Compiled`.
        """
        watched: Mapping[str, Callable[..., Any]] = {
            **{name: self.kernel(function) for name, function in table.items()},
            "generated": lambda name, text: None,
        }
        program = make(bound, kernels=watched, keys_stay=keys_stay, deferred_bytes=deferred_bytes)
        program.generated = self._zeros(program.generated)
        if program.steps is not None:
            program.steps.advancing = self._zeros(program.steps.advancing)
            program.steps.leaving = self._zeros(program.steps.leaving)
        return program

    def _zeros(self, generated: Generated | None) -> Generated | None:
        return (
            None
            if generated is None
            else _ZeroKernels(generated.bound, generated.fusion, generated.compiled, watch=self)
        )


class _ZeroKernels(Generated):
    """Generated kernels that are not compiled and give zeros."""

    def __init__(self, *args: Any, watch: StandIns) -> None:
        super().__init__(*args)
        self._watch = watch

    def _run(self, bundle: Bundle, float32: bool) -> Run:
        source, steps, shape = self._file(bundle, float32), self.fusion.steps, self.bound.shape

        def run(*args: Any, **options: int) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
            (q, *_), (keys, rows, _) = args[:2]
            lists, tokens = rows.shape if steps else (len(keys) * keys.shape[2], args[4])
            sizes = {
                "kv": lists, "group": shape.group, "token": tokens,
                "query": 0 if q is None else q.shape[1],
            }  # fmt: skip
            with self._watch.observed.launch():
                results = tuple(
                    torch.zeros(
                        [1] * output.splits + [sizes[axis] for axis in output.axes],
                        dtype=torch.int8 if output.truth else torch.float64,
                    )
                    for output in source.results
                    if not output.stage
                )
                finite = torch.ones(lists, dtype=torch.bool) if steps else torch.tensor(True)
                return results, [finite]

        return run


class _InGroups(TorchProgram):
    """A policy's program that scores at most so many layers together, whatever the prompt."""

    def __init__(self, most: int, bound: Bound, **options: Any) -> None:
        super().__init__(bound, **options)
        self._most = most

    def layers_together(self, prompt: int) -> int:
        return min(self._most, super().layers_together(prompt))


class _CountedPrompt:
    """A prompt that notes, of each layer, what was asked before it was scored with others.

    Attributes:
        noted: of each layer shown; None: it was scored by itself, or waits for others.
    """

    def __init__(self, watch: StandIns, prompt: InPools) -> None:
        self._watch, self._prompt = watch, prompt
        self.noted: list[DeviceWork | None] = []

    def queries(self, layer: int, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """See `PromptTensors`."""
        self.noted.append(None)
        return self._prompt.queries(layer, tokens, number)

    def entries(self, layers: range, tokens: torch.Tensor) -> tuple[Slots, Slots]:
        """See `PromptTensors`."""
        if len(layers) > 1:
            self.noted[-1] = self._watch.observed.work
        return self._prompt.entries(layers, tokens)


@dataclass(frozen=True)
class Launches:
    """How much a policy asks of a device, the plugin's own work included.

    Attributes:
        layer: at the end of a layer of a prefill, mean over layers.
        group: each time that several layers are scored together, mean over these times.
        groups: how often that is.
        end: after the last layer, until the entries that stay are in private pages.
        fold: in a fold, of all its requests or, if `one_by_one`, of one layer of one request; None
            if nothing leaves.
        one_by_one: whether requests and layers fold one by one.
    """

    layer: DeviceWork
    group: DeviceWork
    groups: int
    end: DeviceWork
    fold: DeviceWork | None
    one_by_one: bool

    def prefill(self, layers: int) -> DeviceWork:
        """What a prompt asks in all."""
        return self.layer * layers + self.group * self.groups + self.end


def launches(bound: Bound, prompt: int | None = None) -> Launches:
    """Counts what a bound policy asks of a device.

    Args:
        prompt: N tokens, which decide how many layers are scored together; None: few.

    Raises:
        PolicyError: no server carries the policy out.
    """
    most = bound.shape.layers
    if prompt is not None:
        most = StandIns().program(bound, installed()).layers_together(prompt)
    with torch.no_grad():
        return _Counting(deepest(bound), most).launches()


class _Counting:
    """Counts in a trial's longest prompt, and in the last of its folds."""

    def __init__(self, case: TrialCase, most: int) -> None:
        self.case, self.bound, self.watch = case, case.bound, StandIns()
        self.program = self.watch.program(
            case.bound, installed(), make=partial(_InGroups, most), deferred_bytes=sys.maxsize
        )
        self.random = torch.Generator().manual_seed(0)

    def launches(self) -> Launches:
        layers = self.bound.shape.layers
        finished, by_layer, groups, end = self._prefill()
        in_one, copies = self._compaction(finished)
        layer, group = sum([*by_layer, *copies], DeviceWork()), sum(groups, DeviceWork())
        memory = Memory.after(finished)
        fold, one_by_one = None, False
        if memory is not None and self.bound.folded.decode is not None:
            one_by_one = memory.steps.rule(self.case.tokens) is None
            fold = self._fold(memory) * (1 / layers if one_by_one else 1)
        number = len(groups)
        return Launches(
            layer * (1 / layers), group * (1 / max(number, 1)), number, end + in_one,
            fold, one_by_one,
        )  # fmt: skip

    def _tensor(self, heads: int, tokens: int) -> torch.Tensor:
        shape = self.bound.shape
        sizes = (shape.layers, heads, tokens, shape.head_dim)
        return torch.randn(sizes, generator=self.random)

    @contextmanager
    def _counted(self, counts: list[DeviceWork]) -> Iterator[None]:
        self.watch.observed = Observed()
        with self.watch.observed:
            yield
        counts.append(self.watch.observed.work)

    def _prefill(self) -> tuple[FinishedPrefill, list[DeviceWork], list[DeviceWork], DeviceWork]:
        """A finished prefill; what was asked at layers, of several together, and at the end."""
        layer_counts: list[DeviceWork] = []
        end: list[DeviceWork] = []
        q = self._tensor(self.bound.shape.heads, self.case.tokens)
        k, v = (
            self._tensor(self.bound.shape.kv_heads, self.case.tokens).transpose(1, 2) for _ in "kv"
        )
        prompt = _CountedPrompt(self.watch, InPools(q, k, v))
        run = drive(
            self.program, self.case.tokens, prompt, within=lambda: self._counted(layer_counts)
        ).run
        with self._counted(end):
            finished = run.finish(wait=False)
        finished.settle(finite=True)
        layers = [noted or total for total, noted in zip(layer_counts, prompt.noted, strict=True)]
        groups = [
            total - noted for total, noted in zip(layer_counts, prompt.noted, strict=True) if noted
        ]
        return finished, layers, groups, end[0]

    def _compaction(self, finished: FinishedPrefill) -> tuple[DeviceWork, list[DeviceWork]]:
        """What copying to private pages asks: for all layers at once, and for each layer.

        As sglang_ext/forward/compress.py copies; what `share` adds is not counted.
        """
        bound, shape = self.bound, self.bound.shape
        slots = bound.positions == "slots"
        if bound.folded.prefill.merge is None and not slots:
            return DeviceWork(1), []
        # Each layer is gathered, rotated (slot positions) and placed.
        layer_counts = [DeviceWork(2 + slots)] * shape.layers
        if bound.folded.prefill.merge is not None:
            k, v = (self._tensor(shape.kv_heads, finished.size) for _ in range(2))
            for layer in range(shape.layers):
                with self._counted(layer_counts):
                    finished.merged(layer, k[layer], v[layer], len(finished.reached(layer)))
        return DeviceWork(), layer_counts

    def _fold(self, memory: Memory) -> DeviceWork:
        """What the last of `_FOLDS` folds asks; every later one asks the same.

        Moving lists that outgrow their pages is not counted.
        """
        bound, shape, prompt = self.bound, self.bound.shape, self.case.tokens
        pool = self._tensor(shape.kv_heads, 1).flatten(0, 2)
        fold_steps = (step for step in range(1, _STEPS) if bound.leaves_at(step, prompt))
        counts: list[DeviceWork] = []
        last_fold, last_step = DeviceWork(), 0

        def read(present: torch.Tensor) -> tuple[Entries, Entries]:
            with self.watch.observed.launch():  # the kernel `entry_ids`
                ids = torch.zeros(present.shape, dtype=torch.int64)
            return Entries(pool, ids), Entries(pool, ids)

        def queries() -> torch.Tensor:
            counts.append(DeviceWork(1))  # queries of all steps are joined
            if not memory.steps.advancing_reads_queries:  # which were not noted step by step
                counts.append(DeviceWork(1))
            return q

        for step in islice(fold_steps, _FOLDS):
            new = range(prompt + last_step, prompt + step)
            q = self._tensor(shape.heads, len(new)).flatten(0, 1)
            newest = torch.tensor([new[-1]])
            counts.clear()
            with self._counted(counts):
                staying = follow_together([memory], [new], newest, queries, read, leaves=True)
                if staying is not None:
                    staying.merge(staying.proceed)
            if staying is not None:
                last_fold = sum([*counts, self._written()], DeviceWork())
            last_step = step
        return last_fold

    def _written(self) -> DeviceWork:
        """What moving entries within pages asks (sglang_ext/forward/group_fold.py)."""
        # To the device: the rows and their lengths; from it: how many entries stay.
        return DeviceWork(3 + (self.bound.positions == "slots"))
