"""The plugin in a real server, over HTTP."""

import base64
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path

import forked
import numpy as np
import pytest
import requests
from faults_of_process import VARIABLE
from plugins_of_process import installed
from random_tokens import prompt

pytestmark = pytest.mark.server
POLICIES = Path(__file__).parents[2] / "policies"
SNAPKV, SINKS, H2O = (str(POLICIES / f"{name}.yaml") for name in ("snapkv", "sinks-recent", "h2o"))
DUO = str(POLICIES.parent / "examples" / "policies" / "duoattention.yaml")
GATE = [[0.9, 0.1], [0.2, 0.3], [0.8, 0.7], [0.4, 0.6]]
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
SECONDS = 2  # for which parameters of requests' own are compiled


@pytest.fixture(scope="module")
def server(model, request, tmp_path_factory):
    """Serves snapkv (default, 48 of every list), sinks-recent with a budget for everything, h2o
    (32 of every list, also while decoding), snapkv once more as snap@0.5, and duoattention, by
    which four lists keep everything and the others 24 entries.
    """
    from kvpolicy.evaluation.serving import serve

    settings = ["snapkv.capacity=48", "snapkv.window=16", "sinks-recent.capacity=4096"]
    settings += ["h2o.heavy=20", "h2o.window=12", "snap@0.5.rate=0.5"]
    settings += ["duoattention.start=4", "duoattention.window=20"]
    gate = tmp_path_factory.mktemp("data") / "gate.tsv"
    gate.write_text("".join("\t".join(map(str, row)) + "\n" for row in GATE))
    flags = {"enable_metrics": True, "sleep_on_idle": True, "kv_policy_fold_interval": 5}
    flags |= {"kv_policy_allow_inspection": True, "kv_policy_data": [f"gate={gate}"]}
    flags |= {"enable_return_hidden_states": True, "enable_streaming_session": True}
    policies = [SNAPKV, SINKS, H2O, f"snap@0.5={SNAPKV}", DUO]
    brief = request.config.getoption("brief")  # then test_engine.py alone starts as users do
    with ExitStack() as until_the_end:
        with nullcontext() if brief else forked.new_interpreters():
            served = serve(model, policies, settings, **flags, env=STRICT)
            server = until_the_end.enter_context(served)
        yield server


@pytest.fixture(scope="module")
def stock(model):
    """Greedy answers of a server without the plugin."""
    from kvpolicy.evaluation.serving import serve

    with serve(model, sleep_on_idle=True, env={"SGLANG_PLUGINS": "cpu_torch"}) as server:
        assert "kvpolicy" not in server.log_text().replace(sys.prefix, "")
        assert "kv_policy" not in internal_state(server)
        return answers(server, None), ask(server, prompt(8, 120) + FORCED, [], 20)


def answers(server, policy):
    """Tokens for 24 prompts of many lengths, in flight together."""

    def ask(seed):
        tokens = prompt(seed, 7 + 25 * seed)
        return server.generate(input_ids=tokens, policy=policy, max_new_tokens=24)["output_ids"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(24)))


def internal_state(server):
    return server.session.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]


FORCED = [17, 400, 2, 9, 2]  # 2 is the model's end of text


def ask(server, tokens, forced, output, policy="none"):
    """Tokens of an answer that may end early, their logprobs, and the type of its end."""
    custom = {"kv_policy_force": forced} if forced else {}
    sampling = {"temperature": 0, "max_new_tokens": output, "stop_token_ids": [2, 400]}
    sampling |= {"custom_params": {"kv_policy": policy, **custom}}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
    answer = server.post("/generate", body).json()
    rated = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], rated, answer["meta_info"]["finish_reason"]["type"]


@pytest.mark.thorough
def test_what_follows_forced_tokens_is_what_stock_sglang_says_after_them(server, stock):
    tokens, rated, end = ask(server, prompt(8, 120), FORCED, 20 + len(FORCED))
    wanted, wanted_rated, wanted_end = stock[1]
    assert tokens == FORCED + wanted
    assert rated[len(FORCED) :] == pytest.approx(wanted_rated, abs=1e-4)
    assert end == wanted_end
    tokens, _, end = ask(server, prompt(8, 120), FORCED, 3, policy="h2o")
    assert (tokens, end) == (FORCED[:3], "stop")  # as SGLang says where both ends coincide


