"""The client, against small servers that behave well or badly in many ways."""

import socket
import threading
from types import SimpleNamespace

import pytest
from fake_server import Completions, listening, send, stream, web_page
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.evaluation.asking.asking import Asking, CacheSize, Gone, in_threads, question_key
from kvpolicy.evaluation.asking.client import Answer, Failed, OpenAI, SGLang
from kvpolicy.evaluation.asking.endpoint import find
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.turns import Request, requests
from kvpolicy.evaluation.asking.variants import Variant
from kvpolicy.evaluation.keys import api_key
from kvpolicy.evaluation.questions.sample import History, Sample, Turn

QUESTION = Request(0, [1, 2, 3], "one two three", [], 4)


class FakeSGLang:
    """Streams the given answers, one list of events per request."""

    def __init__(self, *answers: list, info: dict | None = None) -> None:
        self.answers, self.asked = list(answers), []
        self.info = info or {"internal_states": [{}], "version": "0"}

    def __call__(self, handler, body):
        if handler.path == "/server_info":
            send(handler, self.info)
        elif handler.path == "/generate":
            self.asked.append(body)
            events = self.answers.pop(0)
            stream(handler, [each for each in events if each], done=None not in events)
        else:
            send(handler, {"error": {"message": "what?"}}, 404)


def event(*ids: int, text: str = "", prompt: int = 3, **meta) -> dict:
    facts = {"prompt_tokens": prompt, "completion_tokens": len(ids), **meta}
    return {"text": text, "output_ids": list(ids), "meta_info": facts}


@pytest.fixture(scope="module")
def tokens(model):
    return Tokens(model)


def test_an_answer_of_sglang(tokens):
    facts = {"entries_kept": 1, "entries_before": 2}
    fake = FakeSGLang([event(), event(7, text="a"), event(7, 8, text="a b", kv_policy=facts)])
    with listening(fake) as url:
        answer = SGLang(url, tokens, named=True).ask(QUESTION, "lava@0.5")
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("a b", 3, 2)
    assert answer.meta["kv_policy"] == facts
    assert 0 < answer.ttft
    assert answer.tpot > 0
    [body] = fake.asked
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"]["custom_params"] == {"kv_policy": "lava@0.5"}
    assert body["sampling_params"]["temperature"] == 0


def test_an_answer_that_goes_on_after_given_tokens(tokens):
    given = tokens.encode("oak river", special=False)
    said = tokens.encode("stone", special=False)
    fake = FakeSGLang([event(*given), event(*given, *said, text="oak river stone")])
    with listening(fake) as url:
        client = SGLang(url, tokens, named=True)
        answer = client.ask(Request(1, [1], "", given, 4), "lava", kept=True)
    assert (answer.text.strip(), answer.output_tokens) == ("stone", 1)
    assert answer.ttft is None
    sampling = fake.asked[0]["sampling_params"]
    assert sampling["max_new_tokens"] == 6
    custom = {"kv_policy": "lava", "kv_policy_kept": True, "kv_policy_force": given}
    assert sampling["custom_params"] == custom


def test_an_answer_without_a_word(tokens):
    """An empty answer counts as an answer, and as wrong."""
    with listening(FakeSGLang([event(finish_reason={"type": "stop"})])) as url:
        answer = SGLang(url, tokens, named=True).ask(QUESTION, "lava")
    assert (answer.text, answer.output_tokens, answer.ttft, answer.tpot) == ("", 0, None, None)


def test_an_answer_that_comes_at_once_has_no_time_per_token(tokens):
    with listening(FakeSGLang([event(7, 8, 9)])) as url:
        answer = SGLang(url, tokens, named=True).ask(QUESTION, "lava")
    assert answer.ttft > 0
    assert answer.tpot is None


def test_a_stock_server_is_not_told_of_policies(tokens):
    fake = FakeSGLang([event(7)])
    with listening(fake) as url:
        assert SGLang(url, tokens, named=False).ask(QUESTION, "none").tpot is None
    assert "custom_params" not in fake.asked[0]["sampling_params"]


@pytest.mark.parametrize(
    ("events", "message", "again"),
    [
        ([event(7), None], "the answer broke off", True),
        ([{"error": {"message": "too long"}}], "the server says: too long", False),
        ([], "the answer is empty", True),
        ([event(7, finish_reason={"type": "abort", "message": "bye"})], "gave up: bye", True),
    ],
)
def test_answers_that_are_none(tokens, events, message, again):
    with listening(FakeSGLang(events)) as url, pytest.raises(Failed, match=message) as error:
        SGLang(url, tokens, named=False).ask(QUESTION, "none")
    assert error.value.again == again


