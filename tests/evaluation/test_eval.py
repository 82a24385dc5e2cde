"""`kvpolicy eval` without SGLang: what it refuses and writes, and how it resumes."""

import json
import re
import signal
from argparse import Namespace

import pytest
from fake_server import Completions, listening, send, stream, web_page
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.evaluation import cli, records
from kvpolicy.evaluation.asking import answers, endpoint, eval_setup
from kvpolicy.evaluation.asking.plan import Folder, RunPlan
from kvpolicy.evaluation.asking.variants import Variant, full_kv

QUICK = ["--tasks", "niah,mk", "--lengths", "256", "--samples", "3", "--quiet"]


def run(out, *words: str) -> int:
    return cli.main(["eval", *QUICK, "--out", str(out), *words])


def asks(url: str, model: str) -> list[str]:
    return ["--policy", "none", "--url", url, "--tokenizer", model]


def facts(out, name: str = "samples.jsonl") -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


BAD = "policy: bad\nlanguage: 1\nkeep: recent(windw)\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "BAD"], "error[name]: unknown name `windw`"),
        (["--policy", "lavva"], "did you mean `lava`?"),
        (["--policy", "lava", "--set", "lava.rate=7"], "`rate` is 7"),
        (["--policy", "lava", "--tasks", "niahh"], "unknown task 'niahh'; the tasks are"),
        (["--policy", "lava", "--tasks", "data:x.jsonl"], "x.jsonl: no such file"),
        (["--policy", "lava", "--lengths", "256,9000"], "the model reads at most"),
        (["--policy", "lava", "--lengths", "9"], "niah, 9 tokens, sample 0: "),
        (["--policy", "lava", "--tasks", "data:OWN"], "own.jsonl:2: a prompt of task"),
        (["--policy", "lava", "--tokenizer", "nowhere"], "no such folder with a tokenizer"),
        (["--policy", "lava", "--model", "nowhere"], "nowhere: error[file]: there is no such file"),
        (["--policy", "lava", "--model", "CONFIG"], "this is a file; --model is a folder"),
        (["--policy", "lava", "--api", "openai"], "--api: error[arguments]: this belongs to --url"),
        (["--policy", "none", "--no-full"], "there is no policy to ask instead"),
    ],
)
def test_what_is_refused_before_anything_begins(words, message, tmp_path, model, capsys):
    """Exit code 2, a message, no server, no file."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    own = tmp_path / "own.jsonl"
    row = {"context": "a", "answers": ["b"]}
    own.write_text("".join(json.dumps({**row, "input": "c " * n}) + "\n" for n in (1, 300)))
    config = f"{model}/config.json"
    named = {"BAD": str(bad), "data:OWN": f"data:{own}", "CONFIG": config}
    words = [named.get(word, word) for word in words]
    out = tmp_path / "out"
    assert run(out, "--model", model, "--tokenizer", model, *words) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_every_sample_of_a_short_length_is_tried_before_anything_begins(model):
    """The first sample fits into 194 tokens of up to three letters, the second does not."""

    class Short:
        encode = staticmethod(lambda text, special=True: re.findall(r"\w{1,3}|[^\w\s]", text))

        def count(self, text):
            return len(self.encode(text))

    args = Namespace(tasks=["cwe"], lengths=[194], samples=1, seed=0, model=model, server_args=[])
    eval_setup._check_samples(args, Short(), "words", None)
    args.samples = 2
    with pytest.raises(PolicyError, match="cwe, 194 tokens, sample 1: a prompt"):
        eval_setup._check_samples(args, Short(), "words", None)


@pytest.mark.parametrize(
    ("words", "what"),
    [(["--maps", "1"], "--maps"), (["--tasks", "multiturn-copy"], "the task `multiturn-copy`")],
)
def test_what_a_running_server_does_not_answer(words, what, tmp_path, model, capsys, monkeypatch):
    policies = [{"name": "lava", "settings": {}}]
    found = endpoint.Endpoint("http://x", "sglang", {"tokenizer_path": model}, policies)
    monkeypatch.setattr(endpoint, "find", lambda url, api, key: found)
    asked = ["--policy", "lava", "--url", "http://x", "--tokenizer", model]
    assert run(tmp_path / "out", *asked, *words) == 2
    error = capsys.readouterr().err
    assert f"{what} needs what this server does not answer" in error
    assert "start that server with --kv-policy-allow-inspection" in error


def test_neither_model_nor_url(tmp_path, capsys):
    assert run(tmp_path / "out", "--policy", "lava") == 2
    assert "which server to ask with --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "1.5"], "`1.5` is not a share above 0 and up to 1"),
        (["--budget", "0"], "`0` is not a share"),
        (["--samples", "0"], "`0` is not a whole number from 1 on"),
        (["--lengths", "256,x"], "`x` is not a whole number"),
        (["--tasks", ","], "there is no name of a task"),
        (["--lengths", "200000000"], "`200000000` is more than 100,000,000, the most it can be"),
        (["--samples", "9" * 5000], "is more than 100,000,000, the most it can be"),
    ],
)
def test_values_that_are_none(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "out", *words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_addresses_that_are_refused(tmp_path, model, capsys):
    out = tmp_path / "out"
    with listening(web_page) as url:
        assert run(out, *asks(url, model)) == 2
        assert "is a web page, not a model server" in capsys.readouterr().err
    assert run(out, *asks(url, model)) == 2
    assert "nobody answers there" in capsys.readouterr().err
    with listening(Completions()) as url:
        for words, message in (
            (["--policy", "lava"], "serves no policies, so it cannot be asked for `lava`"),
            (["--budget", "0.5"], "with --url the server's own settings decide"),
            (["--set", "rate=1"], "with --url the server's own settings decide"),
            (["--tasks", "multiturn-evicted"], "needs a server whose cache can be emptied"),
            (["--model-name", "x"], "has no model `x`: `toy`"),
            (["--api-key-env", "NOT_SET_HERE"], "the variable `NOT_SET_HERE` is not set"),
        ):
            assert run(out, *asks(url, model), *words) == 2
            assert message in capsys.readouterr().err
        assert run(out, "--policy", "none", "--url", url) == 2
        assert "need the model's tokenizer" in capsys.readouterr().err
    assert not out.exists()


def test_another_server_and_what_is_written(tmp_path, model, capsys):
    """An OpenAI-compatible endpoint whose answer breaks off twice is asked again."""
    fake, out = Completions(key="secret", broken=2), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, listening(fake) as url:
        patch.setenv("TOY_KEY", "secret")
        patch.setattr("kvpolicy.evaluation.asking.asking._PAUSE", 0.01)
        assert run(out, *asks(url, model), "--api-key-env", "TOY_KEY") == 0
    said = capsys.readouterr().out
    assert "| full KV" in said
    for stage in ("preparation", "server start", "samples", "questions none", "report", "in all"):
        assert f"  {stage} " in said
    found = list(records.read(out / "samples.jsonl"))
    assert {r.question for r in found} == {
        (task, 256, i, 0) for task in ("niah", "mk") for i in range(3)
    }
    assert len(found) == 6
    for record in found:
        assert (record.policy, record.kept, record.output_tokens) == ("none", 1.0, 2)
        assert record.score == 0  # it repeats the last word of the question
        assert record.ttft > 0
    plan = json.loads((out / "plan.json").read_text())
    assert plan["tasks"] == {"niah": "single needle", "mk": "multi-key: all needles"}
    assert plan["server"]["api"] == "openai"
    assert plan["stages"]["report"] > 0
    assert not (out / "errors.jsonl").exists()
    assert "secret" not in (out / "plan.json").read_text()


def test_a_server_that_does_not_start(tmp_path, model, capsys):
    """SGLang's own message, exit code 2; corrected options resume the same evaluation."""
    pytest.importorskip("sglang", reason="SGLang is an extra")
    out = tmp_path / "out"
    assert run(out, "--model", model, "--server-args", "--no-such-option 1") == 2
    said = capsys.readouterr().err
    assert "the SGLang server stopped" in said
    assert "--no-such-option" in said
    assert not (out / "samples.jsonl").read_text()
    with listening(Completions()) as url:
        assert run(out, *asks(url, model)) == 0


