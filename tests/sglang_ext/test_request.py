"""The policy of a request, and requests that are served in full."""

from types import SimpleNamespace

import pytest
from kvpolicy.sglang_ext.forward.failures import serve_in_full
from kvpolicy.sglang_ext.request import propagation, request
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.runtime import Runtime


class Served:
    """A served policy that keeps 64 entries per list."""

    name, standing = "snapkv", request.Standing()

    def plan(self, prompt):
        return None

    keeps_prompt = False

    def folds_within(self, prompt, output):
        return False

    def most_slots(self, prompt):
        return None if prompt <= 64 else 70


SERVED = Served()
POLICIES = {"snapkv": SERVED, "lava": Served()}


def make_request(custom=None, tokens=100, **changes):
    fields = {
        "sampling_params": SimpleNamespace(custom_params=custom, max_new_tokens=8),
        "origin_input_ids": [1] * tokens,
        "multimodal_inputs": None,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "session": None,
        "beam_group": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "return_hidden_states": False,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("custom", "name"),
    [
        ({}, "snapkv"),
        ({"kv_policy_kept": True}, "snapkv"),
        ({"kv_policy": "lava"}, "lava"),
        ({"kv_policy": "none"}, None),
    ],
)
def test_choice(custom, name):
    wanted = POLICIES[name] if name else None
    assert request.choose(POLICIES, "snapkv", custom) is wanted


@pytest.mark.parametrize("value", ["SnapKV", "", 5, None, ["snapkv"], {"name": "snapkv"}, True])
def test_a_wrong_choice_lists_what_there_is(value):
    with pytest.raises(ValueError, match="this server has `snapkv`, `lava`, `none`"):
        request.choose(POLICIES, "snapkv", {"kv_policy": value})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tokens": 64}, Reason.SHORT_PROMPT),
        ({"multimodal_inputs": object()}, Reason.MULTIMODAL),
        ({"input_embeds": [[0.0]]}, Reason.EMBEDDINGS),
        ({"positional_embed_overrides": object()}, Reason.EMBEDDINGS),
        ({"session": object()}, Reason.SESSION),
        ({"beam_group": object()}, Reason.BEAM),
        (
            {"sampling_params": SimpleNamespace(custom_params=None, max_new_tokens=1)},
            Reason.ONE_TOKEN,
        ),
    ],
)
def test_why_a_request_is_served_in_full(changes, reason):
    req = make_request(**changes)
    request.assign(req, SERVED)
    state = request.state_of(req)
    assert state.uncompressed == reason
    assert state.wanted is (reason is None)
    assert state.slots == (70 if reason is None else 0)


class Propagates(Served):
    """A policy that lets tokens leave after a layer; None: data decide the layer."""

    def __init__(self, layer):
        self.layer = layer

    def plan(self, prompt):
        return propagation.PropagationPlan(self.layer, restarts=False, most_prefix=0)


def _output(tokens):
    return SimpleNamespace(custom_params=None, max_new_tokens=tokens)


@pytest.mark.parametrize(
    ("changes", "layer", "reason"),
    [
        ({}, None, None),
        ({"tokens": 120}, None, None),
        ({"tokens": 121}, None, Reason.TOO_LONG),
        ({"tokens": 121}, 3, None),
        ({"sampling_params": _output(1)}, 3, None),
        ({"sampling_params": _output(0)}, 3, Reason.ONE_TOKEN),
        ({"return_hidden_states": True}, 3, Reason.HIDDEN_STATES),
        ({"return_logprob": True}, 3, None),
        ({"return_logprob": True, "logprob_start_len": 0}, 3, Reason.INPUT_LOGPROBS),
        ({"return_logprob": True, "logprob_start_len": 98}, 3, Reason.INPUT_LOGPROBS),
        ({"return_logprob": True, "logprob_start_len": 99}, 3, None),
    ],
)
def test_why_tokens_do_not_leave_the_prefill(changes, layer, reason):
    req = make_request(**changes)
    request.assign(req, Propagates(layer), one_piece=120)
    state = request.state_of(req)
    assert state.uncompressed == reason
    assert state.propagates is (reason is None)


def test_requests_of_a_disabled_policy_are_served_in_full():
    disabled = Served()
    disabled.standing = request.Standing(enabled=False)
    req = make_request()
    request.assign(req, disabled)
    state = request.state_of(req)
    assert (state.uncompressed, state.wanted, state.folds) == (Reason.POLICY_DISABLED, False, False)


def test_a_long_name_is_shortened():
    with pytest.raises(ValueError, match=r"is `x{57}\.\.\.`; this server has `snapkv`") as caught:
        request.choose(POLICIES, "snapkv", {"kv_policy": "x" * 10**6})
    assert len(str(caught.value)) < 200


def test_without_a_policy_there_is_no_state():
    req = make_request()
    assert not request.is_assigned(req)
    request.assign(req, None)
    assert request.is_assigned(req)
    assert request.state_of(req) is None


@pytest.mark.parametrize("own", [False, True])
def test_what_is_computed_again_in_full_may_be_reused(own):
    """`own`: what the client asked for stays."""
    req = make_request(kv=SimpleNamespace(kv_committed_len=105), output_ids=[7] * 5)
    req.skip_radix_cache_insert = own
    request.assign(req, SERVED)
    if not own:
        request.state_of(req).private = SimpleNamespace(ready=True, row=3, borrowed=0)
        freed = []
        serve_in_full(SimpleNamespace(free=freed.append), None, req, Reason.POLICY_ERROR)
        assert freed == [3]  # its slots are others' at once, not when it ends
        assert req.skip_radix_cache_insert
    Runtime.retracted(SimpleNamespace(services=SimpleNamespace(forget_rows=lambda: None)), req)
    assert req.skip_radix_cache_insert is own


def test_a_copy_that_must_be_there_is_missed():
    state = request.RequestState(SERVED, 100, slots=70)
    with pytest.raises(RuntimeError, match="no private slots"):
        _ = state.compressed_copy