def test_the_server_says_which_policies_it_has(server):
    found = internal_state(server)["kv_policy"]
    names = ["snapkv", "sinks-recent", "h2o", "snap@0.5", "duoattention"]
    assert [each["name"] for each in found] == names
    assert [each["default"] for each in found] == [True, False, False, False, False]
    assert [each["path"] for each in found] == [SNAPKV, SINKS, H2O, SNAPKV, DUO]
    assert [(each["enabled"], each["failures"]) for each in found] == [(True, 0)] * 5
    assert found[0]["settings"] == {"capacity": "48", "window": "16"}
    assert found[3]["settings"] == {"rate": "0.5"}
    assert internal_state(server)["kv_policy_inspection"] is True


def test_a_policy_under_another_name_is_reported_by_it(server):
    before = count(server, "requests_total", "snap@0.5")
    meta = server.generate(input_ids=prompt(51, 300), policy="snap@0.5")["meta_info"]
    assert meta["kv_policy"]["policy"] == "snap@0.5"
    assert meta["kv_policy"]["entries_kept"] == 4 * 2 * 150
    assert count(server, "requests_total", "snap@0.5") == before + 1


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (
            {"kv_policy_kept": "yes"},
            "custom_params.kv_policy_kept is 'yes'; expected true or false",
        ),
        ({"kv_policy_force": []}, "custom_params.kv_policy_force is []; expected a list of token"),
        (
            {"kv_policy_force": [4, 512]},
            "kv_policy_force[1] is 512; this model's token ids are 0 to",
        ),
        ({"kv_polcy_kept": True}, "`kv_polcy_kept`, which is not known; did you mean `kv_policy_k"),
    ],
)
@pytest.mark.parametrize("policy", ["snapkv", "none"])
def test_what_cannot_be_asked_is_a_400_in_one_sentence(server, custom, message, policy):
    sampling = {"custom_params": {"kv_policy": policy, **custom}}
    body = {"input_ids": prompt(0, 20), "sampling_params": sampling}
    response = server.post("/generate", body)
    assert (response.status_code, message in response.text) == (400, True), response.text
    assert "\n" not in response.json()["error"]["message"]


def test_kept_positions_stay_in_the_facts_while_entries_leave(server):
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    for policy, lists in (("h2o", 32), ("none", 100)):
        sampling["custom_params"] = {"kv_policy": policy, "kv_policy_kept": True}
        body = {"input_ids": prompt(6, 100), "sampling_params": sampling, "stream": True}
        text = server.post("/generate", body).text
        lines = [x for x in text.splitlines() if x.startswith("data: {")]
        facts = [json.loads(x.removeprefix("data: "))["meta_info"]["kv_policy"] for x in lines]
        kept = facts[0]["kept"]
        assert kept["shape"] == [4, 2, 100]
        assert [each["kept"] for each in facts] == [kept] * len(facts)
        held = sum(byte.bit_count() for byte in base64.b64decode(kept["bits"]))
        assert held == 4 * 2 * lists
        assert facts[-1].get("folds", 0) == (7 if policy == "h2o" else 0)


def test_a_tensor_of_the_model_says_which_heads_keep_everything(server):
    sampling = {"temperature": 0, "max_new_tokens": 17, "ignore_eos": True}
    sampling["custom_params"] = {"kv_policy": "duoattention", "kv_policy_kept": True}
    answer = server.post("/generate", {"input_ids": prompt(6, 96), "sampling_params": sampling})
    facts = answer.json()["meta_info"]["kv_policy"]
    kept = np.frombuffer(base64.b64decode(facts["kept"]["bits"]), np.uint8)
    kept = np.unpackbits(kept).reshape(4, 2, 96)
    forgets = np.zeros(96, np.uint8)
    forgets[:4] = forgets[-20:] = 1
    for layer, gates in enumerate(GATE):
        for head, gate in enumerate(gates):
            assert (kept[layer, head] == (1 if gate > 0.5 else forgets)).all(), (layer, head)
    assert facts["entries_kept"] == 4 * 96 + 4 * 24
    # Steps 5, 10 and 15: four lists lose an entry for each that came.
    assert (facts["folds"], facts["entries_dropped_in_decode"]) == (3, 4 * 15)
    assert count(server, "private_slots", "duoattention") == 0


def test_with_budgets_for_everything_the_answers_are_those_of_stock_sglang(server, stock):
    assert answers(server, "sinks-recent") == stock[0]
    assert answers(server, "none") == stock[0]


