"""Options of requests: to report kept positions, and to force output tokens.

In a real scheduler (scenarios_asked.py), beside the plain model of tests/reference/eager.py.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.sglang_ext.face import asked
from kvpolicy.sglang_ext.report import kept
from kvpolicy.sglang_ext.request import force
from scenarios_asked import positions

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

server = pytest.mark.server
BY_ENTRY = {
    "snapkv": ["capacity=48", "window=16"],
    "adakv": ["capacity=40"],
    "lava": ["capacity=48"],
    "simlayerkv-prefill": ["window=32", "threshold=0.3", "reach=64"],
    "h2o": ["heavy=12", "window=10"],
    "tova": ["capacity=24"],
    "cake": ["capacity=20", "window=6"],
    "streamingllm": ["start=3", "window=21"],
    "d2o": ["rate=0.4", "minmax_heads=true"],
    "cam": ["start=2", "window=24", "reach=4"],
}
BY_TOKEN = {
    "fastkv": ["tsp_layer=1"],
    "gemfilter": ["filter=1", "capacity=40"],
    "pyramidinfer": ["least=16", "batch=4"],
    "asl": ["capacity=40", "lookback=2", "window=8", "tau=1.5", "start=1"],
}
TWO_PASS = {"asl": [*BY_TOKEN["asl"], "two_pass=true"]}
PAIRS = {"minicache": ["start=0", "t=0.6", "gamma=0.05"]}
WHOLE = {"chunked_prefill_size": -1, "mem_fraction_static": 0.5}  # prompts in one piece
RETRACT = {"SGLANG_TEST_RETRACT": "1"}


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios_asked.py."""
    return partial(scenario, "scenarios_asked.py")


def expected(policies, folder, name, ids):
    """Positions of the prompt that the plain model keeps, by layer and KV head."""
    from eager import generate

    overrides = dict(setting.split("=") for setting in policies[name])
    plain = generate(folder, ids, policy=name, overrides=overrides, new_tokens=1)
    lists = plain.kept[0]
    if plain.restarted is None:
        return lists
    return [[[plain.restarted[i] for i in head] for head in layer] for layer in lists]


@pytest.mark.thorough(every=2)
@server
@pytest.mark.parametrize(
    ("policies", "flags"),
    [
        (BY_ENTRY, {}),
        (BY_ENTRY, {"chunked_prefill_size": 64, "page_size": 4}),
        (BY_TOKEN, WHOLE),
        ({k: BY_TOKEN[k] for k in ("fastkv", "gemfilter")}, {"chunked_prefill_size": 64}),
        (TWO_PASS, WHOLE),
        (PAIRS, {}),
    ],
    ids=["entries", "chunks", "tokens", "tokens-in-chunks", "two-pass", "pairs"],
)
def test_what_is_said_to_be_kept_is_kept(run, model, policies, flags):
    found = run("kept", policies=policies, lengths=[210, 15], **flags)
    assert "kept" not in found.pop("not asked")
    for rid, each in found.items():
        name, facts, ids = rid.split()[0], each["facts"], each["ids"]
        said, everything = facts["kept"], [[list(range(len(ids)))] * 2] * 4
        assert said["shape"] == [4, 2, len(ids)], rid
        assert facts["policy"] == name
        if "uncompressed" in facts or name in ("none", *PAIRS):
            assert positions(said) == everything, rid
        else:
            assert positions(said) == expected(policies, model, name, ids), rid
            assert sum(len(h) for x in positions(said) for h in x) == facts["entries_kept"], rid
        assert each["pages"] in (None, True), rid
    compressed = [rid for rid, each in found.items() if "entries_kept" in each["facts"]]
    assert {rid.split()[0] for rid in compressed} == set(policies)
    assert {"none 210", "none 15"} <= set(found) - set(compressed)
    if policies is BY_ENTRY:
        assert sum(each["pages"] is True for each in found.values()) >= 6


@server
def test_a_prompt_for_whose_copy_there_is_no_room_is_held_in_full(run):
    """The prompt cannot be compacted within its slots, as its entries merge."""
    policies = {"d2o": ["rate=0.5"], "snapkv": ["capacity=150", "window=16"]}
    found = run("kept", policies=policies, lengths=[290], max_total_tokens=300)
    facts = found["d2o 290"]["facts"]
    assert facts["uncompressed"] == "no_slots"
    assert positions(facts["kept"]) == [[list(range(290))] * 2] * 4
    within = found["snapkv 290"]["facts"]
    assert within["entries_kept"] == 150 * 2 * 4


