"""Variants of policies, with parameters that requests set, on several ranks."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks
from kvpolicy.sglang_ext.serving.variants import Variants


class OneOfTwo(Ranks):
    """Two ranks, of which the other may fail."""

    size = 2

    def __init__(self, other_fails):
        self.other_fails, self.met = other_fails, 0

    def meet(self, *, failed=False):
        self.met += 1
        if self.other_fails and not failed:
            raise FailedElsewhere("on the other one")


def base():
    bound = SimpleNamespace(bind=lambda shape: None)
    policy = SimpleNamespace(with_settings=lambda texts: bound)
    return SimpleNamespace(name="snapkv", policy=policy, standing="standing")


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_rank_serves_a_variant_that_another_cannot_make(here, elsewhere, caplog):
    def make(policy, bound):
        if here:
            raise OSError("no space left on device")
        return SimpleNamespace()

    ranks = OneOfTwo(elsewhere)
    variants = Variants(None, make, ranks)
    for number in (1, 2):
        if here or elsewhere:
            with pytest.raises(ValueError, match="`snapkv` failed with these values; the server"):
                variants.of(base(), {"window": 24})
            assert ranks.met == number
        else:
            assert variants.of(base(), {"window": 24}).standing == "standing"
            assert ranks.met == 1  # it is kept
    assert ("no space left" in caplog.text) == here
