"""Greedy answers of the plain model under any policy, without a server.

The interpreter makes the policy's decisions; this module carries them out: hidden rows that do not
go deeper leave the computation, a restart computes its second pass, and in decode every KV head of
every layer attends to its own list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from eager_model import Model, attend, checkpoint
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.data.result import Result
from kvpolicy.dsl.interpret import decode, interpreter
from kvpolicy.dsl.interpret.interpreter import InterpretedPrompt, interpret
from kvpolicy.kernels.entries.rounding import rounded
from shipped_policies import shipped_program
from torch import Tensor


@dataclass
class Generation:
    """An answer.

    Attributes:
        tokens: new token ids.
        logits: float64 [vocabulary] per new token, from which it was chosen.
        result: the policy's decisions up to the last step; None without a policy.
        kept: after the prefill and each step, per layer and KV head, sorted positions as in
            `StepResult`; after a restart, positions of the second pass.
        restarted: positions that a restart chose, or None.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    result: Result | None = None
    kept: list[list[list[list[int]]]] = field(default_factory=list)
    restarted: list[int] | None = None

    def gap(self, step: int) -> float:
        """Difference of the best two logits of a step."""
        best, second = self.logits[step].topk(2).values.tolist()
        return best - second


def generate(
    folder: str,
    ids: Sequence[int],
    policy: str | None = None,
    overrides: Mapping[str, str] | None = None,
    *,
    new_tokens: int = 8,
    fold_interval: int = 1,
    reused: int = 0,
    forced: Sequence[int] = (),
    stored: torch.dtype = torch.float32,
    scales: Sequence[tuple[float, float]] | None = None,
    prefills_as_computed: bool = False,
) -> Generation:
    """The greedy answer to a prompt.

    Args:
        folder: folder of a checkpoint, as `save_pretrained` writes it.
        ids: token ids of the prompt.
        policy: a path or the name of a shipped policy.
        overrides: parameter values as text.
        new_tokens: number of tokens to generate; no token ends the answer.
        fold_interval: as in `bind`.
        reused: number of first tokens with keys and values of a plain prefill at every layer, as
            a prefix that a server shares between requests.
        forced: the first new tokens, taken instead of the best logits.
        stored: dtype in which keys and values are cached.
        scales: per layer, factors of keys and values when they are read; only for policies that
            keep entries unchanged.
        prefills_as_computed: whether a prefill reads its own keys and values before they are
            stored.
    """
    model = checkpoint(folder)
    bound = None
    if policy is not None:
        program = shipped_program(policy)
        bound = bind(program, model.shape, overrides, fold_interval=fold_interval)
    cached = _Cached(stored, scales or [(1.0, 1.0)] * model.shape.layers, prefills_as_computed)
    request = _Request(model, bound, reused, cached)
    with request.rounding():
        return request.answer(list(ids), new_tokens, forced)


