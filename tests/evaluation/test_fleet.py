"""`kvpolicy fleet status`: served policies, differences between replicas, faulty replicas."""

import contextlib
import copy
import json

import pytest
from fake_server import listening, send, web_page
from kvpolicy.evaluation.cli import main

POLICY = {"name": "lava", "path": "lava.yaml", "settings": {"rate": "0.5"}, "default": True,
          "enabled": True, "failures": 0, "digest": "0123456789ab"}  # fmt: skip
STATE = {"kv_policy": [POLICY, {**POLICY, "name": "h2o", "default": False, "settings": {}}],
         "kv_policy_applied": True, "kv_policy_inspection": False, "kv_policy_version": "0.1.0",
         "kv_policy_dp_rank": None,
         "kv_experiment": {"name": "trial", "revision": "r1", "digest": "d1", "state": "running",
                           "rolled_back": [], "coverage": 0.1}}  # fmt: skip
INFO = {"version": "0.5.23", "model_path": "m", "admin_api_key": "a secret",
        "internal_states": [STATE]}  # fmt: skip

OF_POLICY = ("digest", "settings", "default", "enabled")


def other(**changes):
    """/server_info of a replica whose state differs in some keys."""
    info = copy.deepcopy(INFO)
    info["internal_states"][0] |= changes
    return info


@contextlib.contextmanager
def fleet(*infos, key=None):
    """Servers that answer /server_info; yields their addresses."""

    def respond(info):
        def one(handler, body):
            assert handler.path == "/server_info"
            if key and handler.headers.get("Authorization") != f"Bearer {key}":
                send(handler, {"error": "Unauthorized"}, 401)
            else:
                send(handler, info)

        return one

    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(listening(respond(info))) for info in infos]


def status(capsys, urls, *words):
    """Exit code, output and errors of the command."""
    given = [word for url in urls for word in ("--url", url)]
    code = main(["fleet", "status", *given, *words])
    return code, *capsys.readouterr()


def test_replicas_that_serve_the_same(capsys):
    with fleet(INFO, other(kv_policy=[*reversed(STATE["kv_policy"])])) as urls:
        code, out, err = status(capsys, urls)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert out.startswith("2 replicas: all serve the same\n")
    assert ["policy", "lava:", "digest", "0123456789ab"] in lines
    assert ["policy", "h2o:", "settings", "defaults"] in lines
    assert ["experiment:", "revision", "r1"] in lines
    assert ["SGLang", "0.5.23"] in lines
    assert ["kvpolicy", "0.1.0"] in lines
    assert "!" not in out
    assert "secret" not in out  # SGLang shows the admin key there


def test_what_differs_is_marked_and_says_where(capsys):
    changed = {**POLICY, "digest": "ffffffffffff", "enabled": False}
    with fleet(INFO, other(kv_policy=[changed, STATE["kv_policy"][1]]), INFO) as urls:
        code, out, _ = status(capsys, [*urls])
        assert code == 1
        lines = out.splitlines()
        assert lines[0] == f"3 replicas: 2 of {len(lines) - 7} facts differ"
        at = next(i for i, line in enumerate(lines) if "lava: digest" in line)
        assert lines[at].split() == "! policy lava: digest 0123456789ab at 2:".split()
        assert lines[at + 1].split() == [urls[0], urls[2]]
        assert lines[at + 2].split() == "! ffffffffffff at 1:".split()
        assert lines[at + 3].split() == [urls[1]]
        assert [line[2:].split("  ")[0] for line in lines if line.startswith("! p")] == [
            "policy lava: digest", "policy lava: enabled"
        ]  # fmt: skip
        code, out, _ = status(capsys, urls, "--json")
    found = json.loads(out)
    assert (code, found["uniform"]) == (1, False)
    assert found["differing"]["policy lava: enabled"] == {
        "yes": [urls[0], urls[2]],
        "no": [urls[1]],
    }
    assert [each["url"] for each in found["replicas"]] == urls
    assert found["replicas"][1]["schedulers"][0]["policy lava: enabled"] == "no"


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"kv_policy_applied": False}, {"policies applied"}),
        ({"kv_policy_version": "0.2.0"}, {"kvpolicy"}),
        ({"kv_experiment": {**STATE["kv_experiment"], "state": "aborted"}}, {"experiment: state"}),
        (
            {"kv_policy": STATE["kv_policy"][:1]},
            {"policies"} | {f"policy h2o: {x}" for x in OF_POLICY},
        ),
    ],
)  # fmt: skip
def test_each_fact_may_differ(capsys, changes, differing):
    with fleet(INFO, other(**changes)) as urls:
        code, out, _ = status(capsys, urls, "--json")
    assert code == 1
    assert set(json.loads(out)["differing"]) == differing