def test_statuses(tokens):
    for status, again in ((400, False), (429, True), (503, True)):
        with listening(lambda h, body, status=status: send(h, {"error": "no"}, status)) as url:
            with pytest.raises(Failed, match=f"status {status}: no") as error:
                SGLang(url, tokens, named=False).ask(QUESTION, "none")
            assert error.value.again == again


def test_nobody_any_more(tokens):
    with listening(web_page) as url:
        client = SGLang(url, tokens, named=False)
        assert client.alive()
    assert not client.alive()
    with pytest.raises(Failed, match="no answer: ConnectionError"):
        client.ask(QUESTION, "none")
    with pytest.raises(Failed, match="no answer"):
        client.flush()


def test_completions(tokens):
    fake = Completions()
    with listening(fake) as url:
        answer = OpenAI(url, "toy", tokens).ask(QUESTION, "none")
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == (" three", 3, 2)
    assert answer.ttft > 0
    assert fake.asked[0]["prompt"] == "one two three"
    assert fake.asked[0]["max_tokens"] == 4
    with pytest.raises(ValueError, match="has no policy lava"):
        OpenAI(url, "toy", tokens).ask(QUESTION, "lava")


def test_what_listens():
    policies = [{"name": "lava", "path": "p", "settings": {}, "default": True}]
    state = {"kv_policy": policies, "kv_policy_token_bytes": 640}
    info = {"internal_states": [state], "version": "1"}
    with listening(FakeSGLang(info=info)) as url:
        found = find(url + "/", None, None)
        assert (found.api, found.policies, found.url) == ("sglang", policies, url)
        assert found.token_bytes == 640
    with listening(FakeSGLang()) as url:
        bare = find(url.removeprefix("http://"), "sglang", None)
        assert (bare.policies, bare.token_bytes) == (None, None)
    with listening(Completions(("a", "b"), key="secret")) as url:
        found = find(url + "/v1", None, "secret")
        assert (found.api, found.models) == ("openai", ("a", "b"))
        assert found.model("b") == "b"
        for name, message in ((None, "has several models: `a` and `b`"), ("c", "no model `c`")):
            with pytest.raises(PolicyError, match=message):
                found.model(name)
        with pytest.raises(PolicyError, match=r"wants a key.*\n.*--api-key-env"):
            find(url, None, None)
        with pytest.raises(PolicyError, match="does not take this key"):
            find(url, None, "other")
    with listening(Completions(())) as url:
        nothing = find(url, None, None)
        with pytest.raises(PolicyError, match="the server lists no models"):
            nothing.model(None)


def refusal(url: str, api: str | None = None) -> str:
    with pytest.raises(PolicyError) as error:
        find(url, api, None)
    return str(error.value)


def test_what_does_not_listen():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert "nobody answers there: the connection is refused" in refusal(f"localhost:{port}")
    with listening(web_page) as url:
        assert "what answers there is a web page, not a model server" in refusal(url)
    with listening(lambda handler, body: send(handler, ["?"])) as url:
        message = refusal(url)
        assert "not SGLang or an OpenAI-compatible server (GET /server_info: 200" in message
    with listening(Completions()) as url:
        assert "not SGLang (GET /server_info: 404" in refusal(url, "sglang")
    assert "not the address of a server" in refusal("htp://x")


def test_a_server_that_hangs_up():
    with listening(lambda handler, body: handler.connection.close()) as url:
        message = "nobody answers there: remote end closed connection without response"
        assert message in refusal(url)


def test_a_name_without_an_address(monkeypatch):
    def unknown(*args, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    message = "nobody answers there: no address is known for this name (name or service not known)"
    assert message in refusal("no-such-name.invalid")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ключ", "a character that HTTP cannot carry"),
        ("one\ntwo", "has a line break"),
        (" ", "the variable `TOY_KEY` is not set"),
    ],
)
def test_keys_that_cannot_be_sent(key, message, monkeypatch):
    monkeypatch.setenv("TOY_KEY", key)
    with pytest.raises(PolicyError, match=message):
        api_key("TOY_KEY")
    monkeypatch.setenv("TOY_KEY", "secret\n")
    assert api_key("TOY_KEY") == "secret"


def conversation(history: History) -> Sample:
    turns = [
        Turn(f" ask {name} answer", f" {reply} <end>", (reply,), 4, lambda text: 1.0)
        for name, reply in (("amber", "oak"), ("delta", "river"), ("hazel", "stone"))
    ]
    return Sample("toy", 8, 0, "start hear now", tuple(turns), history)


