"""Answers of servers that are of another form: each is named in a sentence, in every command."""

import base64
import json

import numpy as np
import pytest
from fake_server import listening, send, stream, web_page
from kvpolicy.evaluation import server_answers
from kvpolicy.evaluation.asking.client import Failed, OpenAI, SGLang
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.turns import Request
from kvpolicy.evaluation.cli import main

FACTS = {"entries_before": 8, "entries_kept": 4, "kv_bytes_before": 80, "kv_bytes_after": 40,
         "prompt_tokens": 4, "slots_freed": 2}  # fmt: skip
POLICY = {"name": "snapkv", "path": "snapkv.yaml", "settings": {}}
STATE = {"kv_policy": [POLICY], "kv_policy_inspection": True}


def answer(**changes) -> dict:
    """A good answer with other fields in `meta_info`, or without those that are None."""
    meta = {"prompt_tokens": 4, "completion_tokens": 2, "kv_policy": FACTS, **changes}
    given = {name: value for name, value in meta.items() if value is not None}
    return {"text": "x", "output_ids": [5, 6], "meta_info": given}


BAD = [
    (None, "the answer is no JSON object"),
    ([1], "the answer is no JSON object"),
    ({}, "has no `meta_info`"),
    ({"meta_info": {}}, "has no list `output_ids`"),
    ({**answer(), "output_ids": ["a"]}, "has no list `output_ids`"),
    ({**answer(), "text": 5}, "has no `text`"),
    (answer(prompt_tokens=None), "has no number `prompt_tokens`"),
    (answer(completion_tokens="2"), "has no number `completion_tokens`"),
    (answer(kv_policy=[]), "`meta_info.kv_policy` of the answer is no object"),
    (answer(kv_policy={**FACTS, "slots_freed": "2"}), "`slots_freed` in `meta_info.kv_policy`"),
    (answer(kv_policy={"entries_kept": 1, "entries_before": 0}), "and no `entries_before`"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_an_answer_of_another_form(bad, message, model):
    with pytest.raises(ValueError, match=message):
        server_answers.generated(bad)

    def respond(handler, body):
        stream(handler, [bad])

    tokens = Tokens(model)
    with listening(respond) as url, pytest.raises(Failed, match=r"its answer|stream of JSON"):
        SGLang(url, tokens, named=True).ask(Request(0, [1, 2, 3, 4], "", [], 2), "snapkv")


def test_an_answer_without_a_text_or_of_a_request_that_was_given_up():
    bare = {name: value for name, value in answer().items() if name != "text"}
    assert server_answers.generated(bare, with_text=False) is bare
    ended = {"meta_info": {"finish_reason": {"type": "abort", "message": "bye"}}}
    assert server_answers.given_up(server_answers.generated(ended)) == "bye"
    assert server_answers.given_up(answer(finish_reason={"type": "stop"})) is None


@pytest.mark.parametrize(
    "event",
    [{"choices": ["x"]}, {"choices": [{"text": 5}]}, {"choices": 3}, {"usage": "x"},
     {"usage": {"prompt_tokens": "a"}}],
)  # fmt: skip
def test_a_completion_of_another_form(event, model):
    def respond(handler, body):
        stream(handler, [event])

    with listening(respond) as url, pytest.raises(Failed, match="its answer cannot be used"):
        OpenAI(url, "toy", Tokens(model)).ask(Request(0, [1], "one", [], 2), "none")


def test_events_without_a_space(model):
    """The space after `data:` is left to the server."""

    def respond(handler, body):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'data:{"choices": [{"text": "one"}]}\n\ndata:[DONE]\n\n')

    with listening(respond) as url:
        said = OpenAI(url, "toy", Tokens(model)).ask(Request(0, [1], "one", [], 2), "none")
    assert said.text == "one"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"error": {"message": "no"}}, "status 400: no"),
        ({"error": "no"}, "status 400: no"),
        ({"message": "no"}, "status 400: no"),
        ("no", "status 400: no"),
        ([1], "status 400"),
        ({}, "status 400"),
    ],
)
def test_refusals_in_all_their_forms(content, words):
    assert server_answers.refusal(400, json.dumps(content).encode()) == words


MAPS = ["--policy", "snapkv", "--tasks", "niah", "--lengths", "256", "--samples", "1",
        "--maps", "1", "--quiet"]  # fmt: skip


class Serving:
    """A server with a policy whose /generate answers with `respond`."""

    def __init__(self, respond, model, **state) -> None:
        self.respond = respond
        states = [{**STATE, **state}]
        self.info = {"internal_states": states, "model_path": model, "tokenizer_path": model}

    def __call__(self, handler, body):
        if handler.path == "/server_info":
            send(handler, self.info)
        elif handler.path == "/flush_cache":
            send(handler, {})
        else:
            self.respond(handler, body)


