"""The methods as in their authors' code, in plain loops, independent of the language.

Every function takes one prompt's tensors, q [L, H, N, D], k and v [L, G, N, D], and returns the
sorted positions kept, per layer and KV head. Of equal scores, lower heads and positions win.
"""

from __future__ import annotations

import math

import numpy as np


def window_attention(q: np.ndarray, k: np.ndarray, window: int) -> np.ndarray:
    """Attention [H, W, N] of one layer's window: causal softmax over all keys."""
    heads, tokens, size = q.shape
    group = heads // k.shape[0]
    window = min(window, tokens)
    result = np.zeros((heads, window, tokens))
    for head in range(heads):
        for row in range(window):
            last = tokens - window + row
            logits = [
                math.fsum(float(a) * float(b) for a, b in zip(q[head, last], key, strict=True))
                / math.sqrt(size)
                for key in k[head // group, : last + 1]
            ]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            total = math.fsum(weights)
            result[head, row, : last + 1] = [x / total for x in weights]
    return result


def pooled(x: np.ndarray, width: int, average: bool) -> np.ndarray:
    """Centred pooling of [M]: the maximum, or the sum divided by the width."""
    half, result = width // 2, np.zeros(len(x))
    for i in range(len(x)):
        near = x[max(0, i - half) : i + half + 1]
        result[i] = near.sum() / width if average else near.max()
    return result


def best(x: np.ndarray, number: int) -> list[int]:
    """Indices of the highest values in float32; of equal values, the lowest indices."""
    single = x.astype(np.float32)
    order = sorted(range(len(x)), key=lambda i: (-single[i], i))
    return sorted(order[: max(0, number)])


def _prefix(q: np.ndarray, k: np.ndarray, window: int) -> np.ndarray:
    """Attention [H, W, M] to the M tokens before the window."""
    return window_attention(q, k, window)[:, :, : max(0, k.shape[1] - window)]


def _with_window(chosen: list[int], tokens: int, window: int) -> list[int]:
    return chosen + list(range(max(0, tokens - window), tokens))


def snapkv(q, k, v, *, capacity, window, kernel, average):
    """SnapKV: votes of each query head, pooled, then added up over the group."""
    result = []
    for q_layer, k_layer in zip(q, k, strict=True):
        tokens, group = k.shape[2], q.shape[1] // k.shape[1]
        votes = _prefix(q_layer, k_layer, window).sum(1)
        scores = np.array([pooled(row, kernel, average) for row in votes])
        scores = scores.reshape(k.shape[1], group, -1).sum(1)
        number = tokens if tokens <= capacity else capacity - window
        result.append([_with_window(best(row, number), tokens, window) for row in scores])
    return result


def vatp_snapkv(q, k, v, *, capacity, window, kernel, average):
    """VATP with SnapKV: the group's pooled votes times the L1 norms of the values."""
    result = []
    for q_layer, k_layer, v_layer in zip(q, k, v, strict=True):
        tokens, group = k.shape[2], q.shape[1] // k.shape[1]
        votes = _prefix(q_layer, k_layer, window).sum(1)
        pools = np.array([pooled(row, kernel, average) for row in votes])
        pools = pools.reshape(k.shape[1], group, -1).sum(1)
        sizes = np.abs(v_layer.astype(np.float64)).sum(-1)[:, : pools.shape[1]]
        number = tokens if tokens <= capacity else capacity - window
        result.append([_with_window(best(row, number), tokens, window) for row in pools * sizes])
    return result


def pyramid_budgets(layers: int, tokens: int, *, capacity, window, beta) -> list[int | None]:
    """Entries outside the window per layer; None where all stay."""
    inner, rest = capacity - window, tokens - window
    if tokens < capacity:
        return [None] * layers
    if tokens < 2 * inner:
        return [inner] * layers
    return _pyramid(layers, inner, rest, beta)


def _pyramid(layers: int, inner: int, rest: int, beta: int) -> list[int]:
    least = inner // beta
    most = 2 * inner - least
    if most >= rest:
        most = rest
        least = 2 * inner - most
    step = (most - least) // max(1, layers - 1)
    return [most - layer * step for layer in range(layers)]


def pyramidkv(q, k, v, *, capacity, window, kernel, average, beta, strongest=False):
    """PyramidKV: mean or maximum over the group, then pooling; a budget per layer."""
    layers, kv, tokens, _ = k.shape
    budgets = pyramid_budgets(layers, tokens, capacity=capacity, window=window, beta=beta)
    result = []
    for layer in range(layers):
        votes = _prefix(q[layer], k[layer], window).sum(1)
        votes = votes.reshape(kv, q.shape[1] // kv, -1)
        votes = votes.max(1) if strongest else votes.mean(1)
        scores = [pooled(row, kernel, average) for row in votes]
        number = tokens if budgets[layer] is None else budgets[layer]
        result.append([_with_window(best(row, number), tokens, window) for row in scores])
    return result


def _heads_compete(scores: list[np.ndarray], inner: int, alpha: float, even: int) -> list[int]:
    """AdaKV's numbers of entries outside the window, per KV head."""
    flat = np.concatenate(scores)
    heads = [i // len(scores[0]) for i in best(flat, len(scores) * inner)]
    return [round(heads.count(g) * (1 - alpha) + even) for g in range(len(scores))]


def adakv(q, k, v, *, capacity, window, kernel, average, alpha, strongest, beta=None):
    """AdaKV: heads compete; with `beta`, layers have PyramidKV's budgets."""
    layers, kv, tokens, _ = k.shape
    inner, rest = capacity - window, tokens - window
    inners = [inner] * layers if beta is None else _pyramid(layers, inner, rest, beta)
    result = []
    for layer in range(layers):
        votes = _prefix(q[layer], k[layer], window).mean(1)
        votes = votes.reshape(kv, q.shape[1] // kv, -1)
        votes = votes.max(1) if strongest else votes.mean(1)
        scores = [pooled(row, kernel, average) for row in votes]
        if tokens <= capacity or inners[layer] > rest:
            numbers = [tokens] * kv
        else:
            numbers = _heads_compete(scores, inners[layer], alpha, int(alpha * inners[layer]))
        result.append(
            [
                _with_window(best(row, n), tokens, window)
                for row, n in zip(scores, numbers, strict=True)
            ]
        )
    return result


def lava(q, k, v, *, capacity, window, kernel, average, alpha):
    """LAVa: layer budgets by entropy, heads compete; `alpha` is the floor of the authors' code."""
    layers, kv, tokens, _ = k.shape
    if tokens <= capacity:
        return [[list(range(tokens))] * kv] * layers
    scores, entropies = [], []
    for layer in range(layers):
        votes = _prefix(q[layer], k[layer], window).mean(1)
        votes = np.array([pooled(row, kernel, average) for row in votes])
        votes = votes.reshape(kv, q.shape[1] // kv, -1).max(1)
        strength = np.abs(v[layer].astype(np.float64)).sum(-1)[:, : tokens - window].max(1)
        scores.append(votes * strength[:, None])
        shares = scores[-1] / scores[-1].sum()
        entropies.append(-math.fsum(p * math.log(p) for p in shares.flat if p > 0))
    total = (capacity - window) * layers
    result = []
    for layer in range(layers):
        inner = int(entropies[layer] / math.fsum(entropies) * total)
        numbers = _heads_compete(list(scores[layer]), inner, alpha, int(alpha * capacity))
        result.append(
            [_with_window(best(row, n), tokens, window)
             for row, n in zip(scores[layer], numbers, strict=True)]
        )  # fmt: skip
    return result


def simlayerkv(q, k, v, *, threshold, queries, start, reach, window):
    """SimLayerKV: a layer whose last queries attend mostly to the ends keeps only these."""
    result = []
    for q_layer, k_layer in zip(q, k, strict=True):
        tokens = k.shape[2]
        attention = window_attention(q_layer, k_layer, queries)
        looked = []
        for head in attention:
            for row, weights in enumerate(head):
                query = tokens - len(head) + row
                looked.append(
                    math.fsum(
                        float(x)
                        for i, x in enumerate(weights)
                        if i <= query and (i < start or 1 <= query - i <= reach)
                    )
                )
        lazy = np.float32(math.fsum(looked) / len(looked)) > np.float32(threshold)
        ends = [i for i in range(tokens) if i < start or i >= tokens - window]
        result.append([ends if lazy else list(range(tokens))] * k.shape[1])
    return result


def chunkkv(q, k, v, *, capacity, window, chunk, reuse):
    """Chunks of the tokens before the window, in order of the attention that they sum up to."""
    layers, group, tokens = len(q), q.shape[1] // k.shape[1], q.shape[2]
    rest = max(0, tokens - window)
    spans = [range(first, min(first + chunk, rest)) for first in range(0, rest, chunk)]
    kept = []
    for layer in range(layers):
        source = layer - layer % reuse
        votes = _prefix(q[source], k[source], window).sum(1).reshape(-1, group, rest).sum(1)
        heads = []
        for own in votes:
            sums = np.array([math.fsum(own[span]) for span in spans], np.float32)
            order = sorted(range(len(spans)), key=lambda i: (-sums[i], i))
            chosen = [position for i in order for position in spans[i]][: max(0, capacity - window)]
            heads.append(_with_window(sorted(chosen), tokens, window))
        kept.append(heads)
    return kept


def keydiff(q, k, v, *, capacity, newest):
    """The keys with the smallest cosine with the mean of all keys, each of length 1."""
    tokens, kept = k.shape[2], []
    rest = max(0, tokens - newest)
    for layer in k.astype(np.float64):
        heads = []
        for own in layer:
            directions = own / np.linalg.norm(own, axis=1, keepdims=True)
            anchor = directions.mean(0)
            alike = directions @ anchor / np.linalg.norm(anchor)
            heads.append(_with_window(best(-alike[:rest], capacity - newest), tokens, newest))
        kept.append(heads)
    return kept
