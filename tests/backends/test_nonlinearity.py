"""gelu and silu against mpmath, and their corners; a linear with nothing to sum shows them value by value."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from compute import BACKENDS, compute
from torch import Tensor

from baracuda import Activation, BackendKind, ElementKind, QuantizeKind
from baracuda.backends.nonlinearity import activated
from cases import BITS

#: The errors docs/numerics.md promises, in units of the last place of the exact result.
BOUNDS = {
    (Activation.GELU, torch.float32): 10,
    (Activation.SILU, torch.float32): 4,
    (Activation.GELU, torch.float64): 12,
    (Activation.SILU, torch.float64): 4,
}
#: Behind these the negative side is -0.
ENDS = {
    (Activation.GELU, torch.float32): 14.5,
    (Activation.SILU, torch.float32): 112.0,
    (Activation.GELU, torch.float64): 39.0,
    (Activation.SILU, torch.float64): 760.0,
}
SMOOTH = [Activation.GELU, Activation.SILU]
MATH = [torch.float32, torch.float64]


def exact(kind: Activation, x: float) -> mpmath.mpf:
    y = mpmath.mpf(x)
    return y * mpmath.erfc(-y / mpmath.sqrt(2)) / 2 if kind is Activation.GELU else y / (1 + mpmath.exp(-y))


def last_place(value: mpmath.mpf, dtype: torch.dtype) -> mpmath.mpf:
    digits, least = (23, -149) if dtype is torch.float32 else (52, -1074)
    exponent = least if value == 0 else int(mpmath.floor(mpmath.log(abs(value), 2))) - digits
    return mpmath.ldexp(1, max(exponent, least))


@pytest.mark.parametrize("dtype", MATH, ids=str)
@pytest.mark.parametrize("kind", SMOOTH)
def test_the_error_is_what_the_contract_promises(kind: Activation, dtype: torch.dtype) -> None:
    """Over the whole range, where the values are ordinary, and where they are tiny."""
    end, generator = ENDS[kind, dtype], torch.Generator().manual_seed(0)
    spans = [torch.rand(700, generator=generator, dtype=torch.float64) * end * sign for sign in (-1, 1)]
    spans += [torch.randn(900, generator=generator, dtype=torch.float64) * 2]
    spans += [torch.randn(300, generator=generator, dtype=torch.float64) * 2.0 ** torch.arange(-140, 10).repeat(2)]
    x = torch.cat(spans).to(dtype)
    with mpmath.workdps(40):
        for value, got in zip(x.tolist(), activated(x, kind).tolist(), strict=True):
            wanted = exact(kind, value)
            error = abs(mpmath.mpf(got) - wanted) / last_place(wanted, dtype)
            bound = 4 if kind is Activation.GELU and value > 0 else BOUNDS[kind, dtype]
            assert error <= bound, (value, got, float(error))


def through_a_linear(values: Tensor, kind: Activation, backend: BackendKind | None) -> Tensor:
    """The activation of each value: with K = 0 the bias is all there is."""
    n = values.numel()
    element = ElementKind.of(values.dtype)
    operands = {
        "act_q": torch.empty(1, 0, dtype=torch.int8),
        "act_scale": 1.0,
        "weight_q": torch.empty(n, 0, dtype=torch.int8),
        "weight_scale": 1.0,
        "bias": values,
    }
    shape = (1, n, 0)
    op = QuantizeKind.SMOOTHQUANT_LINEAR
    return compute(op, shape, element, backend=backend, operands=operands, nonlinearity=kind)["output"][0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *MATH], ids=str)
@pytest.mark.parametrize("kind", [Activation.RELU, *SMOOTH])
def test_nan_is_kept_canonical_infinities_have_their_limits_and_the_far_side_is_a_negative_zero(
    kind: Activation, dtype: torch.dtype, backend: BackendKind | None
) -> None:
    finfo = torch.finfo(dtype)
    given = torch.tensor([math.nan, math.inf, -math.inf, finfo.max, finfo.min, 0.0], dtype=dtype)
    got = through_a_linear(given, kind, backend)
    far = 0.0 if kind is Activation.RELU else -0.0
    wanted = torch.tensor([math.nan, math.inf, far, finfo.max, far, 0.0], dtype=dtype)
    assert torch.equal(got.view(BITS[dtype.itemsize]), wanted.view(BITS[dtype.itemsize]))


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("dtype", MATH, ids=str)
def test_a_negative_zero_stays_one_and_subnormals_stay_halves(kind: Activation, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    y = activated(torch.tensor([-0.0, tiny / 4, -tiny / 4], dtype=dtype), kind)
    assert torch.signbit(y[0])
    half = 1.0 if kind in (Activation.NONE, Activation.RELU) else 0.5
    below = 0.0 if kind is Activation.RELU else -half * tiny / 4
    assert y[1:].tolist() == [half * tiny / 4, below]


@pytest.mark.parametrize("kind", SMOOTH)
def test_every_bf16_comes_within_one_last_place_of_the_exact_activation(kind: Activation) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    got = through_a_linear(x.float(), kind, None).bfloat16().double()
    wide = x.double()
    wanted = wide * torch.special.erfc(-wide / math.sqrt(2)) / 2 if kind is Activation.GELU else wide * wide.sigmoid()
    place = 2.0 ** (wanted.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert ((got - wanted).abs() <= 0.51 * place).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMOOTH)
def test_the_compiled_kernels_have_the_bits_of_the_reference_for_every_16th_f32(kind: Activation) -> None:
    """And the promised error, against the same recipe in f64."""
    for start in range(-(2**31), 2**31, 2**27):
        x = torch.arange(start, start + 2**27, 16, dtype=torch.int64).to(torch.int32).view(torch.float32)
        got = through_a_linear(x, kind, None)
        wanted = through_a_linear(x, kind, BackendKind.REFERENCE)
        assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), start
        exact = through_a_linear(x.double(), kind, None)
        place = torch.ldexp(torch.ones_like(exact), torch.frexp(exact)[1].clamp(min=-125) - 24)
        error = torch.where(exact.abs() < torch.finfo(torch.float32).max, (got.double() - exact).abs() / place, 0.0)
        assert (error <= torch.where(exact > 0, 4, BOUNDS[kind, torch.float32])).all(), start
