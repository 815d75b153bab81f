"""Floats as PTX rounds them: results that are NaN have one pattern, subnormal numbers count unless .ftz says not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

NAN_F32 = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
NAN_F64 = np.array([0x7FFFFFFFFFFFFFFF], np.uint64).view(np.float64)
#: Significant bits and the exponent of the smallest normal number.
FORMATS = {"f16": (11, -14), "bf16": (8, -126), "f32": (24, -126)}


def one_nan(x: Array) -> Array:
    """x, with the pattern that instructions give for NaN."""
    wrong = np.isnan(x)
    return np.where(wrong, NAN_F32 if x.dtype == np.float32 else NAN_F64, x) if wrong.any() else x


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """The bits of f32 rounded to bf16, ties to even."""
    bits = x.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_f16(bits: Array) -> Array:
    return one_nan(bits.view(np.float16).astype(np.float32))


def to_f16(x: Array) -> Array:
    """The bits of f32 or f64 rounded to f16, ties to even."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of f32, in f64 with the last bit odd unless it is exact: rounding this once more is as good as once.

    The product of two f32 is exact in f64; what the sum loses is found exactly, and decides the last bit.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = (lost != 0) & np.isfinite(total) & even
    return np.where(inexact, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    return one_nan(fused(a, b, c).astype(np.float32))


def round_to(x: Array, kind: str) -> Array:
    """f64 to the nearest of a 16-bit type's values, ties to even, as f64; overflow is infinite."""
    digits, least = FORMATS[kind]
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    unit = np.maximum(exponent - 1, least) - (digits - 1)
    rounded = np.ldexp(np.rint(np.ldexp(x, -unit)), unit)
    most = 65504.0 if kind == "f16" else float.fromhex("0x1.fep127")
    return np.where(np.isfinite(x) & (np.abs(rounded) > most), np.copysign(np.inf, x), np.where(x == 0, x, rounded))


def fma_16(a: Array, b: Array, c: Array, kind: str) -> Array:
    """Bits of a * b + c, of the bits of f16 or bf16, rounded once."""
    widen = from_f16 if kind == "f16" else from_bf16
    result = round_to(fused(widen(a), widen(b), widen(c)), kind).astype(np.float32)
    return to_f16(result) if kind == "f16" else to_bf16(result)


def reciprocal(x: Array) -> Array:
    """rcp.approx.ftz.f32: hardware may be off by one unit from this, the nearest value.

    The kernels refine it and correct the quotient by its exact remainder, so their result is the same for both.
    """
    tiny = np.float32(2.0**-126)
    flushed = np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)
    result = np.float32(1) / flushed
    return one_nan(np.where(np.abs(result) < tiny, np.copysign(np.float32(0), result), result))


def least(a: Array, b: Array, nan: bool) -> Array:
    """The smaller, -0 below 0; of a number and NaN the number, unless `nan`."""
    return _extreme(a, b, nan, np.signbit(a), a < b)


def largest(a: Array, b: Array, nan: bool) -> Array:
    return _extreme(a, b, nan, ~np.signbit(a), a > b)


def _extreme(a: Array, b: Array, nan: bool, first_zero: Array, first: Array) -> Array:
    chosen = np.where(np.where(a == b, first_zero, first), a, b)
    missing_a, missing_b = np.isnan(a), np.isnan(b)
    if nan:
        return one_nan(np.where(missing_a | missing_b, np.nan, chosen).astype(a.dtype))
    return one_nan(np.where(missing_a, b, np.where(missing_b, a, chosen)))


def to_integer(x: Array, dtype: np.dtype, rounding: str) -> Array:
    """Rounded (rni, rzi, rmi, rpi) and held within the integer's range; NaN gives 0."""
    whole = ROUNDINGS[rounding[:2]](x.astype(np.float64))
    info = np.iinfo(dtype)
    low, high = whole <= float(info.min), whole >= float(info.max)
    held = np.where(np.isnan(x) | low | high, 0.0, whole).astype(dtype)
    return np.where(low, dtype.type(info.min), np.where(high, dtype.type(info.max), held)).astype(dtype)


ROUNDINGS = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}
