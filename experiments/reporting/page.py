"""One page about an experiment, with the verdict first; it needs no network."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from pathlib import Path

from kvpolicy.experiments.fleet.overview import Overview
from kvpolicy.experiments.reporting import offline_page
from kvpolicy.experiments.reporting.charts import charts
from kvpolicy.experiments.reporting.headline import headline
from kvpolicy.experiments.reporting.sections import Section, facts, prose, sections

SOURCES = Path(__file__).parent / "pages"


def page(overview: Overview) -> str:
    """The page as HTML."""
    drawn = charts(overview)
    parts = sections(overview, drawn)
    named = {
        "HEADER": _header(overview),
        "NAV": "\n".join(f'<a href="#{part.id}">{html.escape(part.title)}</a>' for part in parts),
        "SECTIONS": "\n\n".join(map(_section, parts)),
    }
    body = offline_page.filled((SOURCES / "experiment.html").read_text("utf-8"), named)
    styles_and_scripts = [SOURCES / "experiment.css", SOURCES / "experiment.js"]
    title = f"Experiment {overview.experiment.name} - kvpolicy"
    return offline_page.page(title, body, drawn, styles_and_scripts)


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
    notes = "".join(f"<p>{prose(note)}</p>\n" for note in overview.notes)
    if not overview.warnings:
        return notes
    items = "".join(f"<li>{prose(warning)}</li>" for warning in overview.warnings)
    return (
        f'<div class="warnings" role="note" aria-label="Warnings"><ul>{items}</ul></div>\n{notes}'
    )
