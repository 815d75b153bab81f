"""Wrong input to the linears: the documented error, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import baracuda
from baracuda import InvalidProblem, Unsupported

X = torch.linspace(-3, 3, 24).view(4, 6)
Q = X.to(torch.int8)
W, WS = torch.ones(3, 6, dtype=torch.int8), torch.ones(3)
LINEARS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    (
        "weight is a vector",
        lambda: baracuda.quantized_linear(X, W[0], WS),
        InvalidProblem,
        r"a weight of shape \[N, K\], got .*\[6\]",
    ),
    (
        "weight is too short",
        lambda: baracuda.quantized_linear(X, W[:, :5], WS),
        InvalidProblem,
        r"weight_q: expected shape \[3, 6\], got \[3, 5\]",
    ),
    ("weight is float", lambda: baracuda.quantized_linear(X, W.float(), WS), Unsupported, "the weight: .*got f32"),
    (
        "weight is elsewhere",
        lambda: baracuda.quantized_linear(X, W.to("meta"), WS),
        InvalidProblem,
        "weight_q: .*got one on meta",
    ),
    (
        "weight scales too few",
        lambda: baracuda.quantized_linear(X, W, WS[:2]),
        InvalidProblem,
        r"weight_scale: expected shape \[3\], got \[2\]",
    ),
    (
        "bias too long",
        lambda: baracuda.quantized_linear(X, W, WS, torch.ones(4)),
        InvalidProblem,
        r"bias: expected shape \[3\], got \[4\]",
    ),
    (
        "residual misses a row",
        lambda: baracuda.quantized_linear(X, W, WS, residual=torch.ones(3, 3)),
        InvalidProblem,
        r"residual: expected the output's shape \[4, 3\], got \[3, 3\]",
    ),
    (
        "residual is wider than the output",
        lambda: baracuda.quantized_linear(X.bfloat16(), W, WS, residual=torch.ones(4, 3)),
        InvalidProblem,
        r"residual: expected a torch.bfloat16 tensor of shape \[4, 3\], got torch.float32",
    ),
    (
        "residual is elsewhere",
        lambda: baracuda.smoothquant_linear(Q, W, 1.0, WS, residual=torch.ones(4, 3, device="meta")),
        InvalidProblem,
        "residual: .*got one on meta",
    ),
    (
        "activation is unknown",
        lambda: baracuda.quantized_linear(X, W, WS, activation="tanh"),
        InvalidProblem,
        "activation: expected one of 'none', 'relu', 'gelu', 'silu', got 'tanh'",
    ),
    ("x is a scalar", lambda: baracuda.quantized_linear(X[0, 0], W, WS), InvalidProblem, r"x of shape \[..., K\]"),
    (
        "act_scale is nan",
        lambda: baracuda.smoothquant_linear(Q, W, math.nan, WS),
        InvalidProblem,
        "finite and > 0 .*got nan",
    ),
    (
        "act_q is float",
        lambda: baracuda.smoothquant_linear(X, W, 1.0, WS),
        Unsupported,
        "quantized activations: expected one of s8, u8, got f32; convert it, as with .*or quantize it",
    ),
    (
        "act zero point outside",
        lambda: baracuda.smoothquant_linear(Q, W, 1.0, WS, act_zero_point=200),
        InvalidProblem,
        "act_zero_point: .*200",
    ),
    (
        "out is an array",
        lambda: baracuda.quantized_linear(X, W, WS, out=np.ones((4, 3), np.float32)),
        InvalidProblem,
        "expected .*got",
    ),
    (
        "packed weights by their bytes",
        lambda: baracuda.quantized_linear(X, W.byte(), WS),
        Unsupported,
        "the weight: expected one of s8, s4, got u8; .*weight_element='s4'",
    ),
    (
        "a weight of another K",
        lambda: baracuda.quantized_linear(X, W[:, :5], WS),
        InvalidProblem,
        r"weight_q: expected shape \[3, 6\], got \[3, 5\]; weights are \[N, K\], .*K = 6",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [row[1:] for row in LINEARS], ids=[row[0] for row in LINEARS])
def test_a_linear_refuses(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_is_refused_with_what_records_it() -> None:
    module = baracuda.nn.QuantizedLinear.from_float(torch.nn.Linear(6, 3))
    with pytest.raises(Unsupported, match=r"torch\.jit cannot record it; use torch\.export"):
        torch.jit.trace(module, X)
