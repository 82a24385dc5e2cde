"""Attention over the private lists of a batch by FlashInfer, planned when lists change.

FlashInfer takes the list of one (request, KV head) as a sequence with a single KV head in pages of
G tokens, which private pages are: B requests are B * G sequences, whose lengths differ by layer.
Lengths change when requests come, fold and go, and FlashInfer plans then; decode steps in between
only read. Tokens generated since lie in ordinary slots: SGLang's own wrapper reads them, and
`merged` combines both.

With CUDA graphs the kernels read buffers that keep their addresses: how the work is cut (the
schedule), where each list's pages begin, their numbers, and the entries of each last page. All
batch sizes share them, because one batch is planned at a time. A schedule depends on nothing but
lengths: layers whose lists are as long as another's get a copy of its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from kvpolicy.kernels.attention.private_pages_triton import private_pages
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch import occupancy

_MOST_ENTRIES = 2**32  # FlashInfer's kernels count tokens of lists in uint32
_ROWS = 16  # query rows of the smallest tile of its tensor-core kernel
# Most programs that its planners let run at once on a multiprocessor, by `tensor_cores`.
_PROGRAMS = {True: 2, False: 32}

State = tuple[torch.Tensor, torch.Tensor]  # attention [B, H, D], base-2 log-sum-exp [B, H]


def package() -> ModuleType:
    """FlashInfer.

    Raises:
        ImportError: says what to install.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise ImportError("the package flashinfer-python is not installed") from error
    return flashinfer


