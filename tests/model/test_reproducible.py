"""Texts from a seed do not change, as the models were trained and measured on them."""

import hashlib
import json

import lessons
import more_tasks
import numpy as np
import pytest
import tasks

SAMPLES = {
    "niah": "8f01ee16bb5646a3",
    "distractors": "2d45a281bd887efe",
    "mk": "358e014a0b96efc3",
    "mq": "b4e2c53e4ff34baa",
    "mv": "33f92811c896322f",
    "vt": "378df4a03dc2b311",
    "kv": "e8e37045a923f042",
    "cwe": "13f5d54c0c94a891",
    "fwe": "4bb925283b4c528a",
}
LESSONS = {
    "all facts": "7222b40cd33ded26",
    "bare cwe": "4f3d7ad5f9309157",
    "bare fwe": "e2f45b703dac0742",
    "copy": "162d104d5c6f6ad8",
    "cwe": "8d8d27cecf0724c6",
    "fwe": "71395a755828072b",
    "kv": "0ff027d4dab72388",
    "mv": "0fbaa9c86baeb68c",
    "one fact": "960632820ded91f8",
    "several asked": "0fb0a110fb92b66a",
    "some facts": "e5fbfb58a5315447",
    "two hops": "eb79cfaf7992f8a3",
    "vt": "dd0966b717372f77",
}


def digest(*parts):
    """The first 16 hexadecimal digits of the SHA-256 of `parts` as JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def samples_digest(task):
    """Digest of 20 samples at each of four lengths."""
    drawn = [
        more_tasks.sample(task, length, np.random.default_rng([7, i]))
        for length in (64, 200, 512, 2048)
        for i in range(20)
    ]
    return digest([[s.prompt_ids, s.answer_ids, s.needles, s.text] for s in drawn])


def lessons_digest(kind):
    """Digest of 20 lessons at each of three lengths; kinds of `tasks` are drawn by both modules."""
    rng = np.random.default_rng(8)
    draws = [lessons.batch, *([tasks.batch] if kind in tasks.MIX else [])]
    drawn = [draw(20, length, rng, {kind: 1.0}) for draw in draws for length in (64, 200, 512)]
    # What the generator gives next is part of it: the lessons after these depend on that.
    return digest(
        [[ids.tolist(), marks.tolist()] for ids, marks in drawn], int(rng.integers(2**62))
    )


@pytest.mark.parametrize("task", more_tasks.TITLES)
def test_samples_of_a_seed_do_not_change(task):
    assert samples_digest(task) == SAMPLES[task]


@pytest.mark.parametrize("kind", sorted({*tasks.MIX, *lessons.MIX, *lessons.LISTING_MIX}))
def test_lessons_of_a_seed_do_not_change(kind):
    assert lessons_digest(kind) == LESSONS[kind]