@dataclass(frozen=True)
class _Cached:
    """How keys and values are cached; see `generate`."""

    stored: torch.dtype
    scales: Sequence[tuple[float, float]]
    prefills_as_computed: bool

    def rounded(self, x: Tensor) -> Tensor:
        return rounded(x, self.stored).float()

    def of_layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they are read."""
        both = zip((k, v), self.scales[layer], strict=True)
        made = [self.rounded(x if by == 1 else x / by) * by for x, by in both]
        return made[0], made[1]


class _Request:
    """One request: its recorded tensors, and what each KV head has cached."""

    def __init__(self, model: Model, bound: Bound | None, reused: int, cached: _Cached) -> None:
        self.model, self.bound, self.reused, self.cached = model, bound, reused, cached
        self.layers = range(model.shape.layers)
        self.recorded: list[np.ndarray] = []  # q [L, H, N, D], k and v [L, G, N, D]
        self.steps: list[list[np.ndarray]] = [[], [], []]  # q, k and v per step, [L, heads, D] each
        self.caches: list[list[tuple[Tensor, Tensor]]] = []  # k, v [n, D] by layer, KV head
        self.prompt: InterpretedPrompt | None = None  # as the policy left it
        self.answered = Generation()

    def answer(self, ids: list[int], new_tokens: int, forced: Sequence[int]) -> Generation:
        """Computes the prefill, then a step for every new token but the first."""
        hidden, position = self._prefill(torch.tensor(ids))
        for step in range(new_tokens):
            logits = self.model.logits(hidden)[-1]
            self.answered.logits.append(logits)
            chosen = forced[step] if step < len(forced) else int(logits.argmax())
            self.answered.tokens.append(chosen)
            if len(self.answered.tokens) < new_tokens:
                hidden = self._step(self.answered.tokens[-1], position)
                position += 1
        return self.answered

    # What is cached

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """A block in which the interpreter rounds merged and rotated vectors as the cache does."""

        def as_stored(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
            return self.cached.rounded(torch.from_numpy(x)).numpy()

        # Layers in pairs store directions, which `_cache` rounds.
        shares = self.bound is not None and self.bound.lowered.share is not None
        with ExitStack() as stack:
            for module in () if shares else (decode, interpreter):
                stack.enter_context(patch.object(module, "as_stored", as_stored))
            yield

    # Prefill

    def _prefill(self, ids: Tensor) -> tuple[Tensor, int]:
        """The last hidden states [T, C] and the position of the next token."""
        plain = self._plain(ids) if self.reused else None
        hidden, chosen = self._pass(ids, plain)
        if chosen is not None:  # a restart
            ids, self.answered.restarted = ids[chosen], chosen.tolist()
            sections = self.bound.folded, self.bound.lowered
            folded, lowered = (replace(each, propagate=None) for each in sections)
            self.bound = replace(self.bound, folded=folded, lowered=lowered)
            hidden, _ = self._pass(ids, None)
        self._decide()
        return hidden, len(ids)

    def _plain(self, ids: Tensor) -> list[np.ndarray]:
        """Recorded tensors of a prefill without a policy."""
        alone = _Request(self.model, None, 0, self.cached)
        alone._pass(ids, None)
        return alone.recorded

    def _pass(self, ids: Tensor, plain: list[np.ndarray] | None) -> tuple[Tensor, Tensor | None]:
        """Computes all layers, or those up to a restart: last hidden states, tokens it chose."""
        shape = self.model.shape
        sizes = [(shape.layers, n, len(ids), shape.head_dim) for n in self._heads()]
        self.recorded = [np.zeros(size, dtype=np.float32) for size in sizes]
        there = torch.arange(len(ids))
        hidden = self.model.embed(ids)
        propagating = self.bound is not None and self.bound.propagates
        for layer in self.layers:
            attended = partial(self._recorded, layer, there, plain)
            hidden = self.model.layer(layer, hidden, there, attended)
            if not propagating:
                continue
            chosen = self._goes_deeper(layer)
            if chosen is not None and self.bound.restarts:
                return hidden, chosen
            if chosen is not None:
                hidden, there = hidden[torch.isin(there, chosen)], chosen
                propagating = self.bound.folded.propagate.repeats
        return hidden, None

    def _recorded(
        self, layer: int, there: Tensor, plain: list[np.ndarray] | None, *parts: Tensor
    ) -> Tensor:
        """Notes queries, keys and values of the tokens in `there`; returns attention [H, T, D]."""
        computed, parts = parts, (parts[0], *self.cached.of_layer(layer, *parts[1:]))
        if plain is not None:
            old = there < self.reused
            reused = there[old].numpy()
            for part, source in zip(parts[1:], plain[1:], strict=True):
                part[:, old] = torch.from_numpy(source[layer][:, reused])
        for record, part in zip(self.recorded, parts, strict=True):
            record[layer][:, there.numpy()] = part.numpy()
        return attend(*(computed if self.cached.prefills_as_computed else parts))

    def _heads(self) -> tuple[int, int, int]:
        shape = self.model.shape
        return shape.heads, shape.kv_heads, shape.kv_heads

    def _goes_deeper(self, layer: int) -> Tensor | None:
        """Positions that propagation at this layer chooses, or None; deeper layers are zeros."""
        result = interpret(self.bound, *self.recorded)
        if self.bound.folded.propagate.repeats:
            chosen = (result.propagated or {}).get(layer)
        else:
            chosen = result.propagated if result.selected_layer == layer else None
        return None if chosen is None else torch.tensor(chosen, dtype=torch.long)

    # Caches

    def _decide(self) -> None:
        """Updates every KV head's cache after the prefill or after a step."""
        if self.bound is None:
            kept = [[self._everything()] * self.model.shape.kv_heads for _ in self.layers]
            vectors = None
        else:
            if self.prompt is None:
                inverse = self.model.frequencies.numpy()
                self.prompt = InterpretedPrompt(self.bound, *self.recorded, inverse)
                result = self.prompt.result
                kept = [[np.flatnonzero(h).tolist() for h in each] for each in result.kept]
                vectors = result.merged and [
                    [(k[h][held], v[h][held]) for h, held in enumerate(heads)]
                    for (k, v), heads in zip(result.merged, kept, strict=True)
                ]
            else:
                result = self.answered.result
                (after,) = self.prompt.follow(tuple(each[-1][None] for each in self.steps))
                kept, vectors = after.kept, after.merged
                result = replace(result, steps=[*result.steps, after])
            self.answered.result = result
        self.answered.kept.append(kept)
        self.caches = [
            [self._cache(layer, head, kept, vectors) for head in range(self.model.shape.kv_heads)]
            for layer in self.layers
        ]

    def _everything(self) -> list[int]:
        return list(range(self.recorded[0].shape[2] + len(self.steps[0])))

    def _cache(self, layer: int, head: int, kept: list, vectors: list | None) -> tuple:
        """Keys and values [n, D] of one KV head."""
        held = kept[layer][head]
        both = []
        for record, steps in zip(self.recorded[1:], self.steps[1:], strict=True):
            rows = [record[layer, head], *(step[layer, head][None] for step in steps)]
            both.append(torch.from_numpy(np.concatenate(rows)[held]))
        if vectors is None:
            return tuple(both)
        made = [torch.from_numpy(x) for x in vectors[layer][head]]
        if self.bound.lowered.share is None:
            return tuple(self.cached.rounded(x) for x in made)
        return tuple(self._restored(x, own) for x, own in zip(made, both, strict=True))

    def _restored(self, made: Tensor, own: Tensor) -> Tensor:
        """Vectors [n, D] from stored directions; unchanged vectors are cached as they were."""
        length = own.double().norm(dim=-1, keepdim=True).float().double()
        direction = self.cached.rounded((made.double() / length).nan_to_num(0.0)).double()
        same = (made.float() == own).all(-1, keepdim=True)
        return torch.where(same, own, (direction * length).float())

    # Decode

    def _step(self, token: int, position: int) -> Tensor:
        """Computes one token; returns the last hidden state [1, C]."""
        hidden = self.model.embed(torch.tensor([token]))
        at = torch.tensor([position])
        seen: list[list[np.ndarray]] = [[], [], []]
        for layer in self.layers:
            attended = partial(self._attended, layer, seen)
            hidden = self.model.layer(layer, hidden, at, attended)
        for steps, each in zip(self.steps, seen, strict=True):
            steps.append(np.stack(each))
        self._decide()
        return hidden

    def _attended(
        self, layer: int, seen: list[list[np.ndarray]], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention [H, 1, D], each KV head over its list and the new entry; notes q, k, v."""
        k, v = self.cached.of_layer(layer, k, v)
        for each, part in zip(seen, (q, k, v), strict=True):
            each.append(part[:, 0].numpy())
        group = self.model.shape.group
        parts = []
        for head, (keys, values) in enumerate(self.caches[layer]):
            own = slice(head * group, (head + 1) * group)
            keys = torch.cat([keys, k[head]])[None]
            parts.append(attend(q[own], keys, torch.cat([values, v[head]])[None]))
        return torch.cat(parts)
