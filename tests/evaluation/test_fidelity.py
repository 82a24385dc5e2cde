"""`kvpolicy fidelity` without a server: the distances, the summary, the files, what is refused."""

import contextlib
import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.looking import fidelity, fidelity_report, look
from kvpolicy.evaluation.looking.distributions import (
    FEWEST,
    Distributions,
    distance,
    interval,
    perplexity,
    student,
)
from kvpolicy.evaluation.looking.fidelity_result import Compared, PolicyFidelity, summaries

ROOT = Path(__file__).parents[2]


def distributions(probabilities, top=None) -> Distributions:
    """Distributions from rows of probabilities, of each the best `top`."""
    rows = np.asarray(probabilities, dtype=float)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :top]
    logprobs = np.log(np.take_along_axis(rows, ids, 1))
    return Distributions(ids, logprobs, np.log(rows[:, 0]))


def random_rows(seed, count=6, size=40):
    rows = np.random.default_rng(seed).gamma(0.3, size=(count, size)) + 1e-9
    return rows / rows.sum(axis=1, keepdims=True)


def divergence(p, q):
    return (p * np.log(p / q)).sum(axis=1)


def test_kl_of_whole_distributions_is_the_definition():
    p, q = random_rows(1), random_rows(2)
    found = distance(distributions(p), distributions(q))
    assert found.kl == pytest.approx(divergence(p, q), rel=1e-9)
    assert found.covered == pytest.approx(np.ones(6))
    assert found.agree.tolist() == (p.argmax(1) == q.argmax(1)).tolist()


def test_the_same_distribution_is_at_distance_0():
    p = distributions(random_rows(3))
    found = distance(p, p)
    assert (found.kl == 0).all()
    assert found.agree.all()
    assert found.first_divergence is None


@pytest.mark.parametrize("top", [1, 3, 10, 39])
def test_with_some_tokens_it_is_a_lower_bound(top):
    p, q = random_rows(1, 50), random_rows(2, 50)
    found = distance(distributions(p, top), distributions(q, top))
    assert (found.kl <= divergence(p, q) + 1e-5).all()
    assert (found.covered <= 1).all()
    more = distance(distributions(p, top + 1), distributions(q, top + 1))
    assert (more.covered >= found.covered).all()
    assert more.kl.sum() >= found.kl.sum()


def test_what_one_side_alone_names_counts():
    # P: 0.7 on token 0. Q: 0.9 on token 1, so at most 0.1 on token 0.
    p = Distributions(np.array([[0]]), np.array([[math.log(0.7)]]), np.array([0.0]))
    q = Distributions(np.array([[1]]), np.array([[math.log(0.9)]]), np.array([0.0]))
    found = distance(p, q)
    assert found.kl == pytest.approx([0.7 * math.log(0.7 / 0.1) + 0.3 * math.log(0.3 / 0.9)])
    assert found.covered == pytest.approx([0.7])
    assert found.first_divergence == 0


def test_a_policy_that_is_sure_of_something_else_is_far_away():
    rows = np.full((2, 1000), 1e-6)
    rows[0, 0] = rows[1, 1] = 1 - 999e-6
    p, q = (distributions(row[None], 16) for row in rows)
    exact = divergence(rows[:1], rows[1:])
    found = distance(p, q).kl
    assert found <= exact
    assert found > 0.7 * exact


def test_distributions_are_read_from_an_answer():
    meta = {
        "output_top_logprobs": [[[-0.1, 7, None], [-2.5, 3, None]], [[-0.2, 1, "x"], [-3, 7, "y"]]],
        "output_token_logprobs": [[-2.5, 3, None], [-9.0, 5, None]],
    }
    found = Distributions.of(meta, 2)
    assert found.ids.tolist() == [[7, 3], [1, 7]]
    assert found.logprobs.tolist() == [[-0.1, -2.5], [-0.2, -3]]
    assert found.given.tolist() == [-2.5, -9.0]
    assert perplexity(found.given) == pytest.approx(math.exp(11.5 / 2))
    with pytest.raises(ValueError, match="of 2 positions, not 3"):
        Distributions.of(meta, 3)


@pytest.mark.parametrize("count", [FEWEST, 8, 30])
def test_the_interval_of_a_mean_holds_it_about_as_often_as_it_says(count):
    rng, hits = np.random.default_rng(0), 0
    for _ in range(1000):
        parts = rng.normal(1, 0.2, (count, 1)) + rng.normal(0, 0.2, (count, 16))
        low, high = interval([*parts[:-1], parts[-1][:5]], 0, math.inf)
        hits += low <= 1 <= high
    assert 935 <= hits <= 970


def test_pieces_that_all_agree_are_no_certainty():
    same = PolicyFidelity((compared(seed=0, positions=80),))
    low, high = same.agreement_interval()
    assert (same.agree.mean(), high) == (1, 1)
    assert low == pytest.approx(0.5655, abs=1e-4)  # Wilson's of 5 of 5


