"""`kvpolicy eval` with real SGLang servers: policies, conversations, kills and resumption."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from kvpolicy.evaluation import cli, records, serving
from kvpolicy.evaluation.looking.kept import unpacked

pytestmark = [pytest.mark.server, pytest.mark.thorough]

CONVERSATIONS = ("multiturn", "multiturn-evicted", "multiturn-copy")
ASKED = ["--lengths", "256", "--samples", "4", "--concurrency", "4", "--quiet"]


def words(out: Path, *more: str) -> list[str]:
    return ["eval", *ASKED, "--out", str(out), *more]


def started(out: Path, *more: str) -> forked.Fork:
    """The command in its own process, once it has written a few answers."""
    command = [sys.executable, "-P", "-m", "kvpolicy.evaluation.cli", *words(out, *more)]
    log = out.with_name("errors")
    with log.open("w") as errors:
        process = forked.started(command, stderr=errors)
    until(lambda: answered(out) >= 5 or process.poll() is not None, seconds=600)
    if process.poll() is None and answered(out) >= 5:
        return process
    process.kill()
    raise AssertionError(log.read_text())


def answered(out: Path) -> int:
    path = out / "samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def plain(out: Path) -> dict[tuple, dict]:
    """Records by key, without times; fails if a key occurs twice."""
    found = {}
    for text in (out / "samples.jsonl").read_text().splitlines():
        record = {**json.loads(text), "ttft": None, "tpot": None}
        key = records.Record(**record).key
        assert key not in found
        found[key] = record
    return found


@pytest.fixture(scope="module")
def whole(with_policies, tmp_path_factory) -> Path:
    """An uninterrupted run on a server with policies; all three kinds of conversations."""
    out = tmp_path_factory.mktemp("whole")
    tasks = ",".join(("niah", *CONVERSATIONS, "shared"))
    assert cli.main(words(out, "--policy", "all", "--tasks", tasks, "--maps", "1",
                          "--url", with_policies.url)) == 0  # fmt: skip
    return out


def test_every_question_has_a_record(whole):
    found = list(records.read(whole / "samples.jsonl"))
    assert len({record.key for record in found}) == len(found) == 3 * 4 * (1 + 3 * 2 + 4)
    shares = {"none": 1, "snapkv": 0.25, "half": 0.5}
    for record in found:
        assert record.kept == pytest.approx(shares[record.policy], abs=0.01)
        assert record.uncompressed is None
        assert record.output_tokens > 0
        token = 524288 / 256
        assert record.kv_bytes == pytest.approx(
            shares[record.policy] * record.prompt_tokens * token, rel=0.1
        )
    settings = {record.policy: record.setting for record in found}
    assert settings["half"] == {"rate": "0.5"}
    scores = [record.score for record in found if record.policy == "none"]
    assert sum(scores) / len(scores) > 0.8


def test_what_a_later_turn_finds(whole):
    """In the tree and evicted, answers are equal; in the copy, the prompt is the first turn's."""
    found = {r.key: r for r in records.read(whole / "samples.jsonl")}
    first = {r.prompt_tokens for r in found.values() if r.turn == 0}
    assert first == {256}
    for policy in ("none", "snapkv", "half"):
        for index in range(4):
            tree, evicted, copy = (
                found[policy, None, task, 256, index, 1] for task in CONVERSATIONS
            )
            assert tree.answer == evicted.answer
            assert tree.prompt_tokens == evicted.prompt_tokens > 256
            if policy == "none":
                assert copy.answer == tree.answer
                assert copy.prompt_tokens == tree.prompt_tokens
            else:
                assert copy.prompt_tokens == 256
                assert copy.held < 0.7


def test_maps(whole):
    lines = [json.loads(line) for line in (whole / "kept.jsonl").read_text().splitlines()]
    assert [(m["policy"], m["task"]) for m in lines] == [
        (policy, task)
        for task in ("niah", *CONVERSATIONS, "shared")
        for policy in ("snapkv", "half")
    ]
    for each in lines:
        held = unpacked(each, 256)
        assert held.shape == (4, 2, 256)
        assert len(each["tokens"]) == 256
        assert held.mean() == pytest.approx({"snapkv": 0.25, "half": 0.5}[each["policy"]])
        for start, stop in each["asked"]:
            assert 0 < start < stop <= 256


def test_the_summary(whole):
    table = (whole / "summary.md").read_text()
    assert "| snapkv" in table
    assert (whole / "report.html").stat().st_size > 10_000