def test_a_smaller_budget_changes_answers_and_facts(server, stock):
    assert answers(server, "snapkv") != stock[0]
    meta = server.generate(input_ids=prompt(50, 300), max_new_tokens=4)["meta_info"]
    facts = meta["kv_policy"]
    slot = 4 * 2 * 2 * 32 * 4  # layers, keys and values, KV heads, head size, bytes of float32
    assert facts.pop("compression_seconds") > 0
    assert facts == {
        "policy": "snapkv",
        "prompt_tokens": 300,
        "entries_before": 4 * 2 * 300,
        "entries_kept": 4 * 2 * 48,
        "kv_bytes_before": 300 * slot,
        "kv_bytes_after": 48 * slot,
        "slots_freed": 252,
    }


def test_why_a_request_was_served_in_full(server):
    def facts(tokens, **options):
        answer = server.generate(input_ids=tokens, **options)
        return answer["meta_info"].get("kv_policy", {}).get("uncompressed")

    assert facts(prompt(0, 48)) == "short_prompt"
    assert facts(prompt(0, 300), max_new_tokens=1) == "one_token"
    assert facts(prompt(0, 300), policy="sinks-recent") == "short_prompt"
    assert facts(prompt(0, 300), policy="none") is None


@pytest.mark.parametrize(
    ("custom", "said"), [(["snapkv"], '["snapkv"]'), ("snapkv", "'snapkv'"), (5, "5")]
)
def test_custom_params_that_are_no_object_are_a_400(server, custom, said):
    body = {"input_ids": prompt(0, 20), "sampling_params": {"custom_params": custom}}
    response = server.post("/generate", body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"custom_params is {said}; expected a JSON object" in message


def test_a_very_long_name_is_neither_echoed_nor_logged(server):
    before = len(server.log_text())
    sampling = {"custom_params": {"kv_policy": "x" * 2**20}}
    response = server.post("/generate", {"input_ids": prompt(0, 20), "sampling_params": sampling})
    assert response.status_code == 400
    assert "xxx...`; this server has `snapkv`" in response.text
    assert len(response.text) < 500
    assert len(server.log_text()) - before < 5000


@pytest.mark.parametrize("value", ["nope", 5, ["snapkv"], None])
def test_a_wrong_name_is_a_400_for_that_request_alone(server, value):
    custom = {"kv_policy": value}
    text = " ".join(f"w{i}" for i in prompt(0, 20))
    bodies = {
        "/generate": {"text": text, "sampling_params": {"custom_params": custom}},
        "/v1/completions": {"model": "m", "prompt": text, "custom_params": custom},
        "/v1/chat/completions": {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "custom_params": custom,
        },
        "/v1/messages": {
            "model": "m",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": text}],
            "custom_params": custom,
        },
    }
    for path, body in bodies.items():
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(server.generate, input_ids=prompt(1, 200))
            response = server.post(path, body)
            assert response.status_code == 400, (path, response.text)
            names = "`snapkv`, `sinks-recent`, `h2o`, `snap@0.5`, `duoattention`, `none`"
            assert f"this server has {names}" in response.text
            assert good.result()["meta_info"]["completion_tokens"] == 16


def test_openai_routes_choose_a_policy(server):
    text = " ".join(f"w{i}" for i in prompt(3, 200))
    before = count(server, "requests_total", "sinks-recent")
    body = {"model": "m", "max_tokens": 4, "custom_params": {"kv_policy": "sinks-recent"}}
    messages = [{"role": "user", "content": text}]
    assert server.post("/v1/completions", {**body, "prompt": text}).ok
    assert server.post("/v1/chat/completions", {**body, "messages": messages}).ok
    assert server.post("/v1/messages", {**body, "messages": messages}).ok
    body |= {"options": {"num_predict": 4}, "stream": False}
    assert server.post("/api/generate", {**body, "prompt": text}).ok
    asked = 4
    if version("sglang") != "0.5.22":  # whose /api/chat fails with the transformers of today
        assert server.post("/api/chat", {**body, "messages": messages}).ok
        asked = 5
    assert count(server, "requests_total", "sinks-recent") == before + asked


def test_answers_that_are_not_streamed_carry_the_facts_in_a_header(server):
    text = " ".join(f"w{i}" for i in prompt(3, 200))
    custom = {"kv_policy": "snapkv", "kv_policy_kept": True}
    body = {"model": "m", "max_tokens": 4, "custom_params": custom}
    messages = [{"role": "user", "content": text}]
    for path, more in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"messages": messages}),
        ("/api/generate", {"prompt": text, "stream": False, "options": {"num_predict": 4}}),
    ):
        facts = json.loads(server.post(path, {**body, **more}).headers["x-kv-policy"])
        assert (facts["policy"], facts["entries_kept"]) == ("snapkv", 4 * 2 * 48), path
        assert "kept" not in facts
    two = server.post("/v1/completions", {**body, "prompt": text, "n": 2})
    assert [each["policy"] for each in json.loads(two.headers["x-kv-policy"])] == ["snapkv"] * 2
    asked = {**body, "messages": messages, "return_meta_info": True}
    meta = server.post("/v1/chat/completions", asked).json()["choices"][0]["meta_info"]
    assert meta["kv_policy"]["entries_kept"] == 4 * 2 * 48
    none = {**body, "prompt": text, "custom_params": {"kv_policy": "none"}}
    assert "x-kv-policy" not in server.post("/v1/completions", none).headers
    streamed = server.post("/v1/completions", {**body, "prompt": text, "stream": True})
    assert "x-kv-policy" not in streamed.headers
    assert streamed.text.count("data: ") > 2


