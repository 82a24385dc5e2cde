"""`kvpolicy inspect` without a server: the mask, the text's pieces, both views, what is refused."""

import base64
import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.dsl.tools import cli
from kvpolicy.evaluation.asking import endpoint
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.looking import inspect_page, inspect_prompt, look, terminal
from kvpolicy.evaluation.looking.kept import Kept, pieces, unpacked

ROOT = Path(__file__).parents[2]
PLAIN = terminal.Style(width=60, ansi=False, unicode=False)
COLOURED = terminal.Style(width=60, ansi=True, unicode=True)
HELD = np.zeros((2, 2, 12), dtype=bool)
HELD[:, :, 0] = HELD[0, :, 1] = HELD[1, 0, 2] = HELD[:, :, 10:] = True
FACTS = {
    "policy": "snapkv",
    "prompt_tokens": 12,
    "kv_bytes_before": 12 * 512,
    "kv_bytes_after": 5 * 512,
    "slots_freed": 7,
}


def kept(tokens=tuple("abcdefghijkl"), held=HELD, facts=FACTS) -> Kept:
    return Kept("snapkv", {"capacity": "5"}, tuple(tokens), held, facts, "gold")


def test_the_mask_is_what_the_server_packed():
    mask = np.random.default_rng(0).random((3, 2, 21)) < 0.4
    bits = base64.b64encode(np.packbits(mask, axis=-1).tobytes()).decode()
    assert (unpacked({"shape": [3, 2, 21], "bits": bits}, 21) == mask).all()
    drawn = kept(held=mask, tokens=["x"] * 21).as_map()
    assert drawn["bits"] == bits
    assert (drawn["layers"], drawn["kv_heads"]) == (3, 2)


@pytest.mark.parametrize(
    "packed",
    [
        {},
        {"shape": [1, 1, 9], "bits": "AA=="},
        {"shape": [1, 9], "bits": "AAAA"},
        {"shape": [1, 1, 9], "bits": "?"},
        {"shape": [1, 1, 8], "bits": "AA=="},
        {"shape": ["1", 1, 9], "bits": "AAAA"},
        [],
    ],
)
def test_a_mask_of_another_form_is_refused(packed):
    with pytest.raises(ValueError, match="the mask of kept entries cannot be read"):
        unpacked(packed, 9)


def decoder(parts):
    """A decoder from bytes per id that drops the first leading space, as many tokenizers do."""
    return lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace").lstrip(" ")