def test_few_parts_have_no_interval_and_none_leaves_what_there_can_be():
    assert interval([np.ones(16)] * (FEWEST - 1), 0, 1) is None
    low, high = interval([np.zeros(16)] * 4 + [np.ones(16)], 0, 1)
    assert (low, 0.5 < high <= 1) == (0, True)


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.7764), (7, 2.3646), (29, 2.0452)])
def test_quantiles_of_students_t(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, abs=1e-3)


def compared(text="a.txt", policy="snapkv", seed=1, free=3, positions=6) -> Compared:
    full, other = random_rows(0, positions), random_rows(seed, positions)
    both = distributions(full), distributions(other)
    return Compared(
        text=text,
        policy=policy,
        setting={"capacity": "5"},
        prompt_tokens=20,
        continuation=tuple(range(positions)),
        words=("<b>", "&", *"xyzwvuts")[:positions],
        full=both[0],
        other=both[1],
        distance=distance(*both),
        greedy_divergence=free,
        whole=True,
        kept=0.25,
        uncompressed=None,
    )


def test_policies_are_summarized_over_texts():
    parts = [compared("a", seed=1, free=3), compared("b", seed=2, free=None)]
    parts += [compared("c", seed=3, free=1), compared("a", "lava", seed=0, free=None)]
    found = summaries(parts)
    assert [each.policy for each in found] == ["snapkv", "lava"]
    values = np.concatenate([part.distance.kl for part in parts[:3]])
    assert found[0].kl.tolist() == values.tolist()
    assert found[0].kl_interval() is None
    low, high = summaries(parts[:3] * 2)[0].kl_interval()
    assert low <= values.mean() <= high
    assert found[0].first(greedy=True) == "3"
    assert found[1].first(greedy=True) == ">6"
    assert (found[1].kl.mean(), found[1].agree.mean()) == (0, 1)
    assert PolicyFidelity(tuple(parts[:3])).perplexities()[1] == pytest.approx(
        math.exp(-np.log(random_rows(0)[:, 0]).mean())
    )


@pytest.mark.parametrize(
    ("found", "median"),
    [
        ([(3, 9), (5, 9), (None, 9)], "5"),
        ([(3, 9), (None, 9), (None, 9)], ">9"),
        ([(None, 4), (9, 10)], ">4"),
        ([(None, 2), (None, 2), (8, 10), (9, 10)], ">2"),
        ([(None, 2), (5, 10), (None, 10)], ">5"),
    ],
)
def test_a_text_that_never_differs_leaves_the_median_open(found, median):
    parts = [compared(free=free, positions=positions) for free, positions in found]
    assert PolicyFidelity(tuple(parts)).first(greedy=True) == median


def test_the_table_has_a_row_per_policy_and_says_what_it_means():
    whole = [compared(positions=80), compared(policy="lava", seed=0, free=None, positions=80)]
    lines = fidelity_report.table(whole)
    assert lines[0].startswith("policy")
    assert lines[1].startswith("snapkv (capacity=5)  25.0 %")
    assert "0.0000 (0.0000 to 0.0000)" in lines[2]
    assert lines[4].startswith("80 positions of 1 text; 95 % intervals; KL(")
    alone = fidelity_report.table([compared()])
    assert re.split("  +", alone[1])[2] == f"{compared().distance.kl.mean():.4f}"
    assert alone[3].startswith("6 positions of 1 text; no intervals, which need 5 pieces; KL(")
    assert "KL is over the whole vocabulary of 40 tokens" in lines
    few = distributions(random_rows(0), 3), distributions(random_rows(1), 3)
    part = {"full": few[0], "other": few[1], "distance": distance(*few), "whole": False}
    bound = Compared(**{**vars(compared()), **part, "uncompressed": "short_prompt"})
    lines = fidelity_report.table([bound])
    least = 100 * distance(*few).covered.min()
    assert any(line.startswith("KL is a lower bound: 3 tokens") for line in lines)
    assert any(f"which are {least:.1f} % of" in line for line in lines)
    assert "snapkv served a.txt in full: short_prompt" in lines


