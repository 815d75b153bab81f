"""Stored floats to the math type and back, integers to floats, and the canonical NaN.

The math type is f64 for f64 tensors and f32 for all others. The canonical NaN is the quiet one with the sign bit and
the payload cleared; every output that can be NaN holds that one.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505, PLR1714
from __future__ import annotations

import triton
import triton.language as tl

#: Triton's interpreter rounds an fma twice, narrows to bf16 by truncation and lets numpy's minimum keep NaN. The few
#: functions that ask for it give the hardware's result there; everything else is one text for both.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

INF = tl.constexpr(float("inf"))
MAX_ZERO_POINT = tl.constexpr(2**24 - 256)
#: $0 = $1, two 16-bit floats, where the conversion to 16 bits has made every NaN 0x7FFF: clear the excess bits.
QUIET_BF16_PAIR = tl.constexpr(
    "{ .reg .b32 m; set.nan.u32.bf16x2 m, $1, $1; and.b32 m, m, 0x3f003f; not.b32 m, m; and.b32 $0, $1, m; }"
)
QUIET_F16_PAIR = tl.constexpr(
    "{ .reg .b32 m; set.nan.u32.f16x2 m, $1, $1; and.b32 m, m, 0x1ff01ff; not.b32 m, m; and.b32 $0, $1, m; }"
)


@triton.jit
def widen(x, F64: tl.constexpr):
    """A stored float in the math type, exactly; from bf16 by integers, so that no compiler undoes it with `narrow`."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif F64:
        return x.to(tl.float64)
    else:
        return x.to(tl.float32)


@triton.jit
def to_float(n, F64: tl.constexpr):
    """An integer in the math type, or a float of any type by the compiler's own conversion."""
    return n.to(tl.float64 if F64 else tl.float32)


@triton.jit
def quiet(y):
    """y with the canonical NaN in place of any other."""
    return tl.where(y == y, y, float("nan"))


@triton.jit
def nan_where(condition, y):
    """The canonical NaN where the condition holds, else y."""
    return tl.where(condition, float("nan"), y)


@triton.jit
def narrow(y, dtype: tl.constexpr, MAY_BE_NAN: tl.constexpr, COMPUTED: tl.constexpr = False):
    """y rounded to `dtype`; a NaN becomes the canonical one. COMPUTED: y is what arithmetic gave, nothing loaded."""
    if dtype == tl.bfloat16 or dtype == tl.float16:
        nan: tl.constexpr = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
        if INTERPRETED:
            bits = y.to(tl.uint32, bitcast=True)
            half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
            if dtype == tl.float16:
                half = y.to(tl.float16).to(tl.int16, bitcast=True)
            half = tl.where(y == y, half, nan).to(tl.int16)
        else:
            half = y.to(dtype).to(tl.int16, bitcast=True)
            if MAY_BE_NAN:  # the conversion makes every NaN 0x7FFF, the largest of all patterns
                half = tl.minimum(half, tl.cast(nan, tl.int16))
        return half.to(dtype, bitcast=True)
    elif MAY_BE_NAN and COMPUTED and dtype == tl.float32 and not INTERPRETED:
        # Arithmetic's NaN is 0x7FFFFFFF, the largest of all integers.
        bits = tl.minimum(y.to(tl.int32, bitcast=True), tl.full([], 0x7FC00000, tl.int32))
        return bits.to(tl.float32, bitcast=True)
    elif MAY_BE_NAN:
        return quiet(y).to(dtype)
    else:
        return y.to(dtype)


@triton.jit
def narrow_pairs(y, dtype: tl.constexpr):
    """f32 rounded to `dtype` with canonical NaNs, for threads that hold neighbours: two 16-bit floats at a time."""
    if dtype == tl.float32:
        return quiet(y)
    else:
        asm: tl.constexpr = QUIET_BF16_PAIR if dtype == tl.bfloat16 else QUIET_F16_PAIR
        half = y.to(dtype)
        return tl.inline_asm_elementwise(asm, "=r,r", [half], half.dtype, is_pure=True, pack=2)


@triton.jit
def sealed(x):
    """The same int32 or int64; LLVM joins nothing before it with what comes behind it."""
    if INTERPRETED:
        return x
    elif x.dtype == tl.int64:
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], tl.int64, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def load_scale(scale, index, mask, F64: tl.constexpr):
    """The scale at `index`; a number arrives as the bits of a double."""
    if scale.dtype.is_ptr():
        return widen(tl.load(scale + index, mask=mask), F64)
    else:
        return to_float(scale.to(tl.int64).to(tl.float64, bitcast=True), F64)


@triton.jit
def load_zero_point(zero_point, index, mask):
    """The zero point at `index`, kept where `q - zero_point` is an exact f32."""
    if zero_point.dtype.is_ptr():
        loaded = tl.load(zero_point + index, mask=mask)
        return tl.minimum(tl.maximum(loaded, -MAX_ZERO_POINT), MAX_ZERO_POINT)
    else:
        return zero_point