FORCED = {name: BY_ENTRY[name] for name in ("snapkv", "lava", "h2o", "streamingllm", "d2o")}
FORCED |= {name: BY_TOKEN[name] for name in ("fastkv", "gemfilter")} | PAIRS


@pytest.mark.thorough
@server
@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_forced_to_what_it_said_goes_on_and_is_rated_as_before(run, overlap):
    names = FORCED if overlap else ("snapkv", "d2o", "fastkv")
    policies = {name: FORCED[name] for name in names}
    found = run("own", policies=policies, disable_overlap_schedule=not overlap)
    for name, (free, *forced) in found.items():
        assert len(free["tokens"]) == len(free["logprobs"]) == 24
        for each in forced:
            assert each["tokens"] == free["tokens"], name
            assert each["logprobs"] == pytest.approx(free["logprobs"], abs=1e-5), name
            torch.testing.assert_close(
                torch.tensor(each["top"]), torch.tensor(free["top"]), atol=1e-5, rtol=0
            )


@pytest.mark.thorough
@server
@pytest.mark.parametrize("flags", [{}, {"disable_overlap_schedule": True}, {"page_size": 16}])
def test_forced_tokens_are_rated_by_the_model_and_end_nothing(run, flags):
    names = ("snapkv", "h2o", "gemfilter", "minicache") if flags else FORCED
    found = run("others", policies={name: FORCED[name] for name in names}, **flags)
    for name, each in found.items():
        forced, answer = each["forced"], each["answer"]
        assert answer["tokens"][: len(forced)] == forced, name
        assert len(answer["tokens"]) > len(forced), name
        # The first token is rated by the same distribution as if nothing were forced.
        assert answer["top"][0] == pytest.approx(each["free"]["top"][0], abs=1e-5), name
        assert answer["logprobs"][0] < answer["top"][0][0], name
        assert each["cut"]["tokens"] == forced[:5], name
        assert each["cut"]["finish"] == {"type": "length", "length": 5}
    plain = found["none"]
    rest = plain["answer"]["tokens"][9:]
    assert rest == plain["next"]["tokens"]
    assert plain["answer"]["logprobs"][9:] == pytest.approx(plain["next"]["logprobs"], abs=1e-4)


@pytest.mark.thorough
@server
@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({}, {}),
        (RETRACT, {"max_total_tokens": 1200, "chunked_prefill_size": 64}),
        (RETRACT, {"disable_overlap_schedule": True, "page_size": 16}),
    ],
    ids=["overlap", "retracted-chunks", "retracted-no-overlap"],
)
def test_forced_requests_and_others_do_not_touch_each_other(run, env, flags):
    # Who is retracted may find its prompt in the radix cache, of a request with the same one: then
    # deeper layers of `fastkv` go on from the entries there.
    policies = {name: each for name, each in FORCED.items() if not env or name != "fastkv"}
    seen = run("mixed", env, policies=policies, count=30, seed=len(flags), **flags)
    assert (seen["different"], seen["not_forced"]) == ([], [])
    assert seen["apart"] < 1e-3
    assert (seen["retracted"] > 0) == bool(env)
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


def make_request(custom=None, **changes):
    names = ("stop_strs", "stop_regex_strs", "json_schema", "regex", "ebnf", "structural_tag")
    sampling = dict.fromkeys(names) | {"custom_params": custom, "max_new_tokens": 4}
    beam = changes.pop("beam_group", None)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**(sampling | changes)),
        vocab_size=100,
        beam_group=beam,
        origin_input_ids=[1, 2, 3],
        output_ids=[],
        to_finish=None,
    )


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (None, {}, "custom_params.kv_policy_force is null; expected a list of token ids"),
        ([], {}, r"kv_policy_force is \[\]; expected a list of token ids"),
        ("abc", {}, "kv_policy_force is 'abc'; expected a list"),
        ("x" * 90, {}, r"kv_policy_force is 'x{56}\.\.\.; expected a list"),
        ([1, 100], {}, r"kv_policy_force\[1\] is 100; this model's token ids are 0 to 99"),
        ([-1], {}, r"kv_policy_force\[0\] is -1; this model's token ids are 0 to 99"),
        ([True], {}, r"kv_policy_force\[0\] is true; this model's"),
        ([1.0], {}, r"kv_policy_force\[0\] is 1.0; this model's"),
        ([1], {"stop_strs": ["a"]}, "cannot be combined with `stop` strings"),
        ([1], {"stop_regex_strs": ["a"]}, "cannot be combined with `stop_regex`"),
        ([1], {"regex": "a"}, "cannot be combined with `regex`"),
        ([1], {"json_schema": "{}"}, "cannot be combined with `json_schema`"),
        ([1], {"beam_group": object()}, "cannot be combined with beam search"),
    ],
)
def test_what_cannot_be_forced(value, changes, message):
    with pytest.raises(ValueError, match=message):
        force.Forcing().note(make_request(**changes), {asked.FORCE: value})


