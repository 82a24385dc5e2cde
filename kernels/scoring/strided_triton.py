"""Addresses, inside kernels, of values that `strided.laid_out` describes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at(i, s1, s2, t0, t1, t2):
    """Offset of value i (int32) in three dimensions with strides t0, t1, t2; inner sizes s1, s2."""
    outer = i // s2
    outer_offset = (outer // s1).to(tl.int64) * t0 + (outer % s1).to(tl.int64) * t1
    return outer_offset + (i % s2).to(tl.int64) * t2
