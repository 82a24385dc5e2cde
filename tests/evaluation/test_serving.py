"""Free ports for servers, which no other process takes; servers that start together."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import threading

import pytest
from kvpolicy.evaluation.serving import Server, ServerFailed, free_port, together


def test_a_port_is_kept_until_a_server_listens_there():
    port = free_port()
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    with socket.create_server(("127.0.0.1", port)) as server:
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""


def _ports(answers: multiprocessing.Queue) -> None:
    answers.put([free_port() for _ in range(5)])


def test_processes_that_were_forked_from_one_find_different_ports():
    random.seed(0)
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    processes = [fork.Process(target=_ports, args=(answers,)) for _ in range(4)]
    for process in processes:
        process.start()
    ports = [port for _ in processes for port in answers.get(timeout=60)]
    for process in processes:
        process.join()
    # Those who have ended keep nothing: equal ports are as likely as among 2,768 by chance.
    assert len(set(ports)) > 10


def test_servers_that_start_together_end_together():
    """All end at once, also if one does not start; each is ended from outside its thread."""
    waiting, running = threading.Barrier(3, timeout=20), []

    @contextlib.contextmanager
    def starting(name):
        waiting.wait()  # none would come by if they started one after the other
        if name == "b":
            raise ServerFailed("it did not answer")
        running.append(name)
        try:
            yield Server(name, None, None)
        finally:
            running.remove(name)

    with together({name: starting(name) for name in "abc"}) as servers:
        assert [*servers] == ["a", "b", "c"]
        assert (servers["a"].url, servers["c"].url) == ("a", "c")
        assert str(servers["b"]) == "it did not answer"
        assert sorted(running) == ["a", "c"]
    assert running == []