def test_beams_ask_as_other_requests_do(server):
    """SGLang gives beam requests other sampling options, which lack those for policies."""

    def ask(**custom):
        sampling = {"max_new_tokens": 6, "beam_width": 2, "custom_params": custom}
        body = {"input_ids": prompt(2, 200), "sampling_params": sampling}
        return server.post("/generate", body)

    def facts(**custom):
        return ask(**custom).json()["meta_info"].get("kv_policy")

    assert facts(kv_policy="h2o") == {
        "policy": "h2o", "prompt_tokens": 200, "uncompressed": "beam_search",
    }  # fmt: skip
    assert facts(kv_policy="none") is None
    for custom, why in (
        ({"kv_policy": "nope"}, "this server has `snapkv`"),
        ({"kv_policy_force": [5]}, "custom_params.kv_policy_force cannot be combined with beam se"),
    ):
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(server.generate, input_ids=prompt(1, 200))
            response = ask(**custom)
            assert (response.status_code, why in response.text) == (400, True), response.text
            assert good.result()["meta_info"]["completion_tokens"] == 16
    assert facts(kv_policy="snapkv")["policy"] == "snapkv"


def test_a_batch_may_mix_policies(server):
    names = ["snapkv", "none", "sinks-recent"]
    sampling = [{"max_new_tokens": 8, "custom_params": {"kv_policy": name}} for name in names]
    body = {"input_ids": [prompt(9, 200)] * 3, "sampling_params": sampling}
    facts = [a["meta_info"].get("kv_policy", {}) for a in server.post("/generate", body).json()]
    assert [each.get("policy") for each in facts] == ["snapkv", None, "sinks-recent"]


