"""`kvpolicy eval` measures through a server the same as a plain model in a loop.

The plain model (tests/reference/eager.py) is float64, takes a policy's decisions from the
interpreter, and shares no code with the served one. This module also turns words into ids and
judges answers for it; it shares with `eval` only the samples and the policy files.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from kvpolicy.evaluation import records
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
pytestmark = [pytest.mark.server, pytest.mark.thorough]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "model-small"
sys.path.insert(0, str(ROOT / "tests" / "reference"))

TASKS, LENGTH, SAMPLES, SEED = ("mk", "kv"), 256, 8, 0
# A quarter of 256 tokens. `eval` finds the settings from the budget; here they are written down.
SETTINGS = {
    "none": None,
    "snapkv": {"capacity": "64", "window": "8"},
    "lava": {"capacity": "64", "window": "8"},
    "sinks-recent": {"capacity": "64"},
}
# Where the best two logits are closer than this, sums in another order may choose the other one.
TIE = 1e-3


@dataclass(frozen=True)
class Answer:
    """One side's answer to a question, whether it is right, and its smallest gap of best logits."""

    text: str
    right: bool
    gap: float = math.inf


Answers = dict[tuple[str, int], Answer]
"""By task and index."""


def judged(text: str, expected: list[str], gap: float = math.inf) -> Answer:
    """An answer, right if it begins with the expected words."""
    words = " ".join(expected).split()
    return Answer(text, text.split()[: len(words)] == words, gap)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, Answers]:
    """Answers by policy, as written by `kvpolicy eval`."""
    out = tmp_path_factory.mktemp("eval")
    policies = [word for name in SETTINGS for word in ("--policy", name)]
    windows = [w for name in ("snapkv", "lava") for w in ("--set", f"{name}.window=8")]
    sizes = ["--tasks", ",".join(TASKS), "--lengths", f"{LENGTH}", "--samples", f"{SAMPLES}"]
    command = [sys.executable, "-P", "-m", "kvpolicy.evaluation.cli", "eval", *policies, *windows]
    command += [*sizes, "--budget", "0.25", "--seed", f"{SEED}", "--model", str(MODEL), "--quiet"]
    done = forked.run([*command, "--out", str(out)], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Answers] = {name: {} for name in SETTINGS}
    for record in records.read(out / "samples.jsonl"):
        answer = judged(record.answer.split("<end>")[0].strip(), record.expected)
        assert answer.right == (record.score == 1), record
        found[record.policy][record.task, record.index] = answer
    return found


@pytest.fixture(scope="module")
def questions() -> dict[tuple[str, int], tuple[list[int], list[str], int]]:
    """Prompt ids, expected items and most new tokens of each question, from the same seeds."""
    from kvpolicy.evaluation.questions import catalog

    ids = {word: i for i, word in enumerate(VOCABULARY)}
    found = {}
    for task in TASKS:
        for index in range(SAMPLES):
            sample = catalog.sample(
                task,
                form="embedded",
                length=LENGTH,
                index=index,
                seed=SEED,
                count=lambda text: 1 + len(text.split()),
            )
            [turn] = sample.turns
            prompt = [ids["<s>"], *(ids[w] for w in (sample.context + turn.prompt).split())]
            assert len(prompt) == LENGTH
            found[task, index] = (prompt, list(turn.expected), turn.most_tokens)
    return found


def eager(questions: dict, policy: str | None, settings: dict[str, str] | None) -> Answers:
    """The plain model's answers."""
    from eager import generate

    end = VOCABULARY.index("<end>")
    answers: Answers = {}
    for key, (prompt, expected, most) in questions.items():
        said = generate(str(MODEL), prompt, policy, settings, new_tokens=min(most, 8))
        length = said.tokens.index(end) if end in said.tokens else len(said.tokens)
        text = " ".join(VOCABULARY[i] for i in said.tokens[:length])
        gap = min(said.gap(i) for i in range(min(length + 1, len(said.tokens))))
        answers[key] = judged(text, expected, gap)
    return answers


def disagreement(one: Answers, other: Answers) -> str | None:
    """Why the two cannot have measured the same; None if they can (McNemar, 95 %).

    A question that only one of the two answers is as likely to be the one's as the other's.
    """
    assert one.keys() == other.keys()
    gained = sum(one[key].right and not other[key].right for key in one)
    lost = sum(other[key].right and not one[key].right for key in one)
    if abs(gained - lost) > 1.96 * math.sqrt(gained + lost):
        return f"{gained} questions are answered by the first alone and {lost} by the second alone"
    return None


@pytest.mark.parametrize("policy", SETTINGS)
def test_eval_measures_what_a_plain_model_does(served, questions, policy):
    plain = eager(questions, None if policy == "none" else policy, SETTINGS[policy])
    assert disagreement(served[policy], plain) is None
    different = [key for key in plain if plain[key].text != served[policy][key].text]
    clear = [(key, plain[key], served[policy][key]) for key in different if plain[key].gap > TIE]
    assert not clear, f"{len(clear)} answers differ where no two words are near a tie"


def test_another_budget_on_one_side_is_seen(served, questions):
    some = {key: asked for key, asked in questions.items() if key[0] == "mk" and key[1] < 10}
    plain = eager(some, "snapkv", {"capacity": "10", "window": "8"})
    assert disagreement({key: served["snapkv"][key] for key in some}, plain) is not None


def test_policies_are_told_apart(served):
    assert disagreement(served["snapkv"], served["sinks-recent"]) is not None
