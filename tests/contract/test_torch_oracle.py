"""torch.fake_quantize_* as an independent oracle of Arithmetic.RECIPROCAL, forward and backward, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compute import BACKENDS, compute
from torch import Tensor

import baracuda
from baracuda import Arithmetic, BackendKind, ElementKind, PerChannel, QuantizeKind

F16, BF16, F32, F64 = (ElementKind[name] for name in ("F16", "BF16", "F32", "F64"))
SCALES = [1.0, 0.1, 1 / 3, 0.007874016, 3e-39, 2.0**-126, 1e-30, 1e30, 3e38]
RANGES = [(-128, 127), (-127, 127), (0, 255), (-8, 7), (0, 15)]


def bit_patterns(element: ElementKind, count: int, seed: int) -> Tensor:
    """Half raw bit patterns of every kind, half ordinary values near a few steps."""
    generator = torch.Generator().manual_seed(seed)
    signed = {16: torch.int16, 32: torch.int32}[element.bits]
    info = torch.iinfo(signed)
    raw = torch.randint(info.min, info.max, (count // 2,), generator=generator, dtype=signed).view(element.dtype)
    near = (torch.randn(count - count // 2, generator=generator, dtype=torch.float64) * 40).to(element.dtype)
    return torch.cat([raw, near])


def same(ours: Tensor, theirs: Tensor) -> bool:
    """The same bits, or both NaN: torch does not promise which NaN."""
    signed = {2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    equal = (ours.view(signed) == theirs.contiguous().view(signed)) | (ours.isnan() & theirs.isnan())
    return bool(equal.all())


def ours(op: QuantizeKind, x: Tensor, low: int, high: int, backend: BackendKind | None, **operands: object) -> Tensor:
    scope = operands.pop("scope", baracuda.PerTensor())
    out = compute(
        op, tuple(x.shape), ElementKind.of(x.dtype), q_min=low, q_max=high, scope=scope, backend=backend,
        arithmetic=Arithmetic.RECIPROCAL, operands={"input": x, **operands},
    )  # fmt: skip
    return next(iter(out.values()))


def gradients_like(x: Tensor) -> Tensor:
    """Finite and positive, since torch multiplies by its mask: an exception below shows what becomes of others."""
    return torch.linspace(0.5, 3, x.numel(), dtype=torch.float64).to(x.dtype).view_as(x)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("element", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_fake_quantize_per_tensor_is_torchs(scale: float, element: ElementKind, backend: BackendKind | None) -> None:
    x = bit_patterns(element, 4000, 1)
    x[2000:] = (x[2000:].double() * scale).to(x.dtype)
    x[:600] = ((torch.arange(-300, 300) + 0.5).double() * scale).to(x.dtype)
    for low, high in RANGES:
        for zero_point in {low, high, (low + high) // 2, max(low, 0)}:
            theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)
            got = ours(QuantizeKind.FAKE_QUANTIZE, x, low, high, backend, scale=scale, zero_point=zero_point)
            assert same(got, theirs), (low, high, zero_point)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("element", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_its_gradient_per_tensor_is_torchs(scale: float, element: ElementKind, backend: BackendKind | None) -> None:
    x = bit_patterns(element, 4000, 2)
    x[2000:] = (x[2000:].double() * scale).to(x.dtype)
    x[:600] = ((torch.arange(-300, 300) + 0.5).double() * scale).to(x.dtype)
    dy = gradients_like(x)
    for low, high in RANGES:
        leaf = x.clone().requires_grad_()
        torch.fake_quantize_per_tensor_affine(leaf, scale, low + 3, low, high).backward(dy)
        got = ours(
            QuantizeKind.FAKE_QUANTIZE_BACKWARD, x, low, high, backend, scale=scale, zero_point=low + 3, grad_output=dy
        )
        assert leaf.grad is not None
        assert same(got, leaf.grad), (low, high)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("element", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_per_channel_it_is_torchs_forward_and_backward(
    axis: int, element: ElementKind, backend: BackendKind | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (12, 10, 33)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * 30).to(element.dtype)
    scale = torch.rand(shape[axis], generator=generator) + 0.01
    zero_point = torch.randint(-128, 128, (shape[axis],), generator=generator, dtype=torch.int32)
    dy = gradients_like(x)
    leaf = x.clone().requires_grad_()
    theirs = torch.fake_quantize_per_channel_affine(leaf, scale, zero_point, axis, -128, 127)
    theirs.backward(dy)
    given = {"scale": scale, "zero_point": zero_point, "scope": PerChannel(axis)}
    assert same(ours(QuantizeKind.FAKE_QUANTIZE, x, -128, 127, backend, **given), theirs.detach())
    assert leaf.grad is not None
    assert same(ours(QuantizeKind.FAKE_QUANTIZE_BACKWARD, x, -128, 127, backend, grad_output=dy, **given), leaf.grad)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.25, float("inf"), float("nan"), 3e-39])
def test_with_a_tensor_scale_it_is_torchs_whatever_the_scale(scale: float) -> None:
    x = bit_patterns(F32, 4000, 4)
    s, zero_point = torch.tensor(scale), torch.tensor(5, dtype=torch.int32)
    theirs = torch.fake_quantize_per_tensor_affine(x, s, zero_point, -128, 127)
    assert same(
        ours(QuantizeKind.FAKE_QUANTIZE, x, -128, 127, BackendKind.REFERENCE, scale=s, zero_point=zero_point), theirs
    )


def test_the_two_arithmetics_differ_on_ties_and_only_by_one_step() -> None:
    """Otherwise this file would say nothing about RECIPROCAL."""
    scale = torch.arange(3.0, 99.0, 2)
    x = (torch.arange(-100, 100) + 0.5) * scale[:, None]
    divided, multiplied = (baracuda.quantize(x, scale, scope=PerChannel(0), arithmetic=a).int() for a in Arithmetic)
    assert (divided != multiplied).any()
    assert (divided - multiplied).abs().max() == 1


def test_autograd_through_the_function_gives_torchs_gradient() -> None:
    x = (torch.randn(300, generator=torch.Generator().manual_seed(6)) * 50).requires_grad_()
    leaf = x.detach().clone().requires_grad_()
    baracuda.fake_quantize(x, 0.4, 3, arithmetic="reciprocal").square().sum().backward()
    torch.fake_quantize_per_tensor_affine(leaf, 0.4, 3, -128, 127).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, leaf.grad)


# -- named exceptions: where torch computes something else -------------------------------------------------------


def test_exception_torch_per_channel_turns_plus_infinity_into_q_min() -> None:
    """It converts to int64 before it clamps; whatever lies beyond becomes the most negative number."""
    x = torch.tensor([[float("inf"), 1e30]])
    scale, zero_point = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, -128, 127)
    got = ours(QuantizeKind.FAKE_QUANTIZE, x, -128, 127, BackendKind.REFERENCE, scale=scale, scope=PerChannel(0))
    assert theirs.tolist() == [[-128.0, -128.0]]
    assert got.tolist() == [[127.0, 127.0]]


@pytest.mark.parametrize("channels", [False, True])
def test_exception_torch_multiplies_the_gradient_by_its_mask(channels: bool) -> None:
    """So an infinite gradient of an element out of range becomes NaN, and a negative one -0."""
    x, dy = torch.tensor([[1e3, 1e3]]), torch.tensor([[float("inf"), -1.0]])
    leaf = x.clone().requires_grad_()
    if channels:
        theirs = torch.fake_quantize_per_channel_affine(
            leaf, torch.ones(1), torch.zeros(1, dtype=torch.int32), 0, -128, 127
        )
    else:
        theirs = torch.fake_quantize_per_tensor_affine(leaf, 1.0, 0, -128, 127)
    theirs.backward(dy)
    got = ours(QuantizeKind.FAKE_QUANTIZE_BACKWARD, x, -128, 127, BackendKind.REFERENCE, scale=1.0, grad_output=dy)
    assert leaf.grad is not None
    assert leaf.grad[0, 0].isnan()
    assert leaf.grad[0, 1].signbit()
    assert got.view(torch.int32).tolist() == [[0, 0]]


def test_exception_torch_computes_float64_in_float32() -> None:
    x = torch.tensor([0.3], dtype=torch.float64)
    theirs = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
    got = ours(QuantizeKind.FAKE_QUANTIZE, x, -128, 127, BackendKind.REFERENCE, scale=0.1)
    assert theirs.item() != 3 * 0.1
    assert got.item() == 3 * 0.1