def test_a_server_without_policies_and_without_an_experiment(capsys):
    state = {name: x for name, x in STATE.items() if not name.startswith("kv_")}
    bare = {**INFO, "internal_states": [state]}
    with fleet(bare) as urls:
        code, out, _ = status(capsys, urls)
    assert code == 0
    assert out.startswith("1 replica: all serve the same\n")
    assert "none: it serves without --kv-policy" in out
    with fleet(INFO, bare) as urls:
        assert status(capsys, urls)[0] == 1


def test_schedulers_of_one_server_are_compared_too(capsys):
    info = copy.deepcopy(INFO)
    state = info["internal_states"][0]
    failed = {**copy.deepcopy(state), "kv_policy_dp_rank": 1}
    failed["kv_policy"][0]["enabled"] = False
    info["internal_states"] = [failed, {**state, "kv_policy_dp_rank": 0}]
    with fleet(info) as [url]:
        code, out, _ = status(capsys, [url], "--json")
    found = json.loads(out)["differing"]
    assert (code, found) == (
        1, {"policy lava: enabled": {"yes": [f"{url} DP0"], "no": [f"{url} DP1"]}}
    )  # fmt: skip


def test_a_key(capsys, monkeypatch):
    monkeypatch.setenv("LOOKING", "look")
    with fleet(INFO, key="look") as urls:
        assert status(capsys, urls, "--api-key-env", "LOOKING")[0] == 0
        code, out, err = status(capsys, urls)
    assert code == 2
    assert out == "1 replica: none answers\n"
    assert f"--url {urls[0]}: error[server]: the server wants a key (status 401)" in err
    assert "--api-key-env" in err
    code, _, err = status(capsys, urls, "--api-key-env", "NOBODY")
    assert code == 2
    assert "the variable `NOBODY` is not set" in err


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (web_page, "no SGLang server (a page that is no JSON)"),
        (lambda handler, body: send(handler, {"detail": "Not Found"}, 404), "no /server_info"),
        (lambda handler, body: send(handler, {"internal_states": 3}), "`internal_states`"),
        (lambda handler, body: send(handler, {"internal_states": [3]}), "`internal_states`"),
        (lambda handler, body: send(handler, {"internal_states": []}), "`internal_states`"),
    ],
)
def test_what_is_no_sglang_server(capsys, respond, message):
    """Other replicas are shown, and the exit code tells that one cannot be asked."""
    with listening(respond) as wrong, fleet(INFO, INFO) as urls:
        code, out, err = status(capsys, [*urls, wrong])
    assert code == 2
    assert out.startswith("3 replicas: all serve the same; 1 cannot be asked\n")
    assert f"--url {wrong}: error[server]: " in err
    assert message in err


def test_nobody_listens(capsys):
    with fleet(INFO) as [gone]:
        pass
    with fleet(INFO) as [url]:
        code, out, err = status(capsys, [url, gone], "--json")
    found = json.loads(out)
    assert (code, found["uniform"]) == (2, False)
    assert found["replicas"][1] == {"url": gone, "error": found["replicas"][1]["error"]}
    assert "nobody answers there: the connection is refused" in found["replicas"][1]["error"]
    assert err == ""


def test_an_address_is_given_once(capsys):
    code, _, err = status(capsys, ["127.0.0.1:1", "http://127.0.0.1:1/"])
    assert code == 2
    assert "http://127.0.0.1:1 is given twice" in err
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "status"])
    assert ended.value.code == 2
