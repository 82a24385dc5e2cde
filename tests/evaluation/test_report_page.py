"""report.html: it needs nothing else, holds the run's figures, and its scripts draw them."""

import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.reporting import page, results, summary_text
from kvpolicy.evaluation.reporting.needles import needles
from kvpolicy.evaluation.reporting.summary import Summary, Turns
from kvpolicy.experiments.reporting import offline_page

sys.path.insert(0, str(Path(__file__).parent))
import made_run

VOID = {"meta", "input"}


class Page(HTMLParser):
    """Checks that elements are nested properly; collects ids, tags and the data."""

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


@pytest.fixture
def opened(browser, text):
    """The browser, with the page of `summary` open."""
    browser.open(text)
    assert browser.problems == []
    return browser


def test_is_one_well_formed_page_without_links_outside(text):
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert text.startswith("<!doctype html>")
    scripts = [attrs for tag, attrs in parsed.tags if tag == "script"]
    own = [name for name in page.OWN if name.endswith(".js")]
    assert len(scripts) == len(offline_page.LIBRARY) + len(own) + 2  # with the data
    for tag, attrs in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "onclick"} & attrs.keys()
        assert attrs.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(https?:", text)


def test_every_placeholder_is_filled(text):
    assert not re.search(r"<!-- [A-Z]+ -->", text)
    for name in page.OWN:
        source = (page.SOURCES / name).read_text(encoding="utf-8")
        assert source in text
        assert "</script" not in source.lower()


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


@pytest.mark.thorough
def test_size_with_every_policy(tmp_path):
    # Long prompts: more maps than the page takes.
    plan = made_run.write(tmp_path, made_run.NAMES, lengths=(6000, 1024), samples=3, maps=False)
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


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_scripts_draw_everything(browser, text, summary, width, dark):
    browser.open(text, width, dark)
    drawn = browser.run("""
        const texts = (selector) => $$(selector).map((node) => node.textContent);
        return {
          hidden: $$("[hidden]").map((node) => node.className),
          captions: texts("#accuracy-panels figcaption"),
          curves: $$("#accuracy-panels figure:first-child [tabindex]").map((node) =>
            node.getAttribute("aria-label")),
          charts: $$("#accuracy-panels .chart, #pareto-panel").map((place) =>
            [place.clientWidth, Number($("svg", place).getAttribute("width"))]),
          named: texts("#pareto-panel g[aria-label=text] text"),
          stops: $$("#pareto-panel [tabindex]").length,
          needles: texts("#needle-panels figcaption"),
          cells: $$("#needle-panels figure:first-child rect").length,
          shades: new Set($$("#needle-panels rect").map((cell) => cell.getAttribute("fill"))).size,
          head: texts("#table th"), rows: $$("#table tbody tr").length,
          first: texts("#table tbody tr:first-child td"),
          turns: texts("#turns-table th"),
          policies: $$("#policies label").map((label) => label.lastChild.textContent),
          map: texts("#kept-map h3"), tokens: $$("#kept-map .kept-text span").length,
          broken: broken(document), wide: document.documentElement.scrollWidth,
        };""")  # fmt: skip
    assert browser.problems == []
    # Nothing is chosen on the map, so that it has no heads.
    assert sorted(drawn["hidden"]) == ["kept-cursor", "kept-cursor", "kept-plot", "kept-row",
                                       "kept-row"]  # fmt: skip
    assert drawn["broken"] == 0
    assert drawn["wide"] == width
    assert drawn["captions"][:2] == ["All tasks", "niah: Single needle"]
    assert len(drawn["captions"]) == 1 + len(made_run.TITLES)
    assert len(drawn["curves"]) == 3
    assert "lava 50 %: score" in " ".join(drawn["curves"])
    assert all(wide == drawn for wide, drawn in drawn["charts"])
    full = summary.row((FULL, None))
    assert "full KV" in drawn["named"]
    assert drawn["stops"] == len(summary.results.series)
    assert len(drawn["needles"]) == 4
    heat = needles(summary.results)["niah"].score[FULL, None]
    assert drawn["cells"] == heat.size
    assert drawn["shades"] > 5
    assert drawn["rows"] == len(summary.results.series) == 13
    score = " to ".join(f"{100 * value:.0f}" for value in full.score[1:])
    assert drawn["first"][:3] == ["full KV", "-", f"{100 * full.score.mean:.0f} ({score})"]
    assert drawn["turns"][2] == "multiturn: first"
    assert drawn["policies"] == list(made_run.NAMES[:3])
    assert drawn["map"][0].startswith(summary.prominent(1)[0])
    assert drawn["tokens"] == 512


def test_points_stand_where_their_figures_are(opened, summary):
    """For score against memory, by the scales of the chart."""
    found = opened.run("""
        const chart = $("#pareto-panel svg"), x = chart.scale("x"), y = chart.scale("y");
        return $$("[tabindex]", chart).map((dot) => {
          const { e, f } = dot.transform.baseVal.consolidate().matrix;
          const name = dot.getAttribute("aria-label").split(":")[0];
          return [name, x.invert(e - 0.5), y.invert(f - 0.5)];
        });""")
    rows = [summary.row(series) for series in summary.results.series]
    wanted = {
        page.summary_text.name(row.series): (row.kv_bytes / 2**20, 100 * row.score.mean)
        for row in rows
    }
    assert {name for name, *_ in found} == set(wanted)
    for name, size, score in found:
        assert (size, score) == pytest.approx(wanted[name], rel=0.02, abs=0.5)


def test_a_point_tells_of_itself_and_not_of_its_neighbours(browser, tmp_path):
    summary = made(tmp_path, made_run.NAMES, tasks=("niah",), lengths=(512,), samples=50)
    browser.open(page.text(summary), 400)
    told = browser.run("""
        const chart = $("#pareto-panel svg");
        return $$("[tabindex]", chart).map((stop) => {
          stop.focus();
          return [stop.getAttribute("aria-label"), chart.value.about];
        });""")
    assert len(told) > 6
    assert all(label == about for label, about in told)


def test_a_line_tells_its_figures_and_intervals_to_mouse_and_keyboard(opened, summary):
    told = """
        const chart = $("#accuracy-panels svg");
        return { tip: $("g[aria-label=tip]", chart).textContent,
          bars: $$(".bars", chart).map((bars) => getComputedStyle(bars).visibility),
          focused: document.activeElement.getAttribute("aria-label") };"""
    before = opened.run(told)
    assert (before["tip"], set(before["bars"])) == ("", {"hidden"})
    opened.run('$("#bars").focus()')
    opened.press("Tab")
    keyboard = opened.run(told)
    name = keyboard["focused"].split(" 6 %")[0]
    assert name in made_run.NAMES
    for budget in made_run.BUDGETS:
        row = summary.row((name, budget))
        assert f"{name} {100 * budget:g} %: score {100 * row.score.mean:.0f}" in keyboard["tip"]
    assert sorted(keyboard["bars"]) == ["hidden", "hidden", "visible"]
    opened.press("Tab")
    assert opened.run(told)["focused"].split(" 6 %")[0] != name
    opened.run("document.activeElement.blur()")
    assert opened.run(told)["tip"] == ""
    x, y = opened.run("""
        $("#accuracy-panels").scrollIntoView();
        await drawn();
        const { x, y } = $("#accuracy-panels svg g[aria-label=dot] > *").getBoundingClientRect();
        return [x, y];""")
    opened.point(x + 3, y + 3)
    mouse = opened.run(told)
    assert ": score" in mouse["tip"]
    assert mouse["bars"].count("visible") == 1


def test_tables_are_sorted_by_a_click(opened, summary):
    drawn = opened.run("""
        const column = (i) => $$("#table tbody tr").map((row) => row.children[i].textContent);
        const click = (i) => $$("#table th button")[i].click();
        click(2); const down = column(2), focus = document.activeElement.textContent;
        click(2); const up = column(2);
        click(3); const differences = column(3);
        choose("#table-budget", "0.125");
        const few = column(0);
        choose("#view", "scores");
        return {down, up, focus, differences, few, task: byId("table-task").parentNode.hidden,
          head: $$("#table th").map((node) => node.textContent)};""")  # fmt: skip
    scores = [summary.row(series).score.mean for series in summary.results.series]
    shown = [f"{100 * score:.0f}" for score in sorted(scores, reverse=True)]
    assert [text.split()[0] for text in drawn["down"]] == shown
    assert [text.split()[0] for text in drawn["up"]] == shown[::-1]
    assert drawn["focus"].startswith("score")
    assert drawn["differences"][-1] == "-"  # full KV has none: last, whichever way
    assert sorted(drawn["few"]) == sorted(["full KV", *made_run.NAMES[:3]])
    assert drawn["head"][2:5] == ["kept", "all tasks", "niah"]
    assert drawn["task"] is True


def test_choices_change_what_is_drawn(opened, summary):
    drawn = opened.run("""
        const chosen = () => $$("#accuracy-panels figure:first-child .curve.chosen").length;
        const all = () => $$("#accuracy-panels figure:first-child .curve").length;
        const before = chosen();
        $$("#policies input")[1].click();
        const focused = document.activeElement.parentNode.lastChild.textContent;
        const without = chosen(), needles = $$("#needle-panels figure").length, grey = all();
        byId("none").click(); const none = chosen();
        byId("every").click(); const every = chosen();
        choose("#length", "1");
        const long = $("#table tbody tr").children[2].textContent;
        choose("#cost", "ttft");
        const axis = $$("#pareto-panel g[aria-label$='axis label'] text").map((n) => n.textContent);
        const visible = () => new Set($$("#accuracy-panels .bars.chosen").map((bars) =>
          getComputedStyle(bars).visibility));
        const hidden = [...visible()];
        byId("bars").click();
        const bars = [...visible()];
        choose("#kept-policy", "2");
        choose("#kept-budget", "0.06");
        return {before, without, needles, none, every, long, axis, hidden, bars, focused, grey,
          map: $("#kept-map h3").textContent, broken: broken(document)};""")  # fmt: skip
    assert opened.problems == []
    assert (drawn["before"], drawn["without"], drawn["none"], drawn["every"]) == (3, 2, 0, 3)
    assert drawn["grey"] == 3
    assert drawn["focused"] == made_run.NAMES[1]
    assert drawn["needles"] == 3  # full KV and two policies
    score = summary.row((FULL, None), None, 1024).score.mean
    assert drawn["long"].split()[0] == f"{100 * score:.0f}"
    assert sorted(drawn["axis"]) == ["score, %", "time to first token, ms"]
    assert (drawn["hidden"], drawn["bars"]) == (["hidden"], ["visible"])
    assert drawn["map"] == f"{made_run.NAMES[2]} 6 %"
    assert drawn["broken"] == 0


def test_names_on_the_front_do_not_meet(browser, tmp_path):
    browser.open(page.text(made(tmp_path, made_run.NAMES, tasks=("niah",), lengths=(512,))), 400)
    for cost in ("kv_bytes", "ttft", "tpot"):
        boxes = browser.run(f"""
            choose("#cost", "{cost}");
            return $$("#pareto-panel g[aria-label=text] text").map((node) => {{
              const {{ left, right, top, bottom }} = node.getBoundingClientRect();
              return [left, right, top, bottom];
            }});""")
        assert boxes
        for (left, right, top, bottom), other in itertools.combinations(boxes, 2):
            apart = left >= other[1] - 1 or right <= other[0] + 1
            assert apart or top >= other[3] - 3 or bottom <= other[2] + 3
        assert all(0 <= left < right <= 400 for left, right, _, _ in boxes)


def test_a_printed_page_is_light_and_whole(browser, text):
    browser.open(text, dark=True, media="print")
    assert browser.run("""return {
        paper: getComputedStyle(document.body).backgroundColor,
        cut: $$(".wide").filter((box) => box.scrollHeight > box.clientHeight + 1).length,
        shown: ["nav", ".bar", "#best"].filter((each) => $(each).offsetHeight).length,
    };""") == {"paper": "rgb(255, 255, 255)", "cut": 0, "shown": 0}  # fmt: skip


@pytest.mark.parametrize("case", ["full alone", "no full", "one of all", "interrupted"])
def test_small_runs_are_drawn_too(browser, case, tmp_path):
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
    browser.open(page.text(Summary(results.load(tmp_path))))
    drawn = browser.run("""return {
        rows: $$("#table tbody tr").map((row) => row.textContent), broken: broken(document),
        charts: $$("#accuracy-panels svg, #pareto-panel svg").length,
        about: byId("summary-about").textContent,
        hidden: $$("[hidden]").map((node) => node.id)};""")  # fmt: skip
    assert browser.problems == []
    assert drawn["broken"] == 0
    assert drawn["charts"] == 2
    assert drawn["about"].endswith("2 samples per task and length: few, so the intervals are wide.")
    assert len(drawn["rows"]) == (1 if case in ("full alone", "no full") else 2)
    assert {"needle", "turns", "kept", "to-needle", "to-kept"} <= set(drawn["hidden"])
    if case == "interrupted":
        assert "n = 0/2" in drawn["rows"][1]


def test_figures_are_rounded_as_in_the_summary(opened):
    shares = [each / 4000 for each in range(-140, 141)] + [0.145, 0.625, 1 / 3]
    drawn = opened.run(f"""return {json.dumps(shares)}.map((share) =>
        [points(share), differenceText({{ difference: [share, share, share] }}).split(" ")[0],
         `${{rounded(share)}}`]);""")
    for share, shown in zip(shares, drawn, strict=True):
        signed = summary_text.signed((share, share, share)).strip("*").split(" ")[0]
        assert shown == [signed, signed, str(summary_text.rounded(share))]


def test_the_page_says_how_many_samples_a_file_has(tmp_path):
    plan = made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), lengths=(512,))
    plan["questions"] = {"niah": {"512": [12, 12]}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    summary = Summary(results.load(tmp_path))
    data = page.page_data(summary)
    assert (data["samples"], data["few"]) == ("12", True)
    assert "<dd>12 samples of each task and length, seed 0</dd>" in page.text(summary)


def test_turns_stand_in_the_order_of_the_scripts():
    text = (page.SOURCES / "report.js").read_text(encoding="utf-8")
    order = ", ".join(f"{turns}: {i}" for i, turns in enumerate(Turns))
    assert f"TURNS = {{ {order} }}" in text
