"""Quantized: the way back, the linears that take it, and what it is to torch and to notebooks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

import baracuda
from baracuda import InvalidProblem, PerChannel, PerGroup, PerTensor, PerToken, Quantized

CASES = [
    (PerToken(), "s8", "symmetric"),
    (PerTensor(), "u8", "asymmetric"),
    (PerChannel(1), "s8", "symmetric"),
    (PerGroup(4), "s4", "symmetric"),
    (PerGroup(4, axis=0), "u4", "asymmetric"),
]


@pytest.mark.parametrize(("scope", "kind", "mode"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_round_trip_needs_no_argument(scope: baracuda.Scope, kind: str, mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(8, 12, dtype=dtype)
    quantized = baracuda.dynamic_quantize(x, scope=scope, dtype=kind, mode=mode)
    q, scale, zero_point = quantized
    expected = baracuda.dequantize(q, scale, zero_point, scope=scope, element=kind, dtype=dtype)
    assert torch.equal(quantized.dequantize(), expected) and expected.dtype is dtype
    assert torch.equal(baracuda.dequantize(quantized), expected)
    wide = baracuda.dequantize(q, scale, zero_point, scope=scope, element=kind)
    assert torch.equal(quantized.dequantize(dtype="f32"), wide)
    assert torch.equal(wide, baracuda.dequantize(quantized, dtype=torch.float32))


def test_an_odd_number_of_packed_elements_comes_back() -> None:
    x = torch.randn(3, 7)
    assert baracuda.dynamic_quantize(x, dtype="s4").dequantize().shape == x.shape


def test_it_is_a_tuple_of_three_that_survives_copies() -> None:
    made = baracuda.dynamic_quantize(torch.randn(4, 6), dtype="u8", mode="asymmetric")
    assert isinstance(made, tuple) and len(made) == 3
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.scope == PerToken() and torch.equal(other.dequantize(), made.dequantize())


def test_one_made_by_hand_says_what_it_lacks() -> None:
    by_hand = Quantized(torch.zeros(2, 4, dtype=torch.int8), torch.ones(2))
    with pytest.raises(InvalidProblem, match=r"without a scope; make it with scope=PerToken\(\)"):
        by_hand.dequantize()
    known = Quantized(torch.ones(2, 4, dtype=torch.int8), torch.ones(2), scope=PerToken())
    assert torch.equal(known.dequantize(), torch.ones(2, 4))
    with pytest.raises(InvalidProblem, match="no scale beside a Quantized"):
        baracuda.dequantize(known, 0.1)


def test_the_linears_take_it_as_it_is() -> None:
    x, w, bias = torch.randn(5, 64), torch.randn(8, 64), torch.randn(8)
    weight = baracuda.dynamic_quantize(w, scope=PerChannel(0))
    expected = baracuda.quantized_linear(x, weight.q, weight.scale, bias)
    assert torch.equal(baracuda.quantized_linear(x, weight, bias=bias), expected)
    four = baracuda.dynamic_quantize(w, scope=PerChannel(0), dtype="s4")
    expected = baracuda.quantized_linear(x, four.q, four.scale, weight_element="s4")
    assert torch.equal(baracuda.quantized_linear(x, four), expected)
    grouped = baracuda.dynamic_quantize(w, scope=PerGroup(32), dtype="u4", mode="asymmetric")
    arguments = {"weight_zero_point": grouped.zero_point, "weight_element": "u4"}
    expected = baracuda.weight_only_linear(x, grouped.q, grouped.scale, **arguments)
    assert torch.equal(baracuda.weight_only_linear(x, grouped), expected)
    rows = baracuda.weight_only_linear(x, weight.q, weight.scale[:, None])
    assert torch.equal(baracuda.weight_only_linear(x, weight), rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scope": PerGroup(32), "dtype": "s4"},
            r"a symmetric weight .* got PerGroup.* use weight_only_linear",
        ),
        ({"scope": PerChannel(0), "dtype": "u8", "mode": "asymmetric"}, r"got PerChannel\(axis=0\) with zero points"),
        ({"scope": PerTensor()}, r"got PerTensor\(\)"),
    ],
)
def test_a_weight_that_does_not_fit_is_told(options: dict[str, object], message: str) -> None:
    weight = baracuda.dynamic_quantize(torch.randn(8, 64), **options)
    with pytest.raises(InvalidProblem, match=message):
        baracuda.quantized_linear(torch.randn(2, 64), weight)


def test_a_bias_in_the_place_of_the_scale_is_told() -> None:
    weight = baracuda.dynamic_quantize(torch.randn(8, 64), scope=PerChannel(0))
    with pytest.raises(InvalidProblem, match="no weight_scale beside a Quantized, which has its own; is it the bias="):
        baracuda.quantized_linear(torch.randn(2, 64), weight, torch.randn(8))


def there_and_back(x: Tensor) -> Tensor:
    return baracuda.dynamic_quantize(x, scope=PerGroup(4), dtype="s4").dequantize()


def test_torch_compile_sees_no_break_and_gives_the_same_bits() -> None:
    x = torch.randn(4, 8)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), there_and_back(x))
    made = torch.compile(baracuda.dynamic_quantize, fullgraph=True, backend="eager")(x)
    assert isinstance(made, Quantized) and torch.equal(made.dequantize(), baracuda.dynamic_quantize(x).dequantize())


class Quantize(torch.nn.Module):
    def forward(self, x: Tensor) -> Quantized:
        return baracuda.dynamic_quantize(x, scope=PerGroup(4, axis=0), dtype="u8", mode="asymmetric")


def test_an_exported_program_returns_it_after_a_save(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    torch.export.save(torch.export.export(Quantize(), (x,)), tmp_path / "program.pt2")
    made = torch.export.load(tmp_path / "program.pt2").module()(x)
    assert isinstance(made, Quantized) and made.scope == PerGroup(4, axis=0)
    assert torch.equal(made.dequantize(), Quantize()(x).dequantize())


def test_vmap_takes_it_apart_and_puts_it_together() -> None:
    x = torch.randn(3, 4, 8)
    made = torch.func.vmap(Quantize())(x)
    assert isinstance(made, Quantized) and torch.equal(made.q[1], Quantize()(x[1]).q)


def test_notebooks_show_a_table() -> None:
    made = baracuda.dynamic_quantize(torch.randn(4, 8), scope=PerGroup(4), dtype="s4")
    shown = made._repr_html_()
    assert shown.startswith("<table>") and "s4 [4, 8]" in shown and "PerGroup(size=4, axis=-1)" in shown
    assert f"{made.nbytes:,}, {made.nbytes / 128:.0%} of the 128 before" in shown
    desc = baracuda.QuantizePerTensorDescriptor(
        numel=8, q_min=-128, q_max=127, input_element="f32", output_element="s8"
    )
    plan = baracuda.QuantizePerTensorPlan.select(desc, device="cpu")
    assert "QuantizePerTensorPlan" in plan._repr_html_() and plan.sku().backend.value in plan._repr_html_()


@pytest.mark.parametrize("name", ["S8", "Int8", "UINT8", "BFloat16"])
def test_names_of_elements_may_be_in_capitals(name: str) -> None:
    assert baracuda.ElementKind.of(name) is baracuda.ElementKind.of(name.lower())


def test_names_of_modes_may_be_in_capitals() -> None:
    x = torch.randn(4, 8)
    made = baracuda.dynamic_quantize(x, dtype="U8", mode="ASYMMETRIC", arithmetic="Divide")
    assert torch.equal(made.q, baracuda.dynamic_quantize(x, dtype="u8", mode="asymmetric").q)
    with pytest.raises(InvalidProblem, match="mode: expected one of 'symmetric', 'asymmetric', got 'both'"):
        baracuda.dynamic_quantize(x, mode="both")
