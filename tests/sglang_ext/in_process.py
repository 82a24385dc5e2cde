"""A real SGLang scheduler inside the test's own process, driven step by step.

SGLang's hooks are global and a process holds one scheduler, so tests run scenarios in subprocesses:
see `scenarios.py`. Requests enter where the tokenizer's would arrive, and answers are taken where
the detokenizer would receive them; everything between is SGLang's.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass
class Answer:
    """The answer to one request so far."""

    tokens: list[int] = field(default_factory=list)
    finish: dict | None = None
    cached_tokens: int = 0
    facts: dict | None = None
    retractions: int = 0
    logprobs: list[float] = field(default_factory=list)  # one per token
    top: list[list[float]] = field(default_factory=list)  # best logprobs per token


def urgency(rid: str) -> int:
    """A priority for a request with a number as id; SGLang heeds it if it schedules by them."""
    return int(rid) * 7 % 50


class Driver:
    """One scheduler and the requests sent to it."""

    def __init__(
        self,
        model: str,
        policies: Sequence[str],
        settings: Sequence[str],
        *,
        rank: int = 0,
        **flags: Any,
    ):
        """
        Args:
            model, policies, settings: as for a server.
            rank: rank among `tp_size`; each has a driver in its own process.
            flags: SGLang's server arguments.
        """
        os.environ["SGLANG_KV_POLICY"] = os.pathsep.join(policies)
        os.environ["SGLANG_KV_POLICY_SET"] = ",".join(settings)
        os.environ.setdefault("SGLANG_KV_POLICY_ALLOW_INSPECTION", "1")
        os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        os.environ.setdefault("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
        os.environ.setdefault("SGLANG_DEBUG_MEMORY_POOL", "1")
        import sglang.srt.managers.scheduler as module
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        options = {
            "model_path": model,
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_total_tokens": 4096,
            "disable_cuda_graph": True,
            **flags,
        }
        args = ServerArgs(**options)
        args.resolve_once()
        ranks = SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
        self.scheduler = module.Scheduler(args, PortArgs.init_new(args))
        self.answers: dict[str, Answer] = {}
        self.steps = 0
        self.each_step: list[Callable[[], None]] = []
        self.mixed = 0  # rows that decoded in mixed forwards
        self._aborted: set[str] = set()  # those in the queue get no answer
        self._inbox: list[Any] = []
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._started = False
        self._failure: BaseException | None = None
        self.scheduler.output_streamer.send_to_detokenizer = self
        receiver = type(self.scheduler.request_receiver)
        receiver.recv_requests = lambda _, local_reqs=(): self._receive(local_reqs)
        threading.Thread(target=self._loop, daemon=True).start()

    @property
    def store(self) -> Any:
        """The plugin's store of private slots."""
        return self.scheduler.req_to_token_pool._aux_cache

    def send(self, rid: str, tokens: Sequence[int], **options: Any) -> None:
        """Queue a greedy request; it is received at the scheduler's next step.

        It generates `max_new_tokens` unless `stop_token_ids` are among the options.

        Args:
            options: `policy`, `custom` (further custom parameters), `stream`, `top` (number of best
                logprobs per token), `adapter` (id of a LoRA adapter), `session` (id), `priority`,
                and sampling parameters.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        policy, stream = options.pop("policy", None), options.pop("stream", False)
        custom, top = options.pop("custom", {}), options.pop("top", 0)
        adapter, session = options.pop("adapter", None), options.pop("session", None)
        priority = options.pop("priority", None)
        custom = custom if policy is None else {"kv_policy": policy, **custom}
        ignore = "stop_token_ids" not in options
        options = {"temperature": 0.0, "ignore_eos": ignore, **options}
        sampling = SamplingParams(custom_params=custom or None, **options)
        sampling.normalize(None)
        sampling.verify(1 << 30)
        self.answers[rid] = Answer()
        self._inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=top > 0,
                logprob_start_len=-1,
                top_logprobs_num=top,
                token_ids_logprob=None,
                stream=stream,
                lora_id=adapter,
                session_id=session,
                priority=priority,
            )
        )

    def abort(self, rid: str) -> None:
        """Abort a request in any state."""
        from sglang.srt.managers.io_struct import AbortReq

        self._aborted.add(rid)
        self._inbox.append(AbortReq(rid=rid))

    def step(self) -> None:
        """Let the scheduler's own event loop make one round."""
        self.steps += 1
        self._go.release()
        self._paused.acquire()
        if self._failure is not None:
            raise self._failure
        last = self.scheduler.last_batch
        if last is not None and last.forward_mode.is_mixed():
            self.mixed += len(last.decoding_reqs)
        for check in self.each_step:
            check()

    def run_until(self, done: Callable[[], bool], limit: int = 20000) -> None:
        """Make rounds until `done`, at most `limit`."""
        for _ in range(limit):
            if done():
                return
            self.step()
        raise RuntimeError(f"not done after {limit} steps")

    def _loop(self) -> None:
        self._go.acquire()
        try:
            self.scheduler.run_event_loop()
        except BaseException as error:  # handed to the thread that waits for this one
            self._failure = error
            self._paused.release()

    def finish(self) -> None:
        """Run until every request is answered or aborted and the scheduler is idle."""
        self.run_until(
            lambda: (
                not self._inbox
                and all(a.finish or rid in self._aborted for rid, a in self.answers.items())
                and self.scheduler.is_fully_idle()
            )
        )

    def flush(self) -> None:
        """Empty the radix cache."""
        if not self.scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("the scheduler is not idle")

    def alone(self, requests: Sequence[tuple[str, list[int], str, int]]) -> dict[str, Answer]:
        """Answers of (rid, tokens, policy, new tokens), one request at a time, nothing cached."""
        answers = {}
        for rid, tokens, policy, output in requests:
            self.send(rid, tokens, policy=policy, max_new_tokens=output)
            self.finish()
            answers[rid] = self.answers.pop(rid)
            self.flush()
        return answers

    def go_on(self, rnd: Random, abort: float) -> set[str]:
        """Make up to two rounds, then abort a request with probability `abort`; those aborted."""
        for _ in range(rnd.randrange(3)):
            self.step()
        victim = rnd.choice(list(self.answers))
        if rnd.random() < abort and not self.answers[victim].finish:
            self.abort(victim)
            return {victim}
        return set()

    def poison(self) -> None:
        """Write NaN to every free slot that does not hold it already."""
        from kvpolicy.sglang_ext.face import compat

        free = compat.free_slots(self.scheduler.token_to_kv_pool_allocator)
        storage = self.store.arena.storage
        first = storage[..., 0].float()  # of each entry's numbers
        written = free[~first.isnan().all(dim=(0, 1, 3))[free]]
        if len(written):
            storage[:, :, written] = float("nan")

    def used_slots(self) -> int:
        """Slots that are neither free nor in the radix cache."""
        allocator, tree = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        return self._capacity - allocator.available_size() - tree.evictable_size()

    def left_over(self) -> dict[str, int]:
        """Slots in use, private ones and, after a flush, missing ones: all 0 on an idle server."""
        counts = {"used": self.used_slots(), "private": self.store.held}
        self.flush()
        allocator = self.scheduler.token_to_kv_pool_allocator
        return counts | {"missing_after_flush": self._capacity - allocator.available_size()}

    @property
    def _capacity(self) -> int:
        return self.scheduler.max_total_num_tokens

    def _receive(self, local: Sequence[Any]) -> list[Any]:
        if self._started:
            self._paused.release()
            self._go.acquire()
        self._started = True
        received, self._inbox = [*local, *self._inbox], []
        return received

    def send_output(self, payload: Any, *_: Any) -> None:
        """Called by SGLang in place of its socket to the detokenizer."""
        from sglang.srt.managers.io_struct import BatchTokenIDOutput, unwrap_from_pickle

        if not isinstance(payload, BatchTokenIDOutput):
            return
        facts = (unwrap_from_pickle(payload.customized_info) or {}).get("kv_policy")
        for i, rid in enumerate(payload.rids):
            answer = self.answers[rid]
            answer.tokens += list(payload.output_ids[i])
            answer.finish = payload.finished_reasons[i] or answer.finish
            answer.cached_tokens = payload.cached_tokens[i]
            answer.retractions = payload.retraction_counts[i]
            for each in facts[i] if facts else ():
                answer.facts = {**(answer.facts or {}), **each} if each else answer.facts
            if payload.output_token_logprobs_val:
                answer.logprobs += payload.output_token_logprobs_val[i]
                answer.top += payload.output_top_logprobs_val[i]
