"""The page of an experiment: it is self-contained, begins with the verdict, draws its charts."""

import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kvpolicy.experiments.fleet.overview import Overview, ReplicaAnswer
from kvpolicy.experiments.reporting import offline_page
from kvpolicy.experiments.reporting import page as report
from kvpolicy.experiments.reporting.charts import change, charts
from kvpolicy.experiments.reporting.html_table import table

sys.path.insert(0, str(Path(__file__).parent))
from made_experiment import SWITCHBACK, TEXT, THREE, Made, made

VOID = {"meta"}
SECTIONS = ["sample-ratio", "guardrails", "memory", "time", "drift", "worst", "shadow", "changes",
            "file"]  # fmt: skip


class Page(HTMLParser):
    """Checks that elements are nested properly; collects tags, ids, tables and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.tables, self.words = [], [], [], {}, []
        self.cell = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.row = []
        if tag in ("th", "td", "caption"):
            self.cell = ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self.rows = self.tables[self.cell] = []
        if tag in ("th", "td"):
            self.row.append(self.cell)
        if tag == "tr":
            self.rows.append(self.row)

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def said(self):
        return " ".join("".join(self.words).split())


def overview(*replicas):
    return Overview(
        [ReplicaAnswer(f"replica {i}", each.document()) for i, each in enumerate(replicas)]
    )


def aborted():
    replica = made(1500, THREE, drift={"lava-25": 0.012, "sinks-6": 0.47})
    replica.lifecycle.abort("guardrail drift of arm sinks-6 is breached")
    return replica


def rolled_back():
    replica = made(3000, THREE, drift={"lava-25": 0.012, "sinks-6": 0.47})
    replica.lifecycle.roll_back("sinks-6", "drift is 0.47")
    replica.analysis.retire("sinks-6")
    return replica


KINDS = {
    "empty": lambda: [Made()],
    "open": lambda: [made(500)],
    "cleared": lambda: [made(5000)],
    "aborted": lambda: [aborted()],
    "rolled back": lambda: [rolled_back()],
    "disagreeing": lambda: [aborted(), made(200, THREE)],
    "switchback": lambda: [made(9000, SWITCHBACK)],
    "no shadow": lambda: [made(300, NO_SHADOW)],
}
NO_SHADOW = re.sub(r"shadow: .*\n|  - \{metric: (drift|top1).*\n", "", TEXT)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def seen(kind):
    return overview(*KINDS[kind]())


@pytest.fixture(scope="module")
def text(seen):
    return report.page(seen)


def test_is_one_well_formed_page_that_needs_nothing_else(text):
    parsed = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_500_000
    assert len(parsed.ids) == len(set(parsed.ids))
    assert [i for i in parsed.ids if i in SECTIONS] == SECTIONS
    for tag, attrs in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "onclick"} & attrs.keys()
        assert attrs.get("href", "#").removeprefix("#") in ("", *parsed.ids)
        assert attrs.get("aria-labelledby", parsed.ids[0]) in parsed.ids
    assert not re.search(r"@import|url\(https?:", text)
    assert not re.search(r"<!-- [A-Z]+ -->", text)


def test_nothing_is_left_to_say(text):
    said = Page(text).said
    assert not re.search(r"\b(nan|None|inf|undefined)\b", said)
    assert "`" not in said


def test_the_verdict_stands_first(text, seen):
    said = Page(text).said
    sentence = report.headline(seen).sentence.replace("`", "")
    place = said.index(sentence)
    assert place < said.index("Sample ratio")
    for warning in seen.warnings:
        assert place < said.index(warning.replace("`", "")) < said.index("Sample ratio")


def test_what_scrolls_can_be_reached_by_keyboard_and_has_a_name(text):
    parsed = Page(text)
    named = [attrs["aria-label"] for _, attrs in parsed.tags if attrs.get("role") == "region"]
    assert len(named) == len(set(named)) > 3
    for tag, attrs in parsed.tags:
        if attrs.get("class") == "wide" or tag == "pre":
            assert attrs["tabindex"] == "0"
            assert attrs["role"] == "region"
        if attrs.get("role") == "img":
            assert attrs["aria-label"].endswith("; the table has the figures")
    heads = [attrs for tag, attrs in parsed.tags if tag == "th"]
    assert all(attrs["scope"] in ("col", "row") for attrs in heads)


def test_figures_of_the_tables(text, seen, kind):
    tables = Page(text).tables
    head, *rows = tables["KV memory by arm"]
    assert head == ["Arm", "Policy", "Of full KV", "Bytes per prompt token"]
    assert [row[0] for row in rows] == [row.arm for row in seen.rows]
    if kind != "empty":
        assert rows[1][2:] == ["50 %", "512"]
    head, *rows = tables["Guardrails"]
    assert len(rows) == len(seen.guardrails)
    for row, verdict in zip(rows, seen.guardrails, strict=True):
        assert row[1:3] == [verdict.arm, f"{verdict.samples:,}"]
        assert row[-1].startswith(verdict.outcome)
    if kind == "switchback":
        assert "Distinct keys by stage and arm" not in tables
    else:
        _, *rows = tables["Distinct keys by stage and arm"]
        assert [row[0] for row in rows] == ["assigned", "finished", "shadowed"]
        assert {row[-1] for row in rows} == {"as wanted"}


def test_times_are_compared_only_where_that_is_causal(text, kind):
    said = Page(text).said
    assert ("Not causal. Arms of one server share its batches" in said) == (kind != "switchback")
    assert ("Times compared" in Page(text).tables) == (kind == "switchback")
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    for name in {"ttft_seconds", "e2e_seconds"} & set(drawn):
        labels = " ".join(row["label"] for row in drawn[name]["rows"])
        assert drawn[name]["aside"] == (kind != "switchback")
        assert ("control" in labels.replace("control:", "")) == (kind == "switchback")


DRAWN = """
return Object.fromEntries($$("[data-chart]").map((place) => {
  const chart = $("svg", place), { domain, range } = chart.scale("x");
  const at = (node, name) => Number(node.getAttribute(name));
  const marks = (name, shape) => $$(`g[aria-label="${name}"] > ${shape}`, chart);
  const bars = marks("rule", "line").flatMap((line) => [at(line, "x1"), at(line, "x2")]);
  const texts = marks("text", "text");
  return [place.dataset.chart, {
    width: at(chart, "width"), wide: place.clientWidth, hidden: chart.getAttribute("aria-hidden"),
    domain, outside: bars.filter((x) => x < range[0] - 1 || x > range[1] + 1).length,
    signs: $$('g[aria-label="dot"] > *', chart)
      .map((dot) => [dot.getAttribute("d"), dot.getAttribute("fill")]),
    arrows: texts.map((text) => text.textContent).filter((text) => text === "\u25b6").length,
    labels: texts.map((text) => text.textContent),
    bad: broken(place),
  }];
}));"""


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1200, False)])
def test_scripts_draw_every_chart(browser, text, seen, kind, width, dark):
    browser.open(text, width, dark)
    drawn = browser.run(DRAWN)
    assert browser.problems == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    made = charts(seen)
    assert set(drawn) == set(made)
    for name, chart in drawn.items():
        low, high = chart["domain"]
        assert low < high
        assert (chart["outside"], chart["bad"], chart["hidden"]) == (0, 0, "true"), name
        assert chart["width"] == chart["wide"] <= width
        for row in made[name]["rows"]:
            assert row["label"] in chart["labels"]
    if kind == "aborted":
        shapes, colours = zip(*drawn["drift"]["signs"], strict=True)
        assert len(set(shapes)) == 3
        assert colours == ("var(--aside)", "var(--good)", "var(--bad)")
        assert drawn["guardrails"]["arrows"] == 2  # drift and top1_disagreement of sinks-6


def test_charts_follow_the_width_of_the_page(browser):
    browser.open(report.page(overview(made(500))), 1200)
    before, after, wide = browser.run("""
        const width = () => Number($("[data-chart] svg").getAttribute("width"));
        const before = width();
        document.body.style.maxWidth = "600px";
        await drawn();
        return [before, width(), $("[data-chart]").clientWidth];""")
    assert after == wide < before


def test_worst_requests_name_their_replica():
    parsed = Page(report.page(overview(made(100), made(100, seed=1))))
    head, *rows = parsed.tables["Worst requests"]
    assert head == ["Number", "Replica", "Arm", "Drift, nats", "Tokens"]
    assert len(rows) == 20
    drifts = [float(row[3]) for row in rows]
    assert drifts == sorted(drifts, reverse=True)
    assert {row[1] for row in rows} == {"replica 0", "replica 1"}


def test_the_log_of_changes():
    replica = made(10)
    replica.lifecycle.pause()
    replica.lifecycle.promote("lava-25", "it does well")
    parsed = Page(report.page(overview(replica)))
    assert [row[1] for row in parsed.tables["Changes of the experiment"][1:]] == [
        f"revision {replica.lifecycle.experiment.revision} begins",
        "paused",
        "promoted (lava-25): it does well",
    ]
    assert "Promoted: arm lava-25 serves every request with lava@0.25" in parsed.said


def test_words_of_others_are_escaped():
    evil = "</script><script>alert(1)</script><!-- DATA -->`<b>`"
    replica = made(50)
    replica.reload = {"success": False, "problem": evil}
    replica.lifecycle.abort(evil)
    found = Overview([ReplicaAnswer(evil, replica.document())])
    text = report.page(found)
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 3
    assert len(re.findall("<script", text)) == len(offline_page.LIBRARY) + 3
    Page(text)


def test_vendored_files_are_those_that_are_recorded():
    recorded = (offline_page.SOURCES / "vendored.txt").read_text(encoding="utf-8")
    text = report.page(overview(Made()))
    for name, licence in offline_page.LIBRARY.items():
        content = (offline_page.SOURCES / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        line = next(line for line in recorded.splitlines() if line.startswith(f"{name} "))
        assert line.split()[-1] == digest
        assert licence in line
        version = line.split()[2]
        assert f"v{version} " in content.decode()[:80]
        assert version in Page(text).said
        terms = (offline_page.SOURCES / licence).read_text(encoding="utf-8")
        assert "permission notice appear in all copies" in terms
        assert terms in text
        assert b"</script" not in content.lower()


def test_a_table_escapes_and_has_heads():
    text = table("A <b>", ["Name ", "N"], [["x & y", "1"]])
    parsed = Page(text)
    assert parsed.tables == {"A <b>": [["Name", "N"], ["x & y", "1"]]}
    assert '<th scope="row" class="text">x &amp; y</th><td>1</td>' in text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.5, "50 % less than control"), (1.2, "20 % more than control"), (1.0001, "as control")],
)
def test_changes_in_words(ratio, text):
    assert change(ratio) == text
