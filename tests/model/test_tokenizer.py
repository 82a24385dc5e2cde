"""Text in, the model's ids out, and back."""

import numpy as np
import pytest
import tasks
from kvpolicy.evaluation.questions import embedded
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY


def test_every_id_survives_text(tokenizer):
    ids = list(range(len(VOCABULARY)))
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


@pytest.mark.parametrize("task", tasks.TASKS)
def test_prompts_survive_text(tokenizer, task):
    sample = tasks.sample(task, 512, np.random.default_rng(1))
    assert tokenizer(sample.text)["input_ids"] == sample.prompt_ids
    assert tokenizer.decode(sample.prompt_ids, skip_special_tokens=True) == sample.text
    assert tokenizer.decode(sample.answer_ids) == sample.answer_text


def test_case_and_missing_spaces_do_not_matter(tokenizer):
    tidy = tokenizer("fact amber seven is oak river stone . ask amber seven answer")
    assert embedded.UNK not in tidy["input_ids"]
    loose = tokenizer("Fact amber  seven is oak river stone. Ask amber seven answer")
    assert loose["input_ids"] == tidy["input_ids"]


def test_unknown_words_become_unk(tokenizer):
    assert tokenizer("ask zyzzyva answer")["input_ids"] == [
        embedded.BOS,
        embedded.ASK,
        embedded.UNK,
        embedded.ANSWER,
    ]


def test_chat_template_renders_a_question_as_the_prompt(tokenizer):
    sample = tasks.sample("niah", 64, np.random.default_rng(2))
    question = sample.text.removesuffix(" answer")
    chat = [{"role": "user", "content": question}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert rendered["input_ids"] == sample.prompt_ids
    chat.append({"role": "assistant", "content": sample.answer_text})
    rendered = tokenizer.apply_chat_template(chat, return_dict=True)
    assert rendered["input_ids"] == [*sample.prompt_ids, *sample.answer_ids, embedded.END]


def test_special_tokens(tokenizer):
    assert tokenizer.bos_token_id == embedded.BOS
    assert tokenizer.eos_token_id == embedded.END
    assert tokenizer.pad_token_id == embedded.PAD
