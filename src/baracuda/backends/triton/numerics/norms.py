"""What a norm computes in f64: means and the inverse root, each step rounded as IEEE 754 has it."""

from __future__ import annotations

import triton
import triton.language as tl

from .conversions import INTERPRETED, widen
from .division import invert


@triton.jit
def in_f64(x):
    return widen(x, x.dtype == tl.float64).to(tl.float64)


@triton.jit
def from_f64(x, F64: tl.constexpr):
    """In the math type."""
    return x if F64 else x.to(tl.float32)


@triton.jit
def count_in_f64(width):
    """A number of elements, [1]."""
    return (tl.zeros([1], tl.int32) + width).to(tl.float64)


@triton.jit
def mean_of(total, size):
    return total / size


@triton.jit
def inverse_root(squares, size, EPS: tl.constexpr):
    """1 / sqrt(squares / size + eps), each step rounded to f64 as IEEE 754 has it."""
    eps = tl.full([], EPS, tl.int64).to(tl.float64, bitcast=True)
    mean = mean_of(squares, size) + eps
    if INTERPRETED:
        root = tl.sqrt(mean)
    else:
        root = tl.inline_asm_elementwise("sqrt.rn.f64 $0, $1;", "=d,d", [mean], tl.float64, is_pure=True, pack=1)
    return invert(root, True)
