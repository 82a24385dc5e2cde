"""One page about an experiment that needs nothing else: the verdict first."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from pathlib import Path

from kvpolicy.experiments.headline import headline
from kvpolicy.experiments.offline_page import filled, inline_json
from kvpolicy.experiments.overview import Overview
from kvpolicy.experiments.report_charts import charts
from kvpolicy.experiments.report_sections import Section, facts, prose, sections

SOURCES = Path(__file__).parent / "pages"
VENDORED = {"d3.min.js": "d3.LICENSE.txt", "plot.min.js": "plot.LICENSE.txt"}


def page(overview: Overview) -> str:
    """The page as HTML."""
    drawn = charts(overview)
    parts = sections(overview, drawn)
    named = {
        "TITLE": html.escape(f"Experiment {overview.experiment.name} - kvpolicy"),
        "STYLE": _source("experiment.css"),
        "HEADER": _header(overview),
        "NAV": "\n".join(f'<a href="#{part.id}">{html.escape(part.title)}</a>' for part in parts),
        "SECTIONS": "\n\n".join(map(_section, parts)),
        "DATA": inline_json(drawn),
        "SCRIPTS": _scripts(),
    }
    return filled(_source("experiment.html"), named)


def _source(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


def _scripts() -> str:
    vendored = [f"/*\n{_source(licence)}*/\n{_source(name)}" for name, licence in VENDORED.items()]
    return "\n".join(f"<script>\n{text}</script>" for text in [*vendored, _source("experiment.js")])


def _section(part: Section) -> str:
    title = f"{part.id}-title"
    return (
        f'<section id="{part.id}" aria-labelledby="{title}">\n'
        f'<h2 id="{title}">{html.escape(part.title)}</h2>\n{part.body}\n</section>'
    )


def _header(overview: Overview) -> str:
    tone, sentence = headline(overview)
    state = "replicas differ" if overview.state is None else overview.state.value
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    items = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in [*facts(overview), ("Page written", written)]
    )
    return (
        f"<h1>Experiment {html.escape(overview.experiment.name)}</h1>\n"
        f'<div class="verdict {tone}"><strong>{html.escape(state)}</strong>'
        f"<p>{prose(sentence)}</p></div>\n{_warnings(overview)}<dl>{items}</dl>"
    )


def _warnings(overview: Overview) -> str:
    if not overview.warnings:
        return ""
    items = "".join(f"<li>{prose(warning)}</li>" for warning in overview.warnings)
    return f'<div class="warnings" role="note" aria-label="Warnings"><ul>{items}</ul></div>\n'
