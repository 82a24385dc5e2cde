"""The most slots that a request may hold in decode, for admission."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from kvpolicy.dsl.bind.bind import bind  # noqa: E402
from kvpolicy.dsl.bind.bounds import Bounds  # noqa: E402
from kvpolicy.dsl.check.policy import load  # noqa: E402
from kvpolicy.dsl.ir.nodes import ModelShape  # noqa: E402
from kvpolicy.sglang_ext.face.policy_files import Policy  # noqa: E402
from kvpolicy.sglang_ext.memory.arena import create_arena  # noqa: E402
from kvpolicy.sglang_ext.memory.growth import Growth  # noqa: E402
from kvpolicy.sglang_ext.request.request import Served  # noqa: E402

POLICIES = Path(__file__).parents[2] / "policies"
SHAPE = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=8)
SET = {
    "h2o": {"heavy": "30", "window": "20"},
    "streamingllm": {"start": "4", "window": "46"},
    "tova": {"capacity": "50"},
    "cam": {"start": "4", "window": "46"},
    "cake": {"capacity": "50"},
    "d2o": {"rate": "0.25"},
}


def growth(name, page_size=1, fold_interval=8):
    program = load(str(POLICIES / f"{name}.yaml")).require()
    bound = bind(program, SHAPE, SET.get(name), fold_interval=fold_interval)
    arena = create_arena(4, 2, 2, 8, torch.float32, "cpu")
    return Growth(bound, lambda prompt: Bounds(bound, prompt).kept, arena, page_size)


@pytest.mark.parametrize("name", SET)
def test_policies_that_hold_a_size_are_bounded(name):
    most = growth(name).most(200, 100_000)
    if name == "d2o":
        # A share of the prompt, and what is protected where layers get less than that.
        assert 50 + 8 <= most == growth(name).most(200, 10) <= 100
    else:
        # 50 entries per list, at most a page more for each, the tail until the next fold.
        assert 50 + 8 <= most <= 50 + 2 + 8 + 4
        assert growth(name).most(20, 100_000) == most  # the prompt is shorter
        assert growth(name, page_size=16).most(200, 100_000) == most + 30
        assert growth(name, fold_interval=64).most(200, 100_000) == most + 56


@pytest.mark.parametrize("name", ["snapkv", "simlayerkv", "d2o-code", "roco", "pyramidinfer"])
def test_others_grow_with_their_output(name):
    assert growth(name).most(200, 1000) is None


@pytest.mark.parametrize("capacity", [64, 2**20, 2**40])
def test_a_prompt_within_the_budget_is_known_to_stay_whole(capacity):
    """So it is not scored in vain, for any budget."""
    program = load(str(POLICIES / "snapkv.yaml")).require()
    bound = bind(program, SHAPE, {"capacity": str(capacity)})
    policy = Policy("snapkv", program, "snapkv.yaml", {})
    served = Served(policy, bound, create_arena(4, 2, 2, 8, torch.float32, "cpu"), page_size=1)
    assert served.most_slots(min(capacity, 100_000)) is None
    assert capacity <= served.most_slots(2 * capacity) <= capacity + 2  # a page per list
