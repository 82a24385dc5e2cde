"""The screen of an experiment, the sentence above it, and pooled replicas."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.commands import wrong
from kvpolicy.experiments.fleet.outlook import outlook
from kvpolicy.experiments.fleet.overview import Overview, ReplicaAnswer
from kvpolicy.experiments.replica.document import document
from kvpolicy.experiments.reporting import text_table, words
from kvpolicy.experiments.reporting.headline import decided, headline, lacks
from kvpolicy.experiments.reporting.status import evidence, screen

sys.path.insert(0, str(Path(__file__).parent))
from made_experiment import SWITCHBACK, TEXT, THREE, Made, experiment, feed, made


def of(*replicas):
    return Overview(
        [ReplicaAnswer(f"replica {i}", each.document()) for i, each in enumerate(replicas)]
    )


def row(text, *beginning):
    """Cells of the first line of the screen that begins with these."""
    return next(
        line.split() for line in text.splitlines() if line.split()[: len(beginning)] == [*beginning]
    )


# One replica


def test_the_document_says_what_a_server_answers():
    replica = made(50)
    found = replica.document()
    assert found["revision"] == experiment().revision
    assert found["state"] == "running"
    assert found["analysed_seconds"] == 3600
    assert found["reload"] == {"success": True, "problem": None}
    assert [each["metric"] for each in found["verdicts"]][:2] == ["drift", "drift"]
    assert found["analysis"] == replica.analysis.as_document()
    known = {"reload": {}, "state_saved": True}
    assert document(replica.lifecycle, replica.analysis, **known)["analysed_seconds"] is None


def test_nothing_has_been_seen_yet():
    overview = of(Made())
    tone, sentence = headline(overview)
    assert tone == "open"
    assert sentence == "Arm `lava-25` is not decided: drift lacks its first sample."
    text = screen(overview)
    lines = text.splitlines()
    assert lines[0] == f"RUNNING  lava-25, revision {experiment().revision}"
    assert "coverage 1 % of the keys; next step in 30 min" in lines
    assert row(text, "lava-25") == ["lava-25", "lava@0.25", "0", "0", "-", "50", "%", "0", "0",
                                    "-", "-"]  # fmt: skip
    assert row(text, "drift", "control")[-2:] == ["noise", "floor"]
    assert row(text, "drift", "lava-25")[-3:] == ["0", "%", "undecided"]
    assert "\nsample ratio as wanted: " in text
    assert "warning" not in text
    assert not wrong(overview)


def test_samples_that_are_missing_come_at_the_present_rate():
    overview = of(made(500))
    sentence = headline(overview).sentence
    verdict = next(each for each in overview.guardrails if each.metric == "drift")
    found, seconds = overview.outlook(verdict)
    assert found.outcome == "cleared"
    assert seconds == pytest.approx(found.missing * 3600 / verdict.samples)
    what = lacks(overview, verdict)
    assert what.startswith(f"about {words.rounded(found.missing)} more samples, ")
    assert f"drift lacks {what}" in sentence


def test_few_samples_foretell_nothing():
    overview = of(made(30))
    verdict = next(each for each in overview.guardrails if each.metric == "drift")
    assert 0 < verdict.samples < 20
    assert lacks(overview, verdict) == "samples; how many cannot be told yet"


@pytest.mark.parametrize("seed", range(3))
def test_the_outlook_is_about_right(seed):
    """The number predicted after 150 samples is right within a factor of two."""
    replica = Made()
    feed([replica.analysis], 300, seed=seed)
    early = next(each for each in of(replica).guardrails if each.metric == "drift")
    foretold = early.samples + outlook(replica.analysis, early).missing
    number = 300
    while next(
        each for each in replica.analysis.verdicts()
        if each.metric == "drift" and each.role == "guardrail"
    ).outcome == "undecided":  # fmt: skip
        feed([replica.analysis], 20, seed=number, first_key=number)
        number += 20
    needed = replica.analysis.records["lava-25"].shadowed
    assert needed / 2 < foretold < needed * 2


@pytest.mark.parametrize(("drift", "outcome"), [(0.051, "breached"), (0.02, "cleared")])
def test_the_outlook_is_right_where_values_are_alike(drift, outcome):
    analysis, needed = Made().analysis, 0

    def verdict():
        found = [each for each in analysis.verdicts() if each.metric == "drift"]
        return next(each for each in found if each.arm == "lava-25")

    for _ in range(100):
        analysis.shadowed("lava-25", drift, 0.0, 50, 1)
    foretold = outlook(analysis, verdict())
    while verdict().outcome == "undecided":
        analysis.shadowed("lava-25", drift, 0.0, 50, 1)
        needed += 1
    assert foretold.outcome == verdict().outcome == outcome
    assert foretold.missing == pytest.approx(needed, abs=1)
    assert needed > analysis.experiment.analysis.min_samples


def test_no_rate_where_nothing_comes_any_more():
    replica = made(500)
    replica.lifecycle.abort("an operator")
    overview = of(replica)
    verdict = next(each for each in overview.guardrails if each.metric == "drift")
    found, seconds = overview.outlook(verdict)
    assert found.missing > 0
    assert seconds is None
    unknown = {**made(500).document(), "analysed_seconds": None}
    assert Overview([ReplicaAnswer("a", unknown)]).outlook(verdict)[1] is None
    assert "at the present rate" not in headline(Overview([ReplicaAnswer("a", unknown)])).sentence


def test_cleared():
    overview = of(made(4000))
    assert decided(overview, "lava-25")
    assert headline(overview) == ("good", "Arm `lava-25` is cleared of every guardrail.")
    text = screen(overview)
    assert row(text, "drift", "lava-25")[-4:] == ["100", "%", "clear", "cleared"]
    assert row(text, "kv", "bytes", "lava-25")[-1] == "better"
    assert row(text, "lava-25")[-2:] == ["50", "%"]  # of full KV
    assert not wrong(overview)


def test_some_arms_are_cleared_and_others_not():
    overview = of(made(5000, THREE, drift={"lava-25": 0.012, "sinks-6": 0.048}))
    tone, sentence = headline(overview)
    assert tone == "good"
    assert sentence.startswith(
        "Arm `lava-25` is cleared of every guardrail; arm `sinks-6` is not decided: drift lacks "
    )


def test_aborted():
    replica = made(600, drift=0.5)
    replica.lifecycle.abort("guardrail drift of arm lava-25 is breached")
    overview = of(replica)
    assert headline(overview) == (
        "bad",
        "Aborted: guardrail drift of arm lava-25 is breached; every request gets full KV.",
    )
    text = screen(overview)
    assert text.startswith("ABORTED  lava-25")
    assert "coverage" not in text
    assert text.endswith("aborted: guardrail drift of arm lava-25 is breached\n")
    assert wrong(overview)


def rolled_back(requests=3000):
    replica = made(requests, THREE, drift={"lava-25": 0.012, "sinks-6": 0.47})
    replica.lifecycle.roll_back("sinks-6", "drift is 0.47")
    replica.analysis.retire("sinks-6")
    return replica


def test_a_bad_arm_is_rolled_back_and_a_good_one_cleared():
    overview = of(rolled_back(5000))
    assert headline(overview) == (
        "good",
        "Arm `sinks-6` is rolled back (drift is 0.47); arm `lava-25` is cleared of every "
        "guardrail.",
    )
    text = screen(overview)
    assert row(text, "sinks-6")[4:6] == ["-", "gone"]
    assert row(text, "lava-25")[6:8] == ["50", "%"]  # of the two that are left
    assert wrong(overview)


def test_an_arm_that_one_replica_has_rolled_back():
    other = made(3000, THREE, drift={"lava-25": 0.012, "sinks-6": 0.47})
    overview = of(rolled_back(), other)
    assert headline(overview).sentence.startswith(
        "Arm `sinks-6` is rolled back at replica 0 only (drift is 0.47); "
    )
    assert "arm `sinks-6` is rolled back at replica 0 only" in overview.warnings
    assert headline(of(rolled_back(100))).tone == "bad"


def test_an_abort_says_which_arm_was_good():
    replica = made(5000, THREE, drift={"lava-25": 0.012, "sinks-6": 0.47})
    replica.lifecycle.abort("guardrail drift of arm sinks-6 is breached")
    assert headline(of(replica)).sentence == (
        "Aborted: guardrail drift of arm sinks-6 is breached; every request gets full KV; arm "
        "`lava-25` is cleared of every guardrail."
    )


def test_promoted():
    replica = made(4000)
    replica.lifecycle.promote("lava-25", "cleared")
    overview = of(replica)
    assert headline(overview) == (
        "good",
        "Promoted: arm `lava-25` serves every request with `lava@0.25` (cleared).",
    )
    assert screen(overview).startswith("PROMOTED  lava-25")
    assert not wrong(overview)


def test_breached_where_the_file_says_alert():
    text = TEXT.replace("steps:", "analysis: {on_fail: alert, min_samples: 50}\nsteps:")
    overview = of(made(600, text, drift=0.5))
    tone, sentence = headline(overview)
    assert tone == "bad"
    assert sentence.startswith("Guardrail `drift` of arm `lava-25` is breached (")
    assert sentence.endswith("; the experiment goes on, as its file says `on_fail: alert`.")
    assert row(screen(overview), "drift", "lava-25")[-1] == "breached"
    assert wrong(overview)


def test_paused_and_disabled():
    replica = made(50)
    replica.lifecycle.pause()
    assert "no further step while it is paused" in screen(of(replica))
    off = TEXT.replace("arms:", "enabled: false\narms:")
    overview = of(made(0, off))
    assert headline(overview).sentence == ("Disabled in its file: every request gets the default.")


def test_no_guardrail_decides_nothing():
    text = TEXT.replace("role: guardrail, margin: 0.05, clip: 2", "role: info")
    text = text.replace("  - {metric: top1_disagreement, role: guardrail, margin: 0.05}\n", "")
    text = text.replace("role: guardrail, margin: 0.02", "role: info")
    overview = of(made(50, text))
    assert "nothing is decided" in headline(overview).sentence
    assert row(screen(overview), "drift", "lava-25")[-2:] == ["shown", "only"]


def test_a_mismatch_comes_before_every_figure():
    replica = made(4000)
    for number in range(10_000, 12_000):
        replica.analysis.assigned("control", number)
    overview = of(replica)
    assert headline(overview) == (
        "bad",
        "Compare nothing: sample ratio mismatch at the stage `assigned`.",
    )
    text = screen(overview)
    assert "\nsample ratio mismatch: p = assigned below 0.0001," in text
    assert "\nwarning: sample ratio mismatch at the stage `assigned`: " in text
    assert wrong(overview)


def test_an_arm_that_was_compared_in_part_is_not_simply_cleared():
    replica = made(6000)
    assert headline(of(replica)).tone == "good"
    for _ in range(2_000):
        replica.analysis.sample_ended("lava-25", "no_room", 5_000, key_hash=-1)
    overview = of(replica)
    assert headline(overview) == (
        "open",
        "Arm `lava-25` is cleared of every guardrail; there are requests of `lava-25` that are not "
        "scored again.",
    )
    assert wrong(overview)
    shown = " ".join(screen(overview).split())
    assert "warning: requests of `lava-25` that are not scored again: " in shown
    assert "% compared, " in shown


def test_steps_that_are_held_are_shown():
    replica = made(10)
    replica.lifecycle.hold_steps("sample ratio mismatch at the stage `assigned`")
    shown = " ".join(screen(of(replica)).split())
    assert "no further step, as long as this holds: sample ratio mismatch at the stage" in shown
    assert "next step" not in shown


def test_a_gateway_that_strips_the_key():
    replica = Made()
    for _ in range(400):
        replica.analysis.assigned("control", 7)
    sentence = headline(of(replica)).sentence
    assert sentence == "Compare nothing: all traffic in one arm."


def test_a_metric_without_a_clip_has_no_interval():
    overview = of(made(300, TEXT.replace(", clip: 4096", "")))
    assert row(screen(overview), "kv", "bytes", "lava-25")[3:] == [
        "-512", "-", "-", "-", "no", "clip",
    ]  # fmt: skip


def test_windows_of_a_switchback():
    overview = of(made(9000, SWITCHBACK))
    text = screen(overview)
    assert "KEYS" not in text
    assert "sample ratio" not in text
    verdict = next(each for each in overview.guardrails if each.metric == "ttft_seconds")
    assert "more pairs of windows" in lacks(overview, verdict)


def test_what_is_wrong_with_a_server_is_said():
    replica = made(10)
    replica.reload = {"success": False, "problem": "e.yaml:2:1: error[key]: no\nmore"}
    replica.state_saved = False
    without = made(10)
    without.state_saved = without.state_file = False
    assert of(without).warnings == []  # nothing is wrong, so `status` does not exit with 1
    sentence = "replica 0 has no state file: a restart would forget a rollback"
    assert of(without).notes[0].startswith(sentence)
    assert f"note: {sentence}"[:60] in screen(of(without))
    overview = of(replica)
    assert overview.warnings == [
        "the experiment file at replica 0 is not in use, an earlier version is: "
        "e.yaml:2:1: error[key]: no",
        "the state file at replica 0 cannot be written: a restart would forget what has changed "
        "since",
    ]


# Several replicas


def test_replicas_together_are_one_that_has_seen_everything():
    parts, whole = [Made(), Made()], Made()
    for number, part in enumerate(parts):
        feed([part.analysis, whole.analysis], 800, seed=number, first_key=800 * number)
    for replica in (*parts, whole):
        replica.wait(3600)
    together, one = of(*parts), of(whole)
    assert together.rows == [
        replace(
            row,
            means={k: pytest.approx(v) for k, v in row.means.items()},
            compared=ANY,
        )
        for row in one.rows
    ]
    for mine, other in zip(together.verdicts, one.verdicts, strict=True):
        assert (mine.metric, mine.arm, mine.outcome) == (other.metric, other.arm, other.outcome)
        if mine.absolute:  # differences are paired inside each replica
            assert mine.samples == other.samples
            assert mine.mean == pytest.approx(other.mean)
            assert mine.log_e_clear == pytest.approx(other.log_e_clear)
    assert headline(together) == headline(one)
    for arm, outcomes in one.shadow.items():
        twice = {outcome: 2 * count for outcome, count in outcomes.items()}
        assert together.shadow[arm] == twice | {"compared": outcomes["compared"]}
    assert "2 replicas, pooled: replica 0, replica 1" in screen(together)


def test_replicas_that_share_keys_count_them_once():
    first, second = made(300), made(300)
    overview = of(first, second)
    assert [row.keys for row in overview.rows] == [row.keys for row in of(first).rows]
    assert sum(row.requests for row in overview.rows) == 600


def test_replicas_that_disagree():
    first, second = made(600, drift=0.5), made(200)
    first.lifecycle.abort("drift")
    overview = of(first, second)
    assert overview.state is None
    assert headline(overview).sentence == (
        "Aborted at replica 0 only: drift; requests there get full KV."
    )
    text = screen(overview)
    assert text.startswith("DIFFERS")
    assert "warning: the replicas differ: aborted at replica 0; running at replica 1" in text
    second.lifecycle.promote("lava-25", "an operator")
    assert "Aborted at replica 0 only" in headline(of(first, second)).sentence
    assert "Promoted at replica 1 only" in headline(of(made(10), second)).sentence.replace(
        "replica 0", "replica 9"
    )


def test_versions_of_one_revision_are_pooled_and_named():
    other = Made(TEXT.replace("coverage: 10 %\narms", "coverage: 20 %\narms"))
    other.lifecycle.replace(replace(other.lifecycle.experiment, steps=(), coverage=0.2))
    overview = of(made(100), other)
    text = screen(overview)
    assert "coverage 10 % at replica 0, 20 % at replica 1" in text
    assert "different versions of this revision" in " ".join(overview.warnings)


def test_a_warning_that_one_replica_alone_has():
    alone = Made()
    for _ in range(400):
        alone.analysis.assigned("control", 7)
    found = {**made(5000).document(), "warnings": ["noise in `drift`: much of it"]}
    overview = Overview([ReplicaAnswer("a", found), ReplicaAnswer("b", made(10).document())])
    assert overview.warnings == ["at a: noise in `drift`: much of it"]


def test_breached_together_though_by_none_alone():
    text = THREE.replace("steps:", "analysis: {min_samples: 100}\nsteps:")
    parts = [
        made(240, text, drift={"sinks-6": 0.5}, seed=seed, first_key=1000 * seed)
        for seed in range(2)
    ]
    assert not any(each.outcome == "breached" for part in parts for each in of(part).guardrails)
    overview = of(*parts, *[
        made(240, text, drift={"sinks-6": 0.5}, seed=seed, first_key=1000 * seed)
        for seed in range(2, 4)
    ])  # fmt: skip
    assert headline(overview).sentence.endswith(
        "; no replica alone has seen enough to roll it back: `abort --arm` does."
    )


def test_replicas_of_two_experiments_are_refused():
    other = Made(TEXT.replace("margin: 0.02", "margin: 0.03"))
    with pytest.raises(PolicyError, match="do not run one experiment"):
        of(Made(), other)


# How it looks


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("text", [TEXT, THREE, SWITCHBACK])
def test_lines_keep_to_the_width(width, text):
    replica = made(3000, text)
    replica.lifecycle.abort("a reason " * 60)
    shown = screen(of(replica, made(3000, text)), width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.isascii()


def test_long_names_are_cut_and_numbers_never():
    text = TEXT.replace("lava-25:", "an-arm-whose-name-is-long-and-says-everything:")
    shown = screen(of(made(3000, text)))
    assert max(map(len, shown.splitlines())) <= 80
    assert row(shown, "control")[-4:] == ["773", "0", "100", "%"]
    assert re.search(r"\ban-a\S*\.\.\S*ing\b", shown)


def test_colours_are_for_terminals():
    overview = of(made(10))
    assert "\033[" not in screen(overview)
    assert screen(overview, colours=True).startswith("\033[1;33mRUNNING")


def test_evidence_is_a_share_of_what_decides():
    overview = of(made(600))
    guardrail, control = (
        next(each for each in overview.verdicts if each.arm == arm)
        for arm in ("lava-25", "control")
    )
    assert evidence(overview, replace(guardrail, log_e_clear=1.5)) == "50 % clear"
    assert evidence(overview, replace(guardrail, log_e_clear=-1.0, log_e_breach=99.0)) == (
        "100 % breach"
    )
    assert evidence(overview, control) == "-"


def test_table_keeps_columns_in_line():
    lines = text_table.table(["A ", "N"], [["name", "1"], ["x", "1,000"]], 80)
    assert lines == ["A         N", "name      1", "x     1,000"]
    cut = text_table.table(["A ", "N"], [["a long name of an arm", "1"]], 12)
    assert cut == ["A          N", "a lo.. arm 1"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (words.number(None), "-"), (words.number(0.0), "0"), (words.number(1234.5), "1,234"),
        (words.number(0.031249), "0.0312"), (words.number(0.0000123), "0.0000123"),
        (words.number(1.5e-9), "1.5e-09"),
        (words.probability(0.43), "0.43"), (words.probability(1e-90), "below 0.0001"),
        (words.percent(0.4984), "49.8 %"), (words.percent(1.0), "100 %"),
        (words.interval("error_rate", -0.001, 0.02), "-0.1 to 2 %"),
        (words.interval("drift", None, None), "-"),
        (words.duration(0.2), "less than 1 s"), (words.duration(59), "59 s"),
        (words.duration(3600), "1 h"), (words.duration(5400), "1 h 30 min"),
        (words.duration(86_400 * 12), "12 d"), (words.duration(3599.9), "1 h"),
        (words.count(1, "key"), "1 key"), (words.count(1200, "key"), "1,200 keys"),
        (words.rounded(7), "7"), (words.rounded(1234), "1,300"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(made, text):
    assert made == text