@pytest.mark.parametrize("length", [300, 20])
def test_streams_carry_the_facts_in_every_chunk(server, length):
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": prompt(4, length), "sampling_params": sampling, "stream": True}
    lines = [x for x in server.post("/generate", body).text.splitlines() if x.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[-1]["meta_info"]["completion_tokens"] == 6
    for chunk in chunks:
        assert chunk["meta_info"]["kv_policy"]["policy"] == "snapkv"


def count(server, name, policy, **labels):
    """Value of one of the plugin's metrics."""
    wanted = [f'policy="{policy}"', *(f'{k}="{v}"' for k, v in labels.items())]
    samples = server.metrics().items()
    prefix = f"sglang:kv_policy_{name}{{"
    found = [v for k, v in samples if k.startswith(prefix) and all(w in k for w in wanted)]
    assert len(found) <= 1, found
    return sum(found)


def test_metrics_count_what_policies_did(server):
    def snapshot():
        names = ("requests_total", "prompt_tokens_total", "kept_entries_total")
        names += ("prompt_entries_total", "prompt_bytes_total")
        names += ("saved_bytes_total", "compression_seconds_count")
        counts = {name: count(server, name, "snapkv") for name in names}
        short = count(server, "uncompressed_requests_total", "snapkv", reason="short_prompt")
        return {**counts, "short": short, "none": count(server, "requests_total", "none")}

    before = snapshot()
    for seed in range(3):
        server.generate(input_ids=prompt(100 + seed, 200), max_new_tokens=4)
    server.generate(input_ids=prompt(0, 20), max_new_tokens=4)
    for _ in range(2):
        server.generate(input_ids=prompt(7, 20), max_new_tokens=4, policy="none")
    after = snapshot()
    assert {name: after[name] - before[name] for name in after} == {
        "requests_total": 4,
        "prompt_tokens_total": 600,
        "kept_entries_total": 3 * 4 * 2 * 48,
        "prompt_entries_total": 3 * 4 * 2 * 200,
        "prompt_bytes_total": 3 * 200 * 2048,
        "saved_bytes_total": 3 * (200 - 48) * 2048,
        "compression_seconds_count": 3,
        "short": 1,
        "none": 2,
    }
    assert count(server, "private_slots", "snapkv") == 0


def test_every_series_exists_from_the_start(server):
    """`snap@0.5` has had at most one request."""
    from kvpolicy.sglang_ext.report.metrics import BY_REASON, COUNTERS, GAUGES
    from kvpolicy.sglang_ext.request.reasons import Reason

    samples = [name for name in server.metrics() if 'policy="snap@0.5"' in name]
    for name in (*COUNTERS, *GAUGES, "compression_seconds_count", "fold_seconds_count"):
        assert sum(each.startswith(f"sglang:kv_policy_{name}{{") for each in samples) == 1, name
    found = [each for each in samples if "uncompressed_requests_total" in each]
    for reason in Reason:
        assert sum(f'reason="{reason}"' in each for each in found) == 1, reason
    assert count(server, "failed_requests_total", "snap@0.5", reason="policy_error") == 0
    assert count(server, "enabled", "snap@0.5") == 1
    assert set(BY_REASON) == {"uncompressed_requests_total", "failed_requests_total"}


@pytest.mark.parametrize("stream", [False, True])
def test_folds_are_in_the_facts_at_the_end_and_in_the_metrics(server, stream):
    # Longer than SGLang lets an answer grow before it sends a part of it.
    sampling = {"temperature": 0, "max_new_tokens": 70, "ignore_eos": True}
    sampling["custom_params"] = {"kv_policy": "h2o"}
    body = {"input_ids": prompt(6, 100), "sampling_params": sampling, "stream": stream}
    dropped = count(server, "decode_dropped_entries_total", "h2o")
    names = ("folds_total", "fold_seconds_count", "skipped_folds_total")
    before = [count(server, name, "h2o") for name in names]
    response = server.post("/generate", body)
    if stream:
        lines = [x for x in response.text.splitlines() if x.startswith("data: {")]
        found = [json.loads(line.removeprefix("data: "))["meta_info"] for line in lines]
        folds = [each["kv_policy"]["folds"] for each in found]
        assert folds == sorted(folds)
        assert len(set(folds)) >= 10
        facts = found[-1]["kv_policy"]
    else:
        facts = response.json()["meta_info"]["kv_policy"]
    assert facts["folds"] == 69 // 5
    assert facts["entries_dropped_in_decode"] == 4 * 2 * 65
    assert facts["skipped_folds"] == 0
    assert facts["entries_kept"] == 4 * 2 * 32
    assert [count(server, name, "h2o") for name in names] == [before[0] + 13, before[1] + 13, 0]
    assert count(server, "decode_dropped_entries_total", "h2o") == dropped + 4 * 2 * 65
    assert count(server, "private_slots", "h2o") == 0


def test_requests_go_on_after_a_pause_as_if_there_was_none(server, model):
    """Paused as trainers do for new weights: they stay in place, or are computed again later.

    The weights that come are the same ones.
    """
    names = ["snapkv", "h2o", "snap@0.5", "none"]
    weights = ("/update_weights_from_disk", {"model_path": model, "flush_cache": False})
    memory = [("/release_memory_occupation", {}), ("/resume_memory_occupation", {})]

    def ask(name):
        sampling = {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True}
        sampling["custom_params"] = {"kv_policy": name}
        body = {"input_ids": prompt(len(name), 300), "sampling_params": sampling}
        answer = server.post("/generate", body).json()
        return answer["output_ids"], answer["meta_info"]["num_retractions"]

    alone = [ask(name)[0] for name in names]
    for mode, meanwhile in (
        ("in_place", [weights]),
        ("retract", [("/flush_cache", {}), *memory, weights]),
    ):
        with ThreadPoolExecutor(len(names)) as pool:
            asked = [pool.submit(ask, name) for name in names]
            for _ in range(2):
                time.sleep(0.3)
                assert server.post("/pause_generation", {"mode": mode}).ok
                for path, body in meanwhile:
                    assert server.post(path, body).ok, (mode, path)
                assert server.post("/continue_generation", {}).ok
        assert [each.result()[0] for each in asked] == alone, mode
        assert any(each.result()[1] for each in asked) == (mode == "retract")


def test_a_cache_is_not_flushed_under_running_requests(server):
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(
            server.generate, input_ids=prompt(0, 300), max_new_tokens=400, ignore_eos=True
        )
        while not count(server, "private_slots", "snapkv"):
            assert not asked.done()
        assert server.post("/flush_cache", {}).status_code == 400
    assert asked.result()["meta_info"]["completion_tokens"] == 400


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "none"])
def test_what_else_a_request_asks_for_changes_no_answer(server, policy):
    """Logprobs of the prompt are those of full KV: it is computed before entries leave."""

    def ask(name=policy, **fields):
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        sampling["custom_params"] = {"kv_policy": name}
        sampling |= fields.pop("sampling", {})
        body = {"input_ids": prompt(9, 200), "sampling_params": sampling, **fields}
        response = server.post("/generate", body)
        assert response.ok, response.text
        return response.json()

    plain = ask()["output_ids"]
    for start in (-1, 0, 100, 199):
        numbers = {"return_logprob": True, "logprob_start_len": start}
        answer, full = ask(**numbers), ask("none", **numbers)
        rated, of_full = (
            [x[0] for x in a["meta_info"]["input_token_logprobs"]] for a in (answer, full)
        )
        assert answer["output_ids"] == plain, start
        assert len(rated) == (0 if start < 0 else 200 - start)
        assert rated[1:] == pytest.approx(of_full[1:], abs=1e-4)
        assert len(answer["meta_info"]["output_token_logprobs"]) == 12
    answer = ask(return_hidden_states=True)
    assert (answer["output_ids"], len(answer["meta_info"]["hidden_states"])) == (plain, 12)
    assert [each["output_ids"] for each in ask(sampling={"n": 3})] == [plain] * 3
    stopped = ask(sampling={"stop_token_ids": [plain[5]], "ignore_eos": False})
    assert stopped["output_ids"] == plain[: plain.index(plain[5]) + 1]
    assert ask(sampling={"max_new_tokens": 0})["output_ids"] == []
    body = {"query": prompt(9, 200), "items": [[5], [6]], "label_token_ids": [3, 4], "model": "m"}
    scores = [
        server.session.post(f"{server.url}/v1/score", json=body, headers={"x-kv-policy": name})
        for name in (policy, "none")
    ]
    assert scores[0].json()["scores"] == scores[1].json()["scores"]
    assert count(server, "private_slots", "snapkv") == count(server, "private_slots", "h2o") == 0


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_turns_of_a_session_are_served_in_full(server, policy, streaming):
    """The next turn continues from the row of the last one."""
    body = {"capacity_of_str_len": 100_000, "streaming": streaming}
    session, rid, history = server.post("/open_session", body).json(), None, []
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    sampling["custom_params"] = {"kv_policy": policy}
    for turn, length in enumerate((150, 30, 30)):
        history = [*history, *prompt(80 + turn, length)]
        body = {"input_ids": history[-length:], "sampling_params": sampling}
        answer = server.post("/generate", {**body, "session_params": {"id": session, "rid": rid}})
        meta = answer.json()["meta_info"]
        assert meta["kv_policy"]["uncompressed"] == "session"
        full = server.generate(input_ids=history, policy="none", max_new_tokens=8)
        assert answer.json()["output_ids"] == full["output_ids"], turn
        rid, history = meta["id"], [*history, *answer.json()["output_ids"]]
    assert server.post("/close_session", {"session_id": session}).ok
    server.flush()


