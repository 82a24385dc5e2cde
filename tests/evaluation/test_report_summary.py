"""summary.csv and summary.md: figures worked out by hand, and missing ones are named."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kvpolicy.evaluation.records import FULL, Record, line
from kvpolicy.evaluation.reporting import results, summary_text
from kvpolicy.evaluation.reporting.statistics import of_share
from kvpolicy.evaluation.reporting.summary import COLUMNS, Summary, Turns, csv_text, front, named

sys.path.insert(0, str(Path(__file__).parent))
import made_run

PLAIN = Record(
    policy=FULL, budget=None, setting={}, task="niah", length=512, index=0, turn=0, depth=0.5,
    score=1.0, answer="", expected=["x"], prompt_tokens=500, output_tokens=4, kept=1.0, held=1.0,
    kv_bytes=9000.0, ttft=None, tpot=None, uncompressed=None,
)  # fmt: skip


def folder(path, records, *, tasks=("niah",), lengths=(512,), samples=4, budgets=(0.5,)):
    plan = made_run.plan(["snapkv"], tasks, lengths, samples, budgets)
    path.mkdir(exist_ok=True)
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "samples.jsonl").write_text("".join(map(line, records)))
    return path


def full(index, score, **changes):
    return replace(PLAIN, index=index, score=score, **changes)


def snapkv(index, score, **changes):
    known = {"policy": "snapkv", "budget": 0.5, "kept": 0.5, "held": 0.6, "kv_bytes": 1000.0}
    return replace(PLAIN, index=index, score=score, **{**known, **changes})


def summarised(path, records, **plan):
    return Summary(results.load(folder(path, records, **plan)))


def table(summary):
    rows = list(csv.DictReader(csv_text(summary).splitlines()))
    return {(r["policy"], r["task"], r["length"], r["turns"]): r for r in rows}


def test_figures_by_hand(tmp_path):
    records = [full(i, 1.0, ttft=0.1 * (i + 1), tpot=0.01, output_tokens=i) for i in range(4)]
    records += [
        snapkv(0, 1.0, ttft=0.2, kept=0.25),
        snapkv(1, 0.0, ttft=0.4, kept=0.75),
        snapkv(2, 0.0, ttft=0.3),
        snapkv(3, 1.0, ttft=0.1, kept=1.0, held=None, kv_bytes=3000.0, uncompressed="no_slots"),
    ]
    summary = summarised(tmp_path, records)
    found = table(summary)
    row = found["snapkv", "niah", "all", "all"]
    assert tuple(row) == COLUMNS
    share, low, high = of_share(0.5, 4)
    assert float(row["score"]) == share
    assert float(row["score_low"]) == pytest.approx(low, rel=1e-5)
    assert float(row["score_high"]) == pytest.approx(high, rel=1e-5)
    assert float(row["difference"]) == -0.5
    assert float(row["difference_low"]) < -0.5 < float(row["difference_high"])
    assert (row["asked"], row["answered"], row["paired"]) == ("4", "4", "4")
    assert float(row["kept"]) == pytest.approx((0.25 + 0.75 + 0.5 + 1) / 4)
    assert float(row["held"]) == pytest.approx(0.6)
    assert float(row["kv_bytes"]) == 1500
    assert [float(row[k]) for k in ("ttft", "ttft_q1", "ttft_q3")] == pytest.approx(
        [0.25, 0.175, 0.325]
    )
    assert row["tpot"] == ""
    assert (row["in_full"], row["reasons"]) == ("1", "no_slots 1")
    row = found[FULL, "niah", "all", "all"]
    assert (row["kept"], row["difference"], row["budget"]) == ("1", "", "")
    assert float(row["kv_bytes"]) == 9000
    assert float(row["output_tokens"]) == 1.5


def test_differences_are_paired_by_question(tmp_path):
    """snapkv lacks question 1, which full KV got wrong; on common questions none differs."""
    records = [full(0, 1.0), full(1, 0.0), snapkv(0, 1.0)]
    row = summarised(tmp_path, records, samples=2).row(("snapkv", 0.5), "niah")
    assert (row.difference.mean, row.paired) == (0.0, 1)
    assert (row.answered, row.asked, row.complete) == (1, 2, False)


def test_missing_questions_are_shown(tmp_path):
    records = [full(i, 1.0) for i in range(4)] + [snapkv(0, 1.0), snapkv(2, 1.0)]
    summary = summarised(tmp_path, records, tasks=("niah", "vt"))
    text = summary_text.markdown(summary)
    assert "100 (34 to 100) n = 2/4" in text  # niah
    assert "n = 2/8" in text  # all tasks: vt was not asked yet
    assert "n = 0/4" in text  # vt
    assert table(summary)["snapkv", "vt", "all", "all"]["score"] == ""


def test_few_samples_are_said(tmp_path):
    records = [full(i, 1.0) for i in range(4)]
    assert "With 4 samples" in summary_text.markdown(summarised(tmp_path, records))
    records = [full(i, 1.0) for i in range(30)]
    text = summary_text.markdown(summarised(tmp_path, records, samples=30))
    assert "With 30 samples" not in text


def test_a_file_may_have_fewer_samples_than_were_asked_for(tmp_path):
    path = folder(tmp_path, [full(0, 1.0)], tasks=("niah", "data:my.jsonl"), samples=100)
    assert Summary(results.load(path)).results.samples == (100, 100)
    plan = json.loads((path / "plan.json").read_text())
    plan["questions"] = {"niah": {"512": [100, 100]}, "data:my.jsonl": {"512": [12, 12]}}
    (path / "plan.json").write_text(json.dumps(plan))
    text = summary_text.markdown(Summary(results.load(path)))
    assert "With 12 to 100 samples per task and length the intervals are wide" in text
    plan["tasks"] = {"data:my.jsonl": "my"}
    assert summary_text.samples(results.Results(plan, (), ())) == "12"


def test_questions_of_one_sample_count_as_one(tmp_path):
    """Ten samples with two correlated questions each count as ten units, not twenty."""
    records = [full(i, float(i < 7), turn=turn) for i in range(10) for turn in range(2)]
    summary = summarised(tmp_path, records, samples=10)
    assert summary.row((FULL, None), "niah").score == pytest.approx(of_share(0.7, 10))
    assert (summary.row((FULL, None)).asked, summary.results.conversations()) == (20, ["niah"])


def test_tasks_about_the_same_contexts_count_as_one(tmp_path):
    """Three tasks that ask the same 30 conversations place their mean no closer than one does."""
    tasks = ("multiturn", "multiturn-evicted", "multiturn-copy")
    records = [full(i, float(i < 21), task=task) for i in range(30) for task in tasks]
    records += [snapkv(i, float(i < 15), task=task) for i in range(30) for task in tasks]
    summary = summarised(tmp_path, records, tasks=tasks, samples=30)
    for series in summary.results.series:
        of_all, of_one = summary.row(series), summary.row(series, "multiturn")
        assert of_all.score == pytest.approx(of_one.score)
        assert of_all.difference == (of_one.difference and pytest.approx(of_one.difference))


def test_first_and_later_questions(tmp_path):
    records = [full(i, 1.0, turn=turn) for i in range(4) for turn in range(3)]
    records += [snapkv(i, float(turn == 0), turn=turn) for i in range(4) for turn in range(3)]
    summary = summarised(tmp_path, records)
    series = ("snapkv", 0.5)
    first, later = (summary.row(series, "niah", turns=t) for t in (Turns.FIRST, Turns.LATER))
    assert (first.score.mean, first.asked, first.difference.mean) == (1.0, 4, 0.0)
    assert (later.score.mean, later.asked, later.difference.mean) == (0.0, 8, -1.0)
    assert summary.row(series, "niah").score.mean == pytest.approx(1 / 3)
    assert "## First and later questions" in summary_text.markdown(summary)
    assert float(table(summary)["snapkv", "niah", "all", "later"]["score"]) == 0


def test_lengths_and_tasks_weigh_the_same(tmp_path):
    records = [full(i, 1.0) for i in range(4)] + [full(0, 0.0, length=1024)]
    summary = summarised(tmp_path, records, lengths=(512, 1024))
    assert summary.row((FULL, None)).score.mean == 0.5
    assert summary.row((FULL, None), "niah", 512).score.mean == 1.0
    assert "## Prompts of 1024 tokens" in summary_text.markdown(summary)


def test_what_the_plan_says_is_asked(tmp_path):
    """A file of 3 questions; snapkv is asked at one length only."""
    records = [full(i, 1.0, length=n) for i in range(3) for n in (512, 1024)]
    path = folder(tmp_path, [*records, snapkv(0, 1.0)], lengths=(512, 1024))
    plan = json.loads((path / "plan.json").read_text())
    plan["questions"] = {"niah": {"512": [3, 3], "1024": [3, 6]}}
    plan["policies"][1]["aliases"] = {"snapkv@0.5@512": [512]}
    (path / "plan.json").write_text(json.dumps(plan))
    summary = Summary(results.load(path))
    assert summary.row((FULL, None), None, 512).complete
    assert summary.row((FULL, None)).asked == 9
    assert summary.row((FULL, None), "niah", 1024, Turns.LATER).asked == 3
    assert summary.row(("snapkv", 0.5)).asked == 3
    row = summary.row(("snapkv", 0.5), None, 1024)
    assert (row.asked, row.score) == (0, None)
    assert "n = 1/3" in summary_text.markdown(summary)


def test_no_full_kv_no_differences(tmp_path):
    records = [snapkv(i, 1.0) for i in range(4)]
    summary = summarised(tmp_path, records)
    assert summary.row(("snapkv", 0.5)).difference is None
    assert "Difference to full KV" not in summary_text.markdown(summary)


def test_a_record_that_stands_twice_counts_once(tmp_path):
    records = [full(0, 0.0), full(0, 1.0)]
    row = summarised(tmp_path, records).row((FULL, None))
    assert (row.answered, row.score.mean) == (1, 1.0)


def test_prominent_are_the_best(tmp_path):
    made_run.write(tmp_path, made_run.NAMES[:6], tasks=("niah", "kv"), lengths=(512,), maps=False)
    summary = Summary(results.load(tmp_path))
    score = {
        name: sum(summary.row((name, b)).score.mean for b in made_run.BUDGETS)
        for name in made_run.NAMES[:6]
    }
    assert summary.prominent(3) == sorted(score, key=score.get, reverse=True)[:3]


def test_policies_without_a_share_are_not_prominent(tmp_path):
    whole = replace(PLAIN, policy="minicache", score=1.0)
    path = folder(tmp_path, [full(0, 1.0), snapkv(0, 0.0), whole])
    plan = json.loads((path / "plan.json").read_text())
    plan["policies"].insert(1, {"policy": "minicache", "budget": None, "setting": {}})
    (path / "plan.json").write_text(json.dumps(plan))
    assert Summary(results.load(path)).prominent(2) == ["snapkv", "minicache"]


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([(1, 0.5), (2, 0.9), (3, 0.8), (4, 0.9)], [0, 1]),
        ([(1, 0.5), (1, 0.7)], [1]),
        ([(2, 0.5), (2, 0.5)], [0, 1]),
        ([(1, 0.9)], [0]),
        ([], []),
    ],
)
def test_front(points, best):
    assert front(points) == best


def test_named_are_the_best_of_each_cost():
    points = [(1.0, 0.5), (1.01, 0.7), (2.0, 0.8), (2.0, 0.8), (2.01, 0.6), (3.0, 0.9)]
    assert front(points) == [0, 1, 2, 3, 5]
    assert named(points) == [1, 2, 3, 5]


def test_names_and_sizes():
    assert summary_text.percent(0.0625) == "6.25 %"
    assert summary_text.name(("lava", 0.125)) == "lava 12.5 %"
    assert summary_text.name((FULL, None)) == "full KV"
    assert summary_text.size(1536) == "1.5 KiB"
    assert summary_text.size(1011) == "1,011 B"
    assert summary_text.size(None) == summary_text.percent(None) == "-"
    assert summary_text.milliseconds((1.2345, 0.98765, 12.3)) == "1230 (988 to 12300)"


def test_files_of_one_name_are_told_apart(tmp_path):
    tasks = {
        "niah": "niah",
        "data:/home/me/my.jsonl": "my.jsonl",
        "data:q.jsonl": "data:q.jsonl",
        "data:a/q.jsonl": "a/q.jsonl",
        "data:x/b/q.jsonl": "x/b/q.jsonl",
        "data:y\\b\\q.jsonl": "y/b/q.jsonl",
    }
    summary = summarised(tmp_path, [full(0, 1.0)], tasks=tasks)
    assert summary.results.short == tasks
    text = summary_text.markdown(summary)
    assert all(f"* `{name}`: " in text for name in tasks.values())


def test_names_of_files_end_no_cell_of_a_table(tmp_path):
    summary = summarised(tmp_path, [full(0, 1.0)], tasks={"niah": "niah", "data:a|b\nc": "own"})
    head, rule, *rows = summary_text.scores(summary).splitlines()
    assert " a\\|b c |" in head
    assert {len(line.replace("\\|", "").split("|")) for line in (head, rule, *rows)} == {8}


def test_an_interval_beside_zero_is_not_shown_as_touching_it():
    assert summary_text.signed((-0.03, -0.06, -0.002)) == "**-3 (-6 to -0.2)**"
    assert summary_text.signed((-0.03, -0.06, 0.0)) == "-3 (-6 to 0)"


def test_halves_go_away_from_zero():
    assert summary_text.signed((-0.025, -0.145, 0.005)) == "-3 (-15 to +1)"
    assert summary_text.signed((0.0025, -0.0049, 0.00049)) == "+0.3 (-0.5 to 0)"
    assert [str(summary_text.rounded(share)) for share in (0.125, 0.145, -1e-9)] == [
        "13",
        "15",
        "0",
    ]
