"""What the plugin knows about one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import Bounds, Size
from kvpolicy.dsl.bind.entries import known_counts
from kvpolicy.dsl.bind.kept import heads_differ, keep_of
from kvpolicy.dsl.bind.steady import ENDLESS
from kvpolicy.dsl.execute.decode.memory import Known, Memory
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.heads import ALL, Heads
from kvpolicy.dsl.ir.once import PROMPTS, once_at_most
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face.asked import POLICY, not_served
from kvpolicy.sglang_ext.face.kernels_in_use import in_use
from kvpolicy.sglang_ext.face.policy_files import Policy
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.growth import Growth, slots_of_rank
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.request import propagation
from kvpolicy.sglang_ext.request.pending_steps import PendingSteps, wanted
from kvpolicy.sglang_ext.request.propagation import Progress, PropagationPlan
from kvpolicy.sglang_ext.request.reasons import Reason

_ATTRIBUTE = "kv_policy_state"
_MANY = 1024  # output tokens within which entries are taken to leave
MOST_MOVED = 2**29  # most bytes that are held twice while a prompt is compacted within its slots


@dataclass
class Standing:
    """How often a policy has failed; shared by all its variants (serving/variants.py).

    Attributes:
        failures: requests for which it failed.
        enabled: False once it has failed too often.
    """

    failures: int = 0
    enabled: bool = True


class Served:
    """A policy bound to the model that is served.

    Attributes:
        upper_layers: layers that are stored with the one below (`share:`).
        standing: how often the policy has failed.
        set: parameter values that requests have set, if it is a variant; else empty.
        heads_differ: whether the KV heads of a layer may hold different entries.
        in_stages: whether other stages have other layers.
    """

    def __init__(
        self, policy: Policy, bound: Bound, arena: Arena, page_size: int, heads: Heads = ALL
    ) -> None:
        """
        Args:
            page_size: slots of a page of SGLang's allocator.
            heads: KV heads of the model that this rank has.
        """
        self.policy, self.name = policy, policy.name
        self.bound = bound
        self.kernels = in_use(arena.storage.device)
        table, layers = self.kernels.table, arena.span
        # With a queue of their own: while a thread warms one policy, prompts of others exchange.
        own_heads, keys_stay = heads.joined(), self.kernels.read_the_pool
        self.program = TorchProgram(
            bound, kernels=table, heads=own_heads, layers=layers, keys_stay=keys_stay
        )
        self.in_stages = len(arena.spans) > 1
        self.upper_layers = bound.upper_layers
        self._arena = arena
        self.growth = Growth(bound, self.kept, arena, page_size)
        self.heads_differ = heads_differ(bound.lowered)
        self._bounded = self.kept(ENDLESS).total < self._everything(ENDLESS)
        self.standing = Standing()
        self.set: dict[str, Any] = {}

    @once_at_most(PROMPTS)
    def plan(self, prompt: int) -> PropagationPlan | None:
        """How a prompt is propagated; None if every layer is certain to see all tokens."""
        return propagation.plan(self.bound, prompt)

    @once_at_most(PROMPTS)
    def known_counts(self, prompt: int) -> list[int] | None:
        """[L] entries that each list of a layer keeps of a prompt; None if data decide."""
        return known_counts(self.bound, prompt)

    @once_at_most(PROMPTS)
    def single_queries(self, prompt: int) -> int:
        """Number of a prompt's last queries that are read singly, not only in sums over all."""
        bound = self.bound
        windows = [node for node in bound.nodes() if node.operation.is_window]
        layers = range(bound.shape.layers)
        sizes = [bound.window(n, prompt, layer) for n in windows if n.args for layer in layers]
        return max([*sizes, bound.step_queries(prompt) - 1, 1])

    def _everything(self, prompt: int) -> int:
        return self.bound.shape.layers * self.bound.shape.kv_heads * prompt

    @once_at_most(PROMPTS)
    def kept(self, prompt: int) -> Size:
        """Bounds on the entries that a prefill keeps of a prompt."""
        return Bounds(self.bound, prompt).kept

    @once_at_most(PROMPTS)
    def most_slots(self, prompt: int) -> int | None:
        """Private slots that suffice for a prompt; None if compressing it saves nothing."""
        kept = self.kept(prompt)
        if kept.total >= self._everything(prompt):
            return None if self._bounded or self.keeps_prompt else prompt
        slots = max(
            slots_of_rank(kept.of(layers), layers, self.bound, self._arena, prompt)
            for layers in self._arena.spans
        )
        # A policy that goes on after the prompt, or lets tokens leave the prefill, is applied even
        # where that saves no slots.
        goes_on = self.bound.folded.decode is not None or self.bound.propagates
        return slots if slots < prompt or goes_on else None

    @property
    def keeps_prompt(self) -> bool:
        """Whether nothing leaves before the first decode step."""
        keeps = keep_of(self.bound.folded.prefill).op == "all" and not self.bound.propagates
        return self.bound.folded.decode is not None and keeps

    def folds_within(self, prompt: int, output: int) -> bool:
        """Whether entries may leave while `output` tokens are generated."""
        if self.bound.folded.decode is None:
            return False
        # The last token is not computed, so a request of n tokens has n - 1 decode steps.
        return output >= _MANY or self.bound.next_leaving(1, prompt, output - 1) is not None


