"""The forecast of a server on a GPU, with full KV and with a policy.

It is a cost model: bytes and operations of the model and of the policy (`dsl/bind/work.py`,
cost.py), what the host asks of the device (launches.py), and the GPU's rates (`dsl/bind/gpu.py`).
`Forecast.assumptions` says what else is assumed.

Dimensions: L layers, G KV heads, N tokens of the prompt, B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.gpu import MATRIX_REACHED, MEMORY_REACHED, Gpu
from kvpolicy.dsl.bind.lengths import computed
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.bind.steady import is_steady
from kvpolicy.dsl.bind.work import Work
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools.cost import cost, memory_of_decode
from kvpolicy.dsl.tools.launches import Launches, launches

MOST_AT_ONCE = 4096  # most requests that SGLang runs at once by default
# SGLang: share of the GPU's memory for weights and pool; kernels per layer, which decode steps
# replay as one graph; seconds of the host per decode step, beside the GPU's.
MEMORY_SHARE, LAYER_KERNELS, STEP_HOST = 0.87, 10, 1.5e-3
# Seconds of the host per operation, view, launch and transfer: of a prefill, as measured beside an
# H200 (docs/performance/kernels.md: 3.2 ms for the 189 of snapkv's), and of a fold, fitted to
# benchmarks/host_model.py; in a fold also per request, per layer and per list of one.
PREFILL_ASK, FOLD_ASK = 16e-6, 30e-6
FOLD_REQUEST, FOLD_LAYER, FOLD_LIST = 60e-6, 1e-6, 0.12e-6
_HELD = "the size is held"
_UNCOUNTED = "how many is not counted: more requests may fit, and TPOT may be lower"


@dataclass(frozen=True)
class Serving:
    """What is expected with full KV or with a policy; times are seconds.

    Attributes:
        prompt_bytes: bytes of the KV cache of one request after its prefill.
        ttft: time from the start of the prefill to the first token, of one request alone.
        tpot: time of a decode step of B requests, in the middle of their answers.
        at_once: number of requests that fit.
        throughput: tokens generated per second, with as many requests as fit.
    """

    prompt_bytes: int
    ttft: float
    tpot: float
    at_once: int
    throughput: float


@dataclass(frozen=True)
class FoldWork:
    """The work of a fold of B requests.

    Attributes:
        device: operations, launches and transfers.
        host: seconds of the host.
        times: number of folds in an answer.
    """

    device: float
    host: float
    times: int


@dataclass(frozen=True)
class Forecast:
    """What is expected of a policy, beside full KV.

    Attributes:
        scoring: seconds of the GPU for scoring, choosing and compaction of one prompt.
        share: `scoring` as a share of the prefill's time with full KV.
        operations: arithmetic operations of scoring and choosing for one prompt.
        prefill_asks: operations, launches and transfers of a prefill for the policy.
        fold: the work of a fold of `Load.batch` requests; None if nothing leaves.
        assumptions: what the figures rest on, as sentences.
    """

    full: Serving
    policy: Serving
    scoring: float
    share: float
    operations: float
    prefill_asks: float
    fold: FoldWork | None
    assumptions: Sequence[str]


def pool_of(config: ModelConfig, gpu: Gpu) -> float:
    """Bytes that SGLang has for the KV cache; below 0 if the weights do not fit."""
    return MEMORY_SHARE * gpu.memory - config.weights_size


@dataclass(frozen=True)
class Load:
    """What a server is asked.

    Attributes:
        prompt: N tokens of a prompt, at least 1.
        new: tokens of an answer, at least 1.
        batch: B requests that decode together, at least 1.
    """

    prompt: int
    new: int
    batch: int


def forecast(bound: Bound, config: ModelConfig, gpu: Gpu, load: Load, pool: float) -> Forecast:
    """What is expected of a server on a GPU.

    Args:
        bound: the policy, with the fold interval of the server.
        pool: bytes of the KV cache; see `pool_of`.

    Raises:
        PolicyError: no server carries the policy out.
    """
    full = _Way(config, gpu, load, pool)
    policy = _WithPolicy(config, gpu, load, pool, bound, launches(bound, load.prompt))
    return Forecast(
        full.serving(),
        policy.serving(),
        policy.scoring,
        policy.scoring / full.prefill,
        policy.operations,
        policy.prefill_asks,
        policy.fold(load.batch),
        tuple(_assumptions(full, policy)),
    )


class _Way:
    """Serving with full KV.

    Attributes:
        entries: entries of one request after its prefill, over all layers and KV heads.
    """

    def __init__(self, config: ModelConfig, gpu: Gpu, load: Load, pool: float) -> None:
        self.config, self.gpu, self.load, self.pool = config, gpu, load, pool
        self.prompt, self.new = load.prompt, load.new
        self.token = config.shape.layers * config.shape.kv_heads  # entries
        self.entries = self.token * load.prompt

    def serving(self) -> Serving:
        """All figures."""
        at_once = self.at_once
        tpot = self.step(max(at_once, 1))
        seconds = self.prefill + self.new * tpot / max(at_once, 1)
        return Serving(
            self.config.kv_size(int(self.entries)),
            self.prefill,
            self.step(self.load.batch),
            at_once,
            self.new / seconds if at_once else 0.0,
        )

    @property
    def prefill(self) -> float:
        """Seconds of a prompt's prefill."""
        asks = self.config.shape.layers * LAYER_KERNELS
        return max(self._reach([self.prompt] * self.config.shape.layers), PREFILL_ASK * asks)

    def _reach(self, tokens: Sequence[int]) -> float:
        """Seconds of the GPU for layers with these numbers of tokens."""
        return self.gpu.seconds(sum(map(self.config.layer_work, tokens), Work()))

    def held(self, generated: float) -> float:
        """Entries of one request after `generated` tokens of its answer."""
        return self.entries + self.token * generated

    @property
    def request_bytes(self) -> float:
        """Bytes of one request at the end of its answer."""
        return self.config.kv_size(1) * self.held(self.new)

    @property
    def at_once(self) -> int:
        """Number of requests that fit, one of them with its whole prompt during its prefill."""
        extra = self.config.kv_size(self.token * self.prompt) - self.request_bytes
        return min(MOST_AT_ONCE, max(0, int((self.pool - max(extra, 0)) / self.request_bytes)))

    def step(self, requests: int) -> float:
        """Seconds of a decode step of `requests` requests, in the middle of their answers."""
        work = self.config.decode_work(requests, self.held(self.new / 2))
        gaps = self.config.shape.layers * LAYER_KERNELS * self.gpu.gap
        return max(self.gpu.seconds(work) + gaps, STEP_HOST)


