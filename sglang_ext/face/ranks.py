"""The ranks of a scheduler (`--tp`) and its stages (`--pp`): all have to decide alike.

Ranks have some KV heads each, stages some layers.

Every rank runs a scheduler of its own, so what is decided on one must be decided on all: which
entries stay, how many slots a request takes, and whether its policy has failed. Tensors are
exchanged on the device. Before each exchange the hosts meet (one number each): a rank that has
failed says so instead of leaving the others waiting in it.

Stages cannot meet: when one computes a batch, the next one computes the batch before it. But each
has computed a batch before any of them processes its result. So what a forward has found here is
sent when it is over, and waited for where its result is processed, where nobody waits any longer
than SGLang does. Where stages have several ranks, all ranks of all stages send it. The ranks of one
stage process a result at the same place, and may meet there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed
from kvpolicy.dsl.execute.heads import ALL, Divided, Heads
from kvpolicy.sglang_ext.face.compat import StageGroup, TensorGroup


class FailedElsewhere(RuntimeError):
    """A policy has failed on another rank; all ranks know."""


class Ranks:
    """The one rank of a scheduler without others.

    Attributes:
        size: how many there are.
        heads: which of the model's KV heads this one has.
    """

    size = 1
    heads: Heads = ALL

    def meet(self, *, failed: bool = False) -> None:
        """Every rank has come as far, or has failed on the way.

        Raises:
            FailedElsewhere: another one has.
        """

    def worst(self, numbers: Sequence[int]) -> list[int]:
        """The largest of every rank's numbers, place by place; all give as many."""
        return list(numbers)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this thread meets nobody: other ranks' numbers are its own."""
        yield


class TensorRanks(Ranks):
    """One of several.

    Args:
        group: SGLang's.
        kv_heads: G of the model, as of `Divided`.
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
        found = torch.tensor(list(numbers), dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self._group.host)
        listed: list[int] = found.tolist()
        return listed

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
        found = x.new_empty(self.size * x.numel())
        torch.distributed.all_gather_into_tensor(found, x, group=self._group.device)
        return found.view(self.size, -1)


class Stages:
    """The one stage of a scheduler without others.

    Attributes:
        spans: layers of each stage, in order.
        own: those of this one.
    """

    def __init__(self, layers: range) -> None:
        self.spans: tuple[range, ...] = (layers,)
        self.own = layers

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.spans)

    def send(self, found: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send what a forward has found here; all stages do after the forward of the same batch.

        Args:
            found: int64, at least 0; as long on every stage.

        Returns:
            What waits for the others, and gives the largest of all numbers, of every rank of every
            stage.
        """
        return lambda: found


class PipelineStages(Stages):
    """One of several.

    Args:
        group: SGLang's.
        own: as the attribute.
    """

    def __init__(self, group: StageGroup, own: range) -> None:
        # All processes of the model, and a group of its own: what SGLang sends between them does
        # not get in its way.
        self._group = torch.distributed.new_group(backend="gloo")
        ends = torch.zeros((group.size, 2), dtype=torch.int64)
        ends[group.stage] = torch.tensor([own.start, own.stop])
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX, group=self._group)
        self.spans, self.own = tuple(range(*each) for each in ends.tolist()), own

    def send(self, found: torch.Tensor) -> Callable[[], torch.Tensor]:
        greatest = torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(found, greatest, group=self._group, async_op=True)

        def received() -> torch.Tensor:
            work.wait()
            return found

        return received
