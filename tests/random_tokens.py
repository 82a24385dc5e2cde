"""Prompts of random token ids."""

import random


def prompt(seed: int, length: int) -> list[int]:
    """`length` ids of words that every model here has; none of them ends a text."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, 500) for _ in range(length)]
