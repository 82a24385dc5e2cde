"""Orderings of policies (benchmarks/quality_parts/orderings.py) on records with known results."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kvpolicy.evaluation.records import FULL, Record

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
np = pytest.importorskip("numpy", reason="statistics need numpy")

from quality_parts.orderings import ORDERINGS, Ordering, Scores, Verdict, compare, findings  # noqa: E402

BUDGETS = (0.5, 0.125)


def record(policy, budget, task, index, score, turn=0):
    return Record(
        policy=policy,
        budget=budget,
        setting={},
        task=task,
        length=512,
        index=index,
        turn=turn,
        depth=None,
        score=score,
        answer="",
        expected=[],
        prompt_tokens=512,
        output_tokens=3,
        kept=budget,
        held=None,
        kv_bytes=None,
        ttft=None,
        tpot=None,
        uncompressed=None,
    )


def asked(policy, rate, task="niah", count=60, seed=0):
    """Records of a policy that answers a share `rate` of the questions, at all budgets."""
    chosen = random.Random(f"{policy} {task} {seed}")
    for budget in (None,) if policy == FULL else BUDGETS:
        for index in range(count):
            yield record(policy, budget, task, index, float(chosen.random() < rate))


def ordering(strict=True, **facts):
    return Ordering("one beats other", "here", (("one", "other"),), strict=strict, **facts)


def verdict(one, other, strict=True, count=60, **facts):
    records = [
        *asked(FULL, 1, count=count),
        *asked("one", one, count=count),
        *asked("other", other, count=count),
    ]
    [finding] = findings(records, [ordering(strict, **facts)])
    return finding.verdict


@pytest.mark.parametrize(
    ("one", "other", "strict", "expected"),
    [
        (0.9, 0.4, True, Verdict.HOLDS),
        (0.4, 0.9, True, Verdict.FAILS),
        (0.4, 0.9, False, Verdict.FAILS),
        (0.9, 0.4, False, Verdict.HOLDS),
        (0.6, 0.6, True, Verdict.OPEN),
        (0.6, 0.6, False, Verdict.OPEN),
    ],
)
def test_clear_differences_have_a_verdict_and_noise_has_none(one, other, strict, expected):
    assert verdict(one, other, strict) is expected


def test_policies_that_never_differ_are_equal_and_not_better():
    assert verdict(1, 1, strict=False, count=400) is Verdict.HOLDS
    assert verdict(1, 1, strict=True, count=400) is Verdict.FAILS


def test_few_samples_without_a_difference_tell_nothing():
    assert verdict(1, 1, strict=False, count=5) is Verdict.OPEN
    assert verdict(1, 1, strict=True, count=5) is Verdict.OPEN


def test_tasks_that_full_kv_fails_are_left_out():
    records = [*asked(FULL, 1), *asked("one", 0.9), *asked("other", 0.4)]
    records += [*asked(FULL, 0.1, "cwe"), *asked("one", 0, "cwe"), *asked("other", 1, "cwe")]
    [finding] = findings(records, [ordering()])
    assert finding.tasks == ("niah",)
    assert finding.verdict is Verdict.HOLDS


def test_only_the_budgets_and_tasks_of_a_claim_count():
    records = [*asked(FULL, 1), *asked("one", 0.5), *asked("other", 0.5)]
    records += [*asked(FULL, 1, "kv"), *asked("one", 0.9, "kv"), *asked("other", 0.1, "kv")]
    chosen = ordering(tasks=("kv",), budgets=(0.125, 0.0625))
    finding = compare(Scores(records), chosen, "one", "other")
    assert (finding.tasks, list(finding.by_budget)) == (("kv",), [0.125])
    assert finding.pooled.mean == pytest.approx(finding.levels[0] - finding.levels[1])
    assert finding.verdict is Verdict.HOLDS


def test_differences_are_paired():
    """With equal shares of right answers, intervals depend on which questions are right."""
    full = list(asked(FULL, 1))
    one = [record("one", 0.5, "niah", i, float(i % 2 == 0)) for i in range(60)]
    same = [record("other", 0.5, "niah", i, float(i % 2 == 0)) for i in range(60)]
    others = [record("other", 0.5, "niah", i, float(i % 2 == 1)) for i in range(60)]
    widths = []
    for other in (same, others):
        [finding] = findings([*full, *one, *other], [ordering()])
        assert finding.pooled.mean == 0
        widths.append(finding.pooled.high - finding.pooled.low)
    assert widths[0] < widths[1] / 3


def test_turns_of_a_sample_are_one_sample():
    records = [record(FULL, None, "shared", i, 1.0, turn) for i in range(4) for turn in range(3)]
    records += [record("one", 0.5, "shared", 0, float(turn > 0), turn) for turn in range(3)]
    scores = Scores(records)
    assert len(scores.full) == 4
    assert scores.scores["one", 0.5]["shared", 512, 0] == pytest.approx(2 / 3)


def test_policies_that_were_not_asked_leave_a_claim_open():
    [finding] = findings([*asked(FULL, 1), *asked("one", 1)], [ordering()])
    assert finding.verdict is Verdict.OPEN
    assert finding.pooled is None


def test_claims_name_shipped_policies_and_variants():
    from kvpolicy.dsl.syntax.library import shipped
    from quality_parts.orderings import LOOSER, WIDE, early

    named = {name for each in ORDERINGS for pair in each.pairs for name in pair}
    assert named <= {*shipped(), WIDE, LOOSER, *map(early, range(4))}


def checked(tmp_path, here, stated):
    """The check of full KV on 60 answers and a card."""
    from kvpolicy.evaluation.reporting.results import Results
    from quality_parts.checks import check_full_kv

    card = f"| task | 256 | 512 |\n|---|---:|---:|\n| one needle (`niah`) | 1 (0-2) | {stated} |\n"
    (tmp_path / "MODEL.md").write_text(f"# A model\n\n{card}")
    records = tuple(record(FULL, None, "niah", i, float(i < here)) for i in range(60))
    plan = {"policies": [], "tasks": {"niah": ""}, "lengths": [512], "samples": 60}
    return check_full_kv(Results(plan, records, ()), tmp_path)


def test_full_kv_is_checked_against_the_models_card(tmp_path):
    [line] = checked(tmp_path, 57, "97 (92-99)")
    assert "95 (86-98) here, 97 (92-99) in MODEL.md" in line
    [line] = checked(tmp_path, 60, "80 (71-87)")
    assert line.endswith("where more is asked of an answer")


def test_full_kv_that_answers_less_stops_the_publication(tmp_path):
    from quality_parts.checks import Doubtful

    with pytest.raises(Doubtful, match="less of niah at 512 tokens: 50"):
        checked(tmp_path, 30, "97 (92-99)")


def test_what_was_kept_otherwise_is_said():
    from quality_parts.checks import in_full, off_budget

    kept = [replace(record("one", 0.5, "niah", i, 1), kept=0.55) for i in range(3)]
    kept += [record("other", 0.5, "niah", i, 1) for i in range(3)]
    whole = [replace(record("whole", None, "niah", 0, 1), uncompressed="decode_only")]
    assert off_budget([*kept, *whole]) == {("one", 0.5): pytest.approx(0.55)}
    assert in_full([*kept, *whole]) == {"whole": (1, 1, "decode_only")}
