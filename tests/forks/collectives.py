"""Collectives of ranks through shared memory, as in SGLang's kernels for CPUs.

Those kernels are not installed with the tests. Gloo, which replaces them, wakes a thread for each
of dozens of messages, which is slow for ranks that share a core. Here each rank writes its data to
its own place, raises its counter, and waits for the counters of the others; results are the same
on all ranks, in the order of ranks. Messages from one rank to another go through a pipe. Large
tensors and asynchronous collectives still go through gloo.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from forked import FOLDER
from torch.distributed import distributed_c10d

GLOO = "KVPOLICY_TEST_GLOO"  # environment variable: everything goes through gloo
_BYTES = 1 << 16  # most bytes of a rank in an exchange
_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 1 << 30  # futex call and operations of Linux on x86-64
_PATH = 256  # most bytes of the file's path
_PIPE = 1 << 20  # bytes that a rank can send before the other has to read
_PATIENCE = 300  # seconds to wait for a rank before an error
_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _Pause(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Room:
    """Memory of one group of ranks: two halves, used in turn, so that none is written while read.

    When a rank writes a half again, all others have begun an exchange in the other half, after
    they had read this one.
    """

    def __init__(self, group: Any, gather: Callable[..., Any]) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        path = ""
        if self.rank == 0:
            file, path = tempfile.mkstemp(prefix="kvpolicy-ranks-", dir="/dev/shm")
            os.ftruncate(file, 64 * self.size + 2 * self.size * _BYTES)
            os.close(file)
        paths = [torch.zeros(_PATH, dtype=torch.uint8) for _ in range(self.size)]
        gather(paths, torch.tensor(list(path.encode().ljust(_PATH)), dtype=torch.uint8), group)
        with open(bytes(paths[0].tolist()).decode().strip(), "r+b") as opened:
            memory = mmap.mmap(opened.fileno(), 0)
        gather(paths, paths[0], group)  # all have opened it
        if self.rank == 0:
            os.unlink(path)
        self._counts = [ctypes.c_int.from_buffer(memory, 64 * i) for i in range(self.size)]
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=64 * self.size)
        self._places = whole.view(2, self.size, _BYTES)
        self._round = 0

    def exchange(self, x: torch.Tensor | None, like: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, valid until the exchange after the next.

        Args:
            x: this rank's tensor, of one dtype and shape on all ranks; None to write none.
            like: a tensor of that dtype and shape.

        Raises:
            RuntimeError: a rank has not come within `_PATIENCE` seconds.
        """
        number = like.numel() * like.element_size()
        self._round += 1
        places = self._places[self._round % 2, :, :number]
        if x is not None:
            places[self.rank].copy_(x.detach().contiguous().view(-1).view(torch.uint8))
        own = self._counts[self.rank]
        own.value = self._round
        _syscall(_FUTEX, ctypes.byref(own), _WAKE, _ALL, None, None, 0)
        for other in self._counts:
            self._wait(other)
        return [each.view(like.dtype).view(like.shape) for each in places]

    def _wait(self, other: ctypes.c_int) -> None:
        pause = _Pause(_PATIENCE, 0)
        while (seen := other.value) < self._round:
            if _syscall(_FUTEX, ctypes.byref(other), _WAIT, seen, ctypes.byref(pause), None, 0):
                if ctypes.get_errno() == 110:  # ETIMEDOUT
                    raise RuntimeError(f"a rank has not come within {_PATIENCE} s")


class _Sent:
    """A message that is in the pipe."""

    def wait(self, timeout: object = None) -> bool:
        """Returns at once: the message has been sent."""
        return True


class _Line:
    """A pipe from one rank of a group to another, whose messages arrive in their order.

    Args:
        sends: whether this end sends, and makes the pipe; the other finds it in the group's store.
    """

    def __init__(self, group: Any, source: int, target: int, *, sends: bool) -> None:
        store, name = distributed_c10d._world.pg_map[group][1], f"line {source} {target}"
        if sends:
            folder = tempfile.mkdtemp(prefix="line-", dir=os.environ.get(FOLDER))
            path = os.path.join(folder, "pipe")
            os.mkfifo(path)
            store.set(name, path)
        else:
            path = store.get(name).decode()
        self._file = os.open(path, os.O_RDWR)  # opening waits for neither end
        fcntl.fcntl(self._file, fcntl.F_SETPIPE_SZ, _PIPE)
        self._waiting: deque[_Received] = deque()

    def send(self, x: torch.Tensor) -> _Sent:
        """Writes a tensor to the pipe."""
        left = memoryview(x.detach().contiguous().view(-1).view(torch.uint8).numpy())
        while left:
            left = left[os.write(self._file, left) :]
        return _Sent()

    def receive(self, x: torch.Tensor) -> _Received:
        """A message to be read into `x` when it is waited for."""
        message = _Received(self, x)
        self._waiting.append(message)
        return message

    def read_until(self, message: _Received) -> None:
        """Reads messages up to this one."""
        while not message.done:
            self._waiting.popleft().read(self._file)


