"""report.html: it needs nothing else, holds the run's figures, and its scripts draw them."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.reporting import page, results
from kvpolicy.evaluation.reporting.summary import Summary, Turns

sys.path.insert(0, str(Path(__file__).parent))
import made_run

DOM = Path(__file__).parent / "report_dom.js"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
VOID = {"meta", "input"}


class Page(HTMLParser):
    """Checks that elements close in their order; collects ids, links and the data."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.pieces = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.tags and self.tags[-1][1].get("id") == "data":
            self.pieces.append(text)


def made(folder, names=made_run.NAMES[:3], **options):
    made_run.write(folder, names, **{"samples": 8, **options})
    return Summary(results.load(folder))


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return made(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def text(summary):
    return page.text(summary)


@pytest.fixture(scope="module")
def path(text, tmp_path_factory):
    written = tmp_path_factory.mktemp("page") / "report.html"
    written.write_text(text, encoding="utf-8")
    return written


def run(path, statements):
    """What statements print after the page's scripts have run."""
    done = subprocess.run(
        ["node", DOM, path], input=statements, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_is_one_well_formed_page_without_links_outside(text):
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert text.startswith("<!doctype html>")
    scripts = [attrs for tag, attrs in parsed.tags if tag == "script"]
    assert len(scripts) == len(page.SCRIPTS) + 1
    for tag, attrs in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "onclick"} & attrs.keys()
        assert attrs.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(", text)
    # The one address is the name of SVG; the server's was the run's own.
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg", "http://127.0.0.1:20000"}


def test_every_placeholder_is_filled(text):
    assert "<!--" not in text
    for name in ("kept_map.js", "report.css"):
        assert (page.SOURCES / name).read_text(encoding="utf-8") in text


def test_scripts_cannot_end_their_element():
    for name in page.SCRIPTS:
        assert "</script" not in (page.SOURCES / name).read_text(encoding="utf-8").lower()


def test_data_round_trip(text, summary):
    """Tokens of the maps hold `</script>`."""
    data = json.loads("".join(Page(text).pieces))
    assert data == json.loads(json.dumps(page.page_data(summary)))
    assert data["maps"]["prompts"][0]["tokens"][-1] == "</script>"
    rows = {tuple(row[:4]): row for row in data["rows"]}
    series = summary.results.series.index(("lava", 0.125))
    row = rows[series, 4, 1, 0]  # kv, 1024 tokens, all turns
    own = summary.row(("lava", 0.125), "kv", 1024)
    assert row[6] == pytest.approx(list(own.score), rel=1e-3)
    assert row[8] == pytest.approx(own.kept, rel=1e-3)


def test_words_of_the_plan_are_escaped(tmp_path):
    plan = made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    evil = "</script><script>alert(1)</script><!-- DATA -->"
    plan.update(command=evil, machine=evil, notes=[evil], tasks={"niah": evil})
    plan["policies"][1]["about"] = evil
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    text = page.text(Summary(results.load(tmp_path)))
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
    data = json.loads("".join(Page(text).pieces))
    assert data["tasks"][0]["title"] == evil


def test_header_says_what_was_run(text):
    for words in ("kvpolicy eval --policy all", "examples/model-small", "sglang 0.5.23",
                  "2 cores, Python 3.11", "6 layers, 4 KV heads", "full KV 60 s",
                  "512, 1024"):  # fmt: skip
        assert words in text


def test_size_with_every_policy(tmp_path):
    made_run.write(tmp_path, made_run.NAMES, samples=3, maps=False)
    plan = json.loads((tmp_path / "plan.json").read_text())
    # Long prompts: more maps than the page takes.
    plan["lengths"][0] = 6000
    maps = (json.dumps(m) + "\n" for m in made_run.kept_maps(plan))
    (tmp_path / "kept.jsonl").write_text("".join(maps))
    summary = Summary(results.load(tmp_path))
    data = page.page_data(summary)
    shown = data["maps"]["shown"]
    assert len(shown) + data["maps"]["left_out"] == 2 * 26 * 4
    assert data["maps"]["left_out"] > 0
    # The best policies are among those that are shown.
    best = summary.results.series.index((summary.prominent(1)[0], 0.5))
    assert best in {entry[1] for entry in shown}
    assert len(page.text(summary).encode()) < 3_000_000


def test_fronts_are_those_of_the_figures(summary):
    fronts = page.page_data(summary)["fronts"]
    assert set(fronts) == {"kv_bytes", "ttft", "tpot"}
    scores = [summary.row(s).score.mean for s in summary.results.series]
    sizes = [summary.row(s).kv_bytes for s in summary.results.series]
    best, named = fronts["kv_bytes"]["-1,-1"]
    assert set(named) <= set(best)
    assert best == sorted(best, key=lambda i: sizes[i])
    for i in best:
        assert not any(scores[j] > scores[i] and sizes[j] < sizes[i] for j in range(len(scores)))
    assert best[-1] == summary.results.series.index((FULL, None))


@needs_node
def test_scripts_draw_everything(path, summary):
    drawn = run(path, """
        const texts = (node, name) => node.all(name).map((n) => n.textContent);
        console.log(JSON.stringify({
          hidden: Object.keys(byIds).filter((id) => byIds[id].hidden),
          captions: texts(byIds["accuracy-panels"], "figcaption"),
          series: byIds["accuracy-panels"].children[0].find((n) => n.attributes.tabindex === "0")
            .map((n) => n.attributes["aria-label"]),
          head: texts(byIds.table, "th"), rows: byIds.table.all("tr").length - 1,
          first: texts(byIds.table.all("tr")[1], "td"),
          labels: byIds["pareto-panel"].find((n) => n.attributes.class === "label")
            .map((n) => n.textContent),
          needles: texts(byIds["needle-panels"], "figcaption"),
          turns: texts(byIds["turns-table"], "th"),
          policies: texts(byIds.policies, "label"),
          map: maps[0].title, tokens: maps[0].tokens.length,
          nan: [...byIds["accuracy-panels"].all("path"), ...byIds["pareto-panel"].all("path")]
            .filter((n) => /NaN|undefined|Infinity/.test(n.attributes.d)).length,
        }));""")  # fmt: skip
    assert drawn["hidden"] == []
    assert drawn["nan"] == 0
    assert drawn["captions"][:2] == ["All tasks", "niah: Single needle"]
    assert len(drawn["captions"]) == 1 + len(made_run.TITLES)
    assert len(drawn["series"]) == 3
    assert "lava 50 %: score" in " ".join(drawn["series"])
    assert drawn["rows"] == len(summary.results.series) == 13
    full = summary.row((FULL, None))
    score = " to ".join(f"{100 * value:.0f}" for value in full.score[1:])
    assert drawn["first"][:3] == ["full KV", "-", f"{100 * full.score.mean:.0f} ({score})"]
    assert "full KV" in drawn["labels"]
    assert len(drawn["needles"]) == 4
    assert drawn["turns"][2] == "multiturn: first"
    assert drawn["policies"] == list(made_run.NAMES[:3])
    assert drawn["map"].startswith(summary.prominent(1)[0])
    assert drawn["tokens"] == 512


@needs_node
def test_tables_are_sorted_by_a_click(path, summary):
    drawn = run(path, """
        const column = (i) => byIds.table.all("tr").slice(1).map((r) => r.children[i].textContent);
        const click = (i) => byIds.table.all("th")[i].children[0].fire("click");
        click(2); const down = column(2), focus = document.activeElement.textContent;
        click(2); const up = column(2);
        click(3); const differences = column(3);
        byIds["table-budget"].value = "0.125"; byIds["table-budget"].fire("change");
        const few = column(0);
        byIds.view.value = "scores"; byIds.view.fire("change");
        console.log(JSON.stringify({down, up, focus, differences, few,
          head: byIds.table.all("th").map((n) => n.textContent),
          task: byIds["table-task"].parentNode.hidden}));""")  # fmt: skip
    scores = [summary.row(series).score.mean for series in summary.results.series]
    shown = [f"{100 * score:.0f}" for score in sorted(scores, reverse=True)]
    assert [text.split()[0] for text in drawn["down"]] == shown
    assert [text.split()[0] for text in drawn["up"]] == shown[::-1]
    assert drawn["focus"].startswith("score")
    assert drawn["differences"][-1] == "-"  # full KV has none: last, whichever way
    assert sorted(drawn["few"]) == sorted(["full KV", *made_run.NAMES[:3]])
    assert drawn["head"][2:5] == ["kept", "all tasks", "niah"]
    assert drawn["task"] is True


@needs_node
def test_choices_change_what_is_drawn(path, summary):
    drawn = run(path, """
        const chosen = () => byIds["accuracy-panels"].children[0]
          .find((n) => (n.attributes.class ?? "") === "series chosen").length;
        const box = () => byIds.policies.children[1].children[0];
        const before = chosen();
        box().checked = false; box().fire("change");
        const without = chosen(), needles = byIds["needle-panels"].children.length;
        byIds.none.fire("click"); const none = chosen();
        byIds.every.fire("click"); const every = chosen();
        byIds.length.value = "1"; byIds.length.fire("change");
        const long = byIds.table.all("tr")[1].children[2].textContent;
        byIds.cost.value = "ttft"; byIds.cost.fire("change");
        const axis = byIds["pareto-panel"].find((n) => n.attributes.class === "axis")
          .map((n) => n.textContent);
        byIds.bars.checked = true; byIds.bars.fire("change");
        const point = byIds["accuracy-panels"].find((n) => n.attributes.class === "point")[0];
        point.fire("mouseover");
        const status = byIds["accuracy-status"].textContent;
        byIds["kept-policy"].value = "2"; byIds["kept-policy"].fire("change");
        byIds["kept-budget"].value = "0.06"; byIds["kept-budget"].fire("change");
        console.log(JSON.stringify({before, without, needles, none, every, long, axis, status,
          bars: byIds["accuracy-panels"].className, map: maps.at(-1).title}));""")  # fmt: skip
    assert (drawn["before"], drawn["without"], drawn["none"], drawn["every"]) == (3, 2, 0, 3)
    assert drawn["needles"] == 3  # full KV and two policies
    score = summary.row((FULL, None), None, 1024).score.mean
    assert drawn["long"].split()[0] == f"{100 * score:.0f}"
    assert drawn["axis"] == ["time to first token, ms", "score, %"]
    assert "all-bars" in drawn["bars"]
    assert ": score" in drawn["status"]
    assert drawn["map"] == f"{made_run.NAMES[2]} 6 %"


@needs_node
@pytest.mark.parametrize("case", ["full alone", "no full", "one of all", "interrupted"])
def test_small_runs_are_drawn_too(case, tmp_path):
    names = () if case == "full alone" else made_run.NAMES[:1]
    options = {"tasks": ("vt",), "lengths": (512,), "budgets": (0.25,), "maps": False}
    plan = made_run.write(tmp_path, names, samples=2, **options)
    samples = tmp_path / "samples.jsonl"
    if case == "no full":
        plan["policies"] = plan["policies"][1:]
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        lines = samples.read_text().splitlines(keepends=True)
        samples.write_text("".join(line for line in lines if '"none"' not in line))
    if case == "interrupted":
        samples.write_text(samples.read_text().splitlines(keepends=True)[0])
    path = tmp_path / "report.html"
    path.write_text(page.text(Summary(results.load(tmp_path))))
    drawn = run(path, """console.log(JSON.stringify({
        rows: byIds.table.all("tr").slice(1).map((r) => r.textContent),
        bad: ["accuracy-panels", "pareto-panel"].flatMap((id) => byIds[id].find((n) =>
          Object.values(n.attributes).some((v) => /NaN|undefined|Infinity/.test(v)))).length,
        hidden: Object.keys(byIds).filter((id) => byIds[id].hidden)}));""")  # fmt: skip
    assert drawn["bad"] == 0
    assert len(drawn["rows"]) == (1 if case in ("full alone", "no full") else 2)
    assert {"needle", "turns", "kept", "to-needle", "to-kept"} <= set(drawn["hidden"])
    if case == "interrupted":
        assert "n = 0/2" in drawn["rows"][1]


def test_turns_stand_in_the_order_of_the_scripts():
    text = (page.SOURCES / "report.js").read_text(encoding="utf-8")
    order = ", ".join(f"{turns}: {i}" for i, turns in enumerate(Turns))
    assert f"TURNS = {{ {order} }}" in text
