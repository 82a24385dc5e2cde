"""Memory of one long generation: bounded by the policy's budget, growing without one.

Each request generates thousands of tokens alone on a server; slots in use and time of every single
decode step are what SGLang itself prints. Stock SGLang and a server with the policies run one after
the other in this run. The result is checked before anything is printed: answers complete, slots
never above the bound that follows from the budget, none in use at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import report
from soak import leaked

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kvpolicy.evaluation.serving import Server, serve

STEP = re.compile(
    r"Decode batch, #running-req: 1, #token: (\d+), .*throughput \(token/s\): ([\d.]+)"
)
HEADER = (
    "server",
    "generated",
    "most slots",
    "bound",
    "most slots, last part",
    "tokens/s, first part",
    "tokens/s, last part",
)
STOCK = "stock SGLang"
# Parameters with which each policy keeps `budget` entries per layer and KV head.
SETTINGS = {
    "streamingllm": lambda budget: {"start": 4, "window": budget - 4},
    "h2o": lambda budget: {"heavy": budget - budget // 2, "window": budget // 2},
    "tova": lambda budget: {"capacity": budget},
}


def with_context(model: Path, folder: Path, tokens: int) -> Path:
    """The checkpoint for texts of `tokens` tokens: links to its files, and a changed config."""
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(tokens, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def generate(server: Server, prompt: list[int], new: int, policy: str | None) -> dict:
    """Slots in use and seconds of every decode step of an answer of `new` tokens."""
    server.generate(input_ids=prompt[:8], policy="none" if policy else None, max_new_tokens=4)
    before = len(server.log_text())
    options = {"max_new_tokens": new, "ignore_eos": True}
    answer = server.generate(input_ids=prompt, policy=policy, **options)
    steps = STEP.findall(server.log_text()[before:])
    generated = answer["meta_info"]["completion_tokens"]
    # The prefill makes the first token.
    if generated != new or abs(len(steps) - (new - 1)) > 1:
        raise SystemExit(
            f"long_generation: {generated} tokens, {len(steps)} steps instead of {new}"
        )
    server.flush()
    # The last step's line is printed after the request has ended.
    return {
        "generated": generated,
        "slots": [int(slots) for slots, _ in steps[:-1]],
        "seconds": [1 / max(float(speed), 1e-3) for _, speed in steps[:-1]],
    }


def bound(model: Path, budget: int, interval: int) -> int:
    """The most slots that a request may hold.

    Its private pages (each KV head of each layer rounds up to whole pages of G entries), the tokens
    generated until the next fold, and with overlap scheduling the slots of two steps in flight.
    """
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"]
    return -(-budget // heads) * heads + interval + 2


def speeds(result: dict, part: int, period: int) -> np.ndarray:
    """Tokens per second in consecutive parts of the generation.

    Medians over periods of `period` steps, each with one fold, so that a short disturbance by
    another program does not count.
    """
    seconds = np.array(result["seconds"][1:])  # the first includes the prefill
    periods = seconds[: len(seconds) // period * period].reshape(-1, period).sum(1)
    count = max(part // period, 1)
    parts = [periods[i : i + count] for i in range(0, len(periods) - count + 1, count)]
    return np.array([period / np.median(each) for each in parts])


def draw(results: dict[str, dict], most: int, part: int, period: int, path: Path) -> None:
    """Draws slots in use and speed over the tokens generated so far."""
    figure, (slots, speed) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True)
    for i, (name, result) in enumerate(results.items()):
        # Lines that coincide stay visible: each is thinner than the one below it.
        slots.plot(result["slots"], label=name, lw=3.4 / (i + 1))
        values = speeds(result, part, period)
        middle = (np.arange(len(values)) + 0.5) * (part // period * period)
        speed.plot(middle, values, label=name, lw=1.4)
    slots.axhline(most, color="black", lw=0.8, ls="--", label=f"bound: {most} slots")
    slots.set_yscale("log")
    slots.set_ylabel("KV slots in use")
    slots.legend(frameon=False, fontsize=8)
    speed.set_ylabel(f"tokens/s, median over {part} tokens")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("tokens generated")
    for axis in (slots, speed):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def row(name: str, result: dict, most: int | None, part: int, period: int) -> list[str]:
    """A line of the table."""
    parts = speeds(result, part, period)
    return [
        name,
        f"{result['generated']:,}",
        f"{max(result['slots']):,}",
        "-" if most is None else f"{most:,}",
        f"{max(result['slots'][-part:]):,}",
        f"{parts[0]:.0f}",
        f"{parts[-1]:.0f}",
    ]


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--new", type=int, default=20_000, help="tokens generated")
    parser.add_argument("--stock-new", type=int, help="tokens that stock SGLang generates")
    parser.add_argument("--budget", type=int, default=512, help="entries per layer and KV head")
    parser.add_argument("--interval", type=int, default=16, help="decode steps between folds")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument(
        "--policies", default="streamingllm,h2o", help=f"among {', '.join(SETTINGS)}"
    )
    parser.add_argument("--plot", type=Path, help="write the picture here as well")
    options = parser.parse_args()
    options.stock_new = options.stock_new or options.new
    if min(options.new, options.stock_new) < options.interval + 3:
        parser.error("--new, --stock-new: fewer tokens than one fold interval and three")
    return options


def measure(options: argparse.Namespace, names: list[str], folder: Path) -> dict[str, dict]:
    """Results by name: stock SGLang, then every policy on one server."""
    longest = options.prompt + max(options.new, options.stock_new) + 64
    model = with_context(Path(options.model), folder, longest)
    prompt = np.random.default_rng(options.seed).integers(20, 500, options.prompt).tolist()
    flags = {
        "max_total_tokens": longest + options.budget,
        "skip_tokenizer_init": True,
        "decode_log_interval": 1,
        "enable_metrics": True,
        "progress": True,
    }
    with serve(model, **flags) as server:
        results = {STOCK: generate(server, prompt, options.stock_new, None)}
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    settings = [
        f"{name}.{key}={value}"
        for name in names
        for key, value in SETTINGS[name](options.budget).items()
    ]
    if len(names) == 1:
        settings = [setting.partition(".")[2] for setting in settings]
    flags["kv_policy_fold_interval"] = options.interval
    with serve(model, files, settings, **flags) as server:
        for name in names:
            results[name] = generate(server, prompt, options.new, name)
        leaks = leaked(server)
    if leaks:
        raise SystemExit(f"long_generation: slots in use at the end: {leaks}")
    return results


def pictures(options: argparse.Namespace) -> list[Path]:
    """Paths to which the picture is written."""
    kept = [options.save / "long_generation.png"] if options.save else []
    return kept + ([options.plot] if options.plot else [])


def check(results: dict[str, dict], most: int) -> None:
    """Exits with one sentence if a policy held more slots than the bound."""
    for name, result in results.items():
        held = max(result["slots"])
        if name != STOCK and held > most:
            raise SystemExit(f"long_generation: {name} held {held} slots; the bound is {most}")


def main() -> None:
    options = parse()
    names, period = options.policies.split(","), options.interval
    most = bound(Path(options.model), options.budget, period)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, names, Path(folder))
    check(results, most)
    part = max(min(1000, min(options.new, options.stock_new) // 4), period)
    for path in pictures(options):
        draw(results, most, part, period, path)
    rows = [row(n, r, None if n == STOCK else most, part, period) for n, r in results.items()]
    text = (
        f"A prompt of {options.prompt} tokens; {options.budget} entries per layer and KV head, "
        f"entries leave at every {period}th decode step. Slots: KV memory in use, of one token in "
        f"every layer, at its highest over all steps. First and last part: {part} tokens each, of "
        f"which the median.\n\n" + report.table(HEADER, rows)
    )
    if options.save:
        text += "\n\n![slots in use and speed over the generated tokens](long_generation.png)"
    data: dict = {"bound": most, "part": part}
    for name, result in results.items():
        sampled = result["slots"][:: max(part // 10, 1)]
        speed = speeds(result, part, period).round(1).tolist()
        data[name] = {"slots": sampled, "tokens_per_second": speed}
    report.publish("long_generation", "Memory of a long generation", text, data, options.save)


if __name__ == "__main__":
    main()
