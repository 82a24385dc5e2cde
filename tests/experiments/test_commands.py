"""`kvpolicy experiment`: files, requests to servers, and messages on faulty servers."""

import argparse
import contextlib
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kvpolicy.evaluation.cli import main
from kvpolicy.experiments.commands import add

sys.path.insert(0, str(Path(__file__).parent))
from experiment_server import PATH, Endpoints, serving
from made_experiment import TEXT, THREE, Made, experiment, made

ROOT = Path(__file__).parents[2]
OTHER = TEXT.replace("lava@0.25", "lava@0.5")
RAMPED = TEXT.replace("coverage: 1 %\narms", "coverage: 20 %\narms")


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("SGLANG_ADMIN_KEY", "admin")
    monkeypatch.setenv("LOOKING", "look\n")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text(TEXT)
    return path


def run(capsys, *words):
    """Exit code, output and errors of the command."""
    code = main(["experiment", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


# Files


def test_check_says_what_the_experiment_is(capsys, file):
    code, out, _ = run(capsys, "check", file)
    assert code == 0
    assert out == (
        f"{file}: ok: lava-25: control (none) 50 %, lava-25 (lava@0.25) 50 %; coverage 1 %, by "
        f"steps 10 % -> 100 %; revision {experiment().revision}; not looked at, for want of "
        "--kv-policy: lava@0.25\n"
    )


SNAPKV = ROOT / "policies" / "snapkv.yaml"
SETTING = TEXT.replace(
    "{policy: lava@0.25}", "{policy: mine, set: {rat: 0.1, rate: 7, window: 16}}"
)


def test_check_looks_at_policies(capsys, file):
    words = ("check", file, "--kv-policy", f"mine={SNAPKV}", "lava")
    file.write_text(SETTING.replace("{rat: 0.1, rate: 7, window: 16}", "{rate: 0.1}"))
    assert run(capsys, *words)[0] == 0
    assert run(capsys, *words, "--kv-policy-set", "mine.window=32")[0] == 0
    file.write_text(SETTING)
    code, out, _ = run(capsys, *words)
    assert code == 1
    assert "error[name]: arm `lava-25`: policy `snapkv` has no parameter `rat`" in out
    assert "help: did you mean `rate`?" in out
    assert "error[range]: arm `lava-25`: `rate` is 7" in out
    assert "ok:" not in out
    file.write_text(TEXT.replace("lava@0.25", "lave"))
    code, out, _ = run(capsys, *words)
    assert (code, "did you mean `lava`?" in out) == (1, True)


def test_check_without_policies_looks_at_those_that_are_shipped(capsys, file):
    code, out, _ = run(capsys, "check", file)
    assert code == 0
    assert out.endswith("; not looked at, for want of --kv-policy: lava@0.25\n")
    file.write_text(TEXT.replace("{policy: lava@0.25}", "{policy: lava, set: {rat: 0.25}}"))
    code, out, _ = run(capsys, "check", file)
    assert (code, "policy `lava` has no parameter `rat`" in out) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-policy", "x="), "expected PATH or NAME=PATH"),
        (("--kv-policy", "nobody"), "no shipped policy of this name"),
        (("--kv-policy", "lava", "lava"), "lava is also called `lava`; give one of them another"),
        (("--kv-policy", f"none={SNAPKV}"), "the name `none` stands for no policy"),
        (("--kv-policy-set", "rate=1"), "there is no --kv-policy that it could be for"),
        (("--kv-policy", "lava", "--kv-policy-set", "x.rate=1"), "no policy is called `x`"),
        (("--kv-policy", "lava", "--kv-policy-set", "rat=1"), "did you mean `rate`?"),
    ],
)
def test_policies_that_cannot_be_looked_at(capsys, file, words, message):
    code, _, err = run(capsys, "check", file, *words)
    assert code == 2
    assert message in err


def test_check_reports_every_defect(capsys, file, tmp_path):
    file.write_text(TEXT.replace("coverage: 1 %\narms", "coverage: 101 %\narms"))
    code, out, _ = run(capsys, "check", file)
    assert code == 1
    assert f"{file}:2:11: error[" in out
    code, out, _ = run(capsys, "check", file, tmp_path / "missing.yaml")
    assert code == 2
    assert "no such file" in out