class Refusing(Completions):
    """Refuses questions of one task until it is told to answer."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def __call__(self, handler, body):
        if body and self.word and body["prompt"].rstrip().split()[-2] == self.word:
            send(handler, {"error": {"message": "not today"}}, 400)
        else:
            super().__call__(handler, body)


def test_questions_without_an_answer(tmp_path, model, capsys):
    """They are noted and not counted, and the same command asks only these again."""
    out = tmp_path / "out"
    with listening(fake := Completions()) as url:
        assert run(tmp_path / "whole", *asks(url, model)) == 0
        word = next(b["prompt"].split()[-2] for b in fake.asked)
    with listening(fake := Refusing(word)) as url:
        assert run(out, *asks(url, model)) == 1
        assert "got no answer" in capsys.readouterr().err
        failed = facts(out, "errors.jsonl")
        assert failed
        assert {each["error"] for each in failed} == {"status 400: not today"}
        assert len(facts(out)) + len(failed) == 6
        fake.word, before = "", len(fake.asked)
        assert run(out, *asks(url, model)) == 0
        assert len(fake.asked) - before == len(failed)
        assert not (out / "errors.jsonl").exists()
    assert same(out, tmp_path / "whole")


def test_a_server_that_answers_no_question(tmp_path, model, capsys):
    """Its words are shown, instead of a report on nothing."""
    out = tmp_path / "out"

    def refusing(handler, body):
        if body:
            send(handler, {"error": {"message": "not today"}}, 400)
        else:
            Completions()(handler, body)

    with listening(refusing) as url:
        assert run(out, *asks(url, model)) == 1
    error = capsys.readouterr().err
    assert "none of 6 questions got an answer: status 400: not today" in error
    assert f"{out / 'errors.jsonl'} has them all" in error
    assert not (out / "report.html").exists()


def same(one, other) -> bool:
    """Whether two folders have the same records, times aside."""

    def plain(folder) -> dict:
        found = [{**each, "ttft": None, "tpot": None} for each in facts(folder)]
        keys = {(f["policy"], f["task"], f["index"], f["turn"]): f for f in found}
        assert len(keys) == len(found), "a record is there twice"
        return keys

    return plain(one) == plain(other)


class Dying(Completions):
    """Calls `then` after some answers, and breaks off."""

    def __init__(self, after: int, then) -> None:
        super().__init__()
        self.after, self.then = after, then

    def __call__(self, handler, body):
        if body and len(self.asked) == self.after:
            self.then(handler)
            stream(handler, [], done=False)
            self.asked.append(body)
        else:
            super().__call__(handler, body)


def test_a_server_that_goes_away(tmp_path, model, capsys):
    out = tmp_path / "out"
    with listening(Completions()) as url:
        assert run(tmp_path / "whole", *asks(url, model)) == 0
    dying = Dying(2, lambda handler: handler.server.socket.close())
    with pytest.MonkeyPatch.context() as patch, listening(dying) as url:
        patch.setattr("kvpolicy.evaluation.asking.asking._PAUSE", 0.01)
        patch.setattr(
            "kvpolicy.evaluation.asking.client._Http.alive", lambda self: len(dying.asked) < 3
        )
        assert run(out, *asks(url, model), "--concurrency", "1") == 1
    said = capsys.readouterr().err
    assert "the server does not answer any more" in said
    assert "the same command goes on from there" in said
    assert len(facts(out)) == 2
    with (out / "samples.jsonl").open("a") as file:
        file.write('{"policy": "no')  # as if killed while a line was written
    with listening(Completions()) as url:
        assert run(out, *asks(url, model)) == 0
    assert same(out, tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number, tmp_path, model, capsys):
    out = tmp_path / "out"
    before = signal.getsignal(number)
    with listening(Dying(3, lambda handler: signal.raise_signal(number))) as url:
        assert run(out, *asks(url, model), "--concurrency", "1") == 130
    assert "interrupted; what was answered so far is in" in capsys.readouterr().err
    assert len(facts(out)) == 3
    assert signal.getsignal(number) == before


def test_another_evaluation_in_the_folder(tmp_path, model, capsys):
    out = tmp_path / "out"
    with listening(Completions()) as url:
        assert run(out, *asks(url, model)) == 0
        for words, what in (
            (["--seed", "1"], "--seed differs"),
            (["--samples", "2", "--tasks", "niah"], "--tasks and --samples differ"),
        ):
            assert run(out, *asks(url, model), *words) == 2
            assert f"another evaluation is here already: {what}" in capsys.readouterr().err
        assert len(facts(out)) == 6
        (tmp_path / "file").write_text("")
        assert run(tmp_path / "file", *asks(url, model)) == 2
        assert "this cannot be the folder of a report" in capsys.readouterr().err


def plan(**changes) -> RunPlan:
    variants = [full_kv([8]), Variant("a@0.5", "a", 0.5, {"rate": "0.5"}, (8,))]
    fields = {
        "command": "", "model": "m", "form": "words", "lengths": [8], "tasks": {"t": "T"},
        "seed": 0, "samples": 1, "variants": variants, "notes": [], "server": {}, "machine": "",
        "decides": {"seed": 0, "samples": 1}, **changes,
    }  # fmt: skip
    return RunPlan(**fields)


def test_one_run_at_a_time_and_stages_add_up(tmp_path):
    first = plan(stages={"samples": 1.5})
    folder = Folder(tmp_path, first)
    with pytest.raises(Exception, match="another `kvpolicy eval` is writing to this folder"):
        Folder(tmp_path, plan())
    folder.write()
    folder.close()
    again = plan(stages={"samples": 0.5, "report": 1.0})
    Folder(tmp_path, again).close()
    assert again.stages == {"samples": 2.0, "report": 1.0}


def test_the_bytes_of_a_token_stay_where_nothing_is_left_to_ask(tmp_path):
    Folder(tmp_path, plan(server={"bytes_per_token": 640})).write()
    again = plan(server={"bytes_per_token": None})
    Folder(tmp_path, again).close()
    assert again.server["bytes_per_token"] == 640


@pytest.mark.parametrize("content", ["[]", '{"decides": 3}', '{"decides": {}}', "\xff"])
def test_a_folder_with_another_plan(content, tmp_path):
    (tmp_path / "plan.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(PolicyError, match="this is not the plan of a `kvpolicy eval`"):
        Folder(tmp_path, plan())


def test_maps_of_questions_that_were_never_answered_are_removed(tmp_path):
    folder = Folder(tmp_path, plan())
    folder.write()
    folder.close()
    (tmp_path / "kept.jsonl").write_text("{}\n")
    Folder(tmp_path, plan()).close()
    assert (tmp_path / "kept.jsonl").exists()
    Folder(tmp_path, plan(decides={"seed": 1})).close()
    assert not (tmp_path / "kept.jsonl").exists()


@pytest.mark.parametrize("name", ["samples.jsonl", "kept.jsonl"])
@pytest.mark.parametrize("content", [None, b"\xff\xfe\n", b"[]\n", b'{"policy": 1}\n'])
def test_files_of_another_form_are_refused(name, content, tmp_path, model, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).mkdir() if content is None else (out / name).write_bytes(content)
    with listening(Completions()) as url:
        if name == "samples.jsonl":
            (out / "plan.json").write_text("{}")
        assert run(out, *asks(url, model)) == 2
    error = capsys.readouterr().err
    assert "error[file]" in error
    assert "Traceback" not in error


def test_values_by_length_are_one_entry_of_the_plan():
    by_length = [
        Variant("a@0.5@8", "a", 0.5, {"window": "4", "start": "1"}, (8,), predicted={8: 0.5}),
        Variant("a@0.5@16", "a", 0.5, {"window": "8", "start": "1"}, (16,), predicted={16: 0.5}),
    ]
    [entry] = plan(variants=by_length).as_json()["policies"]
    assert entry["setting"] == {"window": "4 (8), 8 (16)", "start": "1"}
    assert entry["aliases"] == {"a@0.5@8": [8], "a@0.5@16": [16]}


def test_a_cut_line_is_removed_and_the_others_stay(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    lines = answers.Lines(path)
    assert lines.append('{"c": 2}\n')
    lines.close()
    assert not lines.append("late\n")
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n'


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": None, "max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 64, "model_max_length": 4096}, None),  # Command-R
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}, None),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 16},
            },
            64,
        ),
    ],
)
def test_the_length_of_a_model_is_not_known_where_sglang_finds_another(tmp_path, config, most):
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = Namespace(server_args=[], model=str(tmp_path))
    assert eval_setup._context(args, None) == most