def test_turns_are_the_same_tokens_whatever_they_find(tokens):
    first = tokens.encode("start hear now ask amber answer")
    second = tokens.encode(" oak <end> ask delta answer", special=False)
    third = tokens.encode(" river <end> ask hazel answer", special=False)
    whole = [first, first + second, first + second + third]
    for history in (History.TREE, History.EVICTED):
        asked = list(requests(conversation(history), tokens, copy=True))
        assert [request.ids for request in asked] == whole
        assert [request.forced for request in asked] == [[], [], []]
    asked = list(requests(conversation(History.COPY), tokens, copy=True))
    assert [request.ids for request in asked] == [first] * 3
    assert [request.ids + request.forced for request in asked] == whole
    asked = list(requests(conversation(History.COPY), tokens, copy=False))
    assert [request.ids for request in asked] == whole
    asked = list(requests(conversation(History.SHARED), tokens, copy=True))
    alone = "start hear now ask {} answer"
    assert [r.ids for r in asked] == [
        tokens.encode(alone.format(name)) for name in ("amber", "delta", "hazel")
    ]


def test_positions_of_parts_of_a_text(tokens):
    text = "start hear now ask amber"
    start = text.index("hear")
    assert tokens.positions(text, [(start, start + len("hear now"))]) == [[2, 4]]
    assert tokens.positions(text, []) == []


def test_a_folder_without_a_tokenizer(tmp_path):
    for folder, message in ((tmp_path, "cannot be loaded"), (tmp_path / "x", "no such folder")):
        with pytest.raises(PolicyError, match=message):
            Tokens(folder)


def test_threads_end_at_the_first_exception():
    done, lock = [], threading.Lock()

    def work(number: int) -> None:
        if number == 3:
            raise RuntimeError("three")
        with lock:
            done.append(number)

    with pytest.raises(RuntimeError, match="three"):
        in_threads(range(1000), work, 2)
    assert len(done) < 1000
    in_threads(range(5), done.append, 8)
    assert set(done) >= set(range(5)) - {3}


@pytest.mark.parametrize(("alive", "error"), [(False, Gone), (True, Failed)])
def test_a_server_that_is_lost_before_its_cache_is_emptied_is_gone(tokens, alive, error):
    def flush():
        raise Failed("its cache cannot be emptied")

    client = SimpleNamespace(flush=flush, alive=lambda: alive, copies=False)
    nothing_yet = SimpleNamespace(keys=set())
    asking = Asking(client, tokens, nothing_yet, CacheSize(None, None), 1, lambda: None)
    variant = Variant("none", "none", None, {}, (8,))
    with pytest.raises(error, match="its cache cannot be emptied"):
        asking.ask(variant, [conversation(History.TREE)])


def test_an_earlier_turn_that_is_asked_again_has_its_answer_already(tokens):
    def ask(request, policy):
        if request.turn == 0:
            raise Failed("not twice", again=False)
        return Answer("oak", 3, 1, None, None)

    def add(record):
        added.append(record.turn)
        return True

    def fail(key, sentence):
        failed.append((key[-1], sentence))

    added, failed = [], []
    client = SimpleNamespace(ask=ask, flush=lambda: None, alive=lambda: True, copies=False)
    variant = Variant("none", "none", None, {}, (8,))
    sample = conversation(History.TREE)
    for known in ({question_key(variant, sample, 0)}, set()):
        answers = SimpleNamespace(keys=known, add=add, fail=fail)
        asking = Asking(client, tokens, answers, CacheSize(None, None), 1, lambda: None)
        asking.ask(variant, [sample])
        assert failed == ([] if known else [(0, "not twice")])
    assert added == [1, 2] * 2


def test_a_cache_is_emptied_by_the_admin_key(tokens):
    """If a server has an admin key, SGLang accepts only that key there."""

    def guarded(handler, body):
        wanted = "admin" if handler.path == "/flush_cache" else "common"
        known = handler.headers["Authorization"] == f"Bearer {wanted}"
        asked.append(known)
        send(handler, {}, 200 if known else 401)

    asked = []
    with listening(guarded) as url:
        SGLang(url, tokens, named=True, key="common", admin_key="admin").flush()
        with pytest.raises(Failed, match=r"may not be emptied: .*--admin-key-env"):
            SGLang(url, tokens, named=True, key="common").flush()
    assert asked == [True, False]  # not again
