"""The tasks: seeded, of the given length, right by an independent reading of the text."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.evaluation.questions import catalog, words
from kvpolicy.evaluation.questions.sample import History
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT = Path(__file__).parents[2]
LENGTHS = (64, 127, 512, 1000, 4097)
FORMS = ("embedded", "words")
NAMES = catalog.names()
COUNTED = ("cwe", "fwe")
CONVERSATIONS = {
    "multiturn": History.TREE,
    "multiturn-evicted": History.EVICTED,
    "multiturn-copy": History.COPY,
}


@pytest.fixture(scope="module")
def tokenizers():
    """The embedded models' tokenizer, and byte-level BPE trained on some English."""
    own = Tokenizer.from_file(str(ROOT / "examples" / "model-tiny" / "tokenizer.json"))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(words.Filler(np.random.default_rng(0)).sentences(20_000), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    return {"embedded": own, "words": bpe}


@pytest.fixture(scope="module")
def draw(tokenizers):
    """A function that draws samples, counting tokens by the tokenizer of their form."""

    def sample(task, form, length, index=0, seed=0):
        return catalog.sample(
            task, form=form, length=length, index=index, seed=seed, count=counting(tokenizers[form])
        )

    return sample


def counting(tokenizer):
    return lambda text: len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("form", FORMS)
def test_tasks_that_share_contexts_say_so(form, draw):
    """In words, a longer question may leave less room for filler beside the same facts."""
    samples = {task: [draw(task, form, 512, index) for index in range(3)] for task in NAMES}

    def alike(task, other):
        pairs = list(zip(samples[task], samples[other], strict=True))
        answers = all(a.turns[0].expected == b.turns[0].expected for a, b in pairs)
        return answers or all(a.context == b.context for a, b in pairs)

    for task in NAMES:
        same = [other for other in NAMES if alike(task, other)]
        assert [n for n in NAMES if catalog.contexts_of(n) == catalog.contexts_of(task)] == same
    assert catalog.contexts_of("multiturn-copy") == "multiturn"
    assert catalog.contexts_of("of-another-version") == "of-another-version"


def refusal(draw, task, form, length, index):
    """Why a sample cannot be made; None if it can."""
    try:
        draw(task, form, length, index)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", NAMES)
def test_prompts_have_the_length_ordered(task, form, draw, tokenizers):
    for length in LENGTHS:
        for index in range(3):
            if refused := refusal(draw, task, form, length, index):
                assert re.fullmatch(
                    rf"a prompt of task '{task}' needs at least \d+ tokens, got {length}", refused
                )
                assert form == "words"
                assert length < 512
                continue
            sample = draw(task, form, length, index)
            prompts = [turn.prompt for turn in sample.turns]
            asked_alone = prompts if sample.history == History.SHARED else prompts[:1]
            sizes = [counting(tokenizers[form])(sample.context + p) for p in asked_alone]
            assert (sample.task, sample.length, sample.index) == (task, length, index)
            if form == "embedded":
                assert set(sizes) == {length}
            else:
                assert max(sizes) <= length
                assert length < 256 or max(sizes) >= 0.98 * length


@pytest.mark.parametrize("task", NAMES)
def test_the_least_length_named_is_one_that_is_enough(task, draw):
    for form in FORMS:
        with pytest.raises(ValueError, match="needs at least") as refused:
            draw(task, form, 8)
        least = int(re.search(r"least (\d+)", str(refused.value))[1])
        assert draw(task, "embedded", least).turns if form == "embedded" else least > 20


def test_a_length_is_met_whatever_a_token_is():
    for count in (len, lambda text: len(text.split()), lambda text: len(text) // 3):
        for task in ("niah", "mk", "kv", "cwe", "fwe", "vt"):
            sample = catalog.sample(task, form="words", length=2000, index=1, seed=2, count=count)
            assert 1960 <= count(sample.context + sample.turns[0].prompt) <= 2000


def test_few_calls_of_the_tokenizer_are_needed(tokenizers):
    count, calls = counting(tokenizers["words"]), []
    for task in NAMES:
        calls.append(0)

        def counted(text):
            calls[-1] += len(text) > 2000
            return count(text)

        catalog.sample(task, form="words", length=4097, index=0, seed=0, count=counted)
    assert max(calls) <= 12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", NAMES)
def test_a_sample_depends_on_its_arguments_alone(task, form, draw):
    def content(index, seed):
        sample = draw(task, form, 512, index, seed)
        return sample.context, [turn.prompt for turn in sample.turns], sample.depth

    first = content(4, 7)
    others = [content(3, 7), content(4, 8)]
    assert content(4, 7) == first
    assert first not in others


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", NAMES)
def test_references_score_1_and_wrong_answers_0(task, form, draw, tokenizers):
    for index in range(5):
        sample, other = draw(task, form, 512, index), draw(task, form, 512, index + 50)
        for turn in sample.turns:
            assert turn.judge(turn.reference) == 1
            assert turn.judge(turn.reference.upper()) == 1
            assert turn.judge("") == turn.judge(" nothing of the kind .") == 0
            assert counting(tokenizers[form])(turn.reference) <= turn.most_tokens + 1
            assert turn.expected
        if task not in COUNTED:
            assert sample.turns[0].judge(other.turns[0].reference) < 0.5
        if len(sample.turns) > 1:
            assert len({turn.expected for turn in sample.turns}) == len(sample.turns)
            assert sample.turns[1].judge(sample.turns[0].reference) == 0


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", NAMES)
def test_copying_the_context_is_no_answer(task, form, draw, tokenizers):
    scores = []
    for index in range(20):
        sample = draw(task, form, 1000, index)
        turn = sample.turns[0]
        ids = tokenizers[form].encode(sample.context, add_special_tokens=False).ids
        scores.append(turn.judge(tokenizers[form].decode(ids[: turn.most_tokens])))
    # In a list to be counted, half of the words are those asked for: RULER's weakness too.
    assert sum(scores) / 20 < (0.75 if task in COUNTED else 0.1)
    assert sum(score == 1 for score in scores) <= 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", [task for task in NAMES if task not in COUNTED])
def test_needles_stand_where_the_sample_says(task, form, draw):
    for index in range(5):
        sample = draw(task, form, 1000, index)
        statements = [sample.context[start:stop] for start, stop in sample.asked]
        for item in sample.turns[0].expected:
            words = item.split()
            assert any(statement.find(words[-1]) > 0 for statement in statements), item
        assert all(statement[-1] in '.,"' for statement in statements)
        start = sample.asked[0][0] / len(sample.context)
        assert sample.depth == pytest.approx(start, abs=0.15)


@pytest.mark.parametrize("task", COUNTED)
def test_what_is_counted_has_no_depth(task, draw):
    for form in FORMS:
        sample = draw(task, form, 512)
        assert sample.depth is None
        assert sample.asked == ()


@pytest.mark.parametrize("task", ["niah", "distractors", "mk", "mq", "mv", "vt", "kv", "multiturn"])
def test_depths_fill_0_to_1_evenly_in_words(task, draw):
    depths = sorted(draw(task, "words", 700, index).depth for index in range(20))
    assert all(abs(depth - (i + 0.5) / 20) < 0.15 for i, depth in enumerate(depths))


def test_depths_lie_anywhere_in_embedded_prompts(draw):
    depths = [draw("niah", "embedded", 256, index).depth for index in range(200)]
    assert all(25 < sum(i / 4 <= depth <= (i + 1) / 4 for depth in depths) for i in range(4))


def test_conversations_differ_in_what_the_second_turn_finds_only(draw):
    for form in FORMS:
        drawn = {task: draw(task, form, 512, 3) for task in CONVERSATIONS}
        assert {task: sample.history for task, sample in drawn.items()} == CONVERSATIONS
        texts = {
            (sample.context, *(turn.prompt + turn.reference for turn in sample.turns))
            for sample in drawn.values()
        }
        assert len(texts) == 1


def test_every_question_of_a_shared_context_follows_it(draw):
    sample = draw("shared", "embedded", 512)
    assert len(sample.turns) == 4
    assert all(turn.prompt.startswith(" ask ") for turn in sample.turns)
    sample = draw("multiturn", "embedded", 512)
    assert [turn.prompt.split()[0] for turn in sample.turns] == ["ask", "<end>"]


# English, read by other means.


def numbers_in(context):
    """Key -> its numbers in the context."""
    found = {}
    for key, value in re.findall(r"ne locker number of the ([a-z ]+) is (\d{7})\.", context):
        found.setdefault(key, []).append(value)
    for key, value in re.findall(r"The locker number of the ([a-z ]+) is (\d{7})\.", context):
        assert key not in found
        found[key] = [value]
    return found


@pytest.mark.parametrize(
    ("task", "keys"),
    [("niah", 1), ("distractors", 8), ("mk", None), ("mq", 24), ("mv", 6), ("shared", 24)],
)
def test_the_numbers_asked_for_stand_in_the_text(task, keys, draw):
    for index in range(5):
        sample = draw(task, "words", 1500, index)
        found = numbers_in(sample.context)
        assert len(found) == keys if keys else len(found) > 30
        for turn in sample.turns:
            question, start = turn.prompt.strip().split("\n")
            asked = [key for key in found if f"the {key}" in question]
            assert all(f"the {key}" in start for key in asked)
            assert Counter(v for key in asked for v in found[key]) == Counter(turn.expected)
            assert turn.prompt[-1] not in " \n"


def test_boxes_hold_what_they_got(draw):
    for index in range(5):
        sample = draw("vt", "words", 1000, index)
        held = {}
        pattern = r"Box (\w+) gets (?:the number (\d+)|what box (\w+) holds)\."
        for box, number, other in re.findall(pattern, sample.context):
            held[box] = number or held[other]
        assert len(held) == 30
        asked = re.search(r"hold the number (\d+) in the end", sample.turns[0].prompt)[1]
        assert {box for box, number in held.items() if number == asked} == set(
            sample.turns[0].expected
        )


def test_pairs_are_one_json_object(draw):
    for index in range(5):
        sample = draw("kv", "words", 2000, index)
        pairs = json.loads(sample.context[sample.context.index("{") :])
        key = re.search(r'"([0-9a-f-]{36})"', sample.turns[0].prompt)[1]
        assert len(pairs) > 15
        assert sample.turns[0].expected == (pairs[key],)


@pytest.mark.parametrize("length", [400, 1000, 4097])
@pytest.mark.parametrize(("task", "top", "lead"), [("cwe", 10, 3), ("fwe", 3, 1.1)])
def test_the_words_asked_for_are_clearly_ahead(task, top, lead, length, draw):
    for index in range(5):
        sample = draw(task, "words", length, index)
        listed = sample.context.split("\n\n")[1].rstrip(".").split(", ")
        ranked = Counter(listed).most_common()
        assert {word for word, _ in ranked[:top]} == set(sample.turns[0].expected)
        assert ranked[top - 1][1] >= lead * ranked[top][1]


def test_filler_hardly_repeats_itself_and_holds_no_facts(draw):
    text = draw("niah", "words", 20_000).context
    sentences = re.findall(r"[A-Z][^.]*\.", text)
    assert len(set(sentences)) > 0.99 * len(sentences)
    assert len(re.findall(r"\d+", text)) == 1
    assert not {*words.ANIMALS} & {*words.PEOPLE, *words.THINGS, *words.PLACES}


# The catalog.


def test_forms_by_the_tokenizer(tokenizers):
    assert {catalog.form_of(tokenizers[form]): form for form in FORMS} == {
        form: form for form in FORMS
    }


def test_titles_and_numbers_of_samples():
    assert len({catalog.title(task) for task in NAMES}) == len(NAMES) == 13
    assert {catalog.count_of(task) for task in NAMES} == {None}


def test_what_cannot_be_made_is_refused_in_one_sentence(draw):
    known = re.escape(", ".join(NAMES))
    message = f"^unknown task 'needle'; the tasks are {known}, or data:PATH for a file$"
    for refused in (
        lambda: draw("needle", "words", 512),
        lambda: catalog.title("needle"),
        lambda: catalog.count_of("needle"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(ValueError, match="unknown form 'prose'; the forms are embedded and words"):
        catalog.sample("niah", form="prose", length=512, index=0, seed=0, count=len)
    with pytest.raises(ValueError, match="begin at 0, got seed -1"):
        draw("niah", "words", 512, 0, -1)