def test_fmt(capsys, file):
    file.write_text(TEXT.replace("2 %", "2%"))
    assert run(capsys, "fmt", "--check", file) == (1, f"{file}: would be formatted\n", "")
    assert run(capsys, "fmt", file) == (0, f"{file}: formatted\n", "")
    assert run(capsys, "fmt", "--check", file) == (0, "", "")
    assert experiment(file.read_text()) == experiment()


def test_schema(capsys, tmp_path):
    code, out, _ = run(capsys, "schema")
    assert code == 0
    assert "arms" in json.loads(out)["properties"]
    path = tmp_path / "schema.json"
    assert run(capsys, "schema", "--out", path) == (0, "", "")
    assert path.read_text() == out
    assert run(capsys, "schema", "--out", path, "--check") == (0, "", "")
    assert run(capsys, "schema", "--check")[0] == 2


def test_simulate(capsys, file):
    words = ("--runs", 20, "--values", 300, "--requests", 300)
    code, out, _ = run(capsys, "simulate", file, *words)
    assert code == 0
    assert out.startswith("lava-25, revision ")
    assert "\ndrift:\n" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("option", ["--runs", "--values", "--requests"])
def test_nothing_cannot_be_simulated(option, capsys, file):
    with pytest.raises(SystemExit) as exit:
        run(capsys, "simulate", file, option, 0)
    assert exit.value.code == 2
    assert f"argument {option}: `0` is not a whole number from 1" in capsys.readouterr().err


# Orders


def test_orders_reach_every_replica(capsys):
    first, second = Endpoints(made(0)), Endpoints(made(0))
    with serving(first) as one, serving(second) as two:
        urls = ("--url", one, "--url", f"{two}/v1/")
        assert run(capsys, "pause", *urls) == (0, f"{one}: paused\n{two}: paused\n", "")
        assert run(capsys, "resume", *urls)[1] == f"{one}: running\n{two}: running\n"
        assert run(capsys, "resume", *urls)[1] == (
            f"{one}: running already\n{two}: running already\n"
        )
        second.made.lifecycle.abort("drift")
        code, out, _ = run(capsys, "abort", "--reason", "looks bad", *urls)
        assert (code, out) == (0, f"{one}: aborted\n{two}: aborted already\n")
    assert first.made.lifecycle.reason == "looks bad"
    assert second.made.lifecycle.reason == "drift"
    assert {key for method, _, key in first.asked if method == "POST"} == {"admin"}


def test_an_arm_is_rolled_back_alone(capsys):
    endpoints = Endpoints(made(0, THREE))
    with serving(endpoints) as url:
        words = ("abort", "--arm", "sinks-6", "--reason", "odd answers", "--url", url)
        assert run(capsys, *words) == (0, f"{url}: running, without arm sinks-6\n", "")
        assert run(capsys, *words)[1] == f"{url}: running, without arm sinks-6 already\n"
    assert endpoints.made.lifecycle.rolled_back == {"sinks-6": "odd answers"}


def test_promote_needs_a_cleared_arm_or_force(capsys):
    endpoints = Endpoints(made(0))
    with serving(endpoints) as url:
        words = ("promote", "--arm", "lava-25", "--url", url)
        code, out, err = run(capsys, *words)
        assert (code, out) == (1, "")
        left = "drift, top1_disagreement, error_rate"
        assert err == f"{url}: declined: arm `lava-25` is not cleared of {left} yet\n"
        would = f"{url}: would promote arm lava-25\n"
        assert run(capsys, *words, "--force", "--dry-run")[:2] == (0, would)
        assert endpoints.made.lifecycle.state == "running"
        assert run(capsys, *words, "--force")[:2] == (0, f"{would}{url}: promoted\n")
        assert run(capsys, *words)[:2] == (0, f"{url}: promoted already\n" * 2)
        code, _, err = run(capsys, "abort", "--url", url)
        assert code == 1
        assert "promoted already" in err


def test_promote_changes_all_replicas_or_none(capsys):
    """An end is latched: replicas that have one would not come back to the others."""
    first, second = Endpoints(made(3000)), Endpoints(made(0))
    with serving(first) as one, serving(second) as two:
        words = ("promote", "--arm", "lava-25", "--url", one)
        assert run(capsys, *words, "--url", "127.0.0.1:9")[0] == 2
        second.refuses = "not now"
        code, _, err = run(capsys, *words, "--url", two)
        assert (code, err) == (1, f"{two}: declined: not now\nnothing was changed anywhere\n")
        assert first.made.lifecycle.state == second.made.lifecycle.state == "running"
        second.refuses = None
        assert run(capsys, *words, "--url", two)[0] == 0
    assert first.made.lifecycle.state == second.made.lifecycle.state == "promoted"