@dataclass(frozen=True)
class Queries:
    """Queries of consecutive tokens at one layer, after RoPE.

    Attributes:
        heads: [T, H, D].
        lse: float32 [T, H], log-sum-exp of each query's logits; None if attention did not give it.
    """

    heads: torch.Tensor
    lse: torch.Tensor | None

    @classmethod
    def joined(cls, parts: Sequence[Queries]) -> Queries:
        """The queries of all parts, in order; with `lse` only if every part has it."""
        lse = [part.lse for part in parts if part.lse is not None]
        joined_lse = torch.cat(lse) if len(lse) == len(parts) else None
        return cls(torch.cat([part.heads for part in parts]), joined_lse)

    @property
    def number(self) -> int:
        return self.heads.shape[0]

    def rows(self, rows: slice) -> Queries:
        return Queries(self.heads[rows], None if self.lse is None else self.lse[rows])

    def last(self, number: int) -> Queries:
        """The last `number` queries, or all if there are fewer."""
        return self.rows(slice(max(self.number - number, 0), None))

    def copied(self) -> Queries:
        return Queries(self.heads.clone(), None if self.lse is None else self.lse.clone())


@dataclass
class Seen:
    """What a policy has seen of a prompt in chunks before the last.

    Attributes:
        window: layer -> queries of the observation window, by chunk.
        run: run of the policy's program, where it sums over chunks; else None.
    """

    window: dict[int, list[Queries]] = field(default_factory=dict)
    run: Any = None


