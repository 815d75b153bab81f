"""Every 16-bit float and every tie: nothing is sampled here.

The expected integers are exact. A float32 quotient rounds like the real number x/s except where the division itself
lands on a tie or an integer, so the oracle asks NumPy for the IEEE quotient and compares a sample with fractions.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from compute import BACKENDS, compute

from baracuda import Arithmetic, BackendKind, ElementKind, QuantizeKind
from baracuda.core.types import MAX_ZERO_POINT

Array = np.ndarray[Any, Any]
F16, BF16, F32, F64, S8, U8 = (ElementKind[name] for name in ("F16", "BF16", "F32", "F64", "S8", "U8"))
PATTERNS = torch.arange(65536, dtype=torch.int32).to(torch.int16)
#: Subnormal, smallest normal, tiny, awkward, powers of two, one ulp off one, large, huge.
SCALES = [1e-45, 3e-39, 2.0**-126, 1e-30, 2.0**-24, 0.0009765625, 0.007874016, 0.1, 1 / 3, 0.99999994, 1.0, 1.0000001]
SCALES += [2.0, 3.0, 7.7, 257.003, 65504.0, 1e30, 2.0**127, 3.4028235e38]
ZERO_POINTS = [0, -128, 127, 5, 255, -100_000, 2**22 + 1, MAX_ZERO_POINT, -MAX_ZERO_POINT]


def every(element: ElementKind) -> tuple[torch.Tensor, Array]:
    """All bit patterns as a tensor, and their values in float32."""
    word = np.arange(65536, dtype=np.uint32)
    with np.errstate(all="ignore"):  # converting a signalling NaN
        values = (
            word.astype(np.uint16).view(np.float16).astype(np.float32)
            if element is F16
            else (word << 16).view(np.float32)
        )
    return PATTERNS.view(element.dtype), values


def clamped(t: Array, zero_point: int, low: int, high: int) -> Array:
    """int(clamp(t)) + zero point in float64, where every bound and every clamped step is exact; NaN to the low end."""
    with np.errstate(all="ignore"):
        t = np.where(np.isnan(t), -np.inf, t.astype(np.float64))
    return np.clip(t, low - zero_point, high - zero_point).astype(np.int64) + zero_point


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", [F16, BF16], ids=str)
def test_every_16_bit_float_quantizes_exactly(
    element: ElementKind, scale: float, arithmetic: Arithmetic, backend: BackendKind | None
) -> None:
    x, values = every(element)
    s = np.float32(scale)
    with np.errstate(all="ignore"):
        t = np.rint(values / s if arithmetic is Arithmetic.DIVIDE else values * (np.float32(1) / s))
    for zero_point in ZERO_POINTS:
        for kind in (S8, U8):
            operands = {"input": x, "scale": scale, "zero_point": zero_point}
            got = compute(
                QuantizeKind.QUANTIZE, x.shape, element, kind, arithmetic=arithmetic, backend=backend, operands=operands
            )["output"]
            np.testing.assert_array_equal(got.numpy(), clamped(t, zero_point, kind.q_min, kind.q_max))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", [F16, BF16], ids=str)
def test_every_16_bit_float_passes_its_gradient_exactly_where_it_did_not_saturate(
    element: ElementKind, scale: float, backend: BackendKind | None
) -> None:
    x, values = every(element)
    with np.errstate(all="ignore"):
        t = np.rint(values / np.float32(scale)).astype(np.float64)
    dy = torch.full_like(x, -1.5)
    for zero_point in ZERO_POINTS:
        operands = {"input": x, "scale": scale, "zero_point": zero_point, "grad_output": dy}
        got = compute(QuantizeKind.FAKE_QUANTIZE_BACKWARD, x.shape, element, S8, backend=backend, operands=operands)
        inside = (-128 - zero_point <= t) & (t <= 127 - zero_point)
        want = torch.where(torch.from_numpy(inside), dy, torch.zeros_like(dy))
        assert torch.equal(got["grad_input"].view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("element", [F16, BF16], ids=str)
def test_the_ieee_quotient_is_the_exact_ratio_rounded_once(element: ElementKind) -> None:
    """The oracle's own oracle: x/s as a fraction, rounded by float(), which rounds once and to even."""
    _, values = every(element)
    finite = values[np.isfinite(values)][:: 401 if element is F16 else 601]
    for scale in (0.1, 1 / 3, 0.007874016, 257.003, 3e-39):
        s = np.float32(scale)
        with np.errstate(all="ignore"):
            quotient = finite / s
        for x, q in zip(finite.tolist(), quotient.tolist(), strict=True):
            exact = Fraction(x) / Fraction(float(s))
            if 2.0**-100 < abs(exact) < 2.0**100:
                below, above = (float(np.nextafter(np.float32(q), np.float32(end))) for end in (-np.inf, np.inf))
                assert abs(exact - Fraction(q)) <= min(exact - Fraction(below), Fraction(above) - exact)


