"""The report of a run: tables, pictures and one HTML page, from the files of `kvpolicy eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import refused, why
from kvpolicy.evaluation.reporting import page, plots, results, summary_text
from kvpolicy.evaluation.reporting.summary import Summary, csv_text


def write(folder: Path) -> list[Path]:
    """Writes summary.md, summary.csv, report.html and the pictures; returns their paths.

    Equal inputs give equal files.

    Raises:
        PolicyError: the folder is not one of `kvpolicy eval`, has no answers yet, or cannot be
            written.
    """
    folder = Path(folder)
    return _write(Summary(results.load(folder)), folder)


def _write(summary: Summary, folder: Path) -> list[Path]:
    try:
        paths = _tables(summary, folder)
        return [*paths, *plots.write(summary, folder)]
    except OSError as error:
        message = f"the report cannot be written: {why(error, str(error))}"
        raise refused(str(folder), "file", message) from None


def _tables(summary: Summary, folder: Path) -> list[Path]:
    paths = []
    for name, text in (
        ("summary.md", summary_text.markdown(summary)),
        ("summary.csv", csv_text(summary)),
        ("report.html", page.text(summary)),
    ):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def main(args: argparse.Namespace) -> int:
    """Runs `kvpolicy report`: writes the report, prints the main table and the paths.

    Raises:
        PolicyError: as `write`.
    """
    folder = Path(args.folder)
    summary = Summary(results.load(folder))
    paths = _write(summary, folder)
    print(summary_text.scores(summary))
    for path in paths:
        print(path)
    return 0
