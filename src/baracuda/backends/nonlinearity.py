"""relu, gelu and silu in steps that every backend can repeat to the bit.

exp and erf of torch, CUDA and libm differ in their last bits, so none of them is called: a range reduction, polynomials
and one division take their place, each multiplication and addition rounded on its own. docs/numerics.md has the recipe
and its error; `csrc/activation.hpp` is the same lines in C++, `triton/activation.py` the same bits in fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.types import Activation


@dataclass(frozen=True, slots=True)
class Terms:
    """The numbers of the recipe in one math type. Coefficients come with the highest power first."""

    bits: torch.dtype
    mantissa: int
    bias: int
    #: Clears the lower half of a significand: what is left has an exact square.
    head: int
    log2e: float
    #: Short enough for its product with any exponent to be exact, and what is missing from it.
    ln2_high: float
    ln2_low: float
    #: (exp(r) - 1 - r) / r**2 near 0.
    exponential: tuple[float, ...]
    #: The normal distribution's upper tail over its density's exponential: upper(z) / lower(z), all terms positive.
    upper: tuple[float, ...]
    lower: tuple[float, ...]
    #: From here on the negative side is nothing but -0.
    gelu_limit: float
    silu_limit: float

    @property
    def magic(self) -> float:
        """Adding it and taking it away rounds to an integer."""
        return 1.5 * 2.0**self.mantissa


def _terms(*values: str) -> tuple[float, ...]:
    return tuple(float.fromhex(value) for value in values)


F32 = Terms(
    torch.int32,
    23,
    127,
    -(1 << 12),
    log2e=float.fromhex("0x1.715476p+0"),
    ln2_high=float.fromhex("0x1.62e4p-1"),
    ln2_low=float.fromhex("0x1.7f7d1cp-20"),
    exponential=_terms("0x1.65957p-10", "0x1.123d04p-7", "0x1.555be2p-5", "0x1.5554a4p-3", "0x1.fffffep-2"),
    upper=_terms("0x1.0efa14p-8", "0x1.4de29ep-5", "0x1.78051p-3", "0x1.c15292p-2", "0x1p-1"),
    lower=_terms("0x1.539d88p-7", "0x1.a27d22p-4", "0x1.e1bbcap-2", "0x1.343b7p+0", "0x1.aceb7ap+0", "0x1p+0"),
    gelu_limit=14.5,
    silu_limit=112.0,
)
F64 = Terms(
    torch.int64,
    52,
    1023,
    -(1 << 27),
    log2e=float.fromhex("0x1.71547652b82fep+0"),
    ln2_high=float.fromhex("0x1.62e42fefa2p-1"),
    ln2_low=float.fromhex("0x1.9ef35793c7673p-41"),
    exponential=_terms(
        "0x1.af3a5f7cc56e2p-26", "0x1.2892e93100ed3p-22", "0x1.71de0cf59163ep-19", "0x1.a019b7e0bf438p-16",
        "0x1.a01a01a7f3e28p-13", "0x1.6c16c178d97f0p-10", "0x1.1111111110976p-7", "0x1.5555555553c9bp-5",
        "0x1.5555555555556p-3", "0x1.0000000000001p-1",
    ),
    upper=_terms(
        "0x1.e18b76f4e05d0p-23", "0x1.d43ecc6679cc9p-18", "0x1.bf13b11ede36bp-14", "0x1.1098871e9a093p-10",
        "0x1.d2dcd244e1342p-8", "0x1.243843a5ff354p-5", "0x1.0e7392fab690dp-3", "0x1.6df11bb383b2ap-2",
        "0x1.5bf9087d18d78p-1", "0x1.a7e7ce89b8a15p-1", "0x1p-1",
    ),
    lower=_terms(
        "0x1.2dc370fb0124fp-21", "0x1.256de21741925p-16", "0x1.18c0d7ecae6e1p-12", "0x1.57f0cb328d94ep-9",
        "0x1.28ec0061bd564p-6", "0x1.78c6c32662fa1p-4", "0x1.64b4513980cc0p-2", "0x1.f5d74912cca0fp-1",
        "0x1.0031dd5e1ec7fp+1", "0x1.689669979950cp+1", "0x1.3a14fc142d29fp+1", "0x1p+0",
    ),
    gelu_limit=39.0,
    silu_limit=760.0,
)  # fmt: skip


def activated(y: Tensor, kind: Activation) -> Tensor:
    """The activation of y, in y's own type: f32 or f64."""
    if kind is Activation.RELU:
        return torch.where(y < 0, 0.0, y)
    terms = F64 if y.dtype is torch.float64 else F32
    if kind is Activation.GELU:
        return _gelu(y, terms)
    return _silu(y, terms) if kind is Activation.SILU else y


def _gelu(y: Tensor, terms: Terms) -> Tensor:
    """y times the normal distribution up to y: less the tail beyond abs(y), which keeps its digits however small."""
    z = _limited(y, terms.gelu_limit)
    head = (z.view(terms.bits) & terms.head).view(y.dtype)
    e, first, second = _exponential((head * head) * -0.5, ((z - head) * (z + head)) * 0.5, terms)
    tail = (((z * e) * _polynomial(terms.upper, z)) / _polynomial(terms.lower, z) * first) * second
    return torch.where(y < 0, -tail, y - tail)


def _silu(y: Tensor, terms: Terms) -> Tensor:
    """y / (1 + exp(-y)), multiplied out by exp(y) where y < 0, so that nothing overflows."""
    z = _limited(y, terms.silu_limit)
    e, first, second = _exponential(-z, torch.zeros_like(z), terms)
    quotient = torch.where(y < 0, -(z * e), y) / ((e * first) * second + 1.0)
    return torch.where(y < 0, (quotient * first) * second, quotient)


def _limited(y: Tensor, limit: float) -> Tensor:
    """abs(y), at most the limit; the limit where y is NaN."""
    return torch.where(y.abs() < limit, y.abs(), limit)


def _exponential(a: Tensor, rest: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """exp(a - rest) for a <= 0 and a small rest, as a number near 1 and two powers of two to multiply it with."""
    n = (a * terms.log2e + terms.magic) - terms.magic
    r = ((a - n * terms.ln2_high) - n * terms.ln2_low) - rest
    e = ((r * r) * _polynomial(terms.exponential, r) + r) + 1.0
    exponent = n.to(terms.bits)
    half = exponent >> 1
    return e, _power(half, terms, a.dtype), _power(exponent - half, terms, a.dtype)


def _power(exponent: Tensor, terms: Terms, dtype: torch.dtype) -> Tensor:
    return ((exponent + terms.bias) << terms.mantissa).view(dtype)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
