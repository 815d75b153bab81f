"""The operators a server calls, and what the plug-in's variable says; vLLM itself is not needed here."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import baracuda
from baracuda.nn import QuantizedLinear, SmoothQuantLinear
from baracuda.serve import operators, vllm_plugin

TOKENS = (1, 3, 16, 70)


def linear(n: int = 48, k: int = 64) -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(k, n)


def x(tokens: int, k: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_dynamic_activations_give_the_bits_of_the_module(mode: str, tokens: int) -> None:
    module = QuantizedLinear.from_float(linear(), mode=mode)
    sums = None if mode == "symmetric" else module.weight.sum(1, dtype=torch.int32)
    args = (module.weight, module.weight_scale, module.bias, sums, mode == "asymmetric")
    assert torch.equal(operators.call.int8_linear(x(tokens), *args), module(x(tokens)))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("zero_point", [None, 5])
def test_static_activations_give_the_bits_of_the_module(zero_point: int | None, tokens: int) -> None:
    module = SmoothQuantLinear.from_float(linear(), 0.03, zero_point)
    sums = None if zero_point is None else module.weight.sum(1, dtype=torch.int32)
    zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
    args = (module.weight, module.weight_scale, module.bias, sums, module.input_scale, zero)
    assert torch.equal(operators.call.int8_static_linear(x(tokens), *args), module(x(tokens)))


def four_bits() -> tuple[torch.Tensor, torch.Tensor]:
    q = baracuda.dynamic_quantize(linear().weight.detach(), scope=baracuda.PerGroup(32), dtype="s4")
    return q.q, q.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bit_weights_are_those_of_their_groups(dtype: torch.dtype) -> None:
    weight, scale = four_bits()
    whole = baracuda.dequantize(weight, scale, scope=baracuda.PerGroup(32), element="s4", dtype=dtype)
    expected = torch.nn.functional.linear(x(5, dtype=dtype), whole)
    got = operators.call.int4_linear(x(5, dtype=dtype), weight, scale, None, 32)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02 if dtype is torch.bfloat16 else 1e-4)


def test_a_kernel_for_four_bit_weights_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the reference stands for it."""
    weight, scale = four_bits()
    bias = torch.randn(48)
    made = operators.call.int4_linear(x(5), weight, scale, bias, 32)
    monkeypatch.setattr(operators, "has_kernel", lambda *_: True)
    called = operators.call.int4_linear(x(5), weight, scale, bias, 32)
    assert torch.equal(called, baracuda.weight_only_linear(x(5), weight, scale, bias, weight_element="s4"))
    assert torch.allclose(called, made, atol=1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_activations_and_four_bit_weights_give_the_bits_of_the_module(dtype: torch.dtype, tokens: int) -> None:
    module = grouped()
    got = operators.call.int4_int8_linear(
        x(tokens, dtype=dtype), module.weight, module.weight_scale, None, module.weight_factor
    )
    assert torch.equal(got, module(x(tokens, dtype=dtype)))


def grouped() -> QuantizedLinear:
    """Groups of 32 whose scales are factors of their row's."""
    module = QuantizedLinear(64, 48, False, weight_element="s4", weight_group=32)
    generator = torch.Generator().manual_seed(5)
    module.weight = torch.randint(0, 256, (48, 32), dtype=torch.uint8, generator=generator)
    module.weight_scale = torch.rand(48, 1, generator=generator) + 0.01
    module.weight_factor = torch.randint(1, 16, (48, 2), dtype=torch.uint8, generator=generator)
    return module


def test_a_server_compiles_each_operator_once_for_any_number_of_tokens() -> None:
    module, (weight, scale) = QuantizedLinear.from_float(linear()), four_bits()
    static, four = SmoothQuantLinear.from_float(linear(), 0.03), grouped()

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = operators.call
        return (
            call.int8_linear(x, module.weight, module.weight_scale, module.bias, None, False),
            call.int8_static_linear(x, static.weight, static.weight_scale, None, None, static.input_scale, None),
            call.int4_linear(x, weight, scale, None, 32),
            call.int4_int8_linear(x, four.weight, four.weight_scale, None, four.weight_factor),
        )

    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in TOKENS[1:]:
            for got, expected in zip(compiled(x(tokens)), model(x(tokens)), strict=True):
                assert torch.equal(got, expected)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("baracuda_serve" in target for target in called) == 4


def test_the_fakes_have_the_shapes_and_types_of_the_results() -> None:
    module = QuantizedLinear.from_float(linear())
    args = (module.weight, module.weight_scale, module.bias.detach(), None, False)
    torch.library.opcheck(
        operators.call.int8_linear.default, (x(3), *args), test_utils=["test_schema", "test_faketensor"]
    )


def test_the_variable_names_schemes_or_switches_the_plug_in_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.VARIABLE, raising=False)
    assert vllm_plugin.wanted() == ["w8a8", "w4a8"]
    assert vllm_plugin.wanted("W4A16, w8a8") == ["w8a8", "w4a16"]
    for off in ("0", "off", ""):
        assert vllm_plugin.wanted(off) == []
    with pytest.raises(baracuda.InvalidProblem, match=r"BARACUDA_VLLM: expected w8a8, w4a16, w4a8 or 0, got 'w2a2'"):
        vllm_plugin.wanted("w2a2")


def test_a_server_of_another_layout_keeps_its_kernels_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)  # whose import then fails
    monkeypatch.setenv(vllm_plugin.VARIABLE, "w8a8")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert "keeps its linear kernels elsewhere" in caplog.text
