"""Parameters with which every method drops entries of sixty-token prompts in five layers."""

METHODS: dict[str, dict[str, str]] = {
    "ada-pyramidkv": {"capacity": "20", "window": "6"},
    "adakv": {"capacity": "20", "window": "6"},
    "asl": {"capacity": "24", "window": "6", "tau": "1.01"},
    "asl-lava-d2o": {"capacity": "24", "window": "6", "tau": "1.01"},
    "cake": {"capacity": "20", "window": "6"},
    "cam": {"start": "2", "window": "24", "reach": "4"},
    "cam-original": {"recent_rate": "0.4", "start_rate": "0.05", "reach": "4"},
    "chunkkv": {"capacity": "20", "window": "6", "chunk": "4", "reuse": "2"},
    "d2o": {"rate": "0.4", "minmax_heads": "true"},
    "d2o-code": {"rate": "0.4"},
    "dynamickv": {"capacity": "20", "window": "6"},
    "fastkv": {"kv_rate": "0.3", "tsp_rate": "0.4", "window": "6"},
    "fastkv-adakv": {"kv_rate": "0.3", "tsp_rate": "0.4", "window": "6"},
    "gemfilter": {"capacity": "30"},
    "h2o": {"heavy": "12", "window": "10"},
    "keydiff": {"capacity": "20"},
    "lava": {"capacity": "20", "window": "6"},
    "minicache": {"start": "1"},
    "pyramidinfer": {"floor_rate": "0.5", "recent_rate": "0.05", "least": "10", "batch": "4"},
    "pyramidkv": {"capacity": "20", "window": "6"},
    "roco": {"capacity": "5", "newest": "1"},
    "simlayerkv": {"threshold": "0.3", "window": "16"},
    "simlayerkv-prefill": {"threshold": "0.3", "window": "16", "queries": "4"},
    "sinks-recent": {"capacity": "24"},
    "snapkv": {"capacity": "20", "window": "6"},
    "streamingllm": {"window": "20"},
    "streamingllm-original": {"window": "20"},
    "tova": {"capacity": "20"},
    "vatp": {"rate": "0.2", "start": "2"},
    "vatp-snapkv": {"capacity": "20", "window": "6"},
}
# Only chosen tokens go deeper, while a shared prefix has keys and values at all layers.
PROPAGATING = ("asl", "asl-lava-d2o", "fastkv", "fastkv-adakv", "pyramidinfer")


def settings(methods: list[str]) -> list[str]:
    """The values of some methods, as `--kv-policy-set` takes them."""
    return [f"{each}.{name}={value}" for each in methods for name, value in METHODS[each].items()]