class _WithPolicy(_Way):
    """Serving with a policy."""

    def __init__(
        self,
        config: ModelConfig,
        gpu: Gpu,
        load: Load,
        pool: float,
        bound: Bound,
        asked: Launches,
    ) -> None:
        super().__init__(config, gpu, load, pool)
        self.bound, self.asked = bound, asked
        self.entries = max_entries(bound, load.prompt)
        self.steady = is_steady(bound)
        # Where nothing leaves the prompt yet, the cache grows to what a longer one may keep.
        everything = self.entries >= self.token * load.prompt
        self.most = max_entries(bound, load.prompt + load.new) if everything else self.entries
        costs = cost(bound, config, load.prompt, gpu)
        # Compaction reads and writes what stays once.
        compaction = Work(moved=2.0 * config.kv_size(int(self.entries)))
        self.operations = costs.operations
        self.scoring = sum(part.seconds for part in costs.parts) + gpu.seconds(compaction)

    @property
    def prefill_asks(self) -> float:
        """Operations, launches and transfers of a prefill besides the model's."""
        return self.asked.prefill(self.config.shape.layers).device

    @property
    def prefill(self) -> float:
        layers = self.config.shape.layers
        host = PREFILL_ASK * (layers * LAYER_KERNELS + self.asked.prefill(layers).host)
        return max(self._reach(computed(self.bound, self.prompt)) + self.scoring, host)

    def held(self, generated: float) -> float:
        everything = super().held(generated)
        if not self.steady:
            return everything
        since_fold = min(generated, self.bound.fold_interval / 2)
        return min(everything, self.most + self.token * since_fold)

    @property
    def request_bytes(self) -> float:
        return super().request_bytes + sum(
            memory_of_decode(self.bound, self.prompt, self.config.element_bytes)
        )

    def fold(self, requests: int) -> FoldWork | None:
        """The work of a fold of `requests` requests; None if nothing leaves."""
        asked, shape = self.asked, self.config.shape
        if asked.fold is None:
            return None
        number = requests * shape.layers if asked.one_by_one else 1
        host = fold_host(number * asked.fold.host, requests, shape)
        return FoldWork(number * asked.fold.device, host, self._folds)

    @cached_property
    def _folds(self) -> int:
        """Number of decode steps of an answer at which entries may leave."""
        leaves = (self.bound.leaves_at(step, self.prompt) for step in range(1, self.new + 1))
        return sum(leaves)

    def step(self, requests: int) -> float:
        fold = self.fold(requests)
        seconds = super().step(requests)
        return seconds if fold is None else seconds + fold.host * fold.times / self.new


