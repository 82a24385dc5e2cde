"""Messages between the fork server, its clients and its forks, with open files."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH_BYTES, _MOST_FILES = 8, 32


def send(channel: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Sends a message and open files."""
    text = json.dumps(message).encode()
    socket.send_fds(channel, [len(text).to_bytes(_LENGTH_BYTES, "big")], list(files))
    channel.sendall(text)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its open files; None if the other side has closed."""
    try:
        head, files, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, _MOST_FILES)
        if len(head) < _LENGTH_BYTES:
            return None
        text = b""
        while len(text) < int.from_bytes(head, "big"):
            part = channel.recv(int.from_bytes(head, "big") - len(text))
            if not part:
                return None
            text += part
    except ConnectionError:
        return None
    return json.loads(text), files


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Moves open files to the given file descriptors."""
    above = max([2, *files, *numbers]) + 1
    held = [os.dup2(file, above + i) for i, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(held, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