def test_replicas_promote_by_what_they_have_seen_together(capsys):
    """None of them has enough evidence by itself; what one has rolled back is not promoted."""
    replicas = [Endpoints(made(requests)) for requests in (400, 400, 400, 400, 400)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(replica)) for replica in replicas]
        some = [word for url in urls[:2] for word in ("--url", url)]
        every = [word for url in urls for word in ("--url", url)]
        words = ("promote", "--arm", "lava-25")
        code, _, err = run(capsys, *words, *some)
        assert code == 1
        assert err.startswith("the replicas together: arm `lava-25` is not cleared of ")
        assert err.endswith("give `--force`\nnothing was changed anywhere\n")
        for url in urls:
            assert run(capsys, *words, "--url", url, "--dry-run")[0] == 1
        assert run(capsys, *words, *every, "--dry-run")[0] == 0
        assert {replica.made.lifecycle.state for replica in replicas} == {"running"}
        assert run(capsys, *words, *every)[0] == 0
        assert {replica.made.lifecycle.state for replica in replicas} == {"promoted"}


def test_what_one_replica_has_rolled_back_is_not_promoted(capsys):
    first, second = Endpoints(made(3000, THREE)), Endpoints(made(3000, THREE))
    second.made.lifecycle.roll_back("lava-25", "odd answers")
    with serving(first) as one, serving(second) as two:
        words = ("promote", "--arm", "lava-25", "--url", one, "--url", two)
        code, _, err = run(capsys, *words)
        assert code == 1
        assert f"arm `lava-25` was rolled back: odd answers (at {two})" in err
        assert first.made.lifecycle.state == "running"


def test_one_replica_that_is_gone_keeps_no_other_from_ending(capsys):
    endpoints = Endpoints(made(0))
    with serving(endpoints) as url:
        code, out, err = run(capsys, "abort", "--url", "127.0.0.1:9", "--url", url)
    assert (code, out) == (2, f"{url}: aborted\n")
    assert "--url http://127.0.0.1:9: error[server]: nobody answers there" in err


def test_put(capsys, file):
    endpoints = Endpoints(made(50))
    with serving(endpoints) as url:
        file.write_text(RAMPED)
        code, out, _ = run(capsys, "put", file, "--url", url, "--dry-run")
        assert code == 0
        assert out == (
            f"{url}: accepts revision {experiment().revision}, which keeps the analysis, "
            "coverage 10 %\n"
        )
        assert endpoints.made.lifecycle.experiment.coverage == 0.01
        assert run(capsys, "put", file, "--url", url)[0] == 0
        assert endpoints.made.lifecycle.experiment.coverage == 0.2
        assert endpoints.made.analysis.records["control"].requests
        file.write_text(OTHER)
        code, out, _ = run(capsys, "put", file, "--url", url)
        assert code == 0
        assert "begins a new analysis" in out
        assert f"has revision {experiment(OTHER).revision} now, running, coverage 1 %" in out


def test_put_changes_all_replicas_or_none(capsys, file):
    first, second = Endpoints(made(0)), Endpoints(made(0))
    second.refuses = "policy `lava@0.5` does not fit"
    file.write_text(OTHER)
    with serving(first) as one, serving(second) as two:
        code, _, err = run(capsys, "put", file, "--url", one, "--url", two)
    assert code == 1
    assert err == (
        f"{two}: declined: policy `lava@0.5` does not fit\nnothing was changed anywhere\n"
    )
    assert first.made.lifecycle.experiment == experiment()


def test_put_sends_no_file_with_errors(capsys, file):
    endpoints = Endpoints(made(0))
    file.write_text("experiment: x\n")
    with serving(endpoints) as url:
        code, _, err = run(capsys, "put", file, "--url", url)
    assert code == 1
    assert "error[" in err
    assert endpoints.asked == []


# Servers that are wrong


