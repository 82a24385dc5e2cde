"""Window scoring: every key read once, from the pool's slots, through the policy's program.

One layer: the shipped `snapkv` with a selection across layers, so that only scores are computed.
All layers: `snapkv` itself, with its selection, as at the end of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Kernels, Slots
from kvpolicy.dsl.syntax.library import read_source
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from timing import Times

from cases.case import Bench, Case, Model, Planned, Target

OURS = "ours"
ATTENDED = "ours, log-sum-exp from attention"
PROGRAM = "torch program"
PLAIN = "torch, matmul and softmax"
# Prompt length of the target.
NAMED = 32768
SELECTION = "keep: recent(window) then top(score)"
LATER = "keep: recent(window) then top[layer, kv, token](score)"


@dataclass
class Prompt:
    """One prompt in the pool: queries of the window and keys of every layer.

    Attributes:
        q: [L, H, W, D]; keys: [L, S, G, D]; slots: int64 [N], in random order.
    """

    model: Model
    tokens: int
    window: int
    layers: int

    def __post_init__(self) -> None:
        shape = self.model.shape
        heads = (shape.heads, self.window, shape.head_dim)
        self.q = self.model.random(self.layers, *heads, seed=1)
        size = (self.tokens + 1, shape.kv_heads, shape.head_dim)
        self.keys = self.model.random(self.layers, *size, seed=2)
        self.slots = 1 + self.model.permutation(self.tokens, seed=3)

    def of(self, layer: int) -> Slots:
        """The keys of one layer as a server holds them."""
        return Slots(self.keys[layer : layer + 1], self.slots)

    @cached_property
    def lse(self) -> list[torch.Tensor]:
        """Per layer float32 [H, W]: log-sum-exp of the window's logits, as attention gives it."""
        return [self._lse(layer) for layer in range(self.layers)]

    def _lse(self, layer: int) -> torch.Tensor:
        q, keys = self.q[layer], self.of(layer).dense
        later = torch.ones(self.window, self.window, dtype=torch.bool, device=q.device).triu(1)
        made = []
        for head, own in enumerate(q):
            k = keys[head * len(keys) // len(q)].double()
            logits = own.double() @ k.T * q.shape[2] ** -0.5
            logits[:, -self.window :].masked_fill_(later, float("-inf"))
            made.append(logits.logsumexp(-1).float())
        return torch.stack(made)


def bound(model: Model, prompt: int, window: int, *, later: bool, layers: int) -> Bound:
    """SnapKV for `layers` layers, keeping a quarter of the prompt, at most 2048 entries."""
    text = read_source("snapkv").text
    if SELECTION not in text:
        raise SystemExit(f"policies/snapkv.yaml no longer says `{SELECTION}`")
    program = load(Source("snapkv", text.replace(SELECTION, LATER) if later else text)).require()
    shape = type(model.shape)(layers, model.shape.heads, model.shape.kv_heads, model.shape.head_dim)
    capacity = max(window + 1, min(2048, prompt // 4))
    return bind(program, shape, {"capacity": str(capacity), "window": str(window)})


class Watched(dict):
    """Triton's table of kernels, which counts how often a generated one is asked for."""

    def __init__(self) -> None:
        super().__init__(TRITON, generated=self._generated)
        self.asked = 0

    def _generated(self, name: str, source: str) -> Callable:
        self.asked += 1
        return TRITON["generated"](name, source)


def observed(program: TorchProgram, prompt: Prompt, layers: int, *, attended: bool = False) -> Run:
    """A prefill with its first layers scored; without kernels, keys are gathered first.

    Args:
        attended: whether attention hands over its log-sum-exp.
    """

    def entries(due: range) -> tuple[torch.Tensor | Slots, None]:
        keys = Slots(prompt.keys[due.start : due.stop], prompt.slots)
        return keys if program.kernels else keys.dense, None

    run = program.start(prompt.tokens)
    for layer in range(layers):
        run.show(layer, prompt.q[layer], entries, lse=prompt.lse[layer] if attended else None)
    return run


def plain(q: torch.Tensor, k: torch.Tensor, kernel: int = 7) -> torch.Tensor:
    """SnapKV's scores [G, N] by matmul and softmax in q's dtype: q [H, W, D], k [G, N, D]."""
    groups, tokens, size = k.shape
    heads, window, _ = q.shape
    grouped = q.reshape(groups, heads // groups * window, size)
    logits = (grouped @ k.transpose(1, 2) * size**-0.5).view(heads, window, tokens)
    hidden = torch.ones(window, window, dtype=torch.bool, device=q.device).triu(1)
    logits[:, :, -window:].masked_fill_(hidden, float("-inf"))
    votes = logits.softmax(-1).sum(1)
    votes[:, -window:] = 0
    pooled = F.max_pool1d(votes, kernel, stride=1, padding=kernel // 2)
    return pooled.view(groups, heads // groups, tokens).sum(1)


def off(prompt: Prompt, layer: int, dtype: torch.dtype) -> float:
    """Relative error that scores in `dtype` may have, keys and queries being exact.

    A logit is a sum of D products in float32 (a logit held in a narrower dtype is rounded once
    more); a weight is its exponential over a sum of N, added up in blocks of 32 or more; votes and
    scores are sums of those. Nothing here cancels, so relative errors add up.
    """
    single = torch.finfo(torch.float32).eps
    q, k = prompt.q[layer].double(), prompt.keys[layer, prompt.slots]
    size = q.shape[-1]
    most = 0.0
    for head in range(q.shape[0]):
        own = k[:, head * k.shape[1] // q.shape[0]].double()
        most = max(most, float((q[head].abs() @ own.abs().T).max()) * size**-0.5)
    logit = single * size * most
    if dtype != torch.float32:
        # A logit is at most the sum of the products' sizes; three more values are rounded.
        logit += torch.finfo(dtype).eps * most
    return 2 * logit + single * (prompt.tokens / 32 + 32) + 3 * torch.finfo(dtype).eps


def scores(finished: FinishedPrefill, layer: int) -> torch.Tensor:
    """Scores float64 [G, N] of a prefill with `report`; absent ones are 0."""
    value = finished.result(finished.program.bound.lowered.prefill.score)[layer]
    assert value.axes == ("kv", "token"), value.axes
    if value.mask is None:
        return value.data
    mask = value.mask if "kv" in value.mask_axes else value.mask[None, :]
    return torch.where(mask, value.data, 0.0)


def same_sets(got: torch.Tensor, kept: torch.Tensor, exact: torch.Tensor, share: float) -> int:
    """Checks that kept sets, bool [G, N], are equal but for near ties; returns how many differ.

    Args:
        exact: float64 [G, N] scores by which `kept` was chosen per KV head, 0 if absent.
        share: relative error of the scores by which `got` was chosen.
    """
    assert torch.equal(got.sum(-1), kept.sum(-1)), "not as many kept"
    differ = got != kept
    least = torch.where(kept & (exact > 0), exact, torch.inf).amin(-1, keepdim=True)
    close = (exact - least).abs() <= 2 * share * least
    assert not bool((differ & ~close).any()), "another set is kept"
    return int(differ.sum()) // 2


def _checked(
    prompt: Prompt,
    policy: Bound,
    layers: Sequence[int],
    made: Callable | None,
    *,
    attended: bool = False,
) -> str:
    """Compares scores and, if `made` is given, the kept sets that it returns with float64."""
    prefills = {}
    for kernels in (watched := Watched(), REFERENCE):
        program = TorchProgram(policy, report=True, kernels=kernels, keys_stay=True)
        given = attended and kernels is not REFERENCE
        run = observed(program, prompt, policy.shape.layers, attended=given)
        prefills[kernels is REFERENCE] = run.finish()
    assert watched.asked, "no kernel was generated for these scores"
    kept, sets = prefills[True].kept, made() if made else []
    worst, different = 0.0, 0
    for layer in layers:
        share = off(prompt, layer, torch.float32)
        exact, mine = scores(prefills[True], layer), scores(prefills[False], layer)
        error = (mine - exact).abs()
        assert bool((error <= share * exact).all()), f"scores of layer {layer} are off"
        assert bool((exact > 0).any(-1).all()), f"layer {layer} has no scores"
        worst = max(worst, float((error / (share * exact).clamp(min=1e-300)).max()))
        if made:
            different += same_sets(sets[layer], kept[layer], exact, share)
    said = f"scores at most {100 * worst:.0f} % of the bound off float64"
    return f"{said}; kept sets equal but for {different} ties within it" if made else said


def _one_layer(bench: Bench, tokens: int, window: int) -> Case:
    """Scores alone."""
    model = bench.model
    prompt = Prompt(model, tokens, window, 1)
    policy = bound(model, tokens, window, later=True, layers=1)
    dense = prompt.of(0).dense.contiguous()

    def with_kernels(kernels: Kernels, *, attended: bool = False) -> Callable[[], Run]:
        program = TorchProgram(policy, kernels=kernels, keys_stay=True)
        return lambda: observed(program, prompt, 1, attended=attended)

    assert prompt.lse  # made before anything is timed
    calls = {
        OURS: with_kernels(TRITON),
        ATTENDED: with_kernels(TRITON, attended=True),
        PROGRAM: with_kernels(REFERENCE),
        PLAIN: lambda: plain(prompt.q[0], dense),
    }

    def check() -> str:
        whole = bound(model, tokens, window, later=False, layers=1)
        _checked(prompt, policy, [0], None, attended=True)
        said = _checked(prompt, policy, [0], None)
        finished = observed(TorchProgram(whole, report=True), prompt, 1).finish()
        exact, other = scores(finished, 0), plain(prompt.q[0], dense).double()
        share = off(prompt, 0, model.dtype)
        # The window has no score here; `plain` pools its neighbours' scores into it.
        far = slice(None, -window)
        assert bool(((other - exact)[:, far].abs() <= share * exact[:, far]).all()), PLAIN
        return said

    counted = tokens * model.shape.kv_heads * model.entry_bytes
    return Case(
        "scoring", f"one layer, window {window}", tokens, 1, calls, check,
        counted=counted, prefill=True,
    )  # fmt: skip


def _all_layers(bench: Bench, tokens: int, window: int) -> Case:
    """What the end of a prefill costs: scores and selections of all layers."""
    model, layers = bench.model, bench.model.shape.layers
    prompt = Prompt(model, tokens, window, layers)
    policy = bound(model, tokens, window, later=False, layers=layers)

    def with_kernels(
        kernels: Kernels, *, attended: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        program = TorchProgram(policy, kernels=kernels, keys_stay=True)
        return lambda: observed(program, prompt, layers, attended=attended).finish(wait=False).kept

    assert prompt.lse  # made before anything is timed
    # ATTENDED: as served by a backend that returns the log-sum-exp.
    calls = {
        ATTENDED: with_kernels(TRITON, attended=True),
        OURS: with_kernels(TRITON),
        PROGRAM: with_kernels(REFERENCE),
    }

    def check() -> str:
        some = sorted({0, layers - 1})
        _checked(prompt, policy, some, calls[ATTENDED], attended=True)
        return _checked(prompt, policy, some, calls[OURS])

    case = Case(
        "scoring",
        f"{layers} layers, window {window}, with selection",
        tokens,
        1,
        calls,
        check,
        counted=layers * tokens * model.shape.kv_heads * model.entry_bytes,
        layers=layers,
        prefill=True,
    )

    def share(times: dict[str, Times]) -> float:
        return bench.share_of_prefill(case, times[ATTENDED])

    what = f"scores and selection of all layers, {tokens} tokens, as called / prefill"
    return case.aiming(Target(what, 0.005, False, "%", share))


def planned(lengths: Sequence[int], window: int) -> list[Planned]:
    """One layer and all layers, at every length; the length of the target first."""
    made = []
    for tokens in lengths:
        for build, label in ((_one_layer, "one layer"), (_all_layers, "all layers")):
            rank = 0 if (tokens, build) == (NAMED, _all_layers) else 1

            def case(bench: Bench, build=build, tokens=tokens) -> Case:
                return build(bench, tokens, window)

            made.append(Planned(f"scoring {label} {tokens}", case, rank))
    return made
