"""The tasks by name: each file of `tasks/` is one, and `data:PATH` is a file of the user.

    from kvpolicy.evaluation.questions import catalog
    sample = catalog.sample("mk", form="embedded", length=512, index=0, seed=0, count=count)

A sample depends on its arguments alone, not on earlier calls.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Protocol

import numpy as np
from kvpolicy.evaluation import tasks
from kvpolicy.evaluation.questions import own_data
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample

FORMS = ("embedded", "words")
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples fill 0 to 1 most evenly


class Tokenizer(Protocol):
    """The part of a tokenizer that `form_of` needs."""

    def get_vocab(self) -> dict[str, int]: ...


def names() -> list[str]:
    """The tasks, in alphabetical order; the file `a_b.py` is task `a-b`."""
    return sorted(name.replace("_", "-") for _, name, _ in pkgutil.iter_modules(tasks.__path__))


def title(task: str) -> str:
    """A few words about a task.

    Raises:
        ValueError: there is no such task.
    """
    if own_data.is_one(task):
        return own_data.title(task)
    return _module(task).TITLE


@lru_cache
def contexts_of(task: str) -> str:
    """The task whose contexts this one asks about, sample by sample; most tasks have their own.

    A report may name a task that is no longer here; it is taken for one with its own contexts.
    """
    return getattr(_module(task), "CONTEXTS", task) if task in names() else task


def form_of(tokenizer: Tokenizer) -> str:
    """`embedded` if the vocabulary is the 512 words of the embedded models, else `words`."""
    is_embedded = tokenizer.get_vocab() == {word: i for i, word in enumerate(VOCABULARY)}
    return "embedded" if is_embedded else "words"


def count_of(task: str) -> int | None:
    """Number of samples of a task `data:PATH`; None for other tasks, which have any number.

    Raises:
        ValueError: there is no such task or file, or the file has a bad line.
    """
    if own_data.is_one(task):
        return own_data.count(task)
    _module(task)
    return None


def sample(
    task: str, *, form: str, length: int, index: int, seed: int, count: Callable[[str], int]
) -> Sample:
    """One sample of a task.

    Args:
        task: name of the task.
        form: `embedded` or `words`, see `form_of`.
        length: tokens of context and first question: exact in the embedded form; in words an upper
            limit, missed by at most 2 % from 256 on. For `data:PATH`, a longer context is cut.
        index: number of the sample, from 0.
        seed: seed, from 0; another seed gives other samples.
        count: function from a text to its number of tokens, with those that the tokenizer adds.

    Raises:
        ValueError: the task is unknown, or the length is too short for it.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; the forms are {' and '.join(FORMS)}")
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index begin at 0, got seed {seed} and index {index}")
    seeds = [seed, index] if form == "embedded" else [seed, index, length]
    order = Order(task, length, index, np.random.default_rng(seeds), _depth(seed, index), count)
    if own_data.is_one(task):
        return own_data.sample(order, form)
    return getattr(_module(task), form)(order)


def _depth(seed: int, index: int) -> float:
    """Depth of a sample's first needle, 0 to 1; even over samples, however many are drawn."""
    return float((np.random.default_rng(seed).random() + index * GOLDEN) % 1)


@lru_cache
def _module(task: str) -> ModuleType:
    if task not in names():
        all_names = ", ".join(names())
        raise ValueError(
            f"unknown task {task!r}; the tasks are {all_names}, or data:PATH for a file"
        )
    return import_module(f"{tasks.__name__}.{task.replace('-', '_')}")
