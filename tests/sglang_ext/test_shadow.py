"""Samples that wait for free slots, or while SGLang wants to be idle: they are tried again."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from kvpolicy.experiments.definition.experiment import Arm, Experiment, KeySource, Shadow
from kvpolicy.experiments.statistics.drift import Candidates
from kvpolicy.sglang_ext import frontend
from kvpolicy.sglang_ext.clients.traffic import Traffic
from kvpolicy.sglang_ext.experiment import shadow
from kvpolicy.sglang_ext.experiment.choices import MOST_OPEN, Choices
from kvpolicy.sglang_ext.experiment.live import Live
from kvpolicy.sglang_ext.experiment.shadow import Shadows, WholeAnswer
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import ASSIGNED, NO_ROOM

TOKENS = 3


def candidates():
    ids = np.tile(np.arange(4, dtype=np.int32), (TOKENS, 1))
    return Candidates(ids, np.log(np.full((TOKENS, 4), 0.2, dtype=np.float32)))


@pytest.fixture
def compare(monkeypatch):
    """A function that runs samples by name; the server refuses each a given number of times."""

    def run(refusals, error=NO_ROOM, uncounted=(), rate=10**6):
        outcomes, tried, drifts = [], [], []
        known = {}

        def counted(assigned, outcome, tokens):
            arm = assigned["arm"]
            outcomes.append((arm, outcome))
            if arm in uncounted:
                raise RuntimeError("on purpose")
            known[arm] = (outcome, tokens)

        live = SimpleNamespace(
            sample_ended=counted,
            clip=2.0,
            weights=0,
            compares=lambda assigned: True,
            experiment=SimpleNamespace(shadow=SimpleNamespace(tokens_per_second=rate)),
            shadowed=lambda rid, assigned, drift, top1, tokens: drifts.append((rid, drift, tokens)),
        )
        left = dict(refusals)

        async def score(manager, request):
            name = request.rid
            tried.append(name)
            if left[name]:
                left[name] -= 1
                raise ValueError(error)
            scored = candidates()
            return scored.ids, scored.logprobs

        def request(*_, namespace, custom, **options):
            return SimpleNamespace(rid=namespace["name"])

        monkeypatch.setattr(shadow, "AGAIN", 0.0)
        monkeypatch.setattr(compat, "is_idle", lambda *_: True)
        monkeypatch.setattr(compat, "has_only_tokens", lambda obj: True)
        monkeypatch.setattr(compat, "cache_namespace", lambda obj, _: {"name": obj.rid})
        monkeypatch.setattr(compat, "scoring_request", request)
        monkeypatch.setattr(compat, "score", score)

        async def all_of_them():
            shadows = Shadows(live, None, 100)
            for name in refusals:
                recorded = {"prompt": np.arange(5), "output": np.arange(TOKENS)}
                found = candidates()
                recorded |= {"ids": found.ids, "logprobs": found.logprobs}
                answer = WholeAnswer(recorded, {}, SimpleNamespace(rid=name), {})
                shadows.offer({"arm": name, "weights": 0}, answer)
            while len(outcomes) < len(refusals):
                await asyncio.sleep(0)

        asyncio.run(asyncio.wait_for(all_of_them(), 20))
        assert known == {
            arm: (outcome, 5 + TOKENS) for arm, outcome in outcomes if arm not in uncounted
        }
        return outcomes, tried, drifts

    return run


def test_what_finds_no_room_is_tried_again_after_the_others(compare):
    outcomes, tried, drifts = compare({"a": 2, "b": 0, "c": 1})
    assert tried == ["a", "b", "c", "a", "c", "a"]
    assert outcomes == [("b", "compared"), ("c", "compared"), ("a", "compared")]
    assert drifts == [(name, 0.0, TOKENS - 1) for name in ("b", "c", "a")]


def test_what_finds_no_room_for_long_is_left_out(compare, monkeypatch):
    monkeypatch.setattr(shadow, "PATIENCE", -1.0)
    outcomes, tried, _ = compare({"a": 100, "b": 0})
    assert tried == ["a", "b"]
    assert outcomes == [("a", "no_room"), ("b", "compared")]


def test_what_the_budget_has_no_tokens_for_is_left_out(compare):
    """What found no room has given its tokens back, for what comes next."""
    outcomes, tried, _ = compare({"a": 1, "b": 0, "c": 0}, rate=0.5)
    assert tried == ["a", "b"]
    assert outcomes == [("b", "compared"), ("c", "over_budget"), ("a", "over_budget")]


def test_what_cannot_be_counted_stops_no_others(compare, caplog):
    outcomes, tried, _ = compare({"a": 0, "b": 0}, uncounted="a")
    assert tried == ["a", "b"]
    assert outcomes == [("a", "compared"), ("b", "compared")]
    assert "was not counted" in caplog.text


@pytest.mark.parametrize(
    ("stages", "batch", "waiting", "running", "used", "idle"),
    [(1, None, 0, 3, 0.7, True), (1, None, 0, 4, 0.7, False), (1, None, 1, 3, 0.7, False),
     (1, None, 0, 3, 0.8, False), (2, None, 0, 1, 0.7, True), (2, None, 0, 2, 0.7, False),
     (8, None, 0, 0, 0.7, True), (8, None, 0, 1, 0.7, False),
     (2, 1, 0, 0, 0.7, True), (2, 1, 0, 1, 0.7, False), (2, 3, 0, 2, 0.7, True)],
)  # fmt: skip
def test_a_server_is_idle_if_it_could_run_one_more(stages, batch, waiting, running, used, idle):
    """Of up to four requests, in as many batches as there are stages, or in batches of `batch`."""
    load = SimpleNamespace(
        num_waiting_reqs=waiting, num_running_reqs=running, max_running_requests=4, token_usage=used
    )
    manager = SimpleNamespace(
        load_snapshot_reader=SimpleNamespace(read_all=lambda: [load]),
        server_args=SimpleNamespace(pp_size=stages, pp_max_micro_batch_size=batch),
        is_pause=False,
    )
    assert compat.is_idle(manager, 0.8) is idle


def test_a_sample_is_scored_where_its_prompt_is_cached():
    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    obj = SimpleNamespace(extra_key="tenant")
    namespace = compat.cache_namespace(obj, {"dp_rank": 1})
    given = {"tokens": [1, 2], "start": 0, "top": 1, "custom": {}}
    request = compat.scoring_request(**given, namespace=namespace)
    assert (request.extra_key, request.routed_dp_rank) == ("tenant", 1)


def test_one_answer_of_a_request_is_scored_whichever_ends_first():
    chosen = Counter()
    for number in range(600):
        choices = Choices()
        answers = ["a", None, "b", "c"]  # one of them has failed
        taken = [choices.take(str(number), 4, answer) for answer in answers]
        assert taken[:3] == [None] * 3
        chosen[taken[3]] += 1
    assert all(count == pytest.approx(200, abs=60) for count in chosen.values())
    assert set(chosen) == {"a", "b", "c"}
    choices = Choices()
    assert [choices.take("lost", 2, None) for _ in range(2)] == [None, None]
    held = [choices.take(str(number), 2, number) for number in range(2 * MOST_OPEN)]
    assert held == [None] * MOST_OPEN + list(range(MOST_OPEN))  # what never ends is not awaited


@pytest.mark.parametrize(
    ("params", "fields", "answers"),
    [
        ({}, {"text": "one"}, None),
        ({"n": 3}, {"text": "one"}, 3),
        ({"n": 2}, {"text": ["one", "two"]}, 4),
        ({}, {"input_ids": [[1], [2], [3]]}, 3),
        ({}, {"input_ids": [1, 2, 3]}, None),
        ({}, {"input_embeds": [[[0.1]], [[0.2]]]}, 2),
        ({}, {"input_embeds": [[0.1], [0.2]]}, None),
        ([{}, {"n": 2}, {"max_new_tokens": 0}], {"text": ["one", "two", "three"]}, 3),
    ],
)
def test_a_request_knows_how_many_answers_it_gets(tmp_path, params, fields, answers):
    arms = (Arm("control", "none"), Arm("lava", "lava"))
    key = (KeySource("session_id"),)
    made = Experiment(name="trial", coverage=1.0, arms=arms, shadow=Shadow(1.0), targeting_key=key)
    (tmp_path / "file").write_text("")
    live = Live(made, tmp_path / "file", {"lava": {}})
    obj = SimpleNamespace(sampling_params=params, session_id="a", custom_labels=None, **fields)
    manager = SimpleNamespace(preferred_sampling_params=None)
    asyncio.run(Traffic({"lava": 0}, live=live).draw(live, manager, obj, None))
    found = obj.sampling_params
    first = found[0] if isinstance(found, list) else found
    assert first["custom_params"][ASSIGNED].get("answers") == answers


def test_what_fails_otherwise_is_not_tried_again(compare, caplog):
    outcomes, tried, _ = compare({"a": 1}, error="something else")
    assert (outcomes, tried) == ([("a", "failed")], ["a"])
    assert "something else" in caplog.text


@pytest.fixture
def scored(monkeypatch):
    """Shadows with a sample whose scoring goes on until it is aborted or let go; what happened."""
    happened = []
    experiment = SimpleNamespace(shadow=SimpleNamespace(tokens_per_second=10**6))
    live = SimpleNamespace(
        weights=0,
        clip=2.0,
        compares=lambda assigned: True,
        experiment=experiment,
        shadowed=lambda *_: None,
        sample_ended=lambda assigned, outcome, tokens: happened.append(outcome),
    )

    async def score(manager, request):
        happened.append("begins")
        live.under_way = asyncio.Event()
        await live.under_way.wait()
        if "aborted" in happened[-1:]:
            raise KeyError("input_top_logprobs_shape")
        found = candidates()
        return found.ids, found.logprobs

    def abort(manager, rid):
        happened.append("aborted")
        live.under_way.set()

    monkeypatch.setattr(shadow, "AGAIN", 0.0)
    monkeypatch.setattr(shadow, "LOOK", 0.0)
    monkeypatch.setattr(compat, "is_idle", lambda *_: True)
    monkeypatch.setattr(compat, "has_only_tokens", lambda obj: True)
    monkeypatch.setattr(compat, "cache_namespace", lambda *_: {})
    monkeypatch.setattr(compat, "scoring_request", lambda *_, **options: SimpleNamespace(rid="s"))
    monkeypatch.setattr(compat, "score", score)
    monkeypatch.setattr(compat, "abort_unnoticed", abort)

    async def rounds():
        for _ in range(20):
            await asyncio.sleep(0)

    def run(scenario):
        async def whole():
            found, shadows = candidates(), Shadows(live, None, 100)
            recorded = {"prompt": np.arange(5), "output": np.arange(TOKENS)}
            recorded |= {"ids": found.ids, "logprobs": found.logprobs}
            obj = SimpleNamespace(rid="a")
            shadows.offer({"arm": "a", "weights": 0}, WholeAnswer(recorded, {}, obj, {}))
            await rounds()
            await scenario(shadows, live, rounds)
            await rounds()
            if happened[-1] == "begins":
                live.under_way.set()
            while not shadows._task.done():
                await asyncio.sleep(0)

        asyncio.run(asyncio.wait_for(whole(), 20))
        return happened

    return run


def test_a_sample_makes_way_and_is_scored_later(scored):
    async def two_at_once(shadows, live, rounds):
        async with shadows.hold():
            assert shadows._scored is None
            async with shadows.hold():
                await rounds()
            await rounds()

    assert scored(two_at_once) == ["begins", "aborted", "begins", "compared"]


def test_nothing_is_scored_until_all_memory_is_back(scored):
    async def release(shadows, live, rounds):
        manager = SimpleNamespace(kv_policy_server=SimpleNamespace(shadows=shadows, live=live))

        async def original(*_):
            assert shadows._scored is None

        for hook, tags in (
            (frontend._around_release_memory, None),
            (frontend._around_resume_memory, ["weights"]),
            (frontend._around_resume_memory, ["kv_cache"]),
        ):
            await hook(original, manager, SimpleNamespace(tags=tags))
            await rounds()
            assert shadows._scored is None
        await frontend._around_resume_memory(original, manager, SimpleNamespace(tags=None))

    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    assert scored(release) == ["begins", "aborted", "begins", "compared"]


def test_scoring_goes_on_where_memory_could_not_be_released(scored):
    async def release(shadows, live, rounds):
        manager = SimpleNamespace(kv_policy_server=SimpleNamespace(shadows=shadows, live=live))

        async def fails(*_):
            raise RuntimeError("on purpose")

        with pytest.raises(RuntimeError, match="on purpose"):
            await frontend._around_release_memory(fails, manager, SimpleNamespace(tags=None))

    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    assert scored(release) == ["begins", "aborted", "begins", "compared"]


def test_answers_of_other_weights_are_not_compared(scored):
    async def update(shadows, live, rounds):
        manager = SimpleNamespace(kv_policy_server=SimpleNamespace(shadows=shadows, live=live))

        async def original(manager, *, obj):
            await rounds()
            return obj

        assert await frontend._around_change_weights(original, manager, obj=1) == 1

    assert scored(update) == ["begins", "aborted", "not_comparable"]
