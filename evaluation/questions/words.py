"""English text for tasks in words: filler, names, numbers; and fitting a text to a length.

The filler consists of neutral sentences from the lists below. It has no digits and no animals,
since facts are made of these, and so many combinations that a sentence hardly ever comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

PEOPLE = """
miller baker tailor sailor teacher painter farmer clerk porter gardener piper weaver doctor lawyer
singer driver cook guard nurse pilot student mayor poet smith carpenter dentist editor fiddler
grocer hunter judge potter roofer scholar shepherd soldier surgeon tenant trader tutor uncle usher
visitor waiter widow writer cousin neighbour
""".split()

MANNERS = """
quiet busy young old tired cheerful careful honest stubborn polite curious nervous patient proud
rich poor clever shy famous lonely friendly serious hungry sleepy tall thin strong weak modest
""".split()

ACTS = """
carried cleaned found sold moved painted repaired bought borrowed opened closed washed lifted
dropped hid measured noticed polished praised pulled pushed returned shared showed sketched tested
touched turned watched weighed wrapped admired covered emptied filled folded
""".split()

THINGS = """
table lamp kettle ladder basket blanket bottle bucket button candle carpet chair clock coat cushion
desk drawer drum envelope fence flute hammer handle hat jar kite letter map mirror needle oven
parcel pencil pillow plate pocket purse rope saddle scarf shelf shovel spoon stool stove suitcase
teapot towel tray trunk umbrella vase violin wagon wallet wheel whistle
""".split()

LOOKS = """
wooden broken heavy light round square narrow wide dusty shiny plain pretty ugly wet dry soft hard
rusty torn empty full cheap costly little large
""".split()

PLACES = """
bridge market garden station harbour church school kitchen cellar attic stable orchard meadow river
tower theatre library museum bakery factory hospital office square corner courtyard chapel cottage
village valley forest mill inn lake quay
""".split()

TIMES = """
yesterday|last week|in the morning|at noon|in the evening|after the rain|before lunch|at dawn
|during the storm|that winter|on a warm day|after the concert|before the holiday|late at night
|one afternoon|some years ago
""".replace("\n", "").split("|")

SIDES = "near behind beside opposite inside outside".split()

SHAPES = (
    "{time} the {manner} {person} {act} the {look} {thing} {side} the {place}.",
    "the {person} {side} the {place} {act} the {look} {thing} {time}.",
    "the {manner} {person} {act} the {thing}, and the {look} {other} was left {side} the {place}.",
    "{side} the {place}, the {person} {act} the {look} {thing} and the {other}.",
    "{time} the {person} {side} the {place} was {manner}, so nobody {act} the {look} {thing}.",
)

_SLOTS = {
    "time": TIMES,
    "manner": MANNERS,
    "person": PEOPLE,
    "act": ACTS,
    "look": LOOKS,
    "thing": THINGS,
    "other": THINGS,
    "side": SIDES,
    "place": PLACES,
}

# Parts of the names in facts.
NATURES = """
brave calm gentle happy lazy loud merry noble quick sly swift wild wise bold bright eager fierce
grumpy humble jolly keen loyal mighty playful restless silent sturdy timid vain wary witty zealous
agile clumsy daring drowsy faithful greedy hasty nimble
""".split()

COLOURS = """
amber azure beige black blue bronze brown coral crimson golden gray green indigo ivory maroon olive
orange pink purple red scarlet silver white yellow
""".split()

ANIMALS = """
badger bat bear beaver bison boar buffalo bull camel cat cobra crab crane crow deer dog dolphin
donkey dove duck eagle elk falcon ferret fox frog goat goose hamster hare hawk hen heron horse hound
jackal koala lark leopard lion lizard llama lynx mole monkey moose mouse mule otter owl ox panda
parrot pigeon rabbit raven robin salmon seal
""".split()

MOST_NAMES = len(NATURES) * len(COLOURS) * len(ANIMALS)


class Filler:
    """A random sequence of sentences; its first words do not depend on how many are asked for.

    Args:
        rng: generator, of which one number is drawn.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = np.random.default_rng(int(rng.integers(2**63)))
        self._sentences: list[list[str]] = []
        self._words = 0

    def sentences(self, words: int) -> list[str]:
        """The first `words` words of the sequence as sentences; the last one may be cut short."""
        while self._words < words:
            self._draw_more()
        sentences: list[str] = []
        for sentence in self._sentences:
            if words <= 0:
                break
            part = sentence[:words]
            words -= len(part)
            sentences.append(" ".join(part).rstrip(".,") + ".")
        return sentences

    def _draw_more(self) -> None:
        for draws in self._rng.integers(0, 2**31, (64, 1 + len(_SLOTS))).tolist():
            shape = SHAPES[draws[0] % len(SHAPES)]
            choices = zip(_SLOTS.items(), draws[1:], strict=True)
            text = shape.format(
                **{slot: words[draw % len(words)] for (slot, words), draw in choices}
            )
            sentence = (text[0].upper() + text[1:]).split()
            self._sentences.append(sentence)
            self._words += len(sentence)


def names(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different names such as `gentle amber falcon`; `count` is at most MOST_NAMES."""
    cells = rng.choice(MOST_NAMES, count, replace=False)
    return [
        f"{NATURES[cell % len(NATURES)]} {COLOURS[cell // len(NATURES) % len(COLOURS)]} "
        f"{ANIMALS[cell // len(NATURES) // len(COLOURS)]}"
        for cell in cells.tolist()
    ]


def numbers(count: int, digits: int, rng: np.random.Generator) -> list[str]:
    """`count` different numbers of `digits` digits."""
    values: dict[int, None] = {}
    while len(values) < count:
        draws = rng.integers(10 ** (digits - 1), 10**digits, count - len(values))
        values.update(dict.fromkeys(draws.tolist()))
    return [str(number) for number in values]


def listing(items: Sequence[str]) -> str:
    """The items as a list in words: `a`, `a and b`, `a, b and c`."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def largest(size: Callable[[int], int], limit: int, most: int, first: int) -> int:
    """Nearly the largest n, at most `most`, whose size is at most `limit`; 0 if there is none.

    The search stops within half a percent of the limit, since sizes are costly.

    Args:
        size: number of tokens of the text with n units, which grows almost in proportion to n.
        first: the first n to try.
    """
    start_size = size(0)
    low, low_size, high, high_size = 0, start_size, most + 1, 0
    guess = first
    tries = 0
    while high - low > 1 and limit - low_size > limit // 200:
        guess = max(low + 1, min(guess, high - 1))
        guess_size = size(guess)
        tries += 1
        if guess_size <= limit:
            low, low_size = guess, guess_size
        else:
            high, high_size = guess, guess_size
        if high_size and tries > 8:
            guess = (low + high) // 2
        elif high_size:
            guess = low + (limit - low_size) * (high - low) // (high_size - low_size)
        else:
            guess = low + (limit - low_size) * low // max(1, low_size - start_size)
    return low
