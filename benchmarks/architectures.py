"""Every architecture of production with every policy it is served with, beside the plain model.

Small checkpoints with random weights, requests of all policies mixed in one real scheduler that
checks its slots after every step; some are aborted, prompts share prefixes, and one entry leaves
for each that comes. Positions that are kept and tokens have to be those of the plain model under
the same policy (`tests/reference`), which computes each request alone. `make test` has six
policies of each architecture.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from tqdm import tqdm

PATIENCE = 900  # seconds for the requests of one architecture
EVERY_STEP = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}
sys.path[:0] = [str(report.ROOT / "tests" / name) for name in ("", "reference", "forks")]

import scenario  # noqa: E402
from architectures import SERVED, config_of, make, served_with  # noqa: E402
from comparison import compare  # noqa: E402

HEADER = (
    "architecture", "class", "policies", "requests", "others' tokens or positions",
    "ties", "aborted", "slots leaked",
)  # fmt: skip


def served(name: str, each: int, folder: Path) -> dict[str, Any]:
    """Facts of one architecture, served with its policies, `each` requests per policy.

    Raises:
        RuntimeError: the server has ended.
    """
    model, methods = make(name, folder / "model"), served_with(name)
    flags = {"methods": methods, "each": each, "pause": 2, "timeout": PATIENCE}
    seen = scenario.run(folder / "out.json", model, EVERY_STEP, **flags)
    different, ties, changed = compare(model, seen["answers"], 1)
    return {
        "class": config_of(name).architectures[0],
        "policies": methods,
        "changed": sorted(changed),
        "requests": len(seen["answers"]),
        "different": different,
        "ties": ties,
        "aborted": seen["aborted"],
        "left": seen["left"],
    }


def row(name: str, found: dict[str, Any]) -> list[object]:
    """Table row of one architecture."""
    figures = (len(found["different"]), found["ties"], found["aborted"], max(found["left"]))
    return [f"`{name}`", f"`{found['class']}`", len(found["policies"]), found["requests"], *figures]


def text(found: dict[str, dict[str, Any]], each: int) -> str:
    """The page."""
    pairs = sum(len(x["policies"]) for x in found.values())
    asked = sum(x["requests"] for x in found.values())
    other = sum(len(x["different"]) for x in found.values())
    unchanged = {x: sorted(set(found[x]["policies"]) - set(found[x]["changed"])) for x in found}
    same = ", ".join(f"{p} of `{x}`" for x, names in unchanged.items() for p in names)
    lines = [
        f"{len(found)} architectures, {pairs} pairs of one and a policy, {each} requests of each "
        f"and three of no policy. Of {asked} answers {other} differ from the plain model's, in the "
        "tokens or in the positions of the prompt that are kept. A tie is a step at which the best "
        "two logits of the plain model lie closer than 0.001 and the server takes the other one; "
        "what follows there is not compared.",
        report.table(HEADER, [row(name, x) for name, x in found.items()]),
        "Answers are those of full KV, for all requests: " + (f"{same}." if same else "none."),
    ]
    return "\n\n".join(lines)


def main() -> None:
    parser = report.saving(__doc__)
    parser.add_argument("--each", type=int, default=2, help="requests of each policy")
    parser.add_argument("architectures", nargs="*", default=list(SERVED), help="all by default")
    options = parser.parse_args()
    found, begun = {}, time.monotonic()
    for name in (shown := tqdm(options.architectures)):
        shown.set_description(name)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = served(name, options.each, Path(folder))
    data = {"seconds": round(time.monotonic() - begun), "architectures": found}
    title = "Every architecture with every policy"
    report.publish("architectures", title, text(found, options.each), data, options.save)
    if any(x["different"] or any(x["left"]) for x in found.values()):
        sys.exit("architectures: answers differ or slots have leaked")


if __name__ == "__main__":
    main()
