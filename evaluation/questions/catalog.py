"""The tasks by name: every file of `tasks/` is one, and `data:PATH` is a file of the user's own.

    from kvpolicy.evaluation.questions import catalog
    sample = catalog.sample("mk", form="embedded", length=512, index=0, seed=0, count=count)

A sample depends on its arguments alone, whatever was made before it.
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
GOLDEN = 0.6180339887498949  # its multiples, less their whole parts, fill 0 to 1 most evenly


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    def get_vocab(self) -> dict[str, int]: ...


def names() -> list[str]:
    """The tasks, in alphabetical order; the file `a_b.py` is task `a-b`."""
    return sorted(name.replace("_", "-") for _, name, _ in pkgutil.iter_modules(tasks.__path__))


def title(task: str) -> str:
    """A few words on what is asked.

    Raises:
        ValueError: there is no such task.
    """
    if own_data.is_one(task):
        return own_data.title(task)
    return _module(task).TITLE


def form_of(tokenizer: Tokenizer) -> str:
    """`embedded` if the model knows the 512 words of the embedded models, else `words`."""
    known = tokenizer.get_vocab() == {word: i for i, word in enumerate(VOCABULARY)}
    return "embedded" if known else "words"


def count_of(task: str) -> int | None:
    """How many samples a file of the user's own has; None where there is no end of them.

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
        task: its name.
        form: `embedded` or `words`, see `form_of`.
        length: tokens of context and first question: exactly in the embedded form; in words at
            most, and no more than 2 % less from 256 on. For `data:PATH`, a longer context is cut.
        index: which sample, from 0.
        seed: from 0; another seed gives other samples.
        count: tokens of a text, those included that the tokenizer adds.

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
    """From sample to sample, 0 to 1 evenly, however many are drawn."""
    return float((np.random.default_rng(seed).random() + index * GOLDEN) % 1)


@lru_cache
def _module(task: str) -> ModuleType:
    if task not in names():
        known = ", ".join(names())
        raise ValueError(f"unknown task {task!r}; the tasks are {known}, or data:PATH for a file")
    return import_module(f"{tasks.__name__}.{task.replace('-', '_')}")
