"""The GPU operations of a fold do not depend on the numbers of layers and requests.

Torch operations that compute, kernel launches and transfers are counted, from the second fold on.
Noting a step's queries happens at every step and is not counted; nor are views, which run nothing.
"""

import sys
from pathlib import Path

import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools.launches import launches
from kvpolicy.sglang_ext.forward import group_fold
from kvpolicy.sglang_ext.memory.lists import Lists
from shipped_policies import shipped_program

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fold_host import SETTINGS
from folding_requests import Case, Crowd

INTERVAL = 4
MOST = {
    "h2o": 15, "tova": 15, "streamingllm": 15, "vatp": 15, "cake": 15, "cam": 40,
    "cam-original": 40, "d2o": 40, "d2o-code": 40, "roco": 40, "pyramidinfer": 40,
}  # fmt: skip
BATCHES = ((2, (64,)), (6, (64,)), (2, (64, 65, 66, 67)), (5, (67, 64, 64, 65, 66)))
WHOLE = 3  # layers of d2o-code, whose lists outgrow their pages at every fold
OUTGROWING = ("d2o-code", "pyramidinfer")  # lists that get other pages at every fold


def steps(policy, layers, prompts):
    """(Observed, number of folds) of decode steps, once all requests have folded twice."""
    setting = SETTINGS[policy]
    case = Case(
        policy, setting.given(INTERVAL), list(prompts), ModelShape(layers, 4, 2, 8), INTERVAL
    )
    crowd = Crowd(case, (4 + setting.first) * INTERVAL)
    for _ in range((1 + setting.first) * INTERVAL):
        crowd.step()
    made = []
    for _ in range(2 * INTERVAL):
        before = crowd.folds
        observed, _ = crowd.step(counting=True)
        made.append((observed, crowd.folds - before))
    assert crowd.folds == 4 * len(prompts)
    crowd.check(2 * sum(setting.held(prompt, layers, 4, INTERVAL) for prompt in prompts))
    return made


def of_folds(policy, batches):
    """Numbers of GPU operations of folds of these batches."""
    found = set()
    for layers, prompts in batches:
        made = steps(policy, layers + WHOLE * (policy == "d2o-code"), prompts)
        noting = min(observed.device for observed, folds in made if not folds)
        found |= {observed.device - noting for observed, folds in made if folds}
        assert all(observed.launches for observed, folds in made if folds)
    return found


@pytest.mark.thorough(besides=["h2o", "d2o"])
@pytest.mark.parametrize("policy", MOST)
def test_a_fold_of_a_batch_takes_few_operations(policy):
    alike, mixed = (of_folds(policy, BATCHES[part]) for part in (slice(2), slice(2, None)))
    assert max(alike | mixed) <= MOST[policy], (alike, mixed)
    assert len(alike) == len(mixed) == 1, (alike, mixed)
    # What reads the length of the prompt is sent for each request.
    assert alike == mixed or policy == "roco", (alike, mixed)


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("policy", sorted({*MOST} - {*OUTGROWING}))
def test_what_explain_expects_of_a_fold_is_what_the_plugin_asks_for(policy):
    """Lists that outgrow their pages are not taken into account."""
    given = SETTINGS[policy].given(INTERVAL)
    bound = bind(shipped_program(policy), ModelShape(32, 32, 8, 128), given)
    expected = launches(bound)
    assert not expected.one_by_one
    assert {expected.fold.device} == of_folds(policy, BATCHES[:1])


def test_what_is_decided_once_is_decided_of_all_layers_at_once():
    """At the first fold of requests, their lists after prefill are joined, shorter ones padded."""
    settings, found = {"window": "16", "threshold": "0.1"}, []
    for layers in (2, 7):
        shape = ModelShape(layers, 4, 2, 8)
        case = Case("simlayerkv", settings, [64, 65, 66], shape, INTERVAL)
        found.append(Crowd(case, 1).step(counting=True)[0])
    assert found[0].device == found[1].device <= 45
    assert all(each.launches for each in found)


@pytest.mark.parametrize("policy", ["h2o", "streamingllm"])
def test_large_batches_are_followed_in_parts(policy, monkeypatch):
    """So that scratch memory does not grow with the batch; lists are the same."""
    monkeypatch.setattr(group_fold, "LARGEST", 2 * 2 * 2 * 40 * 8)
    parts = []
    advance = group_fold.Group.advance

    def noted(self, *, leaves):
        parts.append(len(self._members))
        return advance(self, leaves=leaves)

    monkeypatch.setattr(group_fold.Group, "advance", noted)
    steps(policy, 2, (64, 65, 64, 64, 66))
    assert max(parts) == 2
    assert sum(parts) == 5 * 4


def test_a_request_that_fails_with_others_fails_alone(monkeypatch):
    shape = ModelShape(2, 4, 2, 8)
    crowd = Crowd(
        Case("tova", SETTINGS["tova"].given(INTERVAL), [64, 65, 66], shape, INTERVAL), 4 * INTERVAL
    )
    failed = []
    crowd.services.failures.note = lambda request, stage, error: failed.append(request.rid)
    advance = group_fold.Group.advance

    def fails(self, *, leaves):
        if any(each.request.rid == "2" for each in self._members):
            raise RuntimeError("made to fail")
        return advance(self, leaves=leaves)

    monkeypatch.setattr(group_fold.Group, "advance", fails)
    for _ in range(INTERVAL):
        crowd.step()
    assert failed == ["2"]
    assert crowd.folds == 2


GROWING = """policy: growing
language: 1
about: A test, of which one layer stays whole while it decodes.
positions: slots
keep: sinks(2) then recent(12)
decode:
  keep: all where layer == 0 else sinks(2) then recent(12)
"""


@pytest.mark.parametrize("policy", ["d2o-code", "growing"])
def test_lists_that_are_moved_together_hold_what_each_holds_by_itself(
    policy, monkeypatch, tmp_path
):
    """Merged, and turned to their positions; portions are of one request."""
    name, given = policy, {}
    if policy in SETTINGS:
        given = SETTINGS[policy].given(INTERVAL)
    else:
        path = tmp_path / "growing.yaml"
        path.write_text(GROWING)
        name = str(path)
    monkeypatch.setattr(group_fold, "MOVED", 1)
    held = []
    for together in (True, False):
        if not together:
            alone = lambda *_: (False, False)  # noqa: E731
            monkeypatch.setattr(group_fold.GroupFold, "_in_place_or_moved", alone)
        crowd = Crowd(Case(name, given, [64, 65, 66], ModelShape(4, 4, 2, 8), INTERVAL), 16)
        for _ in range(4 * INTERVAL):
            crowd.step()
        crowd.tables.write()
        crowd.store.check_integrity(crowd.slots.free_slots)
        table = crowd.slots.req_to_token_pool.req_to_token
        lengths = [each.length for each in crowd.requests]
        lists = Lists(crowd.arena, list(crowd.store.by_row.values()), lengths, table)
        ids = torch.cat([lists.layer(layer)[1] for layer in range(4)])
        held.append((crowd.arena.entries[ids], crowd.arena.values[ids]))
    assert all(torch.equal(*pair) for pair in zip(*held, strict=True))