class PrivateAttention:
    """Attention over the private lists of one pool.

    Dimensions: L layers, H query heads, G KV heads, D head size, B requests.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        heads: int,
        dtype: torch.dtype,
        workspace: torch.Tensor,
        *,
        tensor_cores: bool,
    ) -> None:
        """
        Args:
            storage: [L, 2, padded, G, D], the pool; of the queries' dtype or of 8-bit floats.
            heads: H.
            dtype: of queries, fp16 or bf16.
            workspace: uint8, FlashInfer's memory for partial results; may be shared with others on
                the same stream.
            tensor_cores: whether FlashInfer's tensor-core kernel reads, or the other one.

        Raises:
            ImportError: FlashInfer is not installed.
            ValueError: the pool has more entries than it can count.
        """
        package()
        layers, _, padded, kv_heads, size = storage.shape
        if layers * padded * kv_heads >= _MOST_ENTRIES:
            shape = list(storage.shape)
            raise ValueError(f"storage: FlashInfer counts fewer than 2^32 entries, got {shape}")
        all_pages = storage.view(-1, kv_heads, 1, size)
        self._storage, self._pages = storage, (all_pages[:-padded], all_pages[padded:])
        self._heads, self._dtype, self._workspace = heads, dtype, workspace
        self._tensor_cores = tensor_cores
        self._listed = torch.zeros(layers * padded, dtype=torch.int32, device=storage.device)
        self._lists, self._schedules = torch.empty(0), torch.empty(0)
        self._captured: dict[int, _Wrappers] = {}
        self._eager = _Wrappers([], 0)
        self._now: Sequence[Any] = ()
        self._copied = torch.cuda.Event() if storage.device.type == "cuda" else None

    def reserve(self, requests: int) -> None:
        """Allocate what captured batches of up to `requests` requests share; forget earlier ones.

        The first `plan` for a batch size makes its wrappers.
        """
        layers, _, _, kv_heads, _ = self._storage.shape
        device, lists = self._storage.device, requests * kv_heads
        self._lists = torch.zeros((layers, 2, lists + 1), dtype=torch.int32, device=device)
        self._schedules = self._new_schedules(lists)
        self._captured, self._now = {}, ()

    def plan(
        self, tables: Tables, rows: torch.Tensor, counts: np.ndarray, *, captured: int | None
    ) -> None:
        """Make `attend` read these lists from now on, on the current stream.

        Args:
            tables: no layer of these requests may be stored in a pair.
            rows: int [B], row of each request in SGLang's request pool.
            counts: integers [L, B, G], entries of each list in private pages.
            captured: batch size of the CUDA graph to be captured or replayed, padding included;
                None: without a graph.

        Raises:
            ValueError: the lists have more pages than the pool.
        """
        kv_heads = self._storage.shape[3]
        lists = (counts.shape[1] if captured is None else captured) * kv_heads
        starts, last_sizes, longest = _laid_out(counts, lists)
        if starts[-1, -1] > self._listed.shape[0]:
            raise ValueError(f"counts: {starts[-1, -1]} pages are more than the pool has")
        self._now = ()  # until all is done
        if self._copied is not None:
            self._copied.synchronize()  # schedules leave from memory that FlashInfer reuses
        host = torch.from_numpy(np.stack([starts, last_sizes], 1).astype(np.int32))
        if self._storage.device.type == "cuda":
            host = host.pin_memory()
        if captured is None:
            on_device = host.to(self._storage.device, non_blocking=True)
        else:
            on_device = self._lists[:, :, : lists + 1]
            on_device.copy_(host, non_blocking=True)
        arguments = (self._storage, tables, rows, on_device[:, 0], self._listed)
        private_pages(*arguments, longest=longest)
        wrappers = self._wrappers(lists, captured)
        sources = _equal(counts) if wrappers.planned else range(len(counts))
        for layer in dict.fromkeys(sources):
            self._plan_layer(wrappers.layers[layer], host[layer], lists)
        if captured is not None:
            wrappers.planned = True
            self._copy_schedules(sources)
        if self._copied is not None:
            self._copied.record()
        self._now = wrappers.layers

    def attend(
        self, q: torch.Tensor, *, layer: int, scale: float, value_scale: float = 1.0
    ) -> State:
        """Attention of each request's newest token over its private lists.

        Args:
            q: [B, H, D], fp16 or bf16, of the planned batch, padded as its graph is.
            scale: multiplies q.k.
            value_scale: multiplies values.

        Returns:
            [B, H, D], 0 where a head reads no entry; float32 [B, H] base-2 log-sum-exp, -inf there.

        Raises:
            RuntimeError: nothing is planned.
        """
        if not self._now:
            raise RuntimeError("FlashInfer has planned no batch")
        group = self._heads // self._storage.shape[3]
        by_list = q.reshape(-1, group, q.shape[2])
        scales = {"k_scale": scale, "v_scale": value_scale}
        out, lse = self._now[layer].run(by_list, self._pages, return_lse=True, **scales)
        return out.view(q.shape), lse.view(q.shape[:2])

    def merged(self, one: State, other: State) -> torch.Tensor:
        """[B, H, D] attention over the entries of both; each head needs an entry in one of them."""
        group = self._heads // self._storage.shape[3]
        # A KV head's query heads at a time: FlashInfer's kernel takes no more than 64 together.
        parts = [
            x.reshape(-1, group, *x.shape[2:]).contiguous() for state in (one, other) for x in state
        ]
        merged: torch.Tensor = package().merge_state(*parts)[0]
        return merged.view(one[0].shape)

    def _new_schedules(self, lists: int) -> torch.Tensor:
        """uint8 [L, bytes] for FlashInfer's schedules of `lists` lists."""
        shape = (self._storage.shape[0], self._schedule_bytes(lists))
        return torch.zeros(shape, dtype=torch.uint8, device=self._storage.device)

    def _schedule_bytes(self, lists: int) -> int:
        group = self._heads // self._storage.shape[3]
        processors = occupancy.processors(self._storage.device)
        return schedule_bytes(lists, group, processors, tensor_cores=self._tensor_cores)

    def _wrappers(self, lists: int, captured: int | None) -> _Wrappers:
        """Wrappers with room for `lists` lists, made if need be."""
        if captured is None:
            if self._eager.lists < lists:
                schedules = self._new_schedules(lists)
                self._eager = _Wrappers(
                    [self._new_wrapper(schedule) for schedule in schedules], lists
                )
            return self._eager
        if captured not in self._captured:
            size = self._schedule_bytes(lists)
            wrappers = [
                self._new_wrapper(
                    schedule[:size],
                    use_cuda_graph=True,
                    paged_kv_indptr_buffer=starts[: lists + 1],
                    paged_kv_indices_buffer=self._listed,
                    paged_kv_last_page_len_buffer=last_sizes[:lists],
                )
                for schedule, (starts, last_sizes) in zip(self._schedules, self._lists, strict=True)
            ]
            self._captured[captured] = _Wrappers(wrappers, lists)
        return self._captured[captured]

    def _new_wrapper(self, schedule: torch.Tensor, **options: Any) -> Any:
        """FlashInfer's wrapper that plans in `schedule` instead of 8 MiB of its own."""
        wrapper = package().BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2", **options
        )
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        return wrapper

    def _plan_layer(self, wrapper: Any, host: torch.Tensor, lists: int) -> None:
        """Plan from memory of the host, so that FlashInfer does not wait for the device."""
        page, size = self._storage.shape[3:]
        wrapper.plan(
            host[0],
            self._listed,
            host[1, :lists],
            self._heads // page,
            1,
            size,
            page,
            q_data_type=self._dtype,
            kv_data_type=self._storage.dtype,
            sm_scale=1.0,  # `attend` passes the scale
        )

    def _copy_schedules(self, sources: Sequence[int]) -> None:
        """Copy to each layer the schedule of the layer that was planned for it."""
        if list(sources) == list(range(len(sources))):
            return
        host = torch.tensor(sources)
        if self._schedules.device.type == "cuda":
            host = host.pin_memory()
        device_sources = host.to(self._schedules.device, non_blocking=True)
        self._schedules.copy_(self._schedules[device_sources])