def fold_host(asked: float, requests: int, shape: ModelShape) -> float:
    """Seconds of the host in a fold of `requests` requests.

    Args:
        asked: operations, launches, transfers and views, for all requests.
    """
    layer = FOLD_LAYER + shape.kv_heads * FOLD_LIST
    return FOLD_ASK * asked + requests * (FOLD_REQUEST + shape.layers * layer)


def _assumptions(full: _Way, policy: _WithPolicy) -> list[str]:
    gpu, bound = policy.gpu, policy.bound
    sentences = [
        f"{gpu.name}: {MATRIX_REACHED:.0%} of {gpu.matrix / 1e12:,.0f} TFLOP/s and "
        f"{MEMORY_REACHED:.0%} of {gpu.bandwidth / 1e12:.3g} TB/s are reached; "
        f"{1e6 * gpu.gap:.1f} us between kernels of a graph, {LAYER_KERNELS} per layer",
        f"{MEMORY_SHARE:.0%} of {gpu.memory / 2**30:.0f} GiB for weights and KV cache; weights of "
        f"{policy.config.weight_bytes:g} bytes, {policy.config.weights_size / 2**30:.1f} GiB",
        "TTFT: one request on an idle server, its prompt not in the radix cache; without HTTP, "
        "tokenizer and queue",
        f"answers of {policy.new:,} tokens; a decode step reads weights and entries once, and "
        f"takes {1e3 * STEP_HOST:.1f} ms at least for SGLang's host",
        "the prefill's attention hands over its log-sum-exp (FlashInfer, FlashAttention 3); with "
        "another one scoring goes over the keys once more",
        "throughput: as many requests as fit, prefills and decode steps one after the other, no "
        "prompt shared",
    ]
    if policy.load.batch > full.at_once:
        fit = f"{full.at_once:,} with full KV, {policy.at_once:,} with the policy"
        sentences.append(
            f"TPOT is of {policy.load.batch:,} requests whether they fit or not ({fit})"
        )
    decode, fold = bound.folded.decode, policy.fold(1)
    if decode is not None and fold is not None:
        when = f"every {bound.fold_interval}"
        if decode.when is not None:
            when = f"{fold.times:,} of {policy.new:,}"
        sentences.append(
            f"entries leave at {when} steps, all requests at one step, which "
            "waits for the host; " + (_HELD if policy.steady else _UNCOUNTED)
        )
    if bound.upper_layers:
        sentences.append("layers that share a direction are counted as if each held its own")
    if not policy.steady and fold is None:
        sentences.append("nothing leaves while decoding: what is generated stays")
    return sentences
