"""How work grows: with requests that wait, the prompt's length, policies, ranks and replicas.

    python benchmarks/scale.py                      everything
    python benchmarks/scale.py --parts queue --queued 1,1000

`queue` runs SGLang's own scheduler on a small model, stock and with policies, with a pool that is
full and requests that wait, and times what the scheduler does for one decode step; `arrival` what
is computed for a request when it arrives, if no prompt before had its length; `lengths` how that
grows with its length; `policies` their checks at the start; `fleet` is
`kvpolicy fleet status` over HTTP, `experiment` what many replicas say of one, pooled; `ranks` what
the ranks of one replica exchange (scale_ranks.py). Each part checks what it timed: that as many
requests waited as were sent, that answers came, that bounds hold, that the replica that differs is
found, that every request is pooled, that ranks keep what one process keeps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import report
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face import collection
from serving_setup import NO_PLUGIN
from tqdm import tqdm

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.request.request import Served

SERVERS = ("stock", "none", "snapkv", "lava", "h2o")
SETTINGS = [
    "snapkv.capacity=24", "snapkv.window=8", "lava.capacity=24", "lava.window=8", "h2o.heavy=12",
    "h2o.window=12",
]  # fmt: skip
PROMPT, RUNNING, NEW = 40, 8, 400
DIFFERENT = 997  # lengths of prompts
SEEN = 1000  # requests per replica of an experiment
LAYERS, MANY = (32, 80), 300
LENGTHS = (4096, 32768, 262_144, 1_048_576)
LLAMA = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip
Rows = tuple[tuple[str, ...], list[list[object]], dict]


def least(call: Callable[[], object], rounds: int) -> list[float]:
    """Processor seconds of `rounds` calls, each."""
    made = []
    for _ in range(rounds):
        started = time.thread_time()
        call()
        made.append(time.thread_time() - started)
    return made


# Requests that wait.


def of_queue(options: argparse.Namespace) -> Rows:
    """Per server and number of waiting requests: microseconds of an arrival and of a step."""
    head = ("server", "requests waiting", "arrival of one, us", "a decode step, us")
    rows, data = [], {}
    for server in tqdm(options.servers.split(","), desc="queue"):
        words = [sys.executable, __file__, "--one", server, "--queued", options.queued]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= NO_PLUGIN if server == "stock" else {}
        result = subprocess.run(
            [*words, "--rounds", str(options.rounds), "--model", options.model],
            env=env, capture_output=True, text=True,
        )  # fmt: skip
        if result.returncode:
            raise SystemExit(f"scale: {server}:\n{result.stderr[-3000:]}")
        data[server] = json.loads(result.stdout.splitlines()[-1])
        for number, made in data[server].items():
            steps = report.spread(made["steps"], 0, 1e6)
            rows.append([server, f"{int(number):,}", f"{1e6 * made['arrival']:.0f}", steps])
    return head, rows, data


def one(options: argparse.Namespace) -> None:
    """Runs one server in this process, prints its figures as JSON, and exits."""
    sys.path.append(str(report.ROOT / "tests" / "sglang_ext"))
    from in_process import Driver

    server, facts = options.one, {}
    files = [] if server == "stock" else [f"policies/{name}.yaml" for name in SERVERS[2:]]
    given = SETTINGS if files else []
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
    os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "0"
    flags = {
        "max_total_tokens": 2 * RUNNING * (PROMPT + NEW + DIFFERENT),
        "max_running_requests": RUNNING,
    }
    driver = Driver(options.model, [str(report.ROOT / f) for f in files], given, **flags)
    scheduler, spent = driver.scheduler, []
    for name in ("process_input_requests", "get_next_batch_to_run", "process_batch_result"):
        spent.append(timed(scheduler, name))
    policy = {"policy": server} if files else {}

    def send(number: int, first: int, new: int) -> None:
        for i in range(first, first + number):
            # Lengths differ, as users' do, so that values cached per length help little.
            tokens = [3 + (7 * i + j) % 400 for j in range(PROMPT + i % DIFFERENT)]
            driver.send(str(i), tokens, max_new_tokens=new, **policy)

    send(RUNNING, 0, NEW)
    for _ in range(60):
        driver.step()
    for waiting in numbers(options.queued):
        received, there = spent[0]["seconds"], len(scheduler.waiting_queue)
        send(waiting - there, RUNNING + there, 2)
        driver.step()
        arrival = (spent[0]["seconds"] - received) / (waiting - there)
        steps = []
        for _ in range(options.rounds):
            before = sum(each["seconds"] for each in spent)
            driver.step()
            steps.append(sum(each["seconds"] for each in spent) - before)
        running = len(scheduler.running_batch.reqs)
        if (len(scheduler.waiting_queue), running) != (waiting, RUNNING):
            raise SystemExit(f"{len(scheduler.waiting_queue)} wait, not {waiting}; {running} run")
        facts[str(waiting)] = {"arrival": arrival, "steps": steps}
    lengths = {len(answer.tokens) for rid, answer in driver.answers.items() if int(rid) < RUNNING}
    if min(lengths) < options.rounds:
        raise SystemExit(f"requests did not decode: {lengths}")
    print(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # the scheduler's thread still waits for requests


def timed(scheduler: object, name: str) -> dict[str, float]:
    """Wraps a method of the scheduler; `seconds` of the result sums its processor seconds."""
    original, made = getattr(scheduler, name), {"seconds": 0.0}

    def call(*args: object, **options: object) -> object:
        started = time.thread_time()
        try:
            return original(*args, **options)
        finally:
            made["seconds"] += time.thread_time() - started

    setattr(scheduler, name, call)
    return made


# Requests that arrive.


def of_arrivals(options: argparse.Namespace) -> Rows:
    """Per policy: milliseconds of numbers of a request whose prompt has a new length, and pauses.

    A pause is a full collection of Python's, among as many objects as a scheduler has.
    """
    import sglang.srt.managers.scheduler  # noqa: F401
    import torch
    from kvpolicy.dsl.syntax.library import shipped
    from kvpolicy.sglang_ext.face.policy_files import load_policies
    from kvpolicy.sglang_ext.memory.arena import create_arena
    from kvpolicy.sglang_ext.request.request import Served

    head = ("policy", *(f"{layers} layers, ms" for layers in LAYERS),
            f"pauses in {MANY} such requests, {LAYERS[-1]} layers", "the longest, s")  # fmt: skip
    rows, data = [], {}
    names = options.arriving.split(",") if options.arriving else list(shipped())
    for name in tqdm(names, desc="arrival"):
        (policy,), own = load_policies([name], []), {}
        for layers in LAYERS:
            shape = ModelShape(layers=layers, heads=32, kv_heads=8, head_dim=128)
            arena = create_arena(2, layers, 8, 128, torch.bfloat16, "cpu")
            served, made = Served(policy, policy.bind(shape), arena, page_size=1), []
            for prompt in range(4096, 4096 + 997 * options.rounds, 997):
                made += least(lambda s=served, n=prompt: arrives(s, n), 1)
                entries, everything = max_entries(served.bound, prompt), layers * 8 * prompt
                if not 0 < entries <= everything:
                    raise SystemExit(f"scale: {name} keeps {entries} of {everything} entries")
            own[str(layers)] = made
        with pauses() as seconds:
            for prompt in range(100_000, 100_000 + MANY):
                arrives(served, prompt)
        data[name] = {**own, "pauses": seconds}
        spreads = [report.spread(each, 1, 1e3) for each in own.values()]
        rows.append([name, *spreads, len(seconds), f"{max(seconds, default=0):.2f}"])
    return head, rows, data


@contextmanager
def pauses() -> Iterator[list[float]]:
    """Seconds of each full garbage collection in a block; before it everything is collected."""
    made: list[float] = []
    began = 0.0

    def note(phase: str, facts: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif facts["generation"] == 2:
            made.append(time.perf_counter() - began)

    gc.collect()
    gc.callbacks.append(note)
    try:
        yield made
    finally:
        gc.callbacks.remove(note)


@collection.put_off()
def arrives(served: Served, prompt: int) -> None:
    """Asks what a scheduler asks of a policy when a request arrives and is admitted."""
    served.most_slots(prompt)
    served.known_counts(prompt)
    served.single_queries(prompt)
    served.plan(prompt)
    served.growth.most(prompt, 512)


# Lengths of prompts.


def of_lengths(options: argparse.Namespace) -> Rows:
    """Per policy and length: times of bound and cost of a request, and the forecast for a GPU."""
    from kvpolicy.dsl.bind.bind import bind
    from kvpolicy.dsl.bind.gpu import GPUS
    from kvpolicy.dsl.bind.model_config import config_of
    from kvpolicy.dsl.bind.named import FOLD_INTERVAL
    from kvpolicy.dsl.check.policy import load
    from kvpolicy.dsl.tools.cost import cost
    from kvpolicy.dsl.tools.forecast import Load, forecast, pool_of

    config, gpu = config_of("Llama 3.1 8B", LLAMA), GPUS["h200"]
    head = ("policy", "prompt", "bound of a request, us", "estimate of its cost, ms",
            "entries at most", "TTFT, s", "of it the policy, %")  # fmt: skip
    rows, data = [], {}
    for name in tqdm(("snapkv", "lava", "h2o", "fastkv", "pyramidinfer"), desc="lengths"):
        bound = bind(load(name).require(), config.shape, fold_interval=FOLD_INTERVAL)
        for length in LENGTHS:
            bounds = least(lambda b=bound, n=length: max_entries(b, n), options.rounds)
            costs = least(lambda b=bound, n=length: cost(b, config, n), 2)
            entries = max_entries(bound, length)
            if not 0 < entries <= config.shape.layers * config.shape.kv_heads * length:
                raise SystemExit(f"scale: {name} keeps {entries} entries of {length} tokens")
            found = forecast(bound, config, gpu, Load(length, 512, 16), pool_of(config, gpu))
            share = found.scoring / found.policy.ttft
            data[f"{name} {length}"] = {"bound": bounds, "cost": costs, "entries": entries,
                                        "ttft": found.policy.ttft, "share": share}  # fmt: skip
            rows.append(
                [name, f"{length:,}", report.spread(bounds, 0, 1e6), f"{1e3 * min(costs):.0f}",
                 f"{entries:,}", f"{found.policy.ttft:.2f}", f"{100 * share:.2f}"]
            )  # fmt: skip
    return head, rows, data


# Policies.


def of_policies(options: argparse.Namespace) -> Rows:
    """Per number of policies: seconds of their checks, bytes of their part of /server_info."""
    from kvpolicy.dsl.bind.bind import bind
    from kvpolicy.dsl.bind.model_config import config_of
    from kvpolicy.dsl.check.policy import load
    from kvpolicy.dsl.syntax.library import shipped
    from kvpolicy.dsl.tools.cost_limit import check_cost
    from kvpolicy.dsl.tools.trial import trial

    config, names = config_of("Llama 3.1 8B", LLAMA), list(shipped())
    head = (
        "policies",
        "checked, bound, estimated and tried, s",
        "for each, ms",
        "/server_info, KiB",
    )
    rows, data = [], {}
    for number in numbers(options.policies):
        started, digests, said = time.thread_time(), set(), []
        for i in tqdm(range(number), desc=f"{number} policies"):
            bound = bind(load(names[i % len(names)]).require(), config.shape)
            check_cost(bound, config, 131_072, 10.0, "--kv-policy-max-cost")
            trial(bound)
            digests.add(bound.digest)
            said.append({"name": f"{bound.program.name}-{i}", "digest": bound.digest[:12]})
        seconds = time.thread_time() - started
        if len(digests) < min(number, len(names)):
            raise SystemExit(f"scale: {len(digests)} digests of {number} policies")
        size = len(json.dumps(info([{**POLICY, **each} for each in said])))
        data[str(number)] = {"seconds": seconds, "bytes": size}
        rows.append(
            [number, f"{seconds:.1f}", f"{1e3 * seconds / number:.0f}", f"{size / 1024:.1f}"]
        )
    return head, rows, data


# Replicas.

POLICY = {"name": "lava", "path": "policies/lava.yaml", "settings": {"rate": "0.25"},
          "default": False, "enabled": True, "failures": 0, "digest": "0123456789ab"}  # fmt: skip


def info(policies: list[dict]) -> dict:
    """A replica's answer to /server_info, with these policies."""
    state = {"kv_policy": policies, "kv_policy_applied": True, "kv_policy_inspection": False,
             "kv_policy_version": "0.1.0", "kv_policy_dp_rank": None}  # fmt: skip
    return {"version": "0.5.23", "model_path": "m", "internal_states": [state]}