@dataclass
class Reported:
    """What is reported of a request.

    Attributes:
        facts: what its answer says of the policy.
        counted: whether metrics include it.
        seconds: time spent on scoring and compaction.
        shows_kept: whether its answer says which positions are kept.
        kept: these positions of a compressed prompt, as `kept.described` gives them.
        folded: how many times entries have left while it decoded.
        dropped: entries that have left while it decoded.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    counted: bool = False
    seconds: float = 0.0
    shows_kept: bool = False
    kept: dict[str, Any] | None = None
    folded: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Decoding:
    """What a policy that goes on after the prompt continues from.

    Attributes:
        memory: what it remembers.
        pending: decode steps that it has not been taken through.
    """

    memory: Memory
    pending: PendingSteps


@dataclass
class RequestState:
    """A request's policy and how far it has come.

    Attributes:
        served: its policy.
        prompt: N, tokens of the prompt.
        slots: private slots to reserve, an upper bound.
        uncompressed: why its prompt is served in full, or None.
        folds: whether entries may leave while it decodes.
        decoding: what its policy continues from, once its prompt has ended; None: it does not.
        private: its compressed copy, from the forward that ends its prompt (that begins it, if it
            propagates) or from its first fold on; else None.
        published: whether SGLang has offered its prompt to the radix cache.
        detached: whether its prompt has been left to the radix cache.
        in_place: whether it is compacted within its prompt's slots, as prompt and copy at once have
            no room; other requests then do not find the prompt in the radix cache.
        was_compressed: whether it decoded under its policy before it was retracted.
        skipped: decode steps whose folds had no slots for what would have stayed.
        seen: what earlier chunks of its prompt have shown to its policy.
        reported: what is reported of it.
        plan: how its tokens leave the prefill; None if all go through every layer.
        progress: how far that has come.
        failed: whether the policy has failed in its work for the request.
        failure_code: with several ranks or stages, code of the failure on this one that the others
            do not know of yet (forward/failures.py); 0 if there is none.
        under_way: number of forwards with it whose outcome not all stages know yet.
    """

    served: Served
    prompt: int
    slots: int
    uncompressed: Reason | None = None
    folds: bool = False
    decoding: Decoding | None = None
    private: Private | None = None
    published: bool = False
    detached: bool = False
    in_place: bool = False
    was_compressed: bool = False
    skipped: set[int] = field(default_factory=set)
    seen: Seen = field(default_factory=Seen)
    reported: Reported = field(default_factory=Reported)
    plan: PropagationPlan | None = None
    progress: Progress = field(default_factory=Progress)
    failed: bool = False
    failure_code: int = 0
    under_way: int = 0

    @property
    def broken(self) -> bool:
        """Whether the policy has failed here, even if other ranks do not know yet."""
        return self.failed or self.failure_code > 0

    @property
    def is_whole(self) -> bool:
        """Whether all layers still hold all entries of its prompt, in ordinary slots."""
        narrowed = self.progress.stopped or self.progress.layer is not None
        moved = self.private is not None and self.private.borrowed > 0
        return not self.detached and not narrowed and not moved

    def may_move(self, slot_bytes: int) -> bool:
        """Whether its prompt may be compacted within its own slots.

        Args:
            slot_bytes: bytes of one slot in all layers; kept entries are held twice for a moment.
        """
        bound = self.served.bound
        changes = bound.folded.prefill.merge is not None or bound.positions == "slots"
        fits = self.slots * slot_bytes <= MOST_MOVED
        excluded = (
            self.served.upper_layers or self.propagates or self.resumes or self.served.in_stages
        )
        return self.wanted and fits and not (changes or excluded)

    @property
    def wanted(self) -> bool:
        """Whether the request is to be compressed when its prompt ends."""
        return self.uncompressed is None

    @property
    def observed(self) -> bool:
        """Whether its policy sees the prompt: to compress it, or to go on from it."""
        return self.wanted or self.folds

    @property
    def followed_plan(self) -> PropagationPlan | None:
        """The plan by which its tokens may leave; None if all go through every layer."""
        # Once chunks have stopped at a layer, deeper layers lack their entries: no row goes there.
        stopped = self.failed and self.progress.stopped
        return self.plan if self.wanted or stopped else None

    @property
    def propagates(self) -> bool:
        """Whether deeper layers may see fewer tokens than the prompt has."""
        return self.followed_plan is not None

    @property
    def compressed_copy(self) -> Private:
        """Its compressed copy.

        Raises:
            RuntimeError: it has none.
        """
        if self.private is None:
            raise RuntimeError("the request has no private slots")
        return self.private

    @property
    def memory(self) -> Memory:
        """What its policy remembers while it decodes.

        Raises:
            RuntimeError: its policy does not go on.
        """
        return self._required_decoding.memory

    @property
    def pending(self) -> PendingSteps:
        """Decode steps that its policy has not been taken through.

        Raises:
            RuntimeError: its policy does not go on.
        """
        return self._required_decoding.pending

    @property
    def goes_on(self) -> bool:
        """Whether its policy lets entries leave while it decodes, now that its prompt has ended."""
        return self.decoding is not None and not self.decoding.memory.not_finite

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether its policy goes on on other stages, which do not know yet that it failed here."""
        return self.failure_code > 0 and self.decoding is None and self.folds

    @property
    def continues_anywhere(self) -> bool:
        """Whether its policy continues after the prompt, here or on other stages.

        What schedulers decide by it they decide alike.
        """
        return self.decoding is not None or self.goes_on_elsewhere

    @property
    def _required_decoding(self) -> Decoding:
        if self.decoding is None:
            raise RuntimeError("the request's policy does not go on")
        return self.decoding

    @property
    def queries(self) -> int:
        """W, number of the prompt's last queries that the policy observes."""
        return self.served.bound.queries(self.prompt)

    @property
    def resumes(self) -> bool:
        """Whether its earlier output has to be computed again under its policy."""
        return self.observed and self.was_compressed

    def is_at(self, progress: Progress, request: Any) -> bool:
        """Whether its request has been neither aborted nor retracted since it had `progress`."""
        holds: bool = request.kv.holds_kv
        return self.progress is progress and holds

    def leaves_at(self, step: int) -> bool:
        """Whether entries are to leave at a decode step, from 1."""
        return step not in self.skipped and self.served.bound.leaves_at(step, self._seen_prompt)

    def next_leaving(self, step: int, most: int) -> int | None:
        """The first of `most` decode steps from `step` on at which entries leave; None: none."""
        end = step + most
        while step < end:
            leaving_step = self.served.bound.next_leaving(step, self._seen_prompt, end - step)
            if leaving_step is None or leaving_step not in self.skipped:
                return leaving_step
            step = leaving_step + 1
        return None

    @property
    def _seen_prompt(self) -> int:
        # After a second prefill the policy's prompt is the tokens that were chosen.
        return self.prompt if self.decoding is None else self.decoding.memory.prompt

    def pending_positions(self, length: int) -> range:
        """Positions of the tokens whose steps its policy has not been taken through.

        Args:
            length: tokens of the request, the last step's included.
        """
        shift = self.progress.shift
        return range(self.prompt + self.memory.generated - shift, length - shift)

    def next_end(self, prefix: int, end: int) -> int:
        """Length at which a pass of a resumed request ends: its prompt's, or where entries leave.

        Args:
            prefix, end: tokens before the pass, and after it if nothing cuts it short.
        """
        if prefix < self.prompt:
            return min(self.prompt, end)
        step = self.next_leaving(prefix - self.prompt + 1, end - prefix - 1)
        return end if step is None else self.prompt + step

    def remember(self, finished: FinishedPrefill, known: Known) -> None:
        """After its prompt: keep what decode steps need of its policy's prefill."""
        goes_on = self.folds and not finished.not_finite
        memory = Memory.after(finished, known) if goes_on else None
        if memory is None:
            self.forget()
            return
        self.decoding = Decoding(memory, PendingSteps(wanted(self.served.bound, memory.prompt)))

    def give_up(self, reason: Reason) -> None:
        """Serve the rest of the request without its policy."""
        self.uncompressed = reason
        self.seen = Seen()
        self.forget()

    def forget(self) -> None:
        """Forget what its policy remembers: no more entries leave while it decodes."""
        self.folds = False
        self.decoding = None