@pytest.mark.parametrize("value", ["true", 1, 0, None, [True]])
def test_whether_kept_is_asked_for_is_true_or_false(value):
    with pytest.raises(
        ValueError, match=r"^custom_params\.kv_policy_kept is .*; expected true or "
    ):
        kept.wanted({asked.KEPT: value})


@pytest.mark.parametrize(
    ("custom", "wanted"), [(None, False), ({}, False), ({asked.KEPT: True}, True)]
)
def test_kept_is_said_to_those_who_ask(custom, wanted):
    assert kept.wanted(asked.of(make_request(custom), inspection=True)) is wanted


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ([1], r"^custom_params is \[1\]; expected a JSON object$"),
        ("lava", "^custom_params is 'lava'; expected a JSON object$"),
        (0, "^custom_params is 0; expected"),
        (
            {"kv_polcy": "lava"},
            "^custom_params has `kv_polcy`, which is not known; did you mean `kv_",
        ),
        (
            {"kv_": 1},
            "which is not known; there are `kv_policy`, `kv_policy_set`, `kv_policy_kept` and",
        ),
        ({"kv_" + "x" * 10**6: 1}, r"^custom_params has `kv_x{54}\.\.\.`, which is not known"),
    ],
)
def test_what_is_asked_must_be_known(custom, message):
    with pytest.raises(ValueError, match=message):
        asked.of(make_request(custom), inspection=True)


def test_keys_of_others_are_left_to_them():
    custom = {"thinking_budget": 3, "KV_POLICY": 1, "kv_policy": "lava"}
    assert asked.of(make_request(custom), inspection=False) == {"kv_policy": "lava"}


@pytest.mark.parametrize("key", [asked.KEPT, asked.FORCE])
def test_inspection_is_answered_where_the_operator_allows_it(key):
    request = make_request({key: True})
    assert asked.of(request, inspection=True) == {key: True}
    with pytest.raises(
        ValueError, match=f"^custom_params.{key} is for .* without --kv-policy-allow-inspection$"
    ):
        asked.of(request, inspection=False)
    assert asked.of(make_request({key: False}), inspection=False) == {key: False}


def test_bits_are_padded_by_list_and_positions_after_a_restart_are_the_prompts():
    chosen = torch.tensor([[[True, False, True]], [[False, False, True]]])
    said = kept.described(chosen, torch.tensor([1, 4, 8]), 10)
    assert said["shape"] == [2, 1, 10]
    assert positions(said) == [[[1, 8]], [[8]]]
    assert positions(kept.described(chosen, None, 3)) == [[[0, 2]], [[2]]]
    assert positions(kept.everything(1, 2, 9)) == [[list(range(9))] * 2]


def test_which_token_is_forced_follows_from_the_tokens_of_the_row():
    forcing, first, second = force.Forcing(), make_request(), make_request()
    batch = SimpleNamespace(
        reqs=[second, first], sampling_info=SimpleNamespace(), seq_lens_cpu=torch.tensor([4, 4])
    )
    forcing.prepare(batch)
    forcing.note(first, {asked.FORCE: [7, 8]})
    forcing.note(second, {})
    for length, wanted in ((2, 50), (3, 7), (4, 8), (5, 50)):
        batch.seq_lens_cpu = torch.tensor([4, length])
        batch.sampling_info = SimpleNamespace()
        forcing.prepare(batch)
        sampled = forcing.sample(lambda: torch.tensor([40, 50]), batch.sampling_info)
        assert sampled.tolist() == [40, wanted]
    forcing.before_logprobs(sampled)
    assert sampled.tolist() == [40, 50]
