"""`sgl.Engine` has no command line: the environment names its policies."""

import json
import os
import sys
from pathlib import Path

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


def run(tmp_path, setting, policy=str(ROOT / "policies" / "snapkv.yaml")):
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT.replace("MODEL", repr(str(ROOT / "examples" / "model-tiny"))))
    variables = {
        "SGLANG_KV_POLICY": policy,
        "SGLANG_KV_POLICY_SET": setting,
        "KVPOLICY_TEST_SPARES": "1",
    }
    words = [sys.executable, "-P", str(script)]
    return forked.run(words, env={**os.environ, **variables}, timeout=200)


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
