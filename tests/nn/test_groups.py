"""4-bit weights in groups with integer factors: the linear is the 8-bit linear of the expanded weight, to the bit."""

from __future__ import annotations

import pytest
import torch

import baracuda
from baracuda import InvalidProblem, pack_int4
from baracuda.nn import QuantizedLinear, SmoothQuantLinear
from baracuda.schemes.method import QuantizedWeight


def parts(n: int, k: int, group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A packed weight, its factors, its scales, and the s8 weight they stand for."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    factor = torch.randint(1, 16, (n, k // group), generator=generator).to(torch.uint8)
    scale = torch.rand(n, generator=generator) * 0.01 + 1e-3
    return pack_int4(q), factor, scale, q * factor.to(torch.int8).repeat_interleave(group, dim=1)


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(("m", "n", "k", "group"), [(1, 48, 128, 32), (5, 33, 256, 128), (40, 16, 192, 64)])
def test_the_linear_has_the_bits_of_the_expanded_weights(m: int, n: int, k: int, group: int, mode: str) -> None:
    packed, factor, scale, expanded = parts(n, k, group)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    options = {"weight_element": "s4", "weight_factor": factor, "mode": mode}
    got = baracuda.quantized_linear(x, packed, scale, **options)  # type: ignore[arg-type]
    assert torch.equal(got, baracuda.quantized_linear(x, expanded, scale, mode=mode))
    x_q = torch.randint(-128, 128, (m, k), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    zero_point = None if mode == "symmetric" else 3
    static = baracuda.smoothquant_linear(
        x_q, packed, 0.02, scale, act_zero_point=zero_point, weight_element="s4", weight_factor=factor
    )
    assert torch.equal(static, baracuda.smoothquant_linear(x_q, expanded, 0.02, scale, act_zero_point=zero_point))


def test_only_the_low_four_bits_of_a_factor_count() -> None:
    packed, factor, scale, expanded = parts(16, 128, 32)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4))
    got = baracuda.quantized_linear(x, packed, scale, weight_element="s4", weight_factor=factor | 0xA0)
    assert torch.equal(got, baracuda.quantized_linear(x, expanded, scale))


def test_gradients_pass_through_the_expanded_weight() -> None:
    packed, factor, scale, expanded = parts(8, 64, 32)
    inputs = [torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2)]
    baracuda.quantized_linear(inputs[0], packed, scale, weight_element="s4", weight_factor=factor).sum().backward()
    baracuda.quantized_linear(inputs[1], expanded, scale).sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [QuantizedLinear, SmoothQuantLinear])
def test_a_module_holds_factors_and_keeps_them_through_its_state(
    kind: type[QuantizedLinear | SmoothQuantLinear],
) -> None:
    linear = torch.nn.Linear(128, 24)
    packed, factor, scale, expanded = parts(24, 128, 64)
    calibrated = (0.05,) if kind is SmoothQuantLinear else ()
    quantized = QuantizedWeight(packed, scale, factors=factor)
    module = kind.from_float(linear, *calibrated, weight_element="s4", weight_group=64, quantized=quantized)
    x = torch.randn(6, 128)
    other = kind(128, 24, weight_element="s4", weight_group=64)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert torch.allclose(module.dequantized_weight(), expanded * scale[:, None], atol=1e-6)
    assert "in groups of 64" in repr(module)
    assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_group": 48}, "a divisor of K = 128 that is at least 32, got 48"),
        ({"weight_group": 16}, "a divisor of K = 128 that is at least 32, got 16"),
        ({"weight_group": 64, "weight_element": "s8"}, "expected 0 but for a linear with an s4 weight, got 64"),
        ({"weight_group": 64}, "expected the weight as a method has quantized it"),
        ({"quantized": QuantizedWeight(*parts(24, 128, 64)[::2], factors=parts(24, 128, 64)[1])}, "got .24, 2."),
    ],
)
def test_groups_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        QuantizedLinear.from_float(torch.nn.Linear(128, 24), **{"weight_element": "s4", **options})


def test_factors_of_a_wrong_shape_are_refused() -> None:
    packed, factor, scale, _ = parts(8, 64, 32)
    with pytest.raises(InvalidProblem, match=r"weight_factor: expected shape \[8, K / size\]"):
        baracuda.quantized_linear(torch.randn(2, 64), packed, scale, weight_element="s4", weight_factor=factor.view(-1))
    with pytest.raises(InvalidProblem, match=r"weight_factor: expected shape \[8, 2\]"):
        baracuda.quantized_linear(torch.randn(2, 64), packed, scale, weight_element="s4", weight_factor=factor[:4])