def test_all_requests_can_be_aborted_at_any_moment(server):
    def ask(name):
        sampling = {"max_new_tokens": 400, "ignore_eos": True, "custom_params": {"kv_policy": name}}
        body = {"input_ids": prompt(len(name), 300), "sampling_params": sampling}
        return server.post("/generate", body).json()["meta_info"]["finish_reason"]["type"]

    names = ["snapkv", "h2o", "duoattention", "none"]
    for moment in (0.0, 0.05, 0.1, 0.2, 0.4):
        with ThreadPoolExecutor(len(names)) as pool:
            asked = [pool.submit(ask, name) for name in names]
            time.sleep(moment)
            while not all(each.done() for each in asked):  # some may not have arrived
                assert server.post("/abort_request", {"abort_all": True}).ok
                time.sleep(0.1)
        assert [each.result() for each in asked] == ["abort"] * len(names), moment
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [pool.submit(ask, name) for name in names]
        while not count(server, "private_slots", "h2o"):
            assert not all(each.done() for each in asked)
        assert server.post("/pause_generation", {"mode": "abort"}).ok
        assert server.post("/continue_generation", {}).ok
    assert asked[1].result() == "abort"
    server.flush()
    assert {count(server, "private_slots", name) for name in names[:3]} == {0}
    assert "leak" not in server.log_text().lower()