def test_the_files_hold_every_position_and_every_text(tmp_path):
    parts = [compared("a", positions=10), compared("b", seed=2)]
    paths = fidelity_report.write(parts, tmp_path)
    assert [path.name for path in paths] == [
        f"fidelity.{e}" for e in ("csv", "jsonl", "png", "html")
    ]
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert float(rows[3]["kl"]) == pytest.approx(parts[0].distance.kl[3])
    assert rows[0]["token"] == "<b>"
    found = [json.loads(line) for line in paths[1].read_text().splitlines()]
    assert [each["text"] for each in found] == ["a", "b"]
    assert found[0]["mean_kl"] == pytest.approx(parts[0].distance.kl.mean())
    assert paths[2].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_the_page_draws_both_figures_and_needs_nothing_else(browser, width, dark):
    parts = [compared("a", positions=10), compared("b", seed=2, positions=10)]
    parts += [compared("a", "lava", seed=3, positions=10)]
    page = fidelity_report.page(parts)
    assert "&lt;b&gt;</span>" in page
    assert not re.search(r"\ssrc\s*=|@import|url\(https?:|@@", page)
    assert len(page) < 1_500_000
    browser.open(page, width, dark)
    drawn = browser.run("""return {
        lines: $$("[data-chart]").map((place) => $$("g[aria-label=line] path", place).length),
        top: $$("[data-chart] svg").map((chart) => chart.scale("y").domain[1]),
        wide: document.documentElement.scrollWidth, broken: broken(document),
        policies: $$("#policies span").map((span) => span.lastChild.textContent),
        head: $$("th[scope=col]").length, rows: $$("th[scope=row]").map((th) => th.textContent),
        tokens: $$(".words span").length, other: $$(".words .other").length,
    };""")
    assert browser.problems == []
    assert drawn["lines"] == [2, 2]
    assert drawn["top"][1] == 100
    assert (drawn["wide"], drawn["broken"]) == (width, 0)
    titles = ["snapkv (capacity=5)", "lava (capacity=5)"]
    assert drawn["policies"] == drawn["rows"] == titles
    assert drawn["head"] == 9
    assert drawn["tokens"] == 30
    assert drawn["other"] == sum(int((~part.distance.agree).sum()) for part in parts)


def test_bins_of_positions_are_means_over_all_texts():
    at, means = fidelity_report.by_position([np.arange(16.0), np.full(8, 4.0)])  # 3 bins
    assert at.tolist() == [2, 7, 12.5]
    assert means.tolist() == [(2 + 4) / 2, (5 + 6 + 7 + 8 + 9 + 3 * 4) / 8, 12.5]
    at, means = fidelity_report.by_position([np.full(3, 0.5)] * 20)
    assert (at.tolist(), means.tolist()) == ([0, 1, 2], [0.5] * 3)
    assert fidelity_report.by_position([np.ones(2)])[0].tolist() == [0.5]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--text", "LINES.jsonl"], 'LINES.jsonl:2: error[file]: this line is not {"text": "..."}'),
        (["--text", "/nope"], "no such file"),
        (["--text", "TEXT", "--policy", "lava", "--set", "x.y=1"], "no policy here is called `x`"),
        (["--text", "TEXT", "--policy", "policies/../policies/nope.yaml"], "there is no such file"),
        (["--text", "HALF.jsonl"], "HALF.jsonl:1: error[file]: the text has half of a character"),
        (["--text", "TEXT", "--out", "TEXT"], "this is a file; --out is a folder"),
        (["--text", "TEXT", "--out", "TEXT/below"], "TEXT/below: error[file]: not a directory"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_server_starts(
    capsys, tmp_path, monkeypatch, words, sentence
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(look, "serve", None)
    (tmp_path / "TEXT").write_text("some words\n")
    (tmp_path / "LINES.jsonl").write_text('{"text": "a b c"}\n{"words": 1}\n')
    (tmp_path / "HALF.jsonl").write_text(r'{"text": "a \ud800"}')
    files = ("TEXT", "LINES", "HALF")
    words = [str(tmp_path / word) if word.startswith(files) else word for word in words]
    assert main(["fidelity", "--policy", "snapkv", "--model", "examples/model-tiny", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error.splitlines()[0]


def test_files_that_cannot_be_written_in_the_end_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "fidelity.csv").mkdir()
    looking = contextlib.nullcontext(SimpleNamespace(tokens=None))
    monkeypatch.setattr(fidelity, "opened", lambda args, check: looking)
    monkeypatch.setattr(fidelity, "_compared", lambda *args: [compared()])
    monkeypatch.setattr(fidelity, "_texts", lambda file: [])
    monkeypatch.setattr(fidelity, "_top", lambda *args: 1)
    words = ["--text", "text.txt", "--out", str(tmp_path)]
    assert main(["fidelity", "--policy", "snapkv", *words]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("policy")
    assert said.err == f"{tmp_path}: error[file]: is a directory\n"


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_texts_may_hold_ends_of_lines_of_any_kind(end, tmp_path):
    path, texts = tmp_path / "texts.jsonl", [f"one{end}two", "three"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8")
    named = fidelity._texts(str(path))
    assert list(named) == [(f"{path}:{number}", text) for number, text in enumerate(texts, 1)]


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one"}', encoding="utf-8-sig")
    assert list(fidelity._texts(str(path))) == [(f"{path}:1", "one")]


@pytest.mark.parametrize(
    "words",
    [
        ["--prompt-share", "1"],
        ["--prompt-tokens", "0"],
        ["--top", "x"],
        ["--continuation", "1"],
        ["--continuation", "100001"],
    ],
)
def test_values_that_mean_nothing_are_refused(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(["fidelity", "--policy", "snapkv", "--text", "x", "--model", "m", *words])
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err
