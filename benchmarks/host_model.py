"""Host time that `kvpolicy explain --gpu` expects, beside what is measured on this machine.

Prefills and folds of real policies, by the policies' own programs and the plugin's own decode
step; what a GPU would compute is left out of the clock. Before anything is printed, what was
counted for a fold is compared with what the plugin asked a device for: they must be equal.
"""

from __future__ import annotations

import argparse
import time

import report
import torch
from fold_host import PROMPT, SETTINGS
from folding_requests import Case, Crowd, Timed
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.drive import InPools, drive
from kvpolicy.dsl.execute.tensors import kernels
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools import forecast
from kvpolicy.dsl.tools.launches import Observed, StandIns, launches
from shipped import settings
from tqdm import tqdm

LARGE = ModelShape(32, 32, 8, 128)
LENGTHS = (1024, 4096, 16384)
ASKED = "snapkv,h2o,vatp,cam,fastkv,asl,gemfilter,pyramidinfer"
PREFILLS = "snapkv,adakv,lava,h2o,tova,cake,pyramidkv"
FOLDS = "h2o,tova,streamingllm,cake,cam,d2o"
HEADER = ("what", "policy", "layers x KV heads", "requests", "asked for", "expected, ms",
          "measured, ms", "expected / measured")  # fmt: skip


def prefill_seconds(bound: Bound, rounds: int) -> list[float]:
    """Processor seconds of the host's own work for a prompt, per round; a first one warms up."""
    shape, watch = bound.shape, StandIns()
    program = watch.program(bound, kernels.installed())
    pool = torch.randn(shape.layers, PROMPT, shape.kv_heads, shape.head_dim)
    shown = InPools(torch.randn(shape.layers, shape.heads, PROMPT, shape.head_dim), pool, pool)
    made = []
    for turn in range(rounds + 1):
        watch.observed = timed = Timed()
        started = time.thread_time()
        finished = drive(program, PROMPT, shown).run.finish(wait=False)
        if turn:
            made.append(time.thread_time() - started - timed.seconds)
        if torch.stack(finished.kept).all():
            raise SystemExit(f"host_model: {bound.program.name} lets nothing leave")
    return made


def of_prefill(policy: str, layers: int, heads: int, rounds: int) -> tuple[list[object], dict]:
    """Table row and figures of a prefill."""
    shape = ModelShape(layers, 2 * heads, heads, 8)
    bound = bind(
        load(policy).require(), shape, dict(x.split("=") for x in settings(0.5, PROMPT)[policy])
    )
    asked = launches(bound).prefill(layers)
    # Without compaction, which is one launch of the plugin, not of the program.
    expected = forecast.PREFILL_ASK * (asked.host - 1)
    measured = prefill_seconds(bound, rounds)
    return line("prefill", policy, (layers, heads), 1, asked.device, expected, measured)


def asked_of_prompt(policy: str, tokens: int) -> int:
    """Operations, launches and transfers of a prompt on the model of `LARGE`, without compaction.

    As a server's program scores it, with stand-ins for kernels that give zeros.
    """
    given = dict(x.split("=") for x in settings(0.125, tokens)[policy])
    bound, watch = bind(load(policy).require(), LARGE, given), StandIns()
    program = watch.program(bound, kernels.installed())
    row = torch.zeros(LARGE.head_dim)
    pool = row.expand(LARGE.layers, tokens, LARGE.kv_heads, -1)
    queries = row.expand(LARGE.layers, LARGE.heads, tokens, -1)
    watch.observed = Observed()
    with watch.observed:
        drive(program, tokens, InPools(queries, pool, pool)).run.finish(wait=False)
    return watch.observed.device


def of_fold(policy: str, layers: int, heads: int, number: int, rounds: int) -> tuple[list, dict]:
    """Table row and figures of `number` requests that fold together."""
    shape, interval, setting = ModelShape(layers, 2 * heads, heads, 8), 4, SETTINGS[policy]
    case = Case(policy, setting.given(interval), [PROMPT] * number, shape, interval)
    crowd = Crowd(case, (rounds + 3 + setting.first) * interval)
    asked = launches(crowd.bound).fold
    for _ in range((1 + setting.first) * interval):
        crowd.step()
    found, noting, measured = set(), 0, []
    for turn in range(rounds + 1):
        for _ in range(interval):
            before = crowd.folds
            observed, seconds = crowd.step(counting=turn == 0)
            if turn == 0 and crowd.folds > before:
                found.add(observed.device)
            elif turn == 0:
                noting = observed.device
            elif crowd.folds > before:
                measured.append(seconds)
    if found != {asked.device + noting}:
        raise SystemExit(f"host_model: {policy} asked for {found}, not {asked.device} + {noting}")
    expected = forecast.fold_host(asked.host, number, shape)
    return line("fold", policy, (layers, heads), number, asked.device, expected, measured)


def line(
    what: str, policy: str, size: tuple[int, int], number: int, asked: float, expected: float,
    measured: list[float],
) -> tuple[list[object], dict]:  # fmt: skip
    """Table row and figures; the ratio takes the least time, as other work only adds to it."""
    best = min(measured)
    shown = [
        what, policy, f"{size[0]} x {size[1]}", number, f"{asked:.0f}", f"{1e3 * expected:.2f}",
        report.spread(measured, 2, 1000), f"{expected / best:.2f}",
    ]  # fmt: skip
    facts = {"what": what, "policy": policy, "layers": size[0], "kv_heads": size[1]}
    facts |= {"requests": number, "asked": asked, "expected": expected, "measured": measured}
    return shown, facts


def parse() -> argparse.Namespace:
    parser = report.saving(__doc__)
    parser.add_argument("--prefills", default=PREFILLS, help="policies")
    parser.add_argument("--folds", default=FOLDS, help="policies")
    parser.add_argument("--asked", default=ASKED, help="policies whose prompts are counted")
    parser.add_argument("--sizes", default="32x8,32x2,8x2", help="layers and KV heads")
    parser.add_argument("--requests", default="1,8,32", help="that fold together")
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",")]
    numbers = [int(n) for n in options.requests.split(",")]
    cells = [(of_prefill, (name, *size)) for name in options.prefills.split(",") for size in sizes]
    cells += [
        (of_fold, (name, *size, number))
        for name in options.folds.split(",") for size in sizes for number in numbers
    ]  # fmt: skip
    rows, data = [], []
    with torch.no_grad():
        for of, given in tqdm(cells, desc="cells"):
            row, facts = of(*given, options.rounds)
            rows.append(row)
            data.append(facts)
    asked = [
        [name, *(asked_of_prompt(name, tokens) for tokens in LENGTHS)]
        for name in options.asked.split(",")
    ]
    text = (
        f"Prompts of {PROMPT} tokens. *Asked for*: operations of torch that compute, launches and "
        "transfers; of folds equal to what the plugin asked for. Times: of the processor, without "
        f"what stands for kernels; median (min-max) of {options.rounds} rounds, and the ratio to "
        "the least.\n\n" + report.table(HEADER, rows) + "\n\n## By length\n\n"
        f"Asked for by a prompt on {LARGE.layers} layers with {LARGE.kv_heads} KV heads of "
        f"{LARGE.head_dim}, compaction apart. Layers are scored together as far as memory goes.\n\n"
        + report.table(("policy", *(f"{n:,} tokens" for n in LENGTHS)), asked)
    )
    figures = {"rows": data, "asked": asked}
    report.publish("host_model", "Host time, expected and measured", text, figures, options.save)


if __name__ == "__main__":
    main()
