"""Every shipped method beside stock SGLang: entries held, time of the prefill and of a decode step.

Both servers run in this run and take turns, request by request. `held` is what a request holds
after its last token, as a share of what stock SGLang holds then; the times are ratios to stock.
What a run of some policies alone (`--policies`) saves lies beside the complete one, as
methods_added.md and .json.
"""

from __future__ import annotations

import numpy as np
import report
from cost import batch, times
from kvpolicy.evaluation.asking.facts import held, lists_of
from kvpolicy.evaluation.serving import Server, serve
from shipped import settings
from tqdm import tqdm

HEADER = (
    "policy",
    "settings",
    "held, %",
    "prefill / stock",
    "decode step / stock",
    "folds",
)


def compare(stock: Server, ours: Server, policy: str, options) -> dict[str, list[float]]:
    """Ratios to stock and shares held; servers take turns, and the first turn warms up."""
    rng = np.random.default_rng(options.seed)
    result: dict[str, list[float]] = {"prefill": [], "decode": [], "held": [], "folds": []}
    lists = lists_of(options.model)
    for turn in range(options.rounds + 1):
        single = rng.integers(20, 500, (1, options.tokens)).tolist()
        prompts = rng.integers(20, 500, (options.batch, options.tokens)).tolist()
        alone = (batch(s, single, p, options.new) for s, p in ((stock, None), (ours, policy)))
        first = [times(answers[0])[0] for answers in alone]
        plain = batch(stock, prompts, None, options.new)
        policed = batch(ours, prompts, policy, options.new)
        if any(a["meta_info"]["kv_policy"]["policy"] != policy for a in policed):
            raise SystemExit(f"methods: an answer was not served with {policy}")
        steps = [float(np.median([times(a)[1] for a in each])) for each in (plain, policed)]
        if not turn:
            continue
        result["prefill"].append(first[1] / first[0])
        result["decode"].append(steps[1] / steps[0])
        result["held"] += [held(a, lists) for a in policed]
        result["folds"] += [a["meta_info"]["kv_policy"].get("folds", 0) for a in policed]
    if min(result["held"]) >= 1:
        raise SystemExit(f"methods: {policy} dropped nothing")
    return result


def row(name: str, chosen: list[str], result: dict) -> list[str]:
    """A line of the table."""
    return [
        name,
        ", ".join(chosen),
        f"{100 * np.mean(result['held']):.1f}",
        report.spread(result["prefill"]),
        report.spread(result["decode"]),
        f"{np.median(result['folds']):.0f}",
    ]


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--kept", type=float, default=0.125, help="share of the prompt kept")
    parser.add_argument("--batch", type=int, default=4, help="requests decoded together")
    parser.add_argument("--new", type=int, default=48, help="tokens generated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", help="names, comma-separated; default all")
    options = parser.parse_args()
    chosen = settings(options.kept, options.tokens)
    names = options.policies.split(",") if options.policies else list(chosen)
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    given = [f"{name}.{setting}" for name in names for setting in chosen[name]]
    flags = {"skip_tokenizer_init": True, "enable_metrics": True}
    rows, data = [], {}
    with (
        serve(options.model, progress=True, **flags) as stock,
        serve(options.model, files, given, progress=True, **flags) as ours,
    ):
        for name in tqdm(names, desc="policies"):
            data[name] = compare(stock, ours, name, options)
            rows.append(row(name, chosen[name], data[name]))
    text = (
        f"Prompts of {options.tokens} tokens; decode: {options.batch} requests together, "
        f"{options.new} tokens each; median (min-max) of {options.rounds} rounds.\n\n"
        + report.table(HEADER, rows)
    )
    some = bool(options.policies)
    title = "Methods added since the complete run" if some else "Every method beside stock SGLang"
    report.publish("methods_added" if some else "methods", title, text, data, options.save)


if __name__ == "__main__":
    main()
