"""The ranks (`--tp-size`) and stages (`--pp-size`) of a model: all have to decide alike.

Each rank has some KV heads, each stage some layers.

Every rank runs its own scheduler, so what is decided on one must be decided on all: which entries
stay, how many slots a request takes, and whether its policy has failed. Tensors are exchanged on
the device. Before each exchange the hosts meet, with one number each, so that a rank that has
failed says so instead of leaving the others waiting.

Stages cannot meet: while one computes a batch, the next computes the batch before it. But all have
computed a batch before any of them processes its result. So each sends what a forward has found
when the forward is over, and waits for the others when it processes the result, where SGLang has
waited for them already. With several ranks per stage, all ranks of all stages send. The ranks of
one stage process a result at the same point, and may meet there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from kvpolicy.dsl.execute.tensors.heads import ALL, Divided, Heads
from kvpolicy.sglang_ext.face.compat import StageGroup, TensorGroup


class FailedElsewhere(RuntimeError):
    """A policy has failed on another rank; all ranks know."""


class Ranks:
    """The only rank.

    Attributes:
        size: number of ranks.
        heads: KV heads of the model that this rank has.
    """

    size = 1
    heads: Heads = ALL

    def meet(self, *, failed: bool = False) -> None:
        """Wait until every rank has come this far, or has failed on the way.

        Args:
            failed: whether this rank has failed.

        Raises:
            FailedElsewhere: another rank has failed, and this one has not.
        """

    def worst(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each number; all ranks give equally many."""
        return list(numbers)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this thread meets no rank, and takes its numbers for all ranks'."""
        yield


class TensorRanks(Ranks):
    """One of several ranks.

    Args:
        group: SGLang's.
        kv_heads: G of the whole model.
    """

    def __init__(self, group: TensorGroup, kv_heads: int) -> None:
        self.size, self._group = group.size, group
        self.heads = Divided(group.rank, group.size, kv_heads, self._exchange, self.meet)
        self._thread = threading.local()

    def meet(self, *, failed: bool = False) -> None:
        (any_failed,) = self.worst([int(failed)])
        if any_failed and not failed:
            raise FailedElsewhere("the policy has failed on another rank")

    def worst(self, numbers: Sequence[int]) -> list[int]:
        if self._is_alone or not numbers:
            return list(numbers)
        maxima = torch.tensor(list(numbers), dtype=torch.int64)
        torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX, group=self._group.host)
        values: list[int] = maxima.tolist()
        return values

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._thread.alone = True
        try:
            yield
        finally:
            self._thread.alone = False

    @property
    def _is_alone(self) -> bool:
        return getattr(self._thread, "alone", False)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_alone:
            return x.expand(self.size, -1)
        self.meet()
        parts = x.new_empty(self.size * x.numel())
        torch.distributed.all_gather_into_tensor(parts, x, group=self._group.device)
        return parts.view(self.size, -1)


class Sent:
    """What one stage has sent to the others, until theirs has arrived.

    Args:
        numbers: int64; become each number's maximum over all ranks of all stages.
        work: the exchange; None: there is only one process.
    """

    def __init__(self, numbers: torch.Tensor, work: Any = None) -> None:
        self._numbers, self._work = numbers, work

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._work is None or self._work.is_completed()

    def read(self) -> torch.Tensor:
        """The maxima; waits until all stages have sent."""
        if self._work is not None:
            self._work.wait()
        return self._numbers


class Stages:
    """The only stage.

    Attributes:
        spans: layers of each stage, in order.
        span: layers of this stage.
    """

    def __init__(self, layers: range) -> None:
        self.spans: tuple[range, ...] = (layers,)
        self.span = layers

    @property
    def several(self) -> bool:
        """Whether other stages have other layers."""
        return len(self.spans) > 1

    def send(self, numbers: torch.Tensor) -> Sent:
        """Send numbers, as all ranks of all stages do at the same point of their work.

        Args:
            numbers: int64, at least 0, of one shape on all of them; may be overwritten.
        """
        return Sent(numbers)


class PipelineStages(Stages):
    """One of several stages.

    Args:
        group: SGLang's.
        span: layers of this stage.
    """

    def __init__(self, group: StageGroup, span: range) -> None:
        # A separate group of all processes of the model, so that SGLang's messages do not mix with
        # the plugin's.
        self._group = torch.distributed.new_group(backend="gloo")
        all_ends = torch.zeros((group.size, 2), dtype=torch.int64)
        all_ends[group.stage] = torch.tensor([span.start, span.stop])
        torch.distributed.all_reduce(all_ends, torch.distributed.ReduceOp.MAX, group=self._group)
        self.spans, self.span = tuple(range(*ends) for ends in all_ends.tolist()), span

    def send(self, numbers: torch.Tensor) -> Sent:
        greatest = torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(numbers, greatest, group=self._group, async_op=True)
        return Sent(numbers, work)


class Told:
    """What all ranks tell each other at the same messages of a front end.

    The ranks of one stage meet there. Stages handle a message at different times and must not wait
    for each other, so each sends at every message, and hears what all had sent at an earlier one.
    """

    def __init__(self, ranks: Ranks, stages: Stages) -> None:
        self._ranks, self._stages = ranks, stages
        self._sent: deque[Sent] = deque()

    def worst(self, numbers: Sequence[bool], unheard: Sequence[bool]) -> list[int]:
        """Whether each holds on any rank; with stages, on any of them as far as is known here.

        Args:
            unheard: what holds as long as not all have been heard once.
        """
        if not self._stages.several:
            return self._ranks.worst(numbers)
        self._sent.append(self._stages.send(torch.tensor(numbers, dtype=torch.int64)))
        while len(self._sent) > 1 and self._sent[1].arrived():
            self._sent.popleft()
        latest = self._sent[0]
        return latest.read().tolist() if latest.arrived() else list(unheard)
