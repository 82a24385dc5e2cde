"""Policies and an experiment used by several tests."""

OF_EVERY_CLASS = {
    "snapkv": ["capacity=48", "window=16"],
    "lava": ["capacity=48"],
    "h2o": ["heavy=20", "window=20"],
    "d2o": ["rate=0.4"],
    "streamingllm": ["start=2", "window=30"],  # rotates entries that stay
    "cam": ["start=2", "window=30", "reach=4"],  # and merges
    "fastkv": ["capacity=40"],
    "minicache": ["start=0", "t=0.6", "gamma=0.05"],
}
# A policy with one layer whose lists outgrow their pages.
GROWING = """policy: growing
language: 1
about: A test, of which one layer stays whole while it decodes.
keep: sinks(2) then recent(12)
decode:
  keep: all where layer == 0 else sinks(2) then recent(12)
"""


COMPARING = """policy: comparing
language: 1
about: A test, by which KV heads with different entries are compared while decoding.
state:
  heat: heat + sum[group, query](attn(new))
keep: top(heat, 20) or recent(4)
decode:
  keep: top(2 * heat - mean[kv](heat), 12) or recent(4)
"""


def trial(policy, tight):
    """An experiment: one arm's policy drops nothing, another's has a capacity of `tight`."""
    return {
        "experiment": "trial",
        "targeting_key": ["header:x-key"],
        "coverage": "100 %",
        "arms": {
            "control": {"policy": "none"},
            "same": {"policy": policy, "set": {"capacity": 4096}},
            "tight": {"policy": policy, "set": {"capacity": tight}},
        },
        "shadow": {"sample": "100 %", "top": 64, "tokens_per_second": 1_000_000},
        "metrics": [{"metric": "drift", "role": "guardrail", "margin": 0.05, "clip": 2}],
        "analysis": {"min_samples": 1000, "on_fail": "alert"},
    }