def test_killed_and_resumed(whole, with_policies, tmp_path):
    """No record is lost or doubled: they are the same as without the kill."""
    out, tasks = tmp_path / "out", ",".join(("niah", *CONVERSATIONS, "shared"))
    more = ("--policy", "all", "--tasks", tasks, "--maps", "1", "--url", with_policies.url)
    process = started(out, *more)
    process.kill()
    process.wait()
    before = answered(out)
    assert 5 <= before < 132
    assert cli.main(words(out, *more)) == 0
    assert plain(out) == plain(whole)
    assert (out / "kept.jsonl").read_text() == (whole / "kept.jsonl").read_text()


def test_refusals_of_a_server_with_policies(with_policies, tmp_path, capsys):
    more = ("--tasks", "niah", "--url", with_policies.url)
    assert cli.main(words(tmp_path / "out", "--policy", "lava", *more)) == 2
    message = "the server at --url has no policy called `lava`; it has `snapkv` and `half`"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stock_sglang(stock, whole, tmp_path, capsys):
    """Full KV only, with the same answers as a server with policies; a policy is refused."""
    more = ("--tasks", ",".join(("niah", *CONVERSATIONS)), "--url", stock.url)
    assert cli.main(words(tmp_path / "no", "--policy", "snapkv", *more)) == 2
    assert "serves no policies, so it cannot be asked for `snapkv`" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert cli.main(words(tmp_path / "out", "--policy", "none", *more)) == 0
    found, theirs = plain(tmp_path / "out"), plain(whole)
    assert len(found) == 4 * 7
    assert all(theirs[key] == record for key, record in found.items())


def test_a_server_of_its_own_that_dies(model, tmp_path, monkeypatch, capsys):
    """The server is started with every setting, dies, and is started again; none is left behind."""
    out = tmp_path / "out"
    more = ("--model", model, "--policy", "snapkv", "--policy", "streamingllm", "--policy", "roco",
            "--budget", "0.5", "--budget", "0.125", "--set", "window=8", "--tasks", "niah,mk",
            "--lengths", "128,256", "--samples", "5")  # fmt: skip
    more = (*more, "--set", "streamingllm.start=4")
    servers = started_servers(monkeypatch)

    def kill_the_first() -> None:
        if until(lambda: answered(out) >= 5, seconds=600):
            os.killpg(servers[0], signal.SIGKILL)

    kill = threading.Thread(target=kill_the_first)
    kill.start()
    assert cli.main(words(out, *more)) == 1
    kill.join()
    said = capsys.readouterr().err
    assert "the server does not answer any more" in said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    before = plain(out)
    assert cli.main(words(out, *more)) == 0
    assert len(servers) == 2
    assert not any(alive(pid) for pid in servers)
    found = plain(out)
    assert before.items() <= found.items()
    assert len(found) == 2 * 2 * 5 * 6
    kept = {(r["policy"], r["budget"], r["length"]): r["kept"] for r in found.values()}
    for (policy, budget, _), share in kept.items():
        expected = 1 if policy in ("none", "roco") else budget
        assert share == pytest.approx(expected, abs=0.01)
    plan = json.loads((out / "plan.json").read_text())
    settings = {(p["policy"], p["budget"]): p["setting"] for p in plan["policies"]}
    assert settings["snapkv", 0.125] == {"window": "8", "rate": "0.125"}
    assert settings["none", None] == {}
    assert plan["server"]["bytes_per_token"] == 2048


def started_servers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the pids of servers are added that `serve` starts from now on."""
    pids: list[int] = []

    def popen(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        pids.append(process.pid)
        return process

    start = serving.subprocess.Popen
    noting = SimpleNamespace(**{**vars(serving.subprocess), "Popen": popen})
    monkeypatch.setattr(serving, "subprocess", noting)
    return pids


def test_a_killed_client_leaves_no_server_behind(model):
    """Not even one that is still starting."""
    script = f"from kvpolicy.evaluation.serving import serve\nwith serve({model!r}): pass"
    client = subprocess.Popen([sys.executable, "-P", "-c", script], stderr=subprocess.DEVNULL)
    try:
        [server] = until(lambda: children(client.pid))
    finally:
        client.kill()
        client.wait()
    assert until(lambda: not alive(server))


def test_a_client_that_is_gone_already_leaves_none_either():
    script = "from kvpolicy.evaluation import serving; serving._end_with(-1); print('still there')"
    result = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(found: Callable[[], object], seconds: float = 180) -> object:
    """The first true result of `found`, or its last one after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def children(pid: int) -> list[int]:
    text = Path("/proc", str(pid), "task", str(pid), "children").read_text()
    return [int(each) for each in text.split()]