def test_aborted_streams_leave_nothing_behind(server):
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    for seed in range(4):
        body = {"input_ids": prompt(seed, 300), "sampling_params": sampling, "stream": True}
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as answer:
            next(answer.iter_content(64))  # its prefill is done; the client goes away
    server.flush()
    assert count(server, "private_slots", "snapkv") == 0
    assert "leak" not in server.log_text().lower()


@pytest.fixture(scope="module")
def workers(model, tmp_path_factory):
    """A server with two HTTP workers and detokenizers, with all options in a file for --config.

    With SGLang 0.5.22, whose workers load no plugins, it has one of each. Kernels of requests' own
    parameters take seconds to compile.
    """
    from kvpolicy.evaluation.serving import serve

    number = 1 if version("sglang") == "0.5.22" else 2
    config = tmp_path_factory.mktemp("config") / "server.yaml"
    config.write_text(
        f"kv-policy:\n- {SNAPKV}\n- more={H2O}\nkv-policy-set: snapkv.capacity=48\n"
        f"kv-policy-fold-interval: 4\nkv-policy-max-cost: 0\ntokenizer-worker-num: {number}\n"
        "kv-policy-allow-set: more.heavy\n" + "detokenizer-worker-num: 2\n" * (number - 1)
    )
    slow = {"stage": 0, "rank": 0, "delays": {"variant": SECONDS}}
    env = {"PYTHONPATH": installed(config.parent, "faults_of_process"), VARIABLE: json.dumps(slow)}
    with serve(model, arguments=["--config", str(config)], env=env) as server:
        yield server


def test_workers_and_options_in_a_file(workers):
    found = internal_state(workers)["kv_policy"]
    assert [(each["name"], each["settings"]) for each in found] == [
        ("snapkv", {"capacity": "48"}),
        ("more", {}),
    ]
    text = " ".join(f"w{i}" for i in prompt(3, 200))
    for seed in range(8):  # of both workers
        facts = workers.generate(input_ids=prompt(seed, 200))["meta_info"]["kv_policy"]
        assert (facts["policy"], facts["entries_kept"]) == ("snapkv", 4 * 2 * 48)
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        body["custom_params"] = {"kv_policy": "more"}
        response = requests.post(workers.url + "/v1/messages", json=body, timeout=60)
        assert json.loads(response.headers["x-kv-policy"])["policy"] == "more"


def test_nobody_waits_for_the_kernels_of_anothers_parameters(workers):
    def ask(custom):
        sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": custom}
        body = {"input_ids": prompt(0, 200), "sampling_params": sampling}
        return workers.post("/generate", body).json()["meta_info"]["kv_policy"]

    own = {"kv_policy": "more", "kv_policy_set": {"heavy": 40}}
    with ThreadPoolExecutor() as pool:
        waiting, others = [pool.submit(ask, own) for _ in range(3)], 0
        while not any(each.done() for each in waiting):
            assert ask({"kv_policy": "more"})["policy"] == "more"
            others += 1
    assert others > 3
    assert [each.result()["set"] for each in waiting] == [{"heavy": 40}] * 3
    for _ in range(8):  # of both workers, of which one asks anew
        assert ask(own)["set"] == {"heavy": 40}


def with_own_parameters(server, heavy, **fields):
    custom = {"kv_policy": "more", "kv_policy_set": {"heavy": heavy}}
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": custom}
    return server.post(
        "/generate", {"input_ids": prompt(0, 200), "sampling_params": sampling, **fields}
    )


def test_a_request_that_waits_for_its_kernels_can_be_aborted(workers):
    """SGLang does not know it yet; another one with the same parameters goes on."""
    with ThreadPoolExecutor() as pool:
        aborted = pool.submit(with_own_parameters, workers, 41, rid="mine-1")
        other = pool.submit(with_own_parameters, workers, 41, rid="yours")
        while not aborted.done():  # a new connection is either worker's
            requests.post(workers.url + "/abort_request", json={"rid": "mine"}, timeout=60)
        assert not other.done()
    assert aborted.result().status_code == 400
    assert "aborted while the kernels" in aborted.result().text
    assert other.result().json()["meta_info"]["kv_policy"]["set"] == {"heavy": 41}


def test_kernels_wait_while_memory_is_given_up(workers):
    """They would read the pool. What is asked meanwhile is answered later."""
    assert workers.post("/release_memory_occupation", {}).status_code == 200
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(with_own_parameters, workers, 42)
        time.sleep(2 * SECONDS)
        assert not waiting.done()
        assert workers.post("/resume_memory_occupation", {}).status_code == 200
        facts = waiting.result().json()["meta_info"]["kv_policy"]
    assert facts["set"] == {"heavy": 42}


