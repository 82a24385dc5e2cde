"""Timing on a GPU: events, a flushed L2, alternatives in turn; without a GPU, by the clock.

A call is timed twice: as it is called, Python and launches included where the GPU waits for them,
and as a replayed CUDA graph, which is the time of the kernels alone. A call that cannot be captured
is timed as called only, and the reason is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import torch

# Bounds of the rounds per case, which fill the seconds a case may take; without seconds, one round.
LEAST, MOST = 5, 50


@dataclass(frozen=True)
class Times:
    """Seconds of one call.

    Attributes:
        called: seconds of calls.
        graph: seconds of replays; empty if the call was not captured.
        reason: why it was not.
    """

    called: list[float]
    graph: list[float] = field(default_factory=list)
    reason: str | None = None

    @property
    def kernels(self) -> list[float]:
        """Seconds on the device: of replays if there are any, else of calls."""
        return self.graph or self.called

    def facts(self) -> dict:
        """The summaries, for JSON."""
        made = {"called": summary(self.called)}
        if self.graph:
            made["graph"] = summary(self.graph)
        if self.reason:
            made["not_captured"] = self.reason
        return made


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, least, 10th and 90th percentile, and number of values."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "number": len(ordered),
    }


class Clock:
    """Times calls on one device.

    Args:
        device: device of the tensors.
        seconds: time that the rounds of one case may take.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.least = LEAST if seconds else 1
        self.flushed: torch.Tensor | None = None
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.flushed = torch.empty(4 * cache, dtype=torch.uint8, device=device)

    def times(
        self, calls: Mapping[str, Callable[[], object]], waits: Container[str] = ()
    ) -> dict[str, Times]:
        """Times of each call; calls take turns, in rotating order.

        Args:
            calls: calls by name.
            waits: names of calls that wait for the device, and so are not captured.
        """
        ways: dict[tuple[str, str], Callable[[], object]] = {}
        reasons: dict[str, str] = {}
        for name, call in calls.items():
            call()  # compiles
            ways[name, "called"] = call
            if self.device.type == "cuda":
                captured = "it waits for the device" if name in waits else self._captured(call)
                if isinstance(captured, str):
                    reasons[name] = captured
                else:
                    ways[name, "graph"] = captured.replay
        seconds = self._rounds(ways)
        made = {}
        for name in calls:
            graph = seconds.get((name, "graph"), [])
            made[name] = Times(seconds[name, "called"], graph, reasons.get(name))
        return made

    def _captured(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph | str:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            return str(error).strip().splitlines()[0][:200]
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _rounds(self, ways: dict) -> dict[tuple[str, str], list[float]]:
        order = list(ways)
        made: dict[tuple[str, str], list[float]] = {way: [] for way in order}
        started, rounds = time.perf_counter(), 0
        while rounds < self.least or (
            rounds < MOST and time.perf_counter() - started < self.seconds
        ):
            for way in order:
                made[way].append(self.once(ways[way]))
            order, rounds = [*order[1:], order[0]], rounds + 1
        return made

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call that finds none of its data in the L2 cache."""
        if self.flushed is None:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        # The flush keeps the GPU busy while the call is being launched.
        self.flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def copy_bandwidth(self, size: int) -> dict[str, float]:
        """Bytes per second, read and written, of a copy of `size` bytes."""
        source = torch.randint(256, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        seconds = summary([self.once(lambda: target.copy_(source)) for _ in range(20)])
        if not torch.equal(source, target):
            raise SystemExit("the copy is not equal to what was copied")
        return {
            "bytes": size,
            "median": 2 * size / seconds["median"],
            "best": 2 * size / seconds["min"],
        }
