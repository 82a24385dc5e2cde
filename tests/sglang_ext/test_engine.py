"""`sgl.Engine` has no command line: the environment names its policies."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.server
SCRIPT = """
import json, sglang, sys
if __name__ == "__main__":
    try:
        engine = sglang.Engine(
            model_path=MODEL, device="cpu", attention_backend="torch_native", dtype="float32",
            max_total_tokens=4096, skip_tokenizer_init=True, log_level="error",
        )
    except Exception as error:
        print("CAUGHT", type(error).__name__)
        print(error, file=sys.stderr)
        sys.exit(3)
    def facts(**custom):
        sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": custom or None}
        answer = engine.generate(input_ids=list(range(20, 320)), sampling_params=sampling)
        return answer["meta_info"].get("kv_policy")
    print("FACTS", json.dumps([facts(), facts(kv_policy="none")]))
    engine.shutdown()
"""


SEVERAL = """
import json, os, sglang
if __name__ == "__main__":
    def facts(**environment):
        os.environ.update(environment)
        engine = sglang.Engine(
            model_path=MODEL, device="cpu", attention_backend="torch_native", dtype="float32",
            max_total_tokens=4096, skip_tokenizer_init=True, log_level="error",
        )
        found = []
        for custom in ({}, {"kv_policy": "tova", "kv_policy_set": {"capacity": 32}}):
            sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": custom or None}
            try:
                answer = engine.generate(input_ids=list(range(20, 320)), sampling_params=sampling)
                found.append(answer["meta_info"].get("kv_policy"))
            except ValueError as error:
                found.append(str(error))
        engine.shutdown()
        return found
    policy = os.environ.pop("SGLANG_KV_POLICY")
    found = [facts(), facts(SGLANG_KV_POLICY=policy, SGLANG_KV_POLICY_ALLOW_SET="tova.capacity")]
    print("FACTS", json.dumps(found))
"""


def run(tmp_path, setting, policy=str(ROOT / "policies" / "snapkv.yaml"), text=SCRIPT, **more):
    script = tmp_path / "engine.py"
    script.write_text(text.replace("MODEL", repr(str(ROOT / "examples" / "model-tiny"))))
    variables = {
        "SGLANG_KV_POLICY": policy,
        "SGLANG_KV_POLICY_SET": setting,
        "KVPOLICY_TEST_SPARES": "1",
        **more,
    }
    words = [sys.executable, "-P", str(script)]
    return forked.run(words, env={**os.environ, **variables}, timeout=600)


def test_the_environment_names_the_policy(tmp_path):
    result = run(tmp_path, "capacity=48")
    line = next((x for x in result.stdout.splitlines() if x.startswith("FACTS ")), None)
    assert line, result.stderr[-2000:]
    compressed, full = json.loads(line.removeprefix("FACTS "))
    assert (compressed["policy"], compressed["entries_kept"]) == ("snapkv", 8 * 48)
    assert full is None


def test_a_wrong_setting_is_an_exception_that_the_program_can_catch(tmp_path):
    result = run(tmp_path, "kernel=6")
    assert (result.returncode, result.stdout.strip()) == (3, "CAUGHT Refused")
    assert "kvpolicy: --kv-policy " in result.stderr
    assert "`kernel` is 6; it must be a whole number, odd, at least 1" in result.stderr


def test_so_is_a_policy_that_cannot_be_read(tmp_path):
    result = run(tmp_path, "capacity=48", policy="/nowhere.yaml")
    assert (result.returncode, result.stdout.strip()) == (3, "CAUGHT Refused")
    assert "kvpolicy: --kv-policy /nowhere.yaml: there is no such file" in result.stderr


@pytest.mark.thorough
def test_an_engine_after_one_that_was_refused_has_the_environment_as_it_then_is(tmp_path):
    refused = """
import os, sglang
if __name__ == "__main__":
    for name, value in (("", ""), ("_MAX_FAILURES", "-2")):
        os.environ["SGLANG_KV_POLICY" + name] = value or "/nowhere.yaml"
        try:
            sglang.Engine(model_path=MODEL, device="cpu", dtype="float32", max_total_tokens=4096)
        except Exception as error:
            print("REFUSED", error)
        os.environ["SGLANG_KV_POLICY"] = "tova"
    del os.environ["SGLANG_KV_POLICY_MAX_FAILURES"]
"""
    result = run(tmp_path, "capacity=48", text=refused + SCRIPT)
    lines = result.stdout.splitlines()
    assert [x for x in lines if x.startswith("REFUSED ")] == [
        "REFUSED kvpolicy: --kv-policy /nowhere.yaml: there is no such file",
        "REFUSED kvpolicy: SGLANG_KV_POLICY_MAX_FAILURES: --kv-policy-max-failures -2: expected a "
        "whole number from 0 on",
    ]
    line = next((x for x in lines if x.startswith("FACTS ")), None)
    assert line, result.stderr[-2000:]
    assert json.loads(line.removeprefix("FACTS "))[0]["policy"] == "tova"


@pytest.mark.thorough
def test_a_later_engine_may_have_policies_though_an_earlier_one_has_none(tmp_path):
    with forked.new_interpreters():  # an engine that ends takes its process's children with it
        result = run(tmp_path, "", "tova", text=SEVERAL)
    line = next((x for x in result.stdout.splitlines() if x.startswith("FACTS ")), None)
    assert line, result.stderr[-2000:]
    before, after = json.loads(line.removeprefix("FACTS "))
    assert before == [None, None]
    assert [each["policy"] for each in after] == ["tova", "tova"]
    assert [each.get("set") for each in after] == [None, {"capacity": 32}]


def test_each_engine_has_the_server_that_was_installed_for_it(monkeypatch):
    """With its own policies and options, though SGLang applies a process's hooks once."""
    pytest.importorskip("sglang")
    from kvpolicy.sglang_ext import frontend

    managers = []
    for server, policy in (("first", "snapkv"), ("second", "tova"), (None, ""), ("failed", "")):
        monkeypatch.setenv("SGLANG_KV_POLICY", policy)
        if server is not None:
            monkeypatch.setattr(frontend, "_next", server)
        managers.append(SimpleNamespace())
        frontend._after_manager(None, managers[-1])
    assert [*map(frontend._server_of, managers)] == ["first", "second", None, None]


def test_an_experiment_is_an_exception_too(tmp_path):
    file = str(ROOT / "examples" / "experiments" / "lava-25.yaml")
    result = run(tmp_path, "", "lava", SGLANG_KV_POLICY_EXPERIMENT=file)
    assert (result.returncode, result.stdout.strip()) == (3, "CAUGHT Refused")
    assert "experiments are served by `python -m sglang.launch_server` only" in result.stderr
