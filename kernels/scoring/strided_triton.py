"""Addresses inside kernels of values that `strided.laid_out` describes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at(i, s1, s2, t0, t1, t2):
    """Where value i (int32) of three dimensions lies; the inner two have the sizes s1 and s2."""
    outer = i // s2
    far = (outer // s1).to(tl.int64) * t0 + (outer % s1).to(tl.int64) * t1
    return far + (i % s2).to(tl.int64) * t2
