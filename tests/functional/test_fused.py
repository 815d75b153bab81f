"""Norms and gated products: against exact arithmetic, against torch, and with a quantization behind them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import baracuda
from baracuda import InvalidProblem, NormStyle

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def ordered_sum(values: np.ndarray) -> float:
    """The order of docs/numerics.md, in NumPy: blocks of 8 times 1024 lanes, by neighbours; the blocks as one more."""

    def block(part: np.ndarray, lanes: int, steps: int) -> float:
        padded = np.zeros(lanes * steps)
        padded[: len(part)] = part
        sums = np.zeros(lanes)
        for step in padded.reshape(steps, lanes):
            sums = sums + step
        while len(sums) > 1:
            sums = sums[0::2] + sums[1::2]
        return float(sums[0])

    blocks = [block(values[i : i + 8192], 1024, 8) for i in range(0, len(values), 8192)]
    return block(np.array(blocks), 1024, -(-len(blocks) // 1024))


def expected_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, style: str) -> Tensor:
    """Row by row in NumPy; roundings to 16 bits by torch, which the contract shares."""
    math_type = torch.float64 if x.dtype is torch.float64 else torch.float32
    made = []
    for row in x.reshape(-1, x.shape[-1]):
        values = row.double().numpy()
        if style == "layer":
            values = values - ordered_sum(values) / len(values)
        inverse = 1 / math.sqrt(ordered_sum(values * values) / len(values) + eps)
        y = torch.from_numpy(values).to(math_type) * torch.tensor(inverse, dtype=math_type)
        if style == "llama":
            y = y.to(x.dtype).to(math_type)
        if weight is not None:
            y = y * (weight.to(math_type) + (1 if style == "gemma" else 0))
        if bias is not None:
            y = y + bias.to(math_type)
        made.append(y.to(x.dtype))
    return torch.stack(made).view(x.shape)


@pytest.mark.parametrize("style", [style.value for style in NormStyle])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_has_the_bits_of_the_contract(dtype: torch.dtype, style: str) -> None:
    for d in (1, 7, 576, 1025, 8193, 20000):
        x, weight, bias = rows(2, d, dtype=dtype), rows(d, dtype=dtype, seed=1), rows(d, dtype=dtype, seed=2)
        got = baracuda.norm_quantize(x, weight, 1e-6, 0.04, style=style, bias=bias)
        wanted = expected_norm(x, weight, bias, 1e-6, style)
        assert torch.equal(got.q, baracuda.quantize(wanted, 0.04)), d
        if style == "layer":
            assert torch.equal(baracuda.layer_norm(x, weight, bias, 1e-6), wanted), d
        else:
            assert torch.equal(baracuda.rms_norm(x, weight, 1e-6, style=style, bias=bias), wanted), d


def test_a_norm_is_close_to_that_of_torch_and_of_the_models() -> None:
    x, weight, bias = rows(5, 300), rows(300, seed=1), rows(300, seed=2)
    torch.testing.assert_close(baracuda.rms_norm(x, weight, 1e-5, style="torch"), nn.functional.rms_norm(
        x, (300,), weight, 1e-5))  # fmt: skip
    torch.testing.assert_close(baracuda.layer_norm(x, weight, bias), nn.functional.layer_norm(x, (300,), weight, bias))
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert transformers
    for module, style in ((LlamaRMSNorm(300, 1e-6), "llama"), (GemmaRMSNorm(300, 1e-6), "gemma")):
        module.weight.data.copy_(weight)
        for dtype in (torch.float32, torch.bfloat16):
            theirs, ours = module.to(dtype)(x.to(dtype)), baracuda.rms_norm(x.to(dtype), weight.to(dtype), style=style)
            torch.testing.assert_close(ours, theirs)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "asymmetric"},
    {"mode": "asymmetric", "dtype": "u8", "include_zero": True, "arithmetic": "reciprocal"},
    {"dtype": "s4"},
    {"mode": "asymmetric", "dtype": "u4"},
    {"q_min": -100, "q_max": 90},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_where_it_is_made_is_quantized_afterwards(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for d in (1, 33, 1030):
        x, y, weight = rows(2, 3, d, dtype=dtype), rows(2, 3, d, dtype=dtype, seed=1), rows(d, dtype=dtype, seed=2)
        normed, total = baracuda.rms_norm(x, weight, residual=y)
        assert torch.equal(total, x + y) and torch.equal(normed, baracuda.rms_norm(total, weight))
        for floats, made in (
            (normed, baracuda.norm_quantize(x, weight, residual=y, **options)),
            (baracuda.gated(x, y), baracuda.gated_quantize(x, y, **options)),
        ):
            after = baracuda.dynamic_quantize(floats, **options)
            assert torch.equal(made.q, after.q) and torch.equal(made.scale, after.scale)
            assert (made.zero_point is None) == (after.zero_point is None)
            assert after.zero_point is None or torch.equal(made.zero_point, after.zero_point)
        static = {k: v for k, v in options.items() if k not in ("mode", "include_zero")}
        got = baracuda.gated_quantize(x, y, torch.tensor(0.3), 2, **static)
        assert torch.equal(got.q, baracuda.quantize(baracuda.gated(x, y), 0.3, 2, **static))


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_product_rounds_as_a_model_does_and_takes_one_tensor_or_two(
    dtype: torch.dtype, activation: str
) -> None:
    both = rows(4, 2 * 37, dtype=dtype)
    gate, up = both.chunk(2, -1)
    whole = baracuda.gated(both, activation=activation)
    assert torch.equal(whole, baracuda.gated(gate, up, activation=activation))
    one = torch.ones((), dtype=dtype)
    factor = baracuda.gated(gate, one.expand_as(gate), activation=activation)
    assert torch.equal(whole, factor * up)
    theirs = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu, "none": lambda x: x}
    torch.testing.assert_close(whole, theirs[activation](gate) * up)


def test_infinities_and_nans_stay_in_their_rows() -> None:
    x = rows(3, 8)
    x[0, 2], x[1, 3] = float("inf"), float("nan")
    y = baracuda.rms_norm(x)
    assert y[0, 2].isnan() and bool((y[0, [0, 1, 3, 4, 5, 6, 7]] == 0).all())
    assert bool(y[1].isnan().all()) and torch.equal(y[2], baracuda.rms_norm(x[2:])[0])
    q = baracuda.norm_quantize(x)
    assert bool(q.scale[:2].isnan().all()) and bool((q.q[:2] == -127).all())
    zeros = baracuda.norm_quantize(torch.zeros(2, 8), eps=0.0)
    assert bool(zeros.scale.isnan().all())  # 0 / 0
    assert baracuda.norm_quantize(torch.zeros(2, 8)).scale.tolist() == [1.0, 1.0]


def test_empty_rows_and_no_rows() -> None:
    made = baracuda.norm_quantize(torch.empty(3, 0), mode="asymmetric")
    assert made.q.shape == (3, 0) and made.scale.tolist() == [1.0] * 3 and made.zero_point.tolist() == [-128] * 3
    assert baracuda.rms_norm(torch.empty(0, 5)).shape == (0, 5) and baracuda.gated(torch.empty(3, 0)).shape == (3, 0)
    assert baracuda.gated_quantize(torch.empty(0, 8)).q.shape == (0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: baracuda.rms_norm(torch.ones(3, dtype=torch.int32)), "the float tensor"),
        (lambda: baracuda.rms_norm(torch.tensor(1.0)), "at least one axis"),
        (lambda: baracuda.rms_norm(rows(2, 3), rows(4)), r"norm_weight: expected shape \[3\], got \[4\]"),
        (lambda: baracuda.rms_norm(rows(2, 3), eps=-1), "eps: expected a finite number of at least 0"),
        (lambda: baracuda.rms_norm(rows(2, 3), eps="small"), "eps: expected a number"),
        (lambda: baracuda.rms_norm(rows(2, 3), style="rms"), "style: expected one of 'llama'"),
        (lambda: baracuda.rms_norm(rows(2, 3), residual=rows(3)), r"addend: expected shape \[2, 3\], got \[3\]"),
        (lambda: baracuda.norm_quantize(rows(2, 3), zero_point=3), "zero_point: expected a scale beside it"),
        (lambda: baracuda.norm_quantize(rows(2, 3), scale=-1.0), "scale: expected a number that is finite and > 0"),
        (lambda: baracuda.gated(rows(2, 3)), "gate: expected two halves along the last axis"),
        (lambda: baracuda.gated(rows(2, 3), rows(2, 4)), r"up: expected shape \[2, 3\], got \[2, 4\]"),
        (lambda: baracuda.gated(rows(2, 4), activation="tanh"), "activation: expected one of"),
    ],
)
def test_a_wrong_call_is_refused_with_what_was_expected(call: Any, message: str) -> None:
    with pytest.raises(baracuda.BaracudaError, match=message) as raised:
        call()
    assert isinstance(raised.value, InvalidProblem | baracuda.Unsupported)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, y = rows(70, 1100, dtype=torch.bfloat16), rows(70, 1100, dtype=torch.bfloat16, seed=1)
    every = baracuda.norm_quantize(x, residual=y), baracuda.gated_quantize(x, y)
    for i, j in itertools.product((0, 33, 69), (1, 4)):
        alone = (
            baracuda.norm_quantize(x[i : i + j], residual=y[i : i + j]),
            baracuda.gated_quantize(x[i : i + j], y[i : i + j]),
        )
        for a, b in zip(alone, every, strict=True):
            assert torch.equal(a.q, b.q[i : i + j]) and torch.equal(a.scale, b.scale[i : i + j])


def test_they_compile_without_a_graph_break() -> None:
    weight = rows(64, seed=3)

    def step(x: Tensor, y: Tensor) -> tuple[Any, ...]:
        made = baracuda.norm_quantize(x, weight, residual=y)
        product = baracuda.gated_quantize(made.sum)
        linear = baracuda.smoothquant_linear(product.q, torch.ones(4, 32, dtype=torch.int8), product.scale, 0.5)
        return made.q, made.scale, linear, baracuda.layer_norm(x), baracuda.gated(x, y)

    x, y = rows(5, 64), rows(5, 64, seed=1)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 3):
        for got, expected in zip(compiled(x[:n], y[:n]), step(x[:n], y[:n]), strict=True):
            assert torch.equal(got, expected)
