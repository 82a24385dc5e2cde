"""Every figure of a GPU in one command: sections with limits of their own, one page of verdicts.

    python benchmarks/gpu_report.py --out DIR                     within an hour
    python benchmarks/gpu_report.py --out DIR --budget 560        in ten minutes, and what is left:
    python benchmarks/gpu_report.py --out DIR --budget 560 --resume
    python benchmarks/gpu_report.py --out DIR --sections smoke,targets --models qwen3-8b
    python benchmarks/gpu_report.py --out DIR --toy               small sizes on a CPU, no verdict

Each section is a process group that is stopped at its limit; one that fails does not stop the
others, and its last lines are kept. DIR/report.json and DIR/report.md are written while a section
runs and after each, pictures beside them: eight files at most. --resume keeps what is done in DIR
and runs the rest. The exit status is that of sections, not of goals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import checkout  # noqa: F401
import report
from gpu import cache, limited
from gpu.goals import judged
from gpu.page import text
from gpu.pictures import draw_all
from gpu.sections import CACHE, SECTIONS, Section, Setting, entries
from kvpolicy.evaluation.serving import has_gpu

HOUR = 3600.0
KEPT_FOR_CACHE = 20.0


class Report:
    """Facts found so far, kept in DIR."""

    def __init__(self, folder: Path, setting: Setting, resume: bool) -> None:
        self.folder, self.setting = folder, setting
        path = folder / "report.json"
        self.facts: dict = {"toy": setting.toy, "sections": {}, "left_out": []}
        if resume and path.exists():
            self.facts = json.loads(path.read_text(encoding="utf-8"))
            if self.facts["toy"] != setting.toy:
                raise SystemExit(f"gpu_report: {path} is of a run with other sizes: --toy differs")
        self.facts |= {"command": report.command(), "left_out": []}

    def done(self, key: str) -> bool:
        """Whether a section has ended without a failure."""
        return self.facts["sections"].get(key, {}).get("state") == "done"

    def save(self, *, pictures: bool = False) -> None:
        """Write report.json and report.md, and pictures if asked for."""
        if pictures:
            self.facts["pictures"] = draw_all(self.facts, self.folder)
        self.facts["goals"] = judged(self.facts)
        report.write_json(self.folder / "report.json", self.facts)
        (self.folder / "report.md").write_text(text(self.facts) + "\n", encoding="utf-8")


def run_section(
    page: Report, key: str, section: Section, model: str | None, seconds: float
) -> dict:
    """Run the steps of a section; the report shows their results while they run."""
    started = time.monotonic()
    facts: dict = {"state": "running", "what": section.what, "model": model, "limit": seconds}
    facts |= {"version": version(), "steps": {}, "results": {}}
    page.facts["sections"][key] = facts
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        out = Path(folder)

        def look() -> None:
            for path in sorted(out.glob("*.json")):
                with contextlib.suppress(ValueError):
                    facts["results"][path.stem] = json.loads(path.read_text(encoding="utf-8"))
            page.save()

        for name, words in section.steps(page.setting, model, seconds, out).items():
            left = seconds - (time.monotonic() - started)
            ended = limited.run(words, max(left, 1.0), out / f"{name}.log", look)
            facts["steps"][name] = ended
            look()
    bad = [step["state"] for step in facts["steps"].values() if step["state"] != "done"]
    facts |= {"state": bad[0] if bad else "done", "seconds": time.monotonic() - started}
    return facts


def version() -> str:
    """Git's description of the measured code, or `unknown`."""
    words = ["git", "-C", str(report.ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        found = subprocess.run(words, capture_output=True, text=True)
        return found.stdout.strip() or "unknown"
    return "unknown"


def run(options: argparse.Namespace) -> Report:
    """Run all chosen sections for which there is time."""
    until = time.monotonic() + options.budget
    models = tuple(options.models.split(","))
    setting = Setting(options.toy, models, options.server_args, options.together)
    options.out.mkdir(parents=True, exist_ok=True)
    page = Report(options.out, setting, options.resume)
    chosen = options.sections.split(",")
    caching = CACHE in chosen and not options.toy
    if caching:
        _tried(cache.restore, options.out / "cache.tar.gz")
        until -= KEPT_FOR_CACHE
    # Sections tried in an earlier run come last, so that they take no time from the others.
    tried = set(page.facts["sections"])
    for key, section, model in sorted(entries(setting, chosen), key=lambda each: each[0] in tried):
        left = until - time.monotonic()
        if options.resume and page.done(key):
            print(f"{key}: done before", file=sys.stderr)
            continue
        if left < section.seconds / 2:
            page.facts["left_out"].append(key)
            continue
        print(f"{key}: {section.what}, at most {section.seconds:.0f} s", file=sys.stderr)
        ended = run_section(page, key, section, model, min(section.seconds, left))
        page.save(pictures=True)
        print(f"{key}: {ended['state']} after {ended['seconds']:.0f} s", file=sys.stderr)
    if caching:
        _tried(cache.keep, options.out / "cache.tar.gz")
    page.save(pictures=True)
    return page


def _tried(use: Callable[[Path], None], archive: Path) -> None:
    """Use the archive of compiled kernels; errors are printed, as no section needs it."""
    try:
        use(archive)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        print(f"{archive}: {type(error).__name__}: {error}; it is not used", file=sys.stderr)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [*SECTIONS, CACHE]
    parser.add_argument("--budget", type=float, default=HOUR, metavar="SECONDS", help="for all")
    parser.add_argument("--sections", default=",".join(names), help="some of the default")
    parser.add_argument("--out", type=Path, default=report.PERFORMANCE / "gpu", metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="keep what is done in DIR")
    parser.add_argument(
        "--models", default="llama-3.1-8b,qwen3-8b",
        help="configurations with random weights, or checkpoints' folders",
    )  # fmt: skip
    parser.add_argument("--server-args", default="", help="further options of every server")
    parser.add_argument(
        "--together", action="store_true",
        help="servers that are compared start at once; the GPU has to hold them all",
    )  # fmt: skip
    parser.add_argument("--toy", action="store_true", help="small sizes on a CPU, no verdict")
    options = parser.parse_args(words)
    if unknown := set(options.sections.split(",")) - set(names):
        parser.error(f"--sections: there is {', '.join(names)}, not {', '.join(sorted(unknown))}")
    if options.toy:
        options.models = "model-tiny"
    elif not has_gpu():
        parser.error("there is no GPU; --toy runs small sizes without one")
    return options


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    # As Ctrl-C: the running section is stopped, and results so far stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_report: asked to end"))
    page = run(options)
    print(text(page.facts))
    bad = [key for key, each in page.facts["sections"].items() if each["state"] != "done"]
    if bad or page.facts["left_out"]:
        also = f"; for want of time: {', '.join(page.facts['left_out']) or 'nothing'}"
        raise SystemExit(f"gpu_report: not done: {', '.join(bad) or 'nothing'}{also}")


if __name__ == "__main__":
    main()
