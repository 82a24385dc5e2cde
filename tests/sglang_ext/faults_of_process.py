"""A plugin of SGLang for tests: policies fail now and then, or are slow, in one scheduler.

KVPOLICY_TEST_FAULTS is JSON: `stage` and `rank` of that process; `points`: point of
`scenarios_faults` -> n, where every n-th call raises; `delays`: point -> seconds that it takes.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

VARIABLE = "KVPOLICY_TEST_FAULTS"
_FAILING = ExitStack()  # open as long as the process lives


def register() -> None:
    """Makes the points raise, or wait, in the scheduler of the given stage and rank."""
    from kvpolicy.sglang_ext.face import compat
    from scenarios_faults import failing

    given: dict[str, Any] = json.loads(os.environ[VARIABLE])
    points, delays = given.get("points", {}), given.get("delays", {})
    numbers = {point: itertools.count(1) for point in points}

    def is_the_one() -> bool:
        try:
            own = compat.stage_group().stage, compat.tensor_group().rank
        except Exception:  # no scheduler, or not initialized yet
            return False
        return own == (given["stage"], given["rank"])

    def raises(point: str) -> bool:
        if not is_the_one():
            return False
        time.sleep(delays.get(point, 0))
        return point in points and next(numbers[point]) % points[point] == 0

    for point in points.keys() | delays.keys():
        _FAILING.enter_context(failing(point, partial(raises, point)))
