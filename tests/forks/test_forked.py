"""A fork does what a new interpreter does with the same command line."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
pytestmark = pytest.mark.skipif(forked.FOLDER not in os.environ, reason="nothing is forked here")

SCRIPT = """
import json, os, sys
print(json.dumps({
    "words": sys.argv[1:],
    "folder": os.getcwd(),
    "set": os.environ.get("SGLANG_KV_POLICY"),
    "found": [each for each in sys.path if each.endswith("beside")],
    "beside itself": os.path.dirname(os.path.abspath(__file__)) in sys.path,
    "name": __name__,
    "main": sys.modules["__main__"].__file__ == __file__,
}))
print("to errors", file=sys.stderr)
sys.exit(3)
"""
IMPORTED = "import sys; print(*sorted(name for name in sys.modules if 'sglang.srt.m' in name))"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def both(command, **options):
    """Results of a fork and of a new interpreter."""
    fork = forked.run(command, timeout=60, **options)
    with forked.new_interpreters():
        new = forked.run(command, timeout=60, **options)
    return fork, new


@pytest.mark.parametrize("options", [[], ["-P"]])
def test_a_script_finds_what_it_finds_in_a_new_interpreter(script, tmp_path, options):
    beside = str(tmp_path / "beside")
    env = {**os.environ, "SGLANG_KV_POLICY": "a b", "PYTHONPATH": beside}
    command = [sys.executable, *options, script, "x", "--y", ""]
    fork, new = both(command, env=env, cwd=tmp_path)
    assert (fork.returncode, fork.stdout, fork.stderr) == (3, new.stdout, new.stderr)
    seen = json.loads(fork.stdout)
    assert seen["words"] == ["x", "--y", ""]
    assert seen["found"] == [beside]
    assert seen["beside itself"] is (options == [])


def test_an_error_ends_a_fork_as_it_ends_a_new_interpreter(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import atexit; atexit.register(print, 'at the end'); raise ValueError('why')")
    fork, new = both([sys.executable, "-P", str(path)])
    assert fork.returncode == new.returncode == 1
    assert fork.stdout == new.stdout == "at the end\n"
    assert fork.stderr.endswith("ValueError: why\n")


def test_modules_by_which_a_process_is_told_are_not_imported():
    imported = forked.run([sys.executable, "-c", IMPORTED], timeout=60).stdout.split()
    assert "sglang.srt.managers.schedule_batch" in imported
    assert "sglang.srt.managers.scheduler" not in imported
    assert "sglang.srt.managers.tokenizer_manager" not in imported


def test_an_environment_that_imports_have_read_needs_a_new_interpreter():
    env = {**os.environ, "SGLANG_READ_EARLY": "1"}
    with pytest.warns(forked.NewInterpreter, match="have read SGLANG_READ_EARLY "):
        done = forked.run([sys.executable, "-c", IMPORTED], timeout=60, env=env)
    assert (done.returncode, done.stdout) == (0, "\n")


def test_what_nobody_waits_for_is_killed(tmp_path):
    written = tmp_path / "pid"
    code = f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", code], timeout=2)
    pid = Path(written).read_text()
    deadline = time.monotonic() + 30
    while Path("/proc", pid).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path("/proc", pid).exists()
