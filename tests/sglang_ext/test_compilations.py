"""Messages on compilations; the listener is called as Triton calls it."""

import logging
import threading
from types import SimpleNamespace

import pytest
from kvpolicy.kernels.launch import compilations
from kvpolicy.sglang_ext.face import compiling
from triton import knobs
from triton.knobs import CompileTimes


@pytest.fixture
def made(monkeypatch):
    """A function that reports a compiled kernel to hooks."""
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(compilations, "COMPILATIONS", compilations.Compilations())

    def kernel(name, module="kvpolicy.kernels.entries.place_triton"):
        function = SimpleNamespace(__name__=name, module=module)
        times = CompileTimes(1_000_000, [("ttir", 400_000), ("cubin", 2_000_000)], 100_000)
        facts = {"metadata": {}, "metadata_group": {}, "times": times, "cache_hit": False}
        knobs.compilation.listener(src=SimpleNamespace(fn=function), **facts)

    return kernel


def test_kernels_that_requests_wait_for_are_warnings(made, caplog):
    with caplog.at_level(logging.INFO):
        with compiling.compiling("KV-cache policy snapkv"):
            made("_place")
            made("_gather")
        compiling.watch_late()
        made("of_sglang", "sglang.srt.layers")
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "KV-cache policy snapkv: 2 kernels ready in" in caplog.text
        made("_settle")
    last = caplog.records[-1]
    assert last.levelname == "WARNING"
    assert "the kernel _settle was compiled in 3.5 s" in last.getMessage()


def test_policies_that_come_later_are_expected_in_their_thread_alone(made, caplog):
    compiling.watch_late()
    begun, ended = threading.Event(), threading.Event()

    def prepare():
        with compiling.compiling("KV-cache policy mine"):
            made("_place")
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=prepare)
    with caplog.at_level(logging.WARNING):
        thread.start()
        assert begun.wait(10)
        made("_gather")
        ended.set()
        thread.join()
    assert [record.getMessage().split()[4] for record in caplog.records] == ["_gather"]


def test_listeners_of_others_go_on_being_told(made, monkeypatch):
    seen = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **facts: seen.append(facts))
    compiling.watch_late()
    made("_place")
    assert [facts["src"].fn.__name__ for facts in seen] == ["_place"]


def test_what_is_no_function_is_not_ours(made, caplog):
    compiling.watch_late()
    with caplog.at_level(logging.INFO):
        knobs.compilation.listener(src=SimpleNamespace(name="text"))
    assert not caplog.records


def test_long_compilations_say_how_far_they_are(made, caplog, monkeypatch):
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr(compiling.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO), compiling.compiling("KV-cache policy h2o"):
        for _ in range(3):
            made("_place")
    assert "KV-cache policy h2o: 2 kernels ready so far." in caplog.text
