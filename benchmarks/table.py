"""The tables of methods in README.md and docs/methods.md, from the committed results.

Prints the longer one, or with --write puts both in.

What a method decides and what its policy was compared with stand here; lines are counted, figures
come from docs/results/methods.json and quality.json; those of policies that were added since the
last complete run from methods_added.json and quality_added.json. Times of such a run stand in
brackets: they are not from the run that the other times are from.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

import report

HEADER = (
    "policy",
    "paper or code",
    "decides",
    "lines",
    "compared with",
    "held, %",
    "prefill",
    "decode step",
    "score, %",
)
WHOLE = report.ROOT / "docs" / "methods.md"
FILES = {
    report.ROOT / "README.md": ("policy", "paper or code", "decides", "held, %", "score, %"),
    WHOLE: HEADER,
}
SHARE = 0.125  # share of the prompt kept, for the last column


class Method(NamedTuple):
    """A shipped policy in words."""

    name: str
    source: str  # Markdown
    decides: str
    compared: str


def arxiv(title: str, number: str) -> str:
    """A link to a paper."""
    return f"[{title}](https://arxiv.org/abs/{number})"


def github(title: str, path: str) -> str:
    """A link to a repository."""
    return f"[{title}](https://github.com/{path})"


_CODE = "authors' code"
_EAGER = "eager model only"
_ADAKV, _FASTKV = arxiv("AdaKV", "2407.11550"), arxiv("FastKV", "2502.01068")
_STREAMING = arxiv("StreamingLLM", "2309.17453")
_SIMLAYER, _D2O = arxiv("SimLayerKV", "2410.13846"), arxiv("D2O", "2406.13035")
_VATP, _CAM = arxiv("VATP", "2406.12335"), github("CaM", "zyxxmu/cam")
_ASL, _LAVA = arxiv("ASL", "2601.07667"), arxiv("LAVa", "2509.09754")

METHODS = (
    Method("snapkv", arxiv("SnapKV", "2404.14469"), "entries by head", f"{_CODE}, kvpress"),
    Method("chunkkv", arxiv("ChunkKV", "2502.00299"), "whole chunks", "the formula, by hand"),
    Method("adakv", _ADAKV, "entries, heads compete", _CODE),
    Method("pyramidkv", arxiv("PyramidKV", "2406.02069"), "a budget for each layer", _CODE),
    Method("ada-pyramidkv", _ADAKV, "both of the above", _CODE),
    Method("lava", _LAVA, "layers and heads share one budget", f"{_CODE}, paper"),
    Method(
        "dynamickv", arxiv("DynamicKV", "2412.14838"), "layers compete", "a reading of the code"
    ),
    Method("cake", arxiv("CAKE", "2503.12491"), "a budget for each layer; decode", _CODE),
    Method("fastkv", _FASTKV, "tokens that go deeper; entries", _CODE),
    Method("fastkv-adakv", f"{_FASTKV} + {_ADAKV}", "the same, heads compete", _EAGER),
    Method("asl", _ASL, "the layer after which few tokens go deeper", f"{_CODE}, by hand"),
    Method("gemfilter", arxiv("GemFilter", "2409.17422"), "tokens of a second prefill", _CODE),
    Method(
        "pyramidinfer", arxiv("PyramidInfer", "2405.12532"), "fewer tokens at each layer", _CODE
    ),
    Method("streamingllm", _STREAMING, "sinks and a window, slot positions", f"{_CODE}, kvpress"),
    Method("streamingllm-original", _STREAMING, "the same, original positions", _CODE),
    Method("sinks-recent", _STREAMING, "the same, the prompt once", "kvpress"),
    Method("h2o", arxiv("H2O", "2306.14048"), "heavy hitters at every fold", f"{_CODE}, kvpress"),
    Method("vatp", _VATP, "the same, weighed by values", _CODE),
    Method("vatp-snapkv", _VATP, "SnapKV, weighed by values", "the formula, by hand"),
    Method("tova", arxiv("TOVA", "2401.06104"), "what the newest token sees", f"{_CODE}, kvpress"),
    Method(
        "keydiff", arxiv("KeyDiff", "2504.15364"), "keys unlike the others", "the formula, by hand"
    ),
    Method("roco", arxiv("RoCo", "2402.06262"), "which generated entries leave", _CODE),
    Method("simlayerkv", _SIMLAYER, "lazy layers, at the first new token", _CODE),
    Method("simlayerkv-prefill", _SIMLAYER, "lazy layers, at prefill end", f"{_CODE}, kvpress"),
    Method("d2o", _D2O, "layer budgets; dropped entries merge", "paper"),
    Method("d2o-code", github("D2O", "AIoT-MLSys-Lab/d2o"), "the same, as in the code", _CODE),
    Method("cam", _CAM, "values merge into successors", _CODE),
    Method("cam-original", _CAM, "the same, original positions", _CODE),
    Method(
        "minicache",
        arxiv("MiniCache", "2405.14366"),
        "two layers share directions",
        "paper, others' code",
    ),
    Method("asl-lava-d2o", f"{_ASL} + {_LAVA} + {_D2O}", "propagation, budgets, merging", _EAGER),
)


def results(name: str) -> dict:
    """Content of docs/results/NAME.json; empty if the file does not exist."""
    path = report.RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def scores(name: str) -> dict[str, float]:
    """Mean score over tasks by policy, at SHARE or, for policies without a budget, as they are."""
    whole = {"task": "all", "length": "all", "turns": "all"}
    rows = results(name).get("rows", {}).get("table", [])
    rows = [r for r in rows if whole.items() <= r.items()]
    return {r["policy"]: r["score"] for r in rows if r["budget"] in (None, SHARE)}


def cells(method: Method, measured: dict, added: dict, score: float, root: str) -> dict[str, str]:
    """Cells of a method by column; `root` leads from the table's file to the project."""
    path = f"policies/{method.name}.yaml"
    lines = len((report.ROOT / path).read_text(encoding="utf-8").splitlines())
    mine = measured.get(method.name) or added[method.name]
    time = "{:.2f}" if method.name in measured else "({:.2f})"
    held = f"{100 * sum(mine['held']) / len(mine['held']):.0f}"
    times = [time.format(median(mine[each])) for each in ("prefill", "decode")]
    first = [f"[{method.name}]({root}{path})", method.source, method.decides, str(lines)]
    all_of_it = [*first, method.compared, held, *times, f"{100 * score:.0f}"]
    return dict(zip(HEADER, all_of_it, strict=True))


def table(file: Path) -> str:
    """The table of a file in Markdown."""
    measured, added = results("methods"), results("methods_added")
    found = {**scores("quality_added"), **scores("quality")}
    root = "../" * len(file.relative_to(report.ROOT).parts[1:])
    columns = FILES[file]
    rows = [cells(method, measured, added, found[method.name], root) for method in METHODS]
    return report.table(columns, [[row[name] for name in columns] for row in rows])


def written(file: Path) -> str:
    """A file's text with its table replaced by one of today's results."""
    text = file.read_text(encoding="utf-8")
    start = text.index("| policy | paper or code |")
    end = text.index("\n\n", start)
    return text[:start] + table(file) + text[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="put both into their files")
    if parser.parse_args().write:
        for file in FILES:
            file.write_text(written(file), encoding="utf-8")
    else:
        print(table(WHOLE))


if __name__ == "__main__":
    main()