def test_pieces_of_a_text_are_the_text():
    parts = [b"one", b" two", b" ", "é".encode()[:1], "é".encode()[1:], b" x", b"\xff", b"end"]
    decode = decoder(parts)
    ids = [0, 1, 2, 3, 4, 5, 1, 0]
    found = pieces(decode, ids)
    assert found == ["one", " two", " ", "", "é", " x", " two", "one"]
    assert "".join(found) == decode(ids)
    # Bytes that are no text: nothing is lost and there is a piece for every token.
    assert pieces(decode, [0, 6, 7]) == ["one", "", "\N{REPLACEMENT CHARACTER}end"]
    assert pieces(decode, [0, 6]) == ["one", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(decode, []) == []


def test_plain_view_of_a_small_mask():
    assert list(terminal.view(kept(), PLAIN, heads=True)) == [
        "snapkv (capacity=5): 12 tokens, 15 of 48 entries held (31.2 %)",
        "KV memory of the prompt: 2.5 KiB of 6.0 KiB; 7 of 12 token slots freed",
        "",
        "layer             held  positions 0 to 11",
        "    0 ###.....  33.3 % |##        ##|",
        "  0.0 ###.....  33.3 % |##        ##|",
        "  0.1 ###.....  33.3 % |##        ##|",
        "    1 ##......  29.2 % |# :       ##|",
        "  1.0 ###.....  33.3 % |# #       ##|",
        "  1.1 ##......  25.0 % |#         ##|",
        "",
        "text, by all lists: held [-by none-], by some, {by half or more}, {+by all+}",
        "",
        "{+a+}{b}c[-defghij-]{+kl+}",
    ]


def test_a_layer_and_a_head_have_a_text_of_their_own():
    by_layer = list(terminal.view(kept(), PLAIN, layer=1))
    assert by_layer[-3].startswith("text, by the lists of layer 1: held [-by none-]")
    assert by_layer[-1] == "{+a+}[-b-]{c}[-defghij-]{+kl+}"
    by_head = list(terminal.view(kept(), PLAIN, layer=1, head=1))
    assert by_head[-3:] == [
        "text, by layer 1, KV head 1: [-dropped-], {+held+}",
        "",
        "{+a+}[-bcdefghij-]{+kl+}",
    ]


def test_a_terminal_gets_weights_instead_of_marks():
    lines = list(terminal.view(kept(), COLOURED))
    assert lines[-1] == "\x1b[1;4ma\x1b[0m\x1b[1mb\x1b[0mc\x1b[2;9mdefghij\x1b[0m\x1b[1;4mkl\x1b[0m"
    assert lines[4] == "    0 ██▋       33.3 % ▏██        ██▕"


def test_long_runs_are_cut_and_whole_ones_are_not():
    tokens = [f"{i} " for i in range(1300)]
    shares = np.ones(1300)
    shares[30:1270] = 0
    text = terminal.text(tokens, shares, PLAIN)
    assert "[-30 31 32 33 -] [... 1,232 dropped ...] [-1266 1267 1268 1269 -]{+1270" in text
    whole = terminal.text(tokens, shares, PLAIN, whole=True)
    assert re.sub(r"\[-|-\]|\{\+|\+\}", "", whole) == "".join(tokens)
    assert "[… 880 held by all …]" in terminal.text(tokens[:1000], np.ones(1000), COLOURED)


def test_a_prompt_cannot_command_the_terminal():
    text = terminal.text(["a\x1b[2J\r\n", "b\x07\u202e"], np.ones(2), PLAIN)
    assert text == "{+a\\x1b[2J\\x0d+}\n{+b\\x07\\x202e+}"


def test_bins_are_means_of_positions():
    assert terminal.binned(np.array([1, 0, 0, 1, 1, 1, 0]), 3).tolist() == [0.5, 0.5, 2 / 3]
    assert terminal.binned(np.array([1.0, 0.0]), 10).tolist() == [1, 0]


def test_a_prompt_served_in_full_says_why():
    facts = {"policy": "snapkv", "prompt_tokens": 12, "uncompressed": "short_prompt"}
    lines = list(terminal.summary(kept(held=np.ones_like(HELD), facts=facts)))
    assert lines[0].endswith("48 of 48 entries held (100.0 %)")
    assert lines[1] == "served in full: short_prompt (the budget holds the whole prompt)"


def test_every_reason_of_the_server_is_explained():
    text = (ROOT / "docs" / "operators.md").read_text()
    table = text.split("| reason | when |\n|---|---|\n")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    reasons = {each for cell in cells for each in re.findall(r"`(\w+)`", cell)}
    features = {"input_logprobs", "hidden_states"}  # of requests that inspect never sends
    features |= {"multimodal", "input_embeds", "session", "beam_search"}
    assert reasons - features == set(terminal.REASONS)


def test_the_page_stands_alone_and_escapes_the_prompt(browser):
    evil = "</script><script>alert(1)</script>&<!--\u2028"
    found = kept(tokens=[evil, *"bcdefghijkl"])
    page = inspect_page.page(found)
    assert "<script>alert" not in page  # only escaped, inside of the data
    assert page.count("<script") == page.count("</script>") == 6
    assert not re.search(r"""\ssrc\s*=|@import|url\(https?:""", page)
    data = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(data) == found.as_map()
    assert "15 of 48 entries held" in page
    assert len(page) < 1_500_000
    browser.open(page, 400)
    drawn = browser.run("""return { first: $(".kept-text span").textContent,
        answer: $("h2 + pre").textContent, maps: $$(".kept-plot image").length,
        wide: document.documentElement.scrollWidth, broken: broken(document) };""")
    assert browser.problems == []
    assert drawn == {"first": evil, "answer": "gold", "maps": 1, "wide": 400, "broken": 0}


@pytest.mark.parametrize(
    ("words", "served", "sentence"),
    [
        (["--policy", "snapkv"], None, "the server at --url serves no policies"),
        (["--policy", "lava@0.5"], ["snapkv"], "no policy called `lava@0.5`; it has `snapkv`"),
        (["--policy", "snapkv"], ["snapkv"], "the tokenizer of its model is not on this machine"),
    ],
)
def test_what_a_server_lacks_is_named(capsys, tmp_path, monkeypatch, words, served, sentence):
    policies = served and [{"name": name, "settings": {}} for name in served]
    found = endpoint.Endpoint("http://x", "sglang", {"tokenizer_path": "a/b"}, policies, True)
    monkeypatch.setattr(endpoint, "find", lambda url, api, key: found)
    (tmp_path / "text.txt").write_text("some words")
    where = ["--prompt", str(tmp_path / "text.txt"), "--url", "http://x"]
    assert sentence in refusal(capsys, *words, *where)


def test_a_server_that_does_not_say_what_is_kept_is_refused(capsys, tmp_path, monkeypatch):
    policies = [{"name": "snapkv", "settings": {}}]
    found = endpoint.Endpoint("http://x", "sglang", {"tokenizer_path": "a/b"}, policies)
    monkeypatch.setattr(endpoint, "find", lambda url, api, key: found)
    (tmp_path / "text.txt").write_text("some words")
    words = ["--policy", "snapkv", "--prompt", str(tmp_path / "text.txt"), "--url", "http://x"]
    assert main(["inspect", *words]) == 2
    error = capsys.readouterr().err
    assert "kvpolicy inspect needs what this server does not answer" in error
    assert "start that server with --kv-policy-allow-inspection" in error


def test_the_files_are_written_whether_or_not_the_view_is_read(tmp_path, monkeypatch):
    def closed(*args):
        raise BrokenPipeError

    path = tmp_path / "kept.json"
    path.write_text("some words")
    monkeypatch.setattr(inspect_prompt, "opened", lambda args, check: contextlib.nullcontext())
    monkeypatch.setattr(inspect_prompt, "asked", lambda *args: kept())
    monkeypatch.setattr(inspect_prompt, "_print", closed)
    monkeypatch.setattr(cli, "_discard_output", lambda: None)  # it closes that of the tests
    words = ["inspect", "--policy", "snapkv", "--prompt", str(path), "--json", str(path)]
    assert main(words) == 0
    assert json.loads(path.read_text())["answer"] == "gold"


def test_a_file_that_cannot_be_written_in_the_end_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("some words")
    path = tmp_path / "kept.json"

    def asked(*args):
        path.mkdir()
        return kept()

    monkeypatch.setattr(inspect_prompt, "opened", lambda args, check: contextlib.nullcontext())
    monkeypatch.setattr(inspect_prompt, "asked", asked)
    words = ["--policy", "snapkv", "--prompt", str(tmp_path / "text.txt"), "--json", str(path)]
    assert refusal(capsys, *words) == f"{path}: error[file]: is a directory"


def refusal(capsys, *words: str) -> str:
    assert main(["inspect", *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[0]


MODEL = "examples/model-tiny"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--policy", "snapkv", "--prompt", "/nope.txt", "--model", MODEL], "no such file"),
        (["--policy", "snapkv", "--prompt", "EMPTY", "--model", MODEL], "there is no text in it"),
        (["--policy", "snapkw", "--prompt", "TEXT", "--model", MODEL], "no shipped policy"),
        (["--policy", "BROKEN", "--prompt", "TEXT", "--model", MODEL], "error[key]"),
        (["--policy", "snapkv", "--prompt", "TEXT"], "name a model to serve"),
        (["--policy", "snapkv", "--prompt", "TEXT", "--model", "/nope"], "no such file"),
        (["--policy", "none", "--prompt", "TEXT", "--model", MODEL], "keeps everything"),
        (
            ["--policy", "snapkv", "--set", "capacity=x", "--prompt", "TEXT", "--model", MODEL],
            "`capacity` is `x`",
        ),
        (
            ["--policy", "snapkv", "--policy", "lava", "--prompt", "TEXT", "--model", MODEL],
            "one policy at a time",
        ),
        (
            ["--policy", "snapkv", "--prompt", "TEXT", "--model", MODEL, "--head", "1"],
            "a head is of a layer",
        ),
        (
            ["--policy", "snapkv", "--prompt", "TEXT", "--model", MODEL, "--json", "/no/x.json"],
            "no such folder",
        ),
        (
            ["--policy", "snapkv", "--prompt", "TEXT", "--model", MODEL, "--html", "docs"],
            "docs: error[file]: this is a folder; name a file",
        ),
        (["--policy", "snapkv", "--prompt", "TEXT", "--url", "http://127.0.0.1:9"], "nobody"),
        (
            ["--policy", "snapkv", "--prompt", "TEXT", "--model", MODEL, "--api-key-env", "X"],
            "--api-key-env: error[arguments]: this belongs to --url, which is not given",
        ),
        (
            ["--policy", "snapkv", "--prompt", "TEXT", "--url", "http://x", "--set", "window=8"],
            "its own settings",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_server_starts(
    capsys, tmp_path, monkeypatch, words, sentence
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(look, "serve", None)  # an attempt to start one would raise
    files = {"TEXT": "some words\n", "EMPTY": " \n", "BROKEN": "policy: a\nlanguage: 1\nkep: all\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)
    words = [str(tmp_path / f"{word}.txt") if word in files else word for word in words]
    assert sentence in refusal(capsys, *words)


def test_a_standard_input_that_is_closed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    sentence = refusal(capsys, "--policy", "snapkv", "--prompt", "-", "--model", MODEL)
    assert sentence == "the standard input: error[file]: it is closed"
