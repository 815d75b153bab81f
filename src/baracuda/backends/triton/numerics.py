"""The only GPU spelling of divide, round, clamp, in-range, pack and convert; the contract's bits depend on each line.

Launch with `enable_fp_fusion=False`: nothing here may be contracted but the two `fused` steps of the division.
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
#: Adding 1.5 * 2**(mantissa bits) pushes the fraction out of the significand: a round to nearest even.
MAGIC_F32 = tl.constexpr(1.5 * 2.0**23)
MAGIC_F64 = tl.constexpr(1.5 * 2.0**52)
MAX_ZERO_POINT = tl.constexpr(2**24 - 256)
#: Up to here `bound * scale`, rounded, is nearer to its bound than half a step, in f32.
NEAR = tl.constexpr(2**22 - 1024)
#: Larger than any clamp bound.
BEYOND = tl.constexpr(2.0**25)


@triton.jit
def lanes(COLS: tl.constexpr, VECTOR: tl.constexpr):
    """0, 1, ..., COLS - 1, of which a thread is given VECTOR neighbours at most (0: as many as one access takes).

    Where each column has a scale of its own, fewer columns a thread mean fewer scales to keep and more use of each.
    """
    if VECTOR == 0:
        return tl.arange(0, COLS)
    else:
        return tl.max_contiguous(tl.arange(0, COLS), VECTOR)


@triton.jit
def loop_bound(n):
    """An integer that `range` takes: the interpreter keeps scalars in arrays of one element, which numpy refuses."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n


# -- conversions -------------------------------------------------------------------------------------------------


@triton.jit
def widen(x, F64: tl.constexpr):
    """A stored float in the math type, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif F64:
        return x.to(tl.float64)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(y, dtype: tl.constexpr, MAY_BE_NAN: tl.constexpr):
    """y rounded to `dtype`; a NaN becomes the one quiet NaN."""
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
                half = tl.minimum(half, tl.full([], nan, tl.int16))
        return half.to(dtype, bitcast=True)
    elif MAY_BE_NAN:
        return tl.where(y == y, y, float("nan")).to(dtype)
    else:
        return y.to(dtype)


@triton.jit
def load_scale(scale, index, mask, F64: tl.constexpr):
    """The scale at `index`; a number arrives as the bits of a double."""
    if scale.dtype.is_ptr():
        return widen(tl.load(scale + index, mask=mask), F64)
    else:
        return scale.to(tl.int64).to(tl.float64, bitcast=True).to(tl.float64 if F64 else tl.float32)


@triton.jit
def load_zero_point(zero_point, index, mask):
    """The zero point at `index`, kept where `q - zero_point` is an exact f32."""
    if zero_point is None:
        return 0
    elif zero_point.dtype.is_ptr():
        loaded = tl.load(zero_point + index, mask=mask)
        return tl.minimum(tl.maximum(loaded, -MAX_ZERO_POINT), MAX_ZERO_POINT)
    else:
        return zero_point


# -- comparisons that decide what NaN becomes --------------------------------------------------------------------


@triton.jit
def at_least(y, low):
    """The larger of both; `low` where y is NaN."""
    if INTERPRETED:
        return tl.where(y >= low, y, low)
    else:
        return tl.maximum(y, low)


@triton.jit
def at_most(y, high):
    """The smaller of both; `high` where y is NaN."""
    if INTERPRETED:
        return tl.where(y <= high, y, high)
    else:
        return tl.minimum(y, high)


@triton.jit
def larger(a, b):
    """The larger of both, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller of both, or NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """The maximum along an axis, or NaN: `tl.max` alone drops NaN."""
    if INTERPRETED:  # where any other combination is evaluated one element at a time
        poison = tl.max((x != x).to(tl.int32), axis)
        return tl.where(poison > 0, float("nan"), tl.max(tl.where(x == x, x, -INF), axis)).to(x.dtype)
    else:
        return tl.reduce(x, axis, larger)


@triton.jit
def smallest(x, axis: tl.constexpr):
    """The minimum along an axis, or NaN."""
    return -largest(-x, axis) if INTERPRETED else tl.reduce(x, axis, smaller)


# -- division ----------------------------------------------------------------------------------------------------


@triton.jit
def exact_divide(a, b, F64: tl.constexpr):
    """a / b, correctly rounded over the whole range: f32 `/` is approximate, f64 `/` is not."""
    return a / b if F64 else tl.div_rn(a, b)


