"""Which policy a request gets, and which requests are served in full."""

from types import SimpleNamespace

import pytest
from kvpolicy.sglang_ext import request


class Served:
    """Keeps 64 entries per list."""

    name = "snapkv"

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
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("custom", "name"),
    [
        (None, "snapkv"),
        ({}, "snapkv"),
        ({"other": 1}, "snapkv"),
        ({"kv_policy": "lava"}, "lava"),
        ({"kv_policy": "none"}, None),
    ],
)
def test_choice(custom, name):
    wanted = POLICIES[name] if name else None
    assert request.choose(POLICIES, "snapkv", make_request(custom)) is wanted


@pytest.mark.parametrize("value", ["SnapKV", "", 5, None, ["snapkv"], {"name": "snapkv"}, True])
def test_a_wrong_choice_lists_what_there_is(value):
    with pytest.raises(ValueError, match="this server has `snapkv`, `lava`, `none`"):
        request.choose(POLICIES, "snapkv", make_request({"kv_policy": value}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tokens": 64}, request.SHORT_PROMPT),
        ({"multimodal_inputs": object()}, request.MULTIMODAL),
        ({"input_embeds": [[0.0]]}, request.EMBEDDINGS),
        ({"positional_embed_overrides": object()}, request.EMBEDDINGS),
        ({"session": object()}, request.SESSION),
        ({"beam_group": object()}, request.BEAM),
        (
            {"sampling_params": SimpleNamespace(custom_params=None, max_new_tokens=1)},
            request.ONE_TOKEN,
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


def test_without_a_policy_there_is_no_state():
    req = make_request()
    assert not request.is_assigned(req)
    request.assign(req, None)
    assert request.is_assigned(req)
    assert request.state_of(req) is None