def of_fleet(options: argparse.Namespace) -> Rows:
    """Per number of replicas with ten policies: seconds until the differing one is named."""
    from kvpolicy.evaluation.fleet import look

    head = ("replicas", "fleet status, s", "for each, ms")
    rows, data = [], {}
    with answering() as address:
        for number in numbers(options.replicas):
            urls = [f"{address}/{i}" for i in range(number)]
            seconds = []
            for _ in range(3):
                started = time.perf_counter()
                fleet = look(urls, None)
                lines = list(fleet.lines())
                seconds.append(time.perf_counter() - started)
            if any(each.error is not None for each in fleet.answers):
                raise SystemExit("scale: a replica cannot be asked")
            wanted = ["policy lava-3: digest"] if number > 1 else []
            if fleet.differing != wanted or (
                wanted and not any(f"{address}/0" in x for x in lines)
            ):
                raise SystemExit(f"scale: {fleet.differing} differ, not {wanted}")
            data[str(number)] = {"seconds": seconds}
            best = min(seconds)
            rows.append([number, report.spread(seconds), f"{1e3 * best / number:.1f}"])
    return head, rows, data


def of_experiment(options: argparse.Namespace) -> Rows:
    """Per number of replicas of an experiment: seconds to pool and show their documents."""
    sys.path.append(str(report.ROOT / "tests" / "experiments"))
    from kvpolicy.experiments.fleet.overview import Overview, ReplicaAnswer
    from kvpolicy.experiments.reporting.status import screen
    from made_experiment import made

    head = ("replicas", "of each, KiB", "pooled and shown, s", "for each, ms")
    rows, data, said = [], {}, made(SEEN).document()
    size = len(json.dumps(said))
    for number in numbers(options.replicas):
        answers = [ReplicaAnswer(f"replica {i}", copy.deepcopy(said)) for i in range(number)]
        seconds = least(lambda a=answers: screen(Overview(a)), 3)
        seen = sum(row.requests for row in Overview(answers).rows)
        if seen != number * SEEN:
            raise SystemExit(f"scale: {seen} requests of {number} replicas")
        data[str(number)] = {"seconds": seconds, "bytes": size}
        best = min(seconds)
        rows.append(
            [number, f"{size / 1024:.1f}", report.spread(seconds), f"{1e3 * best / number:.2f}"]
        )
    return head, rows, data