class _Wrappers:
    """FlashInfer's wrappers of all layers, for batches of one size or without a graph.

    Attributes:
        layers: one wrapper per layer.
        lists: number of lists for which they have room.
        planned: whether each has planned once, which gives it its kernels.
    """

    def __init__(self, layers: list[Any], lists: int) -> None:
        self.layers, self.lists, self.planned = layers, lists, False


def schedule_bytes(lists: int, group: int, processors: int, *, tensor_cores: bool) -> int:
    """Bytes that suffice for a schedule of FlashInfer for `lists` lists.

    It has three integers and a truth value for each program that may run, two integers for each
    list and a few others, each part aligned to 16 bytes.

    Args:
        group: query heads of a list.
        processors: multiprocessors of the GPU.
    """
    programs = max(_PROGRAMS[tensor_cores] * processors, lists * (-(-group // _ROWS) + 1))
    return -(-(16 * programs + 16 * lists + 1024) // 256) * 256


def reserved_bytes(
    layers: int, slots: int, kv_heads: int, group: int, requests: int, device: torch.device
) -> int:
    """Bytes that suffice for captured batches of at most `requests` requests.

    Args:
        slots: slots of the pool.
        group: query heads per KV head.
    """
    lists, processors = requests * kv_heads, occupancy.processors(device)
    schedule = max(
        schedule_bytes(lists, group, processors, tensor_cores=cores) for cores in _PROGRAMS
    )
    return layers * (4 * slots + 8 * (lists + 1) + schedule)


def _laid_out(counts: np.ndarray, lists: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Where each list's pages begin, entries of its last page, and the most pages of a list.

    Both arrays are int64 [L, lists + 1], the second so wide only for a common copy. Pages are
    numbered on from layer to layer. Lists after those of the requests are empty; an empty list has
    0 entries in its last page.
    """
    layers, requests, kv_heads = counts.shape
    lengths = counts.reshape(layers, requests * kv_heads)
    pages = -(-lengths // kv_heads)
    starts, last_sizes = np.zeros((2, layers, lists + 1), dtype=np.int64)
    starts[:, 1 : lengths.shape[1] + 1] = pages
    last_sizes[:, : lengths.shape[1]] = np.where(lengths > 0, lengths - (pages - 1) * kv_heads, 0)
    return starts.cumsum().reshape(starts.shape), last_sizes, int(pages.max(initial=0))


def _equal(counts: np.ndarray) -> list[int]:
    """For each layer, the first one whose lists have the same lengths."""
    first: dict[bytes, int] = {}
    return [first.setdefault(lengths.tobytes(), layer) for layer, lengths in enumerate(counts)]