@pytest.mark.parametrize(
    ("endpoints", "words", "message", "help"),
    [
        (Endpoints(None), ("status",), "the server has no experiment (status 404)",
         "--kv-experiment"),
        (Endpoints(made(0), api_key="look"), ("status",), "the server wants a key (status 401)",
         "--api-key-env"),
        (Endpoints(made(0), api_key="other"), ("status", "--api-key-env", "LOOKING"),
         "the server does not take this key (status 401)", "--api-key"),
        (Endpoints(made(0), admin_key=None), ("abort",), "the server has no admin key",
         "start it with --admin-api-key"),
        (Endpoints(made(0), admin_key="other"), ("pause",), "does not take the admin key (401)",
         "--admin-api-key"),
    ],
)  # fmt: skip
def test_keys_and_experiments_that_are_missing(capsys, endpoints, words, message, help):
    with serving(endpoints) as url:
        code, out, err = run(capsys, *words, "--url", url)
    assert (code, out) == (2, "")
    first, second = err.strip().split("\n")
    assert first.startswith(f"--url {url}: error[server]: ")
    assert message in first
    assert help in second


def test_the_right_key_is_sent_and_white_space_is_not(capsys):
    endpoints = Endpoints(made(0), api_key="look")
    with serving(endpoints) as url:
        assert run(capsys, "status", "--api-key-env", "LOOKING", "--url", url)[0] == 0
    assert endpoints.asked == [("GET", PATH, "look")]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, "<html>"), "no server with an experiment (a page that is no JSON)"),
        ((200, [1]), "no server with an experiment (a page that is no JSON)"),
        ((500, "no"), "no server with an experiment (status 500)"),
        ((302, ""), "no server with an experiment (status 302)"),
        ((200, {"experiment": {}}), "this is no experiment of a server: it has no `name`"),
        ((200, {**made(0).document(), "state": "odd"}), "its state is `odd`"),
        ((200, {**made(0).document(), "revision": "0" * 12}), "another version of kvpolicy"),
        ((200, {**made(0).document(), "experiment": {}}), "its experiment cannot be read"),
        ((200, {**made(0).document(), "analysis": {}}), "the analysis is of revision None"),
    ],
)
def test_answers_of_something_else(capsys, reply, message):
    endpoints = Endpoints(None)
    endpoints.reply = lambda *_: reply
    with serving(endpoints) as url:
        code, out, err = run(capsys, "status", "--url", url)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:9", "nobody answers there: the connection is refused"),
        ("ftp://127.0.0.1", "not the address of a server"),
        ("http://127.0.0.1:port", "not the address of a server"),
        ("http://127.0.0.1:9/a b", "not the address of a server"),
        ("http://no-such-host.invalid", "nobody answers there"),
    ],
)
def test_addresses_of_nobody(capsys, url, message, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = run(capsys, "status", "--url", url)
    assert code == 2
    assert message in err


def test_a_key_that_is_not_set(capsys, monkeypatch):
    monkeypatch.delenv("SGLANG_ADMIN_KEY")
    code, _, err = run(capsys, "abort", "--url", "127.0.0.1:9")
    assert code == 2
    assert "--admin-key-env: error[arguments]: the variable `SGLANG_ADMIN_KEY` is not set" in err
    code, _, err = run(capsys, "status", "--url", "127.0.0.1:9", "--api-key-env", "NOT_SET")
    assert "the variable `NOT_SET` is not set" in err


def test_replicas_of_different_revisions(capsys):
    with serving(Endpoints(Made())) as one, serving(Endpoints(Made(OTHER))) as two:
        code, _, err = run(capsys, "status", "--url", one, "--url", two)
    assert code == 2
    for url, text in ((one, TEXT), (two, OTHER)):
        revision = experiment(text).revision
        assert f"`lava-25` revision {revision} at {url.removeprefix('http://')}" in err
    assert "put one file everywhere" in err


# What is kept in files


def test_a_run_can_be_kept(capsys, tmp_path):
    endpoints = Endpoints(made(100))
    saved, raw, page = (tmp_path / name for name in ("all.json", "raw.json", "page.html"))
    with serving(endpoints) as url:
        code, out, _ = run(capsys, "status", "--json", "--url", url)
        shown = run(capsys, "status", "--url", url)
    assert code == 0
    saved.write_text(out)
    raw.write_text(json.dumps(json.loads(out)["replicas"][0]["document"]))
    assert run(capsys, "status", "--from", saved) == shown
    assert run(capsys, "status", "--from", raw) == shown
    code, out, _ = run(capsys, "report", "--from", saved, "--out", page)
    assert (code, out.startswith(f"{page}: Arm `lava-25` is not decided")) == (0, True)
    assert page.read_text().startswith("<!doctype html>")
    raw.write_text(json.dumps([endpoints.made.document()] * 2))
    assert "2 replicas, pooled" in run(capsys, "status", "--from", raw)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "no experiment"), ("[1]", "no experiment"), ("3", "no experiment"),
     ('{"replicas": []}', "no experiment"), ('{"replicas": [{}]}', "no experiment"),
     ('{"replicas": [{"name": "a"}]}', "no experiment"), (None, "no such file")],
)  # fmt: skip
def test_files_of_something_else(capsys, tmp_path, text, message):
    path = tmp_path / "saved.json"
    if text is not None:
        path.write_text(text)
    code, _, err = run(capsys, "status", "--from", path)
    assert code == 2
    assert message in err