def neighbours(centre: Array) -> Array:
    return np.concatenate(
        [np.nextafter(centre, centre.dtype.type(-np.inf)), centre, np.nextafter(centre, centre.dtype.type(np.inf))]
    )


def exact_steps(x: Array, scale: Any) -> Array:
    """round(x/s) of the exact ratio, ties to even: Python's own rounding of a Fraction."""
    return np.array([round(Fraction(float(v)) / Fraction(float(scale))) for v in x], dtype=np.int64)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("zero_point", [0, 3, -17])
@pytest.mark.parametrize("scale", [2.0**-20, 0.25, 1.0, 2.0, 1024.0])
@pytest.mark.parametrize("element", [F32, F64], ids=str)
def test_every_tie_goes_to_the_even_step_and_its_neighbours_to_their_own(
    element: ElementKind, scale: float, zero_point: int, backend: BackendKind | None
) -> None:
    """With a power of two the tie is exact, so the neighbours lie on either side of it."""
    math = np.float64 if element is F64 else np.float32
    x = neighbours(((np.arange(-160, 160) + 0.5) * scale).astype(math))
    with np.errstate(all="ignore"):
        t = np.rint(x / math(scale)).astype(np.int64)
    want = clamped(exact_steps(x, scale), zero_point, -128, 127)
    np.testing.assert_array_equal(want, clamped(t, zero_point, -128, 127))
    operands = {"input": torch.from_numpy(x), "scale": scale, "zero_point": zero_point}
    got = compute(QuantizeKind.QUANTIZE, x.shape, element, backend=backend, operands=operands)["output"]
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1 / 3, 0.007874016, 0.7, 3.3, 12.34, 1e-30, 1e30])
@pytest.mark.parametrize("element", [F32, F64], ids=str)
def test_near_a_tie_of_any_scale_the_rounded_quotient_decides(
    element: ElementKind, scale: float, backend: BackendKind | None
) -> None:
    math = np.float64 if element is F64 else np.float32
    s = math(scale)
    x = neighbours((np.arange(-160, 160) + 0.5).astype(math) * s)
    want = clamped(np.rint(x / s), 0, -128, 127)
    operands = {"input": torch.from_numpy(x), "scale": torch.tensor(s)}
    got = compute(QuantizeKind.QUANTIZE, x.shape, element, backend=backend, operands=operands)["output"]
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("kind", [ElementKind.S8, ElementKind.U8, ElementKind.S4, ElementKind.U4], ids=str)
@pytest.mark.parametrize("element", [F16, BF16, F32, F64], ids=str)
def test_every_integer_dequantizes_to_the_exact_product_rounded(element: ElementKind, kind: ElementKind) -> None:
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    q = stored.view(torch.int8).tolist() if kind is S8 else stored.tolist()
    if kind.is_packed:
        q = [nibble for byte in q for nibble in (byte & 15, byte >> 4)]
        q = [v - 16 if kind is ElementKind.S4 and v > 7 else v for v in q]
    for scale in (0.1, 1 / 3, 1.0, 2.0**-20):
        s = float(np.float64(scale) if element is F64 else np.float32(scale))
        for zero_point in (0, 3, -128, MAX_ZERO_POINT):
            operands = {"input": stored.view(kind.dtype), "scale": s, "zero_point": zero_point}
            got = compute(QuantizeKind.DEQUANTIZE, (len(q),), element, kind, operands=operands)["output"]
            # float(Fraction) rounds the exact product once to f64; torch rounds that to f32 and on to the output.
            exact = [Fraction(v - zero_point) * Fraction(s) for v in q]
            if element is F64:
                want = torch.tensor([float(v) for v in exact], dtype=torch.float64)
            else:  # a product of two f32 numbers is exact in f64, so this rounds once to f32
                want = torch.tensor([float(v) for v in exact], dtype=torch.float64).float().to(element.dtype)
            assert torch.equal(got, want)
