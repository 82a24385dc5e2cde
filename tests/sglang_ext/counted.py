"""Checks that a server's metrics count a request once, with any number of schedulers."""

COUNTERS = ("requests", "folds", "decode_dropped_entries")


def _totals(server, policy):
    samples = [(k, v) for k, v in server.metrics().items() if f'policy="{policy}"' in k]
    names = [f"sglang:kv_policy_{each}_total{{" for each in COUNTERS]
    return [sum(v for k, v in samples if k.startswith(name)) for name in names]


def assert_counted_once(server, policy, facts):
    """`facts` sends a request under a policy that folds and returns the facts of its answer."""
    before = _totals(server, policy)
    told = facts()
    more = [after - once for after, once in zip(_totals(server, policy), before, strict=True)]
    assert told["folds"] > 2
    assert more == [1, told["folds"], told["entries_dropped_in_decode"]]