def page(status):
    def respond(handler, body):
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(b"<html>no</html>")

    return respond


def sends(content):
    return lambda handler, body: send(handler, content)


def mask(layers, heads, tokens) -> dict:
    bits = np.packbits(np.ones((layers, heads, tokens), dtype=bool), axis=-1).tobytes()
    return {"shape": [layers, heads, tokens], "bits": base64.b64encode(bits).decode()}


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (page(404), "error[server]: status 404"),
        (page(500), "error[server]: status 500"),
        (web_page, "its answer cannot be used: the answer is no JSON object"),
        (sends({}), "its answer cannot be used: the answer has no `meta_info`"),
        (sends(answer(kv_policy=None)), "it does not say what was kept"),
        (sends(answer(kv_policy={**FACTS, "kept": {"shape": [1, 2]}})), "the mask of kept entries"),
        (sends(answer(kv_policy={**FACTS, "kept": mask(1, 1, 999)})), "999 tokens instead of"),
        (sends(answer(kv_policy={"kept": mask(1, 1, 4)})), "it does not say `kv_bytes_before`"),
    ],
)
def test_inspect_names_what_is_wrong_with_an_answer(respond, message, model, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("he even know start")
    with listening(Serving(respond, model)) as url:
        assert main(["inspect", "--policy", "snapkv", "--prompt", str(prompt), "--url", url]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ({}, "it has logprobs of 0 positions"),
        ({"output_top_logprobs": [[[]], [[]]]}, "are not pairs of a number and a token"),
    ],
)
def test_fidelity_names_what_is_wrong_with_an_answer(forced, message, model, tmp_path, capsys):
    def respond(handler, body):
        custom = body["sampling_params"]["custom_params"]
        ids = custom.get("kv_policy_force", [0, 0])
        send(handler, {**answer(**forced), "output_ids": ids})

    text = tmp_path / "text.txt"
    text.write_text("he even know start")
    words = ["--text", str(text), "--prompt-tokens", "2", "--continuation", "2"]
    with listening(Serving(respond, model)) as url:
        assert main(["fidelity", "--policy", "snapkv", *words, "--url", url]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FACTS, "the server does not say which entries it kept"),
        ({**FACTS, "kept": {"shape": [1, 2], "bits": "???"}}, "the mask of kept entries"),
    ],
)
def test_maps_that_a_server_does_not_give(facts, message, model, tmp_path, capsys):
    def respond(handler, body):
        stream(handler, [answer(kv_policy=facts)])

    with listening(Serving(respond, model)) as url:
        assert main(["eval", "--url", url, *MAPS, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err


def test_no_maps_are_asked_for_where_no_question_got_an_answer(model, tmp_path, capsys):
    with listening(Serving(page(404), model)) as url:
        assert main(["eval", "--url", url, *MAPS, "--out", str(tmp_path / "out")]) == 1
    assert "none of 2 questions got an answer: status 404" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"internal_states": [None]}, "`internal_states` is no list of objects"),
        ({"internal_states": [{"kv_policy": [{"path": "x"}]}]}, "`kv_policy` is no list of polic"),
        ({"internal_states": [{"kv_policy": "snapkv"}]}, "`kv_policy` is no list of policies"),
        ({"internal_states": [STATE], "model_path": 5}, "`model_path` is no text"),
        ({"internal_states": [{"kv_policy_token_bytes": "x"}]}, "`kv_policy_token_bytes` is no"),
    ],
)
def test_a_server_that_says_of_itself_what_cannot_be(info, message, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("he even know start")
    with listening(sends(info)) as url:
        assert main(["inspect", "--policy", "snapkv", "--prompt", str(prompt), "--url", url]) == 2
        assert (
            f"its answer to GET /server_info cannot be used: {message}" in capsys.readouterr().err
        )


def test_fleet_status_of_policies_without_names(capsys):
    with listening(sends({"internal_states": [{"kv_policy": [{"path": "x"}]}]})) as url:
        assert main(["fleet", "status", "--url", url]) == 2
    assert "`kv_policy` is no list of policies" in capsys.readouterr().err


def test_models_without_names(model, tmp_path, capsys):
    def respond(handler, body):
        send(handler, {"data": ["toy"]}, 200 if handler.path == "/v1/models" else 404)

    words = ["--tasks", "niah", "--policy", "none", "--tokenizer", model]
    with listening(respond) as url:
        assert main(["eval", "--url", url, *words, "--out", str(tmp_path / "out")]) == 2
    assert "`data` is no list of models with an `id`" in capsys.readouterr().err