def state_of(request: Any) -> RequestState | None:
    """The state of an SGLang request; None when no policy applies to it."""
    return getattr(request, _ATTRIBUTE, None)


def iterate_finishing(batch: Any) -> Iterator[tuple[Any, RequestState | None]]:
    """Requests of an extend batch whose prompt ends in it, with their state."""
    for request in batch.reqs:
        if request.extend_end == len(request.origin_input_ids):
            yield request, state_of(request)


def decoding_in(batch: Any) -> list[Any]:
    """Requests of an extend batch that decode (`--enable-mixed-chunk`): its last rows, one each."""
    return list(batch.decoding_reqs) if batch.forward_mode.is_mixed() else []


def iterate_rows(batch: Any) -> Iterator[tuple[Any, RequestState, slice, int]]:
    """Requests of an extend batch whose prompt a policy sees: state, rows, tokens before the rows.

    Requests that decode are left out.
    """
    end, prefilled = 0, len(batch.reqs) - len(decoding_in(batch))
    rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    for request, prefix, count in islice(rows, prefilled):
        start, end = end, end + count
        state = state_of(request)
        if state is not None and state.observed:
            yield request, state, slice(start, end), prefix


def is_assigned(request: Any) -> bool:
    """Whether `assign` has seen the request; it is queued again after a retraction."""
    return hasattr(request, _ATTRIBUTE)


def choose(policies: Mapping[str, Served], default: str, asked: Mapping[str, Any]) -> Served | None:
    """The policy of a request: the one it names, none, or the server's default.

    Args:
        asked: what the request asks of policies.

    Raises:
        ValueError: the name is unknown or not a string; the message is for the client.
    """
    name = asked.get(POLICY, default)
    if name == NO_POLICY:
        return None
    if not isinstance(name, str) or name not in policies:
        raise not_served(f"custom_params.{POLICY}", name, (*policies, NO_POLICY))
    return policies[name]


def assign(request: Any, served: Served | None, one_piece: int | None = None) -> None:
    """Note the request's policy and, as far as is known, whether it can be compressed.

    Args:
        one_piece: most tokens that are prefilled in one piece; None for any number.
    """
    state = None if served is None else RequestState(served, len(request.origin_input_ids), slots=0)
    setattr(request, _ATTRIBUTE, state)  # first: what fails from here on is the request's
    if state is None:
        return
    if not state.served.standing.enabled:
        state.uncompressed = Reason.POLICY_DISABLED
        return
    state.plan = plan = state.served.plan(state.prompt)
    reason = _unsuited(request, plan)
    if reason is None and plan is not None:
        reason = _cannot_propagate(request, plan, state.prompt, one_piece)
    if reason is None:
        output = request.sampling_params.max_new_tokens
        state.folds = state.served.folds_within(state.prompt, output)
        slots = state.served.most_slots(state.prompt)
        if slots is None:
            reason = Reason.DECODE_ONLY if state.served.keeps_prompt else Reason.SHORT_PROMPT
        state.slots = slots or 0
    state.uncompressed = reason


def _cannot_propagate(
    request: Any, plan: PropagationPlan, prompt: int, one_piece: int | None
) -> Reason | None:
    if request.return_logprob and 0 <= request.logprob_start_len < prompt - 1:
        return Reason.INPUT_LOGPROBS
    if request.return_hidden_states:
        return Reason.HIDDEN_STATES
    if plan.layer is None and one_piece is not None and prompt > one_piece:
        return Reason.TOO_LONG
    return None


def _unsuited(request: Any, plan: PropagationPlan | None) -> Reason | None:
    # Where tokens leave the prefill, the first new token already depends on it.
    if request.sampling_params.max_new_tokens < (2 if plan is None else 1):
        return Reason.ONE_TOKEN
    if request.multimodal_inputs is not None:
        return Reason.MULTIMODAL
    if request.input_embeds is not None or request.positional_embed_overrides is not None:
        return Reason.EMBEDDINGS
    if request.session is not None:
        return Reason.SESSION
    if request.beam_group is not None:
        return Reason.BEAM
    return None