def test_inspection_is_refused_where_the_operator_did_not_allow_it(workers):
    assert internal_state(workers)["kv_policy_inspection"] is False
    for custom in ({"kv_policy_kept": True}, {"kv_policy_force": [5]}):
        body = {"input_ids": prompt(0, 20), "sampling_params": {"custom_params": custom}}
        response = workers.post("/generate", body)
        assert response.status_code == 400
        assert "this server was started without --kv-policy-allow-inspection" in response.text


def launch(model, *words, env=None):
    """Output and exit status of a server that is expected not to start."""
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", model]
    command += ["--device", "cpu", "--attention-backend", "torch_native", *words]
    done = forked.run(command, timeout=200, env={**os.environ, **(env or {})})
    return done.stdout + done.stderr, done.returncode


def test_a_wrong_policy_stops_the_launch_with_the_checkers_words(model, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("policy: wrong\nlanguage: 1\nkeep: recent(windw)\n")
    output, status = launch(model, "--kv-policy", str(wrong))
    assert status == 1
    assert f"{wrong}:3:" in output
    assert "Traceback" not in output
    assert "server_args=" not in output  # nothing had been started


def test_a_policy_without_its_tensor_stops_the_launch_in_one_sentence(model):
    output, status = launch(model, "--kv-policy", DUO)
    assert status == 1
    assert "needs the tensor `gate`, [layer, kv] of the model" in output
    assert (
        "the file of its 4 x 2 numbers with `--data gate=FILE`, to a server with `--kv-" in output
    )
    assert "Traceback" not in output


def test_an_option_that_cannot_work_stops_the_launch_in_one_sentence(model):
    output, status = launch(model, "--kv-policy", SNAPKV, "--enable-torch-compile")
    assert status == 1
    assert "--enable-torch-compile cannot be combined with --kv-policy" in output
    assert "Traceback" not in output


@pytest.mark.thorough
def test_a_policy_that_costs_too_much_stops_the_launch(model):
    output, status = launch(model, "--kv-policy", "policies/h2o.yaml")
    assert status == 1
    assert "of the time of a prefill of 2,048 tokens, more than the 50 % that are allowed" in output
    assert "allow it with `--kv-policy-max-cost " in output
    assert "Traceback" not in output


def test_workers_that_load_no_plugins_stop_the_launch_in_one_sentence(model):
    """All workers of SGLang 0.5.22; in later versions those with an app chosen by the operator."""
    env = {"SGLANG_HTTP_SERVER_APP_PATH": "others:app"}
    output, status = launch(model, "--kv-policy", SNAPKV, "--tokenizer-worker-num", "2", env=env)
    assert status == 1
    assert (
        "--tokenizer-worker-num 2 cannot be combined with --kv-policy: this SGLang loads no "
        "plugins in its workers; 0.5.23 can, where SGLANG_HTTP_SERVER_APP_PATH is not set."
    ) in output
    assert "Traceback" not in output


@pytest.mark.thorough
def test_a_plugin_that_fails_to_load_stops_the_launch(model, tmp_path):
    """SGLang only logs such failures."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['kvpolicy.sglang_ext.face.options'] = None\n"
    )
    env = {"SGLANG_KV_POLICY": SNAPKV, "PYTHONPATH": str(tmp_path)}
    with forked.new_interpreters():
        output, status = launch(model, env=env)
    assert status == 1
    assert "kvpolicy: the plugin failed to start" in output
    assert "server_args=" not in output


@pytest.mark.parametrize(
    ("parent", "touched"),
    [
        ("object()", "add_cli_args from_cli_args"),  # a scheduler's process
        ("None", "add_cli_args from_cli_args publish"),  # a program may ask for policies later
    ],
)
def test_without_policies_hardly_more_than_the_command_line_is_touched(parent, touched):
    code = f"""
import multiprocessing
import sglang.srt.managers.scheduler, sys
multiprocessing.parent_process = lambda: {parent}
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
factories = dict(ATTENTION_BACKENDS)
load_plugins()
assert factories == ATTENTION_BACKENDS
print(*sorted(t.rsplit(".", 1)[1] for t in HookRegistry._patched))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_KV_POLICY")}
    done = forked.run([sys.executable, "-P", "-c", code], timeout=200, env=env)
    assert done.stdout.splitlines()[-1] == touched, done.stderr
