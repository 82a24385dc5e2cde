"""Forecasts of `explain --gpu` for a server, compared with results by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.gpu import GPUS, MATRIX_REACHED, MEMORY_REACHED
from kvpolicy.dsl.bind.model_config import ModelConfig, config_of
from kvpolicy.dsl.bind.named import FOLD_INTERVAL
from kvpolicy.dsl.execute.drive import InPools, drive
from kvpolicy.dsl.execute.tensors.kernels import installed
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.tools import forecast as model
from kvpolicy.dsl.tools.cost import cost
from kvpolicy.dsl.tools.forecast import Forecast, Load, forecast, pool_of
from kvpolicy.dsl.tools.launches import Observed, StandIns, launches
from shipped_policies import shipped_program

LLAMA = config_of(
    "llama",
    {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    },
)  # fmt: skip
GPU = GPUS["h200"]
TOKEN = 32 * 8 * 2 * 128 * 2  # bytes of a token's keys and values
LISTS = 32 * 8


def bound(name: str, config: ModelConfig = LLAMA, **settings: str) -> Bound:
    program = shipped_program(name)
    return bind(program, config.shape, settings, fold_interval=FOLD_INTERVAL)


def expected(
    name: str, prompt: int = 32768, batch: int = 16, new: int = 512, **settings: str
) -> Forecast:
    load = Load(prompt, new, batch)
    return forecast(bound(name, **settings), LLAMA, GPU, load, pool_of(LLAMA, GPU))


def test_full_kv():
    found = expected("snapkv").full
    assert found.prompt_bytes == 32768 * TOKEN
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    head = 4096 * 128256
    pairs = 32 * 32 * 32768 * 32769 / 2
    products = 2 * 32768 * weights + 4 * 128 * pairs
    seconds = (products / GPU.matrix + 5 * pairs / GPU.vector) / MATRIX_REACHED
    assert found.ttft == pytest.approx(seconds)
    read = 2 * (weights + head) + 16 * (32768 + 256) * TOKEN
    gaps = 32 * model.LAYER_KERNELS * GPU.gap
    assert found.tpot == pytest.approx(read / GPU.bandwidth / MEMORY_REACHED + gaps)
    pool = model.MEMORY_SHARE * GPU.memory - 2 * (weights + 2 * head)
    assert found.at_once == int(pool / ((32768 + 512) * TOKEN))


def test_throughput_is_that_of_prefills_and_steps_in_turn():
    found = expected("snapkv", batch=expected("snapkv").full.at_once).full
    seconds = found.at_once * found.ttft + 512 * found.tpot
    assert found.throughput == pytest.approx(found.at_once * 512 / seconds)


def test_a_prompt_within_the_budget_grows_to_the_budget_and_no_further():
    within, beyond, short = (
        expected("tova", prompt=n, new=8192, capacity="512").policy for n in (512, 513, 100)
    )
    assert within.at_once == beyond.at_once == short.at_once
    assert within.throughput == pytest.approx(beyond.throughput, rel=1e-3)
    alone = expected("tova", prompt=100, new=200, capacity="512")
    assert alone.policy.at_once == alone.full.at_once  # nothing leaves


def test_what_is_not_counted_is_said():
    assert any("more requests may fit" in x for x in expected("simlayerkv").assumptions)
    assert not any("more requests may fit" in x for x in expected("tova").assumptions)


def test_a_window_policy_adds_its_own_work_to_a_prefill_and_takes_entries_off_steps():
    found, policy = expected("snapkv", capacity="1024"), bound("snapkv", capacity="1024")
    own, full = found.policy, found.full
    assert own.prompt_bytes == 1024 * TOKEN
    parts = sum(part.seconds for part in cost(policy, LLAMA, 32768, GPU).parts)
    copied = 2 * 1024 * TOKEN / GPU.bandwidth / MEMORY_REACHED
    assert found.scoring == pytest.approx(parts + copied)
    assert own.ttft == pytest.approx(full.ttft + found.scoring)
    entries = 16 * (32768 - 1024) * TOKEN
    assert full.tpot - own.tpot == pytest.approx(entries / GPU.bandwidth / MEMORY_REACHED)
    # A whole prompt lies beside what is kept of the others.
    pool = model.MEMORY_SHARE * GPU.memory - LLAMA.weights_size
    beside = (32768 - 1024 - 512) * TOKEN
    assert own.at_once == int((pool - beside) / ((1024 + 512) * TOKEN))
    assert found.fold is None
    assert "nothing leaves while decoding" in found.assumptions[-1]


def test_a_policy_that_holds_a_size_holds_it_and_folds():
    found = expected("h2o", heavy="512", window="512")
    policy, asked = found.policy, launches(bound("h2o", heavy="512", window="512"))
    assert found.fold.times == 512 // FOLD_INTERVAL
    assert found.fold.device == asked.fold.device == 10
    layers = 32 * (model.FOLD_LAYER + 8 * model.FOLD_LIST)
    host = model.FOLD_ASK * asked.fold.host + 16 * (model.FOLD_REQUEST + layers)
    assert found.fold.host == pytest.approx(host)
    held = 16 * (1024 + FOLD_INTERVAL / 2) * TOKEN
    weights = LLAMA.weights_size - 2 * LLAMA.embeddings // 2
    step = (weights + held) / GPU.bandwidth / MEMORY_REACHED
    gaps = 32 * model.LAYER_KERNELS * GPU.gap
    assert policy.tpot == pytest.approx(step + gaps + host / FOLD_INTERVAL)
    # A float64 state for each entry is remembered besides.
    pool = model.MEMORY_SHARE * GPU.memory - LLAMA.weights_size
    each = (1024 + FOLD_INTERVAL / 2) * TOKEN + 1024 * LISTS * 8
    assert policy.at_once == int((pool - (32768 * TOKEN - each)) / each)


@pytest.mark.parametrize(("name", "when"), [("h2o", "every 16"), ("simlayerkv", "1 of 512")])
def test_it_is_said_when_entries_leave(name, when):
    assert f"entries leave at {when} steps" in " ".join(expected(name).assumptions)


def test_layers_that_fewer_tokens_reach_take_less_of_a_prefill():
    found = expected("fastkv", tsp_layer="15", tsp_rate="0.2")
    own = sum(
        GPU.seconds(LLAMA.layer_work(tokens)) for tokens in [32768] * 16 + [int(0.2 * 32768)] * 16
    )
    assert found.policy.ttft == pytest.approx(own + found.scoring, rel=1e-3)


def test_a_second_prefill_counts_besides_the_first():
    found = expected("gemfilter", filter="13", capacity="1024")
    layers = [32768] * 14 + [1024] * 32
    own = sum(GPU.seconds(LLAMA.layer_work(tokens)) for tokens in layers)
    # Few tokens are bound by the weights, which all of a prefill together is not.
    assert found.policy.ttft == pytest.approx(own + found.scoring, rel=0.15)


def test_what_does_not_fit_serves_nothing():
    found = expected("snapkv", prompt=4_000_000, capacity="1024")
    assert (found.full.at_once, found.full.throughput) == (0, 0)
    assert any("16 requests whether they fit or not" in text for text in found.assumptions)
    assert (found.policy.at_once, found.policy.throughput) == (0, 0)


def test_short_prompts_of_small_models_are_bound_by_the_host():
    tiny = config_of(
        "tiny",
        {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 100},
    )
    found = forecast(bound("snapkv", tiny), tiny, GPU, Load(16, 8, 1), pool_of(tiny, GPU))
    assert found.full.ttft == pytest.approx(4 * model.LAYER_KERNELS * model.PREFILL_ASK)
    assert found.full.tpot == model.STEP_HOST
    assert found.policy.ttft > found.full.ttft
    assert found.full.at_once == model.MOST_AT_ONCE


@pytest.mark.thorough(every=4)
@pytest.mark.parametrize("name", shipped())
def test_shipped_policies(name):
    """Every shipped policy has a forecast, and memory limits nothing twice."""
    found = expected(name, prompt=8192)
    for own in (found.full, found.policy):
        assert 0 < own.tpot < own.ttft
        assert own.at_once > 0
        assert own.throughput > 0
    assert found.policy.prompt_bytes <= found.full.prompt_bytes
    assert (found.fold is None) == (bound(name).folded.decode is None)


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("name", ["snapkv", "lava", "fastkv", "h2o", "d2o", "asl-lava-d2o"])
def test_what_is_asked_for_does_not_depend_on_sizes(name):
    """Heads are few and small where it is counted; other ones ask for as much."""
    other = LLAMA.shape.__class__(layers=32, heads=16, kv_heads=4, head_dim=64)
    assert launches(bind(shipped_program(name), LLAMA.shape)) == launches(
        bind(shipped_program(name), other)
    )


@pytest.mark.thorough(besides=["1024", "snapkv-16384"])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "vatp"])
def test_what_is_asked_for_is_what_a_prompt_of_that_length_asks(name, tokens):
    """Beside the copy, which is one launch: in groups of as many layers as fit into 256 MiB."""
    given = {"snapkv": {"capacity": "128"}, "h2o": {"rate": "0.125"}, "vatp": {"rate": "0.0625"}}
    bound = bind(shipped_program(name), LLAMA.shape, given[name])
    watch, row = StandIns(), torch.zeros(128)
    program = watch.program(bound, installed())
    pool, q = row.expand(32, tokens, 8, -1), row.expand(32, 32, tokens, -1)
    watch.observed = Observed()
    with watch.observed:
        drive(program, tokens, InPools(q, pool, pool)).run.finish(wait=False)
    assert watch.observed.device == pytest.approx(launches(bound, tokens).prefill(32).device, abs=2)


@pytest.mark.parametrize(("name", "most"), [("fastkv", 12), ("asl", 17)])
def test_the_host_counts_the_window(name, most):
    """Prefills that propagate asked 22.5 and 26 times when the device counted it at each layer."""
    assert launches(bound(name)).layer.device < most


@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova", "adakv"])
def test_what_a_prompts_end_asks_for_does_not_grow_with_the_layers(name):
    """Each layer asks for a copy of its queries; the rest is asked for by all of them together."""
    asked = []
    for layers in (3, 6):
        shape = LLAMA.shape.__class__(layers=layers, heads=16, kv_heads=4, head_dim=64)
        found = launches(bind(shipped_program(name), shape), 1024)
        assert found.groups == 1
        asked.append((found.group.device, found.end.device))
        assert found.prefill(layers).device - sum(asked[-1]) <= 1.5 * layers
    assert asked[0] == asked[1]


def test_layers_that_are_looked_at_one_by_one(monkeypatch):
    asked = launches(bound("h2o"))
    monkeypatch.setattr(model, "launches", lambda *_: replace(asked, one_by_one=True))
    found = expected("h2o", batch=3).fold
    assert found.device == 3 * 32 * asked.fold.device
    layers = 32 * (model.FOLD_LAYER + 8 * model.FOLD_LIST)
    host = model.FOLD_ASK * 3 * 32 * asked.fold.host + 3 * (model.FOLD_REQUEST + layers)
    assert found.host == pytest.approx(host)