def of_ranks(options: argparse.Namespace) -> Rows:
    """Per number of ranks and policy: exchanges for a prompt, beside the model's own sums."""
    import scale_ranks

    head = ("policy", "ranks", "exchanges", "a rank sends, KiB", "time, ms",
            "the model's own sums, ms", "%")  # fmt: skip
    rows, data = [], {}
    for number in tqdm(numbers(options.ranks), desc="ranks"):
        found = scale_ranks.measured(number, options.tokens, min(options.rounds, 9))
        data[str(number)] = found
        rows += scale_ranks.rows(number, found)
    return head, rows, data


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class answering:
    """A server that answers for any number of replicas, the first of which differs."""

    def __enter__(self) -> str:
        own = info([{**POLICY, "name": f"lava-{i}"} for i in range(10)])
        other = copy.deepcopy(own)
        other["internal_states"][0]["kv_policy"][3]["digest"] = "ffffffffffff"

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = json.dumps(other if self.path.startswith("/0/") else own).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                """Nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Rows]]] = {
    "queue": ("Requests that wait", of_queue),
    "arrival": ("A request arrives whose prompt has a new length", of_arrivals),
    "lengths": ("Lengths of prompts, Llama 3.1 8B on an H200 as it is expected", of_lengths),
    "policies": ("Policies, at the start of a server", of_policies),
    "fleet": ("Replicas, `kvpolicy fleet status`", of_fleet),
    "experiment": ("Replicas, `kvpolicy experiment status`, 1,000 requests each", of_experiment),
    "ranks": ("Ranks, one prompt and two layers of Llama 3.1 8B, over gloo", of_ranks),
}


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of the default")
    parser.add_argument("--servers", default=",".join(SERVERS), help="of the queue")
    parser.add_argument("--arriving", help="policies of arrival; the default is all shipped ones")
    parser.add_argument("--queued", default="1,100,1000,10000", help="requests that wait")
    parser.add_argument("--policies", default="1,10,28,100")
    parser.add_argument("--replicas", default="1,10,100,1000")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--tokens", type=int, default=4096, help="of the ranks' prompt")
    parser.add_argument("--name", default="scale", help="of the results")
    parser.add_argument("--rounds", type=int, default=40, help="steps that are timed")
    parser.add_argument("--one", choices=SERVERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def sections(made: dict[str, Rows]) -> Iterator[str]:
    yield (
        "Times are of the processor, median (min-max), but for those of replicas and ranks. A "
        "decode step is what "
        f"SGLang's scheduler does for {RUNNING} requests that run besides the forward: "
        "receiving, choosing the batch, taking its results; *none* is a server with policies whose "
        "requests name none."
    )
    for part, (head, rows, _) in made.items():
        yield f"## {PARTS[part][0]}\n\n{report.table(head, rows)}"


def main() -> None:
    options = parse()
    if options.one:
        one(options)
    made = {}
    for part in options.parts.split(","):
        made[part] = PARTS[part][1](options)
        print(report.table(*made[part][:2]), file=sys.stderr)  # in case a later part fails
    data = {part: facts for part, (_, _, facts) in made.items()}
    report.publish(options.name, "How the host's work grows", "\n\n".join(sections(made)), data,
                   options.save)  # fmt: skip


if __name__ == "__main__":
    main()
