"""Asks one policy the samples of a task and length, several at once, in the order they need.

The order decides what a later turn finds of the earlier ones: the turns of a sample follow one
another, or the radix cache is emptied between the first turns of all samples and the second ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from kvpolicy.evaluation.asking.answers import Answers
from kvpolicy.evaluation.asking.client import Answer, Client, Failed
from kvpolicy.evaluation.asking.facts import held, kept_share
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.turns import Request, requests
from kvpolicy.evaluation.asking.variants import Variant
from kvpolicy.evaluation.questions.sample import History, Sample
from kvpolicy.evaluation.records import FULL, Record

_TRIES = 3
_PAUSE = 1.0  # seconds before the second try; doubled before the third
_IN_A_ROW = 20  # failed questions in a row after which the run gives up


class Gone(Exception):
    """The server no longer answers; the message is one sentence."""


@dataclass(frozen=True)
class CacheSize:
    """Sizes of a model's KV cache; None for what is not known.

    Attributes:
        lists: L * G, the number of entries of one token.
        token_bytes: KV bytes of one token, over all layers.
    """

    lists: int | None
    token_bytes: float | None


@dataclass
class Asking:
    """Asks the questions of a run.

    Attributes:
        client: client of the server.
        tokens: the model's tokenizer.
        answers: the files to which answers are written.
        memory: sizes of the model's KV cache.
        at_once: number of requests in flight.
        answered: called after each question, whether it got an answer or not.
    """

    client: Client
    tokens: Tokens
    answers: Answers
    memory: CacheSize
    at_once: int
    answered: Callable[[], object]
    _failures: int = field(default=0, init=False)

    def ask(self, variant: Variant, samples: Sequence[Sample]) -> None:
        """Asks a policy all questions of samples of one task and length that have no answer yet.

        Raises:
            Gone: the server no longer answers, or `_IN_A_ROW` questions in a row failed.
            Failed: the radix cache cannot be emptied.
        """
        for wave in _waves(samples):
            jobs = [job for sample, turns in wave if (job := self._job(variant, sample, turns))]
            if jobs:
                self._flush()
                in_threads(jobs, lambda job: self._converse(variant, *job), self.at_once)

    def _flush(self) -> None:
        try:
            self.client.flush()
        except Failed as error:
            self._check_alive(str(error))
            raise

    def _check_alive(self, sentence: str) -> None:
        if not self.client.alive():
            raise Gone(f"the server does not answer any more ({sentence})") from None

    def _job(
        self, variant: Variant, sample: Sample, turns: Sequence[int]
    ) -> tuple[Sample, Sequence[int], set[int]] | None:
        """The turns to ask of a sample, and the turns without a record; None if all have one."""
        new_turns = {t for t in turns if question_key(variant, sample, t) not in self.answers.keys}
        if not new_turns:
            return None
        # A turn that has a record is asked again if a later turn finds it in the radix cache.
        asks_again = sample.history == History.TREE
        asked_turns = [t for t in turns if t in new_turns or (asks_again and t < max(new_turns))]
        return sample, asked_turns, new_turns

    def _converse(
        self, variant: Variant, sample: Sample, turns: Sequence[int], new_turns: set[int]
    ) -> None:
        copy = self.client.copies and variant.alias != FULL
        for request in requests(sample, self.tokens, copy=copy):
            if request.turn not in turns:
                continue
            answer, sentence = self._answer(variant, request)
            if request.turn not in new_turns:
                continue
            if answer is None:
                self.answers.fail(question_key(variant, sample, request.turn), sentence)
            else:
                record = self._record(variant, sample, request.turn, answer)
                if not self.answers.add(record):
                    return
            self.answered()

    def _answer(self, variant: Variant, request: Request) -> tuple[Answer | None, str]:
        """The answer, or None and the reason if all tries failed."""
        sentence = ""
        for attempt in range(_TRIES):
            try:
                answer = self.client.ask(request, variant.alias)
                self._failures = 0
                return answer, ""
            except Failed as error:
                sentence = str(error)
                self._check_alive(sentence)
                if not error.again:
                    break
            if attempt < _TRIES - 1:
                time.sleep(_PAUSE * 2**attempt)
        self._failures += 1
        if self._failures >= _IN_A_ROW:
            raise Gone(f"{_IN_A_ROW} requests in a row failed, the last one with: {sentence}")
        return None, sentence

    def _record(self, variant: Variant, sample: Sample, number: int, answer: Answer) -> Record:
        turn = sample.turns[number]
        facts = answer.meta.get("kv_policy")
        kept = held_share = kv_bytes = None
        if variant.alias == FULL:
            kept = held_share = 1.0
        elif facts is not None:
            kept = kept_share(facts)
            if self.memory.lists is not None:
                held_share = held({"meta_info": answer.meta}, self.memory.lists)
            kv_bytes = facts.get("kv_bytes_after")
        if kv_bytes is None and kept is not None and self.memory.token_bytes is not None:
            kv_bytes = answer.prompt_tokens * self.memory.token_bytes
        return Record(
            policy=variant.policy,
            budget=variant.budget,
            setting=dict(variant.setting),
            task=sample.task,
            length=sample.length,
            index=sample.index,
            turn=number,
            depth=sample.depth,
            score=float(turn.judge(answer.text)),
            answer=answer.text,
            expected=list(turn.expected),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            kept=kept,
            held=held_share,
            kv_bytes=kv_bytes,
            ttft=answer.ttft,
            tpot=answer.tpot,
            uncompressed=(facts or {}).get("uncompressed"),
        )


def question_key(variant: Variant, sample: Sample, turn: int) -> tuple:
    """The key of the record of a question, as `Record.key`."""
    return (variant.policy, variant.budget, sample.task, sample.length, sample.index, turn)


def _waves(samples: Sequence[Sample]) -> Iterator[list[tuple[Sample, list[int]]]]:
    """Groups of samples with the turns to ask; the radix cache is emptied before each group."""
    cached = [s for s in samples if s.history != History.EVICTED]
    yield [(sample, list(range(len(sample.turns)))) for sample in cached]
    evicted = [s for s in samples if s.history == History.EVICTED]
    for turn in range(max((len(sample.turns) for sample in evicted), default=0)):
        yield [(sample, [turn]) for sample in evicted if turn < len(sample.turns)]


def in_threads(jobs: Iterable, work: Callable, count: int) -> None:
    """Does jobs in at most `count` threads; raises the first exception of a job.

    The threads end with the process, so that an interrupted run does not wait for answers.
    """
    queue: SimpleQueue = SimpleQueue()
    for job in jobs:
        queue.put(job)
    errors: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                work(queue.get_nowait())
            except Empty:
                return
            except BaseException as error:
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(count, queue.qsize()))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # signals are handled between joins
    except BaseException:
        stop.set()
        raise
    if errors:
        raise errors[0]
