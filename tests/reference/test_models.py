"""Architectures in production: served, with the plain model's answers, or refused."""

import re

import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from architectures import (
    REFUSED,
    SERVED,
    SLOTS,
    TOKENS_LEAVE,
    config_of,
    make,
    rows,
    served_with,
)
from kvpolicy.sglang_ext.face import compat, refusals
from kvpolicy.sglang_ext.face.errors import Refused
from methods import METHODS

EXPERTS_FAIL = ("glm-4-moe", "qwen3-moe")  # with SGLang 0.5.22 on a CPU, without a policy too
WHEN_LOADED = ("cohere-2", "gemma-2", "gemma-3")  # refused when loaded, not by their config
OTHERS = sorted(set(METHODS) - {*SLOTS, *TOKENS_LEAVE})


def chosen(name):
    """Methods to test an architecture with; over all architectures, every method is tested.

    `python benchmarks/architectures.py` tests every pair.
    """
    number, served = list(SERVED).index(name), served_with(name)
    found = [OTHERS[(4 * number + i) % len(OTHERS)] for i in range(4)]
    others = (each[number % len(each)] for each in (TOKENS_LEAVE, SLOTS))
    return [*found, *(method for method in others if method in served)]


def test_each_architecture_is_a_row():
    for title, architectures in (("model", SERVED), ("refused model", REFUSED)):
        table = rows(title)
        assert list(table) == list(architectures)
        for name, row in table.items():
            assert row[0] == config_of(name).architectures[0], name
    assert {each for name in SERVED for each in chosen(name)} == set(METHODS)


@pytest.mark.thorough(besides=["qwen3-moe"])
@pytest.mark.server
@pytest.mark.parametrize("name", SERVED)
def test_served(serve, tmp_path, name):
    from comparison import compare

    if name in EXPERTS_FAIL and compat.installed_version() == "0.5.22":
        pytest.skip("SGLang 0.5.22 does not serve it on a CPU")
    folder, methods = make(name, tmp_path), chosen(name)
    seen = serve(folder, {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}, methods=methods, each=1, pause=2)
    different, ties, changed = compare(folder, seen["answers"], 1)
    assert different == []
    assert ties <= 1
    assert len(changed) >= len(methods) - 2
    assert "none" not in changed
    assert seen["left"] == [0, 0, 0]


@pytest.mark.thorough(every=3)
@pytest.mark.server
@pytest.mark.parametrize(
    ("name", "method", "why"),
    [
        ("cohere", "fastkv", "`fastkv` propagates chosen tokens only, which is served for Apertus"),
        ("ernie-4.5", "streamingllm", "a policy with `positions: slots` cannot be served with"),
        ("smollm3", "streamingllm", "a policy with `positions: slots` cannot be served with"),
    ],
)
def test_policies_that_a_model_is_not_served_with(serve, tmp_path, name, method, why):
    assert "no" in rows("model")[name]
    with pytest.raises(RuntimeError, match=f"kvpolicy: --kv-policy: {why}"):
        serve(make(name, tmp_path), {}, methods=[method], each=1, pause=2)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in WHEN_LOADED])
def test_refused_by_its_config(tmp_path, name):
    from sglang.srt.configs.model_config import ModelConfig

    config_of(name).save_pretrained(tmp_path)
    with pytest.raises(Refused) as refused:
        refusals.check_model(ModelConfig(model_path=str(tmp_path)))
    why = rows("refused model")[name][1]
    assert str(refused.value) == (
        f"--model-path {tmp_path} cannot be served with --kv-policy: {why}."
    )


@pytest.mark.thorough(every=2)
@pytest.mark.server
@pytest.mark.parametrize("name", WHEN_LOADED)
def test_refused_when_it_is_loaded(serve, tmp_path, name):
    why = re.escape(rows("refused model")[name][1])
    with pytest.raises(RuntimeError, match=rf"kvpolicy: --kv-policy: {why}\.\n"):
        serve(make(name, tmp_path), {}, methods=["snapkv"], each=1, pause=2)


def test_classes_that_lose_rows_are_those_of_the_table():
    classes = {row[0] for row in rows("model").values() if row[2] == "yes"}
    others = {row[0] for row in rows("model").values() if row[2] == "no"}
    known = {each.rpartition(".")[2] for each in compat.LOSE_ROWS}
    assert known - classes == {"Qwen2MoeForCausalLM"}  # SGLang computes its experts on a GPU only
    assert not known & others
