"""What is said of compilations; Triton's hooks are called as Triton calls them."""

import logging
import threading
from types import SimpleNamespace

import pytest
from kvpolicy.kernels.launch import compilations
from kvpolicy.sglang_ext.face import compiling
from triton import knobs


@pytest.fixture
def made(monkeypatch):
    """Compiles a kernel, as far as hooks see it."""
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(compilations, "COMPILATIONS", compilations.Compilations())

    def kernel(name, module="kvpolicy.kernels.entries.place_triton"):
        facts = {"fn": SimpleNamespace(name=name, module=module), "key": "", "compile": {}}
        assert knobs.runtime.jit_cache_hook(**facts) is None
        knobs.runtime.jit_post_compile_hook(**facts)

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
    assert "the kernel _settle was compiled in" in last.getMessage()


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


def test_hooks_of_others_go_on_being_called(made, monkeypatch):
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: seen.append(facts))
    compiling.watch_late()
    made("_place")
    assert [facts["fn"].name for facts in seen] == ["_place"]


def test_long_compilations_say_how_far_they_are(made, caplog, monkeypatch):
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr(compiling.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO), compiling.compiling("KV-cache policy h2o"):
        for _ in range(3):
            made("_place")
    assert "KV-cache policy h2o: 2 kernels ready so far." in caplog.text
