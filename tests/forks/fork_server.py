"""Imports SGLang once and forks: a process that has imported it starts in a few milliseconds.

    python -P fork_server.py ADDRESS OWNER

(forked.py starts it, with its folder in PYTHONPATH.)

Listens on the Unix socket ADDRESS until the process OWNER ends. A client (forked.py) sends a
command line of Python, an environment, a folder and the standard streams; a fork becomes that
process, in a session of its own, and its exit status is sent back. If the client hangs up first,
the session is killed.

Modules imported here have already read their environment: a request whose environment differs in
other variables than those of `READ_LATER` is refused, and the client starts a new interpreter. A
fork imports for itself the few modules that make a process a scheduler or a launcher. Nothing here
may start a thread or touch a device, as a fork inherits neither.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import collectives
import forked
import quicker
from messages import place, receive, send

# Modules that schedulers, servers and evaluations import.
MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "transformers",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "kvpolicy.sglang_ext.hooks",
    "kvpolicy.sglang_ext.frontend",
    "kvpolicy.sglang_ext.clients.control",
    "kvpolicy.sglang_ext.experiment.loading",
    "kvpolicy.evaluation.cli",
    "kvpolicy.evaluation.asking.eval",
    "kvpolicy.evaluation.reporting.report",
)
# Plugins see by these what a process is, and the first reads SGLANG_TEST_RETRACT when imported:
# forks import them, and all modules that import them, for themselves.
LEFT_OUT = {"sglang.srt.managers.scheduler", "sglang.srt.managers.tokenizer_manager"}
# Prefixes of variables that no imported module reads before it is used.
READ_LATER = (
    "KVPOLICY_",
    "SGLANG_KV_POLICY",
    "SGLANG_PLUGINS",
    "SGLANG_TEST_RETRACT",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "PYTEST_",
    "SGLANG_HTTP_SERVER_APP_PATH",
    "PYTHONPATH",  # `become` reads it
)
LAUNCHER = "sglang.launch_server"
# Variable set for scripts that make an `sgl.Engine`, and servers whose processes start others.
SPARES_WANTED = "KVPOLICY_TEST_SPARES"
SPARES = 5  # a scheduler, a detokenizer, two HTTP workers, and one more process


def import_modules() -> None:
    """Imports `MODULES`, then forgets `LEFT_OUT` and all modules that import them."""
    imported_by: dict[str, set[str]] = {}
    original = builtins.__import__

    def noting(name, globals=None, locals=None, fromlist=(), level=0):
        module = original(name, globals, locals, fromlist, level)
        if globals is not None:
            if level:
                name = importlib.util.resolve_name("." * level + name, globals["__package__"])
            for each in (name, *(f"{name}.{part}" for part in fromlist or ())):
                imported_by.setdefault(each, set()).add(globals.get("__name__", ""))
        return module

    builtins.__import__ = noting
    try:
        for module in MODULES:
            importlib.import_module(module)
    finally:
        builtins.__import__ = original
    forgotten: set[str] = set()
    waiting = set(LEFT_OUT)
    while waiting:
        forgotten |= waiting
        waiting = {by for name in waiting for by in imported_by.get(name, ())} - forgotten
    for name in forgotten & sys.modules.keys():
        package, _, attribute = name.rpartition(".")
        vars(sys.modules[package]).pop(attribute, None)
    for name in forgotten:
        sys.modules.pop(name, None)


def changed(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Names of the variables in which two environments differ."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


class ForkServer:
    """Forks for clients, and sends each the exit status of its fork."""

    def __init__(self, address: str, owner: int, before: Mapping[str, str]):
        """`before`: the environment before the imports; some modules add variables to it."""
        self.environment = dict(os.environ)
        self.added = {name: os.environ[name] for name in changed(before, os.environ)}
        self.clients: dict[int, socket.socket] = {}  # by pid of the fork
        self.selector = selectors.DefaultSelector()
        self.selector.register(os.pidfd_open(owner), selectors.EVENT_READ, self._end)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)  # a client that sees the file can connect
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> dict[str, Any]:
        """Returns only in a fork, with the request that it has to fulfil."""
        while True:
            for key, _ in self.selector.select():
                request = key.data(key.fileobj)
                if request is not None:
                    return request

    def _accept(self, listener: socket.socket) -> dict[str, Any] | None:
        client, _ = listener.accept()
        message = receive(client)
        if message is None:
            client.close()
            return None
        request, files = message
        request["environment"] = {**self.added, **request["environment"]}
        names = changed(self.environment, request["environment"])
        early = [name for name in names if not name.startswith(READ_LATER)]
        pid = None if early else os.fork()
        if pid == 0:
            self._close()
            os.setsid()
            send(client, {"pid": os.getpid()})
            client.close()
            place(files, (0, 1, 2))
            return request
        for file in files:
            os.close(file)
        if pid is None:
            send(client, {"read too early": early})
            client.close()
            return None
        self.clients[pid] = client
        ended = os.pidfd_open(pid)
        self.selector.register(ended, selectors.EVENT_READ, lambda _: self._reap(pid, ended))
        self.selector.register(client, selectors.EVENT_READ, lambda _: self._give_up(pid))
        return None

    def _reap(self, pid: int, ended: int) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(ended)
        os.close(ended)
        client = self.clients.pop(pid, None)
        if client is not None:
            self.selector.unregister(client)
            with contextlib.suppress(ConnectionError):
                send(client, {"status": status})
            client.close()

    def _give_up(self, pid: int) -> None:
        """Kills the fork of a client that has hung up."""
        client = self.clients.pop(pid, None)
        if client is not None:
            self.selector.unregister(client)
            client.close()
            _kill_session(pid)

    def _end(self, _: int) -> NoReturn:
        for pid in self.clients:
            _kill_session(pid)
        os._exit(0)

    def _close(self) -> None:
        """In a fork, closes the server's files and sockets."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self.selector.close()


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class Spares:
    """Forks made before an SGLang server begins, for processes it starts with multiprocessing.

    SGLang starts its scheduler and its detokenizer as new interpreters ("spawn"). A spare is
    equivalent: it has done nothing but imports, and is a child of the server too.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, socket.socket]] = []

    def fork(self) -> dict[str, Any] | None:
        """Makes the spares. Returns None in the server, in a used spare the request to fulfil."""
        for _ in range(SPARES):
            ours, its = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for channel in (ours, *(channel for _, channel in self.waiting)):
                    channel.close()
                message = receive(its)
                if message is None:
                    os._exit(0)  # the server has ended
                its.close()
                request, files = message
                place(files, request["files"])
                return request
            its.close()
            self.waiting.append((pid, ours))
        return None

    def take_over(self) -> None:
        """Makes multiprocessing use spares instead of new interpreters."""
        from multiprocessing import util

        start = util.spawnv_passfds

        def spawn(path: Any, words: Sequence[Any], files: Sequence[int]) -> int:
            words = [os.fsdecode(word) for word in words]
            if "--multiprocessing-fork" not in words or not self.waiting:
                return start(path, words, files)
            pid, channel = self.waiting.pop(0)
            where = {"environment": dict(os.environ), "folder": os.getcwd()}
            send(channel, {"words": words, "files": list(files), **where}, files)
            channel.close()
            return pid

        util.spawnv_passfds = spawn


def become(request: Mapping[str, Any]) -> None:
    """Acts as a new interpreter with a request's command line, environment and folder.

    Processes that it starts are forks too.
    """
    words = request["words"][1:]
    if LAUNCHER in words or SPARES_WANTED in request["environment"]:
        spares = Spares()
        for_spare = spares.fork()
        if for_spare is not None:
            return become(for_spare)
        spares.take_over()
    else:
        subprocess.Popen = forked.Popen
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    options = []
    while words[0] in ("-B", "-P"):
        options.append(words.pop(0))
    kind, program = (words.pop(0), words[0]) if words[0].startswith("-") else ("", words[0])
    sys.argv = words
    if "-P" not in options:
        sys.path.insert(0, "" if kind else os.path.dirname(os.path.abspath(program)))
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0] = kind
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    address, owner = sys.argv[1:]
    before = dict(os.environ)
    import_modules()
    quicker.hooks()
    quicker.starts()
    quicker.kernels()
    collectives.quicker()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"fork_server: {threads} threads run after the imports; a fork has one")
    gc.collect()
    gc.freeze()  # spares forks from collecting what all share
    # The first fork compiles the project's modules for all, even if the environment forbids it.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.path.join(os.path.dirname(address), "bytecode")
    server = ForkServer(address, int(owner), before)
    become(server.serve())