class _Received:
    """A message to be read; `done` once it has been."""

    def __init__(self, line: _Line, x: torch.Tensor) -> None:
        self._line, self._x, self.done = line, x, False

    def wait(self, timeout: object = None) -> bool:
        """Waits until the message has been read."""
        self._line.read_until(self)
        return True

    def read(self, file: int) -> None:
        """Reads the message from the pipe."""
        made = torch.empty(self._x.numel() * self._x.element_size(), dtype=torch.uint8)
        left = memoryview(made.numpy())
        while left:
            if not select.select([file], [], [], _PATIENCE)[0]:
                raise RuntimeError(f"a rank has sent nothing for {_PATIENCE} s")
            left = left[os.readv(file, [left]) :]
        self._x.copy_(made.view(self._x.dtype).view(self._x.shape))
        self.done = True


def quicker() -> None:
    """Replaces torch's collectives and messages for small CPU tensors by those of this module."""
    _collectives()
    _messages()


def _is_small(x: torch.Tensor) -> bool:
    here = x.device.type == "cpu" and not os.environ.get(GLOO)
    return here and 0 < x.numel() * x.element_size() <= _BYTES


def _messages() -> None:
    lines: dict[tuple[int, str, int, int], _Line] = {}
    isend, irecv, recv = dist.isend, dist.irecv, dist.recv

    def line(group: Any, other: int | None, in_group: int | None, *, sends: bool) -> _Line:
        group = dist.group.WORLD if group is None else group
        peer = dist.get_group_rank(group, other) if in_group is None else in_group
        ends = (dist.get_rank(group), peer) if sends else (peer, dist.get_rank(group))
        name = (os.getpid(), group.group_name, *ends)
        if name not in lines:
            lines[name] = _Line(group, *ends, sends=sends)
        return lines[name]

    def isend_small(
        tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:  # fmt: skip
        if tag or not _is_small(tensor):
            return isend(tensor, dst, group, tag, group_dst)
        return line(group, dst, group_dst, sends=True).send(tensor)

    def irecv_small(
        tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0,
        group_src: int | None = None,
    ) -> Any:  # fmt: skip
        if tag or not _is_small(tensor) or (src is None and group_src is None):
            return irecv(tensor, src, group, tag, group_src)
        return line(group, src, group_src, sends=False).receive(tensor)

    def send_small(tensor: torch.Tensor, *where: Any, **named: Any) -> None:
        isend_small(tensor, *where, **named).wait()

    def recv_small(tensor: torch.Tensor, src: int | None = None, *where: Any, **named: Any) -> int:
        if src is None:
            return recv(tensor, src, *where, **named)
        irecv_small(tensor, src, *where, **named).wait()
        return src

    for module in (dist, distributed_c10d):
        module.isend, module.irecv = isend_small, irecv_small
        module.send, module.recv = send_small, recv_small


def _collectives() -> None:
    rooms: dict[str, _Room] = {}
    reduce, gather = dist.all_reduce, dist.all_gather
    into, broadcast = dist.all_gather_into_tensor, dist.broadcast
    results = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}

    def room(group: Any, x: torch.Tensor, is_async: bool) -> _Room | None:
        group = dist.group.WORLD if group is None else group
        if is_async or not _is_small(x) or dist.get_rank(group) < 0:
            return None
        name = f"{os.getpid()} {group.group_name}"
        if name not in rooms:
            rooms[name] = _Room(group, gather)
        return rooms[name]

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        found = room(group, tensor, async_op) if op in results else None
        if found is None:
            return reduce(tensor, op, group, async_op)
        first, *rest = found.exchange(tensor, tensor)
        made = first.clone()
        for each in rest:
            made = results[op](made, each)
        tensor.copy_(made)
        return None

    def all_gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        found = room(group, tensor, async_op)
        if found is None:
            return gather(tensor_list, tensor, group, async_op)
        for each, own in zip(tensor_list, found.exchange(tensor, tensor), strict=True):
            each.copy_(own)
        return None

    def all_gather_into_tensor(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        found = room(group, input_tensor, async_op)
        if found is None:
            return into(output_tensor, input_tensor, group, async_op)
        parts = output_tensor.view(found.size, *input_tensor.shape)
        for each, own in zip(parts, found.exchange(input_tensor, input_tensor), strict=True):
            each.copy_(own)
        return None

    def broadcast_small(
        tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:  # fmt: skip
        found = room(group, tensor, async_op)
        if found is None:
            return broadcast(tensor, src, group, async_op, group_src)
        if group_src is None:
            group_src = src if group is None else dist.get_group_rank(group, src)
        own = found.rank == group_src
        made = found.exchange(tensor if own else None, tensor)
        if not own:
            tensor.copy_(made[group_src])
        return None

    for module in (dist, distributed_c10d):
        module.all_reduce, module.all_gather = all_reduce, all_gather
        module.all_gather_into_tensor, module.broadcast = all_gather_into_tensor, broadcast_small