@triton.jit
def fused(a, b, c):
    """a * b + c, rounded once."""
    if INTERPRETED and c.dtype == tl.float32:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def prepare(scale, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """(divisor, reciprocal, factor) of a scale, once per scale: x / scale is x * factor / divisor.

    The divisor is positive and where the remainder of a division is exact; the factor brings x there too, with the
    scale's sign. What has no such divisor is all in the factor: of 0 an infinity, of infinity 0, of NaN a NaN.
    """
    if RECIPROCAL:
        return scale, exact_divide(1.0, scale, F64), scale
    else:
        magnitude = tl.abs(scale)
        tiny: tl.constexpr = 2.0**-900 if F64 else 2.0**-100
        huge: tl.constexpr = 2.0**900 if F64 else 2.0**100
        step: tl.constexpr = 2.0**512 if F64 else 2.0**60
        back: tl.constexpr = 2.0**-512 if F64 else 2.0**-60
        factor = tl.where(magnitude < tiny, step, tl.where(magnitude > huge, back, 1.0)).to(scale.dtype)
        ordinary = (magnitude > 0) & (magnitude < INF)
        divisor = tl.where(ordinary, magnitude * factor, 1.0).to(scale.dtype)
        special = tl.where(magnitude == 0, INF, tl.where(magnitude == INF, 0.0, scale)).to(scale.dtype)
        factor = tl.where(ordinary, factor, special)
        negative = scale.to(tl.int64 if F64 else tl.int32, bitcast=True) < 0
        return divisor, exact_divide(1.0, divisor, F64), tl.where(negative, -factor, factor)


@triton.jit
def corrected(quotient, x, divisor, reciprocal):
    """A quotient by the rounded reciprocal, corrected by its exact remainder."""
    return fused(fused(-quotient, divisor, x), reciprocal, quotient)


@triton.jit
def divide_within(x, divisor, reciprocal, F64: tl.constexpr):
    """x / divisor, correctly rounded as far as rounding to an integer can tell, for quotients up to 2**24.

    A division per element costs a third of the bandwidth in bf16. One correction is enough in f32, checked over every
    x; in f64 the second makes the quotient exact by Markstein's theorem.
    """
    if F64 and INTERPRETED:
        return x / divisor
    else:
        quotient = corrected(x * reciprocal, x, divisor, reciprocal)
        return corrected(quotient, x, divisor, reciprocal) if F64 else quotient


# -- rounding ----------------------------------------------------------------------------------------------------


@triton.jit
def bounds(zero_point, HAS_ZP: tl.constexpr, Q_MIN: tl.constexpr, Q_MAX: tl.constexpr, F64: tl.constexpr):
    """(low, high, shift, odd): the clamp's bounds, what added to a value between them rounds it, and the rest of q.

    The shift contains the zero point, so that the sum is MAGIC plus at most 8 bits however large the zero point is:
    its low bits are q. But for an odd zero point's last unit, which would turn ties to even into ties to odd.
    """
    magic: tl.constexpr = MAGIC_F64 if F64 else MAGIC_F32
    if not HAS_ZP:
        return Q_MIN * 1.0, Q_MAX * 1.0, magic, 0
    else:
        math: tl.constexpr = tl.float64 if F64 else tl.float32
        shift = (zero_point & -2).to(math) + magic
        return (Q_MIN - zero_point).to(math), (Q_MAX - zero_point).to(math), shift, zero_point & 1


@triton.jit
def far_bounds(zero_point):
    """Whether any bound is too large for `NEAR`."""
    if zero_point.type.is_block():
        return tl.max(tl.abs(zero_point)) > NEAR
    else:
        return tl.abs(zero_point) > NEAR


@triton.jit
def low_bits(m, F64: tl.constexpr):
    """The rounded integer, right in its low 16 bits: all that an 8-bit result keeps."""
    return m.to(tl.int64, bitcast=True).to(tl.int32) if F64 else m.to(tl.int32, bitcast=True)


@triton.jit
def rint(y, F64: tl.constexpr):
    """Round half to even for any y, NaN and infinities kept."""
    whole: tl.constexpr = 2.0**52 if F64 else 2.0**23
    shift = tl.where(y < 0, -whole, whole).to(y.dtype)
    return tl.where(tl.abs(y) < whole, (y + shift) - shift, y)


# -- the ops -----------------------------------------------------------------------------------------------------


@triton.jit
def quantize_steps(
    x,
    divisor,
    reciprocal,
    factor,
    low,
    high,
    shift,
    RECIPROCAL: tl.constexpr,
    FAR: tl.constexpr,
    F64: tl.constexpr,
):
    """rint(x / scale) clamped to the bounds, plus the shift. NaN gives the lower bound.

    With bounds that are not FAR, x is clamped before it is divided: nothing can overflow any more, and the bounds
    come back exact. Otherwise a quotient beyond every bound need only stay there: +inf is held finite, as its
    remainder would be NaN; what does become NaN is -inf or NaN already, the lower bound to any clamp.
    """
    if RECIPROCAL:
        y = at_most(at_least(x * reciprocal, low), high)
    elif FAR:
        x = x * factor
        y = corrected(at_most(x * reciprocal, BEYOND), x, divisor, reciprocal)
        y = at_most(at_least(y, low), high)
    else:
        x = at_most(at_least(x * factor, low * divisor), high * divisor)
        y = divide_within(x, divisor, reciprocal, F64)
    return y + shift


@triton.jit
def in_range(
    x,
    divisor,
    reciprocal,
    factor,
    low,
    high,
    shift,
    RECIPROCAL: tl.constexpr,
    FAR: tl.constexpr,
    F64: tl.constexpr,
):
    """low <= rint(x / scale) <= high. Clamped one step further out: that rounds the same and says the same."""
    m = quantize_steps(x, divisor, reciprocal, factor, low - 1.0, high + 1.0, shift, RECIPROCAL, FAR, F64)
    t = m - shift
    return (t >= low) & (t <= high)


@triton.jit
def pack_pairs(q, LINES: tl.constexpr, COLS: tl.constexpr):
    """[LINES, COLS] integers to [LINES, COLS / 2] bytes, the even index in the low nibble."""
    even, odd = tl.split(tl.reshape(q, (LINES, COLS // 2, 2)))
    return ((even & 15) | ((odd & 15) << 4)).to(tl.uint8)


@triton.jit
def nibble(byte, SIGNED: tl.constexpr):
    """The low four bits as an integer."""
    n = byte & 15
    return (n ^ 8) - 8 if SIGNED else n


@triton.jit
def unpack_pairs(byte, SIGNED: tl.constexpr):
    """[..., n] bytes to [..., 2 n] integers."""
    byte = byte.to(tl.int32)
    return tl.interleave(nibble(byte, SIGNED), nibble(byte >> 4, SIGNED))


# -- dynamic ranges ----------------------------------------------------------------------------------------------


@triton.jit
def stored_scale(scale, all_zero, dtype: tl.constexpr, SMALLEST: tl.constexpr, F64: tl.constexpr):
    """(as stored, as used): rounded to its storage type, kept away from zero; an all-zero segment gets 1."""
    used = widen(narrow(scale, dtype, True), F64)
    used = tl.where(all_zero, 1.0, tl.where(used < SMALLEST, SMALLEST, used)).to(used.dtype)
    return narrow(used, dtype, True), used


@triton.jit
def asymmetric_scale(low, high, LEVELS: tl.constexpr, dtype: tl.constexpr, SMALLEST: tl.constexpr, F64: tl.constexpr):
    """The width over the levels, both halved where the subtraction overflows; a constant segment's own magnitude."""
    width = high - low
    overflows = tl.abs(width) == INF
    width = tl.where(overflows, high * 0.5 - low * 0.5, width)
    scale = exact_divide(width, tl.where(overflows, LEVELS / 2, LEVELS * 1.0).to(width.dtype), F64)
    return stored_scale(tl.where(low == high, tl.abs(low), scale), (low == 0) & (high == 0), dtype, SMALLEST, F64)


@triton.jit
def divide_by_rule(x, scale, RECIPROCAL: tl.constexpr, F64: tl.constexpr):
    """x / scale, or x * (1 / scale), of a few values."""
    if RECIPROCAL:
        return x * exact_divide(tl.full(scale.shape, 1.0, scale.dtype), scale, F64)
    else:
        return exact_divide(x, scale, F64)


@triton.jit
def choose_qparams(
    low,
    high,
    dtype: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    Q_MIN: tl.constexpr,
    Q_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    F64: tl.constexpr,
):
    """(scale as stored, scale as used, zero point) of segments that span [low, high]; symmetric: high is max abs."""
    if SYMMETRIC:
        scale = exact_divide(high, tl.full(high.shape, Q_MAX, high.dtype), F64)
        stored, used = stored_scale(scale, high == 0, dtype, SMALLEST, F64)
        return stored, used, tl.zeros(high.shape, tl.int32)
    else:
        # Far from zero the literal formula's zero point would swallow the data: such a segment includes zero. Both
        # ways are worked out side by side, as divisions that wait for each other take longer than twice as many.
        low_zero, high_zero = tl.where(low > 0, 0.0, low), tl.where(high < 0, 0.0, high)
        stored, used = asymmetric_scale(low_zero, high_zero, Q_MAX - Q_MIN, dtype, SMALLEST, F64)
        t = divide_by_rule(low_zero, used, RECIPROCAL, F64)
        if not INCLUDE_ZERO:
            literal_stored, literal = asymmetric_scale(low, high, Q_MAX - Q_MIN, dtype, SMALLEST, F64)
            ratio = exact_divide(low, literal, F64)
            near = (tl.abs(ratio) <= 4194304.0) | (ratio != ratio)
            stored, used = tl.where(near, literal_stored, stored), tl.where(near, literal, used)
            t = tl.where(near, divide_by_rule(low, literal, True, F64) if RECIPROCAL else ratio, t)
        t = rint(t, F64)
        zero_point = Q_MIN - tl.where(t == t, t, 0.0)
        zero_point = tl.where(zero_point > MAX_ZERO_POINT, MAX_ZERO_POINT * 1.0, zero_point)
        zero_point = tl.where(zero_point < -MAX_ZERO_POINT, -MAX_ZERO_POINT * 1.0, zero_point)
        return stored, used, zero_point.to(tl.int32)
