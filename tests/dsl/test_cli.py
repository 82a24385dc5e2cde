"""The command line: exit codes, messages, and no traceback for any input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.tools.cli import Command, main

GOOD = "policy: x\nlanguage: 1\nkeep: recent(4)\n"
BAD = "policy: x\nlanguage: 1\nkeep: recnt(4)\n"
DOCS = Path(__file__).parents[2] / "docs"


def run(*arguments, **options):
    """Runs `kvpolicy` in its own process."""
    command = [sys.executable, "-m", "kvpolicy.dsl.tools.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def file(tmp_path):
    def write(content, name="x.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_check_well(file, capsys):
    path = file(GOOD)
    assert main(["check", path]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"


def test_check_reports_every_file(file, capsys):
    assert main(["check", file(BAD, "a.yaml"), file(GOOD, "b.yaml"), file(BAD, "c.yaml")]) == 1
    out = capsys.readouterr().out
    assert out.count("error[name]: unknown function `recnt`") == 2
    assert out.count(": ok\n") == 1


def test_check_warns(file, capsys):
    assert main(["check", file(GOOD + "params: {beta: 2}\n")]) == 0
    assert "warning[unused]: `beta` is never used" in capsys.readouterr().out


def test_check_says_what_cannot_be_served(file, capsys):
    path = file(GOOD + "read: recent(4)\n")
    assert main(["check", path]) == 0
    note = f"{path}:4:1: note[unserved]: `read` cannot be served yet\n  |\n4 | read: recent(4)\n"
    assert note in capsys.readouterr().out


def test_check_shipped_by_name(capsys):
    assert main(["check", "snapkv"]) == 0
    assert capsys.readouterr().out == "policies/snapkv.yaml: ok\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "the file is not UTF-8 text"),
        (b"\x7fELF\x00\x00\x80", "the file is not UTF-8 text"),
        (b"a: " + b"x" * 70_000, "the file has more than 65,536 bytes"),
        (b"\xff" * 70_000, "the file has more than 65,536 bytes"),
    ],
)
def test_check_unreadable(file, capsys, content, message):
    path = file(content)
    assert main(["check", path]) == 2
    assert capsys.readouterr().out == f"{path}: error[file]: {message}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/x.yaml", "nowhere/x.yaml: error[file]: there is no such file\n"),
        ("x.yaml", "x.yaml: error[file]: there is no such file\n"),
        ("snapvk", "snapvk: error[file]: there is no such file and no shipped policy of this "
         "name\n = help: did you mean `snapkv`?\n"),
        ("a" * 300, "a" * 300 + ": error[file]: there is no such file and no shipped policy of "
         "this name\n = help: `kvpolicy list` shows the shipped policies\n"),
        ("x\0y", "x\0y: error[file]: there is no such file and no shipped policy of this name\n"
         " = help: `kvpolicy list` shows the shipped policies\n"),
    ],
)  # fmt: skip
def test_check_missing(capsys, name, message):
    assert main(["check", name]) == 2
    assert capsys.readouterr().out == message


def test_check_folder(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().out == (
        f"{tmp_path}: error[file]: this is a folder, not a policy file\n"
    )


def test_what_is_no_file_is_refused_at_once(tmp_path):
    """No command waits for a pipe or follows a link forever."""
    pipe, loop, nowhere = (tmp_path / name for name in ("pipe", "loop.yaml", "nowhere.yaml"))
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "gone.yaml")
    for path, message in (
        (pipe, "this is a pipe, not a policy file"),
        (loop, "this link leads back to itself"),
        (nowhere, "this link leads to no file"),
        ("/dev/null", "this is a device, not a policy file"),
        ("/dev/zero", "this is a device, not a policy file"),
    ):
        for command in (("check",), ("fmt",), ("explain", "--model", ".", "--length", "9")):
            done = run(command[0], path, *command[1:], timeout=60)
            assert done.returncode == 2
            assert (done.stdout or done.stderr) == f"{path}: error[file]: {message}\n"


def test_names_that_are_too_long_are_refused(capsys):
    """The system refuses to look at them, as it refuses folders without permission."""
    name, prompt = "x" * 5000, ("--length", "9")
    for words in (("explain", "snapkv", "--model", name, *prompt), ("test", f"{name}.yaml")):
        assert main(list(words)) == 2
        done = capsys.readouterr()
        assert (
            "file name too long" in done.out + done.err
        ) or "no such file" in done.out + done.err


def test_warnings_are_no_errors(file, capsys):
    path = file("policy: x\nlanguage: 1\nscore: position / 0\nbudget: 0\nkeep: top(score)\n")
    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    assert out.count("warning[zero]") == 2
    assert out.endswith(f"{path}: ok\n")
    model = DOCS.parent / "examples" / "model-tiny"
    assert main(["explain", path, "--model", str(model), "--length", "100"]) == 0
    out = capsys.readouterr().out
    assert "  warning line 3: a division by 0: `position / 0` is infinite, or 0 where 0 is" in out
    assert "  warning line 4: `budget` is 0: `top` without a count takes nothing\n" in out


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("99999999999999999999", "; a number has at most 18 digits before and after the point"),
        ("1e999", "`1e999`; a number has at most 18 digits"),
        ("1" * 5000, f"`{'1' * 37}...`; a number has at most 18 digits"),
        ("many", "`window` is `many`; it is a number, a whole number, at least 1\n"),
        ("20%", "`20%`; it is a number, a whole number, at least 1\n = help: 20% is `0.2`"),
        ("0.5", "`window` is 0.5; it must be a whole number, at least 1"),
    ],
)  # fmt: skip
def test_settings_that_are_no_values(value, message, capsys):
    model = DOCS.parent / "examples" / "model-tiny"
    command = ["explain", "snapkv", "--model", str(model), "--length", "100", "--set"]
    assert main([*command, f"window={value}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("snapkv: error[range]: `window` is ")
    assert message in err


def test_windows_without_queries_are_explained(file, capsys):
    """If they follow from a short prompt."""
    path = file("policy: x\nlanguage: 1\nscore: |\n  sum[head, query](attn(recent(0.1 * prompt)))\n"
                "keep: top(score, 4)\n")  # fmt: skip
    model = DOCS.parent / "examples" / "model-tiny"
    assert main(["explain", path, "--model", str(model), "--length", "9"]) == 0
    assert "Cost of deciding" in capsys.readouterr().out


def test_check_accepts_a_byte_order_mark_and_windows_lines(file):
    assert main(["check", file(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())]) == 0


def test_undisplayable_text_is_escaped(file):
    done = run("check", file('policy: "\\uD800"\nlanguage: 1\n'), env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert "is not a policy name" in done.stdout
    assert done.stderr == ""


def test_broken_pipe_is_silent():
    command = f"{sys.executable} -m kvpolicy.dsl.tools.cli docs | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "# Reference\n"
    assert done.stderr == ""


def test_check_needs_no_heavy_module(file):
    """In a whole process, no module that executes policies is imported, and no parser is built."""
    script = (
        "import sys\nfrom kvpolicy.dsl.syntax import grammar\n"
        "from kvpolicy.dsl.tools.cli import main\n"
        "grammar.build = lambda: sys.exit('the parser is made from the grammar')\n"
        "code = main(['check', sys.argv[1]])\n"
        "heavy = {'torch', 'numpy', 'sglang', 'jsonschema'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else code)\n"
    )
    command = [sys.executable, "-c", script, file(GOOD)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fmt(file, capsys):
    path = file("language: 1\npolicy: x\nkeep: recent(4)\n")
    assert main(["fmt", "--check", path]) == 1
    assert main(["fmt", path]) == 0
    assert main(["fmt", "--check", path]) == 0
    assert capsys.readouterr().out == f"{path}: would be formatted\n{path}: formatted\n"


def test_fmt_refuses_what_it_cannot_read(file, capsys):
    assert main(["fmt", file("policy: x\nlanguage: 1\nkeep: recent(\n"), "nowhere.yaml"]) == 2
    err = capsys.readouterr().err
    assert "error[syntax]" in err
    assert "nowhere.yaml: error[file]: there is no such file" in err


def test_list(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())


def test_schema_and_docs_go_to_files(tmp_path, capsys):
    for command in ("schema", "docs"):
        path = tmp_path / command
        assert main([command, "--out", str(path), "--check"]) == 1
        assert main([command, "--out", str(path)]) == 0
        assert main([command, "--out", str(path), "--check"]) == 0
        assert path.read_text()
        assert main([command, "--out", str(tmp_path)]) == 2
        assert "is a directory" in capsys.readouterr().err
        assert main([command, "--check"]) == 2
        assert "--check: error[arguments]: it compares" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"), [("docs", "reference.md"), ("schema", "policy.schema.json")]
)
def test_generated_documents_are_current(command, name):
    """After a change of the tables, run `kvpolicy docs --out docs/reference.md`, and so on."""
    assert main([command, "--out", str(DOCS / name), "--check"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["explain", "snapkv", "--model", "m", "--length", "many"],
        ["explain", "snapkv", "--model", "m", "--length", "0"],
        ["run", "snapkv"],
        ["check"],
    ],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: kvpolicy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [("list", 0), ("schema", 0), ("check snapkv", 0), ("check nothing", 2), ("show nothing", 2)],
)
def test_output_that_is_closed(words, code):
    command = f"{sys.executable} -m kvpolicy.dsl.tools.cli {words}"
    for closed in (">&-", ">&- 2>&-"):
        shell = ["sh", "-c", f"{command} {closed}"]
        done = subprocess.run(shell, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["list", "schema", "check nothing"])
def test_output_that_cannot_be_written(words, unbuffered):
    command = [sys.executable, "-m", "kvpolicy.dsl.tools.cli", *words.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 2
    message = "kvpolicy: error[file]: the output is not complete: no space left on device\n"
    assert done.stderr == message


def test_other_failures_are_not_the_output(monkeypatch):
    def fails(args):
        raise OSError("of something else")

    command = Command("fails", fails)
    with pytest.raises(OSError, match="of something else"):
        main(["fails"], {"fails": command})


def test_check_reads_test_files_too(tmp_path, capsys):
    shipped = DOCS.parent / "policies"
    files = [str(path) for path in sorted(shipped.glob("*.yaml"))]
    assert any(file.endswith(".test.yaml") for file in files)
    assert main(["check", *files]) == 0
    wrong = tmp_path / "x.test.yaml"
    wrong.write_text("policy: x\ntests:\n  - nme: a\n")
    assert main(["check", str(wrong)]) == 1
    assert "did you mean `name`?" in capsys.readouterr().out
    assert main(["fmt", "--check", *files]) == 0


def test_check_tries(file, capsys):
    files = file(GOOD), file(GOOD + "read: recent(4)\n", "y.yaml"), file(BAD, "z.yaml")
    assert main(["check", "--trial", *files]) == 1
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{files[0]}: ok, tried in \d+\.\d\d s", out[0])
    # What no server carries cannot be tried.
    assert out[1] == f"{files[1]}: ok"
    assert out[2] == f"{files[1]}:4:1: note[unserved]: `read` cannot be served yet"
    assert "error[name]" in out[6]


def test_check_says_what_a_trial_finds(file, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "softmax", lambda x, dim: x)
    text = GOOD.replace("recent(4)", "top(score)")
    path = file(text + "score: sum[head, query](attn(recent(2)))\nbudget: 3\n")
    assert main(["check", "--trial", path]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}:4:8: error[trial]: `x` is not the same in the interpreter and")
    assert ": ok" not in out


def test_check_tries_for_a_model(file, capsys, tmp_path):
    sizes = {"num_hidden_layers": 7, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    path = file(GOOD + "require: [layers == 7]\n")
    assert main(["check", "--trial", path]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}:4:11: error[range]: policy `x` requires `layers == 7`\n")
    assert main(["check", "--trial", "--model", str(tmp_path), path]) == 0
    assert ": ok, tried in " in capsys.readouterr().out
    assert main(["check", "--trial", "--model", str(tmp_path / "none"), path]) == 2
    assert main(["check", "--model", str(tmp_path), path]) == 2
    assert "add `--trial`" in capsys.readouterr().err


def test_check_tries_with_values_of_parameters(file, capsys):
    path = file(GOOD + "params:\n  n: {default: 2, unit: tokens}\nrequire: [n < 8]\n")
    assert main(["check", "--trial", "--set", "n=9", path]) == 1
    assert "requires `n < 8`, but `n` is 9" in capsys.readouterr().out
    assert main(["check", "--trial", "--set", "n=3", path]) == 0
    assert ": ok, tried in " in capsys.readouterr().out
    assert main(["check", "--trial", "--set", "n", path]) == 2
    assert main(["check", "--set", "n=3", path]) == 2
    assert "add `--trial`" in capsys.readouterr().err


def test_check_tries_nothing_without_torch(file):
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom kvpolicy.dsl.tools.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for words, code, message in (
        (["check"], 0, ""),
        (["check", "--trial"], 2, "kvpolicy check --trial: error[file]: this command needs torch"),
    ):
        command = [sys.executable, "-c", script, *words, file(GOOD)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert done.stderr.startswith(message)
