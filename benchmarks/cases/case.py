"""Kernel cases: calls that do the same work, the check of their results, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.ir.nodes import ModelShape
from timing import Clock, Times


@dataclass(frozen=True)
class Model:
    """A model's sizes, and dtype and device of its tensors.

    Attributes:
        shape: L layers, H query heads, G KV heads, D head size.
        dtype: of keys, values and weights.
        hidden, inner: widths of the hidden states and inside the MLP.
    """

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key, or of one value."""
        return self.shape.head_dim * torch.empty((), dtype=self.dtype).element_size()

    def random(self, *size: int, seed: int) -> torch.Tensor:
        """Normal numbers in the model's dtype."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

    def permutation(self, number: int, seed: int) -> torch.Tensor:
        """int64 [number]: slots in random order, as a server gives them after a while."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randperm(number, generator=generator, device=self.device)


@dataclass(frozen=True)
class Target:
    """A limit on one figure of a case.

    Attributes:
        what: the figure in words, with its size.
        limit: the bound.
        least: whether it is a lower bound; otherwise an upper one.
        unit: `%` (shares of 1 are shown times 100) or `x`.
        figure: computes it from the times of the calls; None if one that it needs is missing.
    """

    what: str
    limit: float
    least: bool
    unit: str
    figure: Callable[[dict[str, Times]], float | None]

    def facts(self, times: dict[str, Times]) -> dict:
        """The target, its limit, the measured figure, and whether it is met."""
        scale, side = (100 if self.unit == "%" else 1), "at least" if self.least else "at most"
        made = {"target": self.what, "limit": f"{side} {scale * self.limit:g} {self.unit}"}
        measured = self.figure(times)
        if measured is None:
            return {**made, "measured": "not measured", "met": None, "value": None}
        met = measured >= self.limit if self.least else measured <= self.limit
        said = f"{scale * measured:.3g} {self.unit}"
        return {**made, "measured": said, "met": met, "value": measured}


@dataclass(frozen=True)
class Tuning:
    """Entry in the file of measured choices, for a case whose calls differ in their knobs.

    Attributes:
        kernel: name in `kvpolicy.kernels.launch.tuned.KERNELS`.
        where: sizes for which the choice holds, by name.
        knobs: call -> knob -> value; without the first call, which takes the wrapper's values.
    """

    kernel: str
    where: dict[str, int | str]
    knobs: dict[str, dict[str, int | str]]


@dataclass(frozen=True)
class Case:
    """Calls that do the same work.

    Attributes:
        topic: section of the report.
        name: what is done.
        tokens, batch: N, B.
        calls: ours first, then the alternatives, by name.
        check: raises AssertionError where a result is wrong; says what was compared, and how well.
        counted: bytes that have to be moved, or None where that says nothing.
        layers: number of layers that a call computes; shares of prefill are for all layers.
        prefill: whether the work is done once per prefill; its share of that is reported.
        waits: calls that wait for the device, so that no CUDA graph can hold them.
        note: further words for the report.
        tuning: the choice to be filled with the fastest call's knobs; None if no choice is made.
    """

    topic: str
    name: str
    tokens: int
    batch: int
    calls: dict[str, Callable[[], object]]
    check: Callable[[], str]
    counted: int | None = None
    layers: int = 1
    prefill: bool = False
    targets: tuple[Target, ...] = ()
    waits: tuple[str, ...] = ()
    note: str = ""
    tuning: Tuning | None = None

    def aiming(self, *targets: Target) -> Case:
        """The case with `targets`, whose figures refer to the case itself."""
        return replace(self, targets=targets)


@dataclass(frozen=True)
class Planned:
    """A case that is built when its turn comes, so that one case at a time takes memory.

    Attributes:
        rank: cases with named targets (0) come before others.
        as_chosen: whether its calls take the choices of cases before it (see `Tuning`).
    """

    label: str
    build: Callable[[Bench], Case]
    rank: int = 1
    as_chosen: bool = False


@dataclass
class Bench:
    """What cases share: the model, the clock, the copy bandwidth and prefill times."""

    model: Model
    clock: Clock
    bandwidth: dict[str, float]
    prefills: dict[int, Times] = field(default_factory=dict)

    def share_of_copy(self, counted: int, times: Times) -> float:
        """Bandwidth over the counted bytes, kernels alone, as a share of the copy's."""
        return counted / statistics.median(times.kernels) / self.bandwidth["median"]

    def prefill(self, tokens: int) -> float:
        """Seconds of the model's matrix products and attention over `tokens` tokens."""
        if tokens not in self.prefills:
            self.prefills[tokens] = self._prefill(tokens)
        return self.model.shape.layers * statistics.median(self.prefills[tokens].kernels)

    def share_of_prefill(self, case: Case, times: Times, *, called: bool = True) -> float:
        """Time per request for all layers, called or kernels alone, as a share of its prefill."""
        seconds = statistics.median(times.called if called else times.kernels)
        layers = self.model.shape.layers / case.layers
        return seconds * layers / case.batch / self.prefill(case.tokens)

    def _prefill(self, tokens: int) -> Times:
        """One layer: its matrix products and causal attention; norms and RoPE are left out."""
        model, shape = self.model, self.model.shape
        wide = shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        weights = [
            model.random(*size, seed=at) * size[0] ** -0.5
            for at, size in enumerate(
                ((model.hidden, wide + 2 * narrow), (wide, model.hidden),
                 (model.hidden, 2 * model.inner), (model.inner, model.hidden))
            )
        ]  # fmt: skip
        x = model.random(tokens, model.hidden, seed=9)

        def layer() -> torch.Tensor:
            q, k, v = (x @ weights[0]).split((wide, narrow, narrow), -1)
            q, k, v = (
                each.view(1, tokens, -1, shape.head_dim).transpose(1, 2) for each in (q, k, v)
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            y = x + mixed.transpose(1, 2).reshape(tokens, wide) @ weights[1]
            gate, up = (y @ weights[2]).chunk(2, -1)
            return y + (torch.nn.functional.silu(gate) * up) @ weights[3]

        return self.clock.times({"layer": layer})["layer"]


class Checked:
    """The largest error of each call against its reference."""

    # Most calls that are listed one by one; of more (variants to tune), only the worst error.
    NAMED = 12

    def __init__(self) -> None:
        self._off: dict[str, tuple[float, float]] = {}

    def within(
        self, got: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, call: str
    ) -> Checked:
        """Checks |got - wanted| <= bound everywhere; returns itself.

        Args:
            got: any dtype.
            wanted, bound: float64, broadcasting to it.

        Raises:
            AssertionError: the bound is exceeded, or `wanted` has nothing but zeros.
        """
        error = (got.double() - wanted).abs()
        assert bool((error <= bound).all()), (
            f"{call}: off by {float(error.max()):.3g}, "
            f"{float((error / bound).max()):.3g} of the bound"
        )
        assert bool(wanted.abs().max() > 0), f"{call}: nothing but zeros to compare with"
        share = float((error / bound.clamp(min=torch.finfo(torch.float64).tiny)).max())
        before = self._off.get(call, (0.0, 0.0))
        self._off[call] = max(before[0], float(error.max())), max(before[1], share)
        return self

    def __str__(self) -> str:
        said = self._off
        if len(said) > self.NAMED:
            worst = tuple(max(each) for each in zip(*said.values(), strict=True))
            said = {f"{len(said)} calls": worst}
        return "; ".join(
            f"{call}: at most {error:.1e} off, {100 * share:.0f} % of the bound"
            for call, (error, share) in said.items()
        )
