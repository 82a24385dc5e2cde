"""What requests hold is freed when they end, and not when Python looks for circles of objects.

Circles with tensors would fill a device until then, and for a full search a server stands still.
"""

import pytest

pytestmark = pytest.mark.server
# Small budgets: entries leave prompts, merge, leave the prefill, or leave while decoding.
SETTINGS = {
    "snapkv": ["capacity=48"],
    "lava": ["capacity=48"],
    "fastkv": ["kv_rate=0.2", "tsp_rate=0.4"],
    "gemfilter": ["capacity=48"],
    "pyramidinfer": ["floor_rate=0.3", "least=16"],
    "asl-lava-d2o": ["capacity=48", "window=8", "tau=0.9"],
    "h2o": ["heavy=24", "window=24"],
    "tova": ["capacity=48"],
    "cake": ["capacity=48", "window=8"],
    "d2o": ["rate=0.2"],
    "cam": ["window=40"],
    "minicache": ["start=0"],
}


@pytest.fixture(scope="module")
def found(scenario):
    return scenario("scenarios_freed.py", "freed", policies=SETTINGS)


def test_no_circles_of_objects_are_left(found):
    circles = {name: each["circles"] for name, each in found["requests"].items()}
    assert circles == {name: [] for name in SETTINGS}
    for name, each in found["requests"].items():
        assert "uncompressed" not in each["facts"], name


def test_python_does_not_look_for_circles_in_the_middle_of_a_fold(found):
    assert found["searches"] < 5