def within(value, path=()):
    """The places in a JSON value, of lists the first two."""
    yield path
    parts = []
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for name, part in parts:
        yield from within(part, (*path, name))


def test_damaged_files_get_a_message_and_no_traceback(capsys, tmp_path):
    path, page = tmp_path / "saved.json", tmp_path / "page.html"
    document = made(60).document()
    apart = ("experiment", "verdicts")  # read as a file is, and not at all
    places = [place for place in within(document) if place and place[0] not in apart]
    damages = (None, "x", -1, math.inf, [], {})
    for number, place in enumerate(places):
        damaged = json.loads(json.dumps(document))
        part = damaged
        for name in place[:-1]:
            part = part[name]
        for damage in damages[number % 3 :: 3] if place[0] == "analysis" else damages:
            part[place[-1]] = damage
            path.write_text(json.dumps(damaged))
            assert run(capsys, "status", "--from", path)[0] in (0, 1, 2)
            if place[0] != "analysis":
                assert run(capsys, "report", "--from", path, "--out", page)[0] in (0, 2)


def test_a_page_that_cannot_be_written(capsys, tmp_path):
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(made(0).document()))
    code, _, err = run(capsys, "report", "--from", path, "--out", tmp_path / "no" / "page.html")
    assert code == 2
    assert "no such file or directory" in err


@pytest.mark.parametrize(
    "words",
    [("status",), ("status", "--url", "a", "--from", "b"), ("promote", "--url", "a"), ("abort",),
     ("status", "--url", "a", "--watch", "0"), ("report", "--url", "a"), ()],
)  # fmt: skip
def test_words_that_do_not_fit(words):
    with pytest.raises(SystemExit) as exit:
        main(["experiment", *words])
    assert exit.value.code == 2


def test_watching_a_file_makes_no_sense(capsys, tmp_path):
    code, _, err = run(capsys, "status", "--from", tmp_path / "x.json", "--watch", "5")
    assert code == 2
    assert "a file does not change" in err


def test_watch_goes_on_until_it_is_interrupted(capsys, monkeypatch):
    endpoints = Endpoints(made(10))
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            endpoints.made = None  # the server starts again
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.experiments.commands.time.sleep", sleep)
    with serving(endpoints) as url:
        code, out, _ = run(capsys, "status", "--watch", "5", "--url", url)
    assert code == 130
    assert looks == [5.0] * 3
    assert out.count("RUNNING  lava-25") == 2
    assert "the server has no experiment" in out


def test_check_and_fmt_need_no_numpy(file):
    program = (
        "import sys; sys.modules['numpy'] = None; from kvpolicy.evaluation.cli import main; "
        "sys.exit(main(['experiment', *sys.argv[1:]]))"
    )

    def run_without(*words):
        command = [sys.executable, "-P", "-c", program, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    assert run_without("check", str(file)) == (0, "")
    assert run_without("fmt", "--check", str(file)) == (0, "")
    code, err = run_without("status", "--url", "127.0.0.1:9")
    assert code == 2
    assert "this action needs numpy" in err
    assert "pip install '.[experiments]'" in err


def commands(language):
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    section = text[text.index("## Looking at an experiment") :]
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def test_commands_of_the_document_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands("sh"):
        words = ["20" if word in ("200", "2000", "4000") else word for word in words]
        assert main(words) == 0, capsys.readouterr()


def test_commands_of_the_document_for_servers_are_accepted():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add(parser)
    asked = [parser.parse_args(words[1:]).action for words in commands("text")]
    assert {"status", "report", "abort", "pause", "resume", "promote", "put"} == set(asked)
