"""Wrong input to the functions: the documented error, what was expected and what came, and nothing written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import baracuda
from baracuda import InvalidProblem, PerChannel, PerGroup, PerToken, Unsupported

X = torch.linspace(-3, 3, 24).view(4, 6)


def _freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


Q = X.to(torch.int8)
W, WS = torch.ones(3, 6, dtype=torch.int8), torch.ones(3)
FUNCTIONS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    (
        "x is a list",
        lambda: baracuda.quantize([1.0], 1.0),
        InvalidProblem,
        "x: expected a torch tensor or an array .*got list",
    ),
    ("x is integer", lambda: baracuda.quantize(Q, 1.0), Unsupported, "the float tensor: .*got s8; convert it"),
    (
        "x is int64",
        lambda: baracuda.quantize(X.long(), 1.0),
        Unsupported,
        r"expected one of f16, bf16, f32, f64, got s64; convert it, as with \.to\(torch\.float32\)",
    ),
    (
        "x is boolean",
        lambda: baracuda.quantize(X > 0, 1.0),
        InvalidProblem,
        r"x: expected a tensor of .*got torch\.bool; convert it with \.to\(\)",
    ),
    (
        "x is text",
        lambda: baracuda.quantize(np.array(["a"]), 1.0),
        InvalidProblem,
        "x: expected an array torch can read",
    ),
    (
        "x is nested",
        lambda: baracuda.quantize(torch.nested.nested_tensor([X[0], X[0, 1:]], layout=torch.jagged), 1.0),
        InvalidProblem,
        "a dense tensor, got a nested one",
    ),
    (
        "x is sparse",
        lambda: baracuda.quantize(X.to_sparse(), 1.0),
        InvalidProblem,
        "a dense tensor, got layout torch.sparse_coo",
    ),
    ("scale is missing", lambda: baracuda.quantize(X, None), InvalidProblem, "scale: expected .*got None"),
    ("scale is text", lambda: baracuda.quantize(X, "0.1"), InvalidProblem, "scale: expected .*got str"),
    ("scale is a list", lambda: baracuda.quantize(X, [0.1]), InvalidProblem, "scale: expected .*got list"),
    (
        "scale has a shape",
        lambda: baracuda.quantize(X, torch.ones(4)),
        InvalidProblem,
        r"scale: expected shape \[\], got \[4\]",
    ),
    (
        "scale elsewhere",
        lambda: baracuda.quantize(X, torch.ones((), device="meta")),
        InvalidProblem,
        "on cpu, got one on meta",
    ),
    (
        "scale is f64",
        lambda: baracuda.quantize(X, torch.ones((), dtype=torch.float64)),
        InvalidProblem,
        "got torch.float64",
    ),
    (
        "scales of a token",
        lambda: baracuda.quantize(X, torch.ones(6), scope=PerToken()),
        InvalidProblem,
        r"\[4\], got \[6\]",
    ),
    (
        "zero point is a float",
        lambda: baracuda.quantize(X, 1.0, 0.5),
        InvalidProblem,
        r"zero_point: expected an integer.*0\.5",
    ),
    (
        "zero point is too large",
        lambda: baracuda.quantize(X, 1.0, 2**24),
        InvalidProblem,
        "zero_point: expected an integer in",
    ),
    ("zero point is text", lambda: baracuda.quantize(X, 1.0, "3"), InvalidProblem, "zero_point: expected .*got str"),
    (
        "zero point of floats",
        lambda: baracuda.quantize(X, 1.0, torch.tensor(1.0)),
        InvalidProblem,
        "an integer tensor, up to int64, got torch.float32",
    ),
    (
        "zero point of bools",
        lambda: baracuda.quantize(X, 1.0, torch.tensor(True)),
        InvalidProblem,
        "an integer tensor, up to int64, got torch.bool",
    ),
    (
        "zero point that int64 does not hold",
        lambda: baracuda.quantize(X, 1.0, torch.tensor(2**63, dtype=torch.uint64)),
        InvalidProblem,
        r"got torch.uint64; convert it with .to\(torch.int32\)",
    ),
    (
        "zero point elsewhere",
        lambda: baracuda.quantize(X, 1.0, torch.tensor(1, device="meta")),
        InvalidProblem,
        "got one on meta",
    ),
    ("scope is text", lambda: baracuda.quantize(X, 1.0, scope="token"), InvalidProblem, "scope.*'token'"),
    (
        "axis is outside",
        lambda: baracuda.quantize(X, 1.0, scope=PerChannel(2)),
        InvalidProblem,
        r"an axis in \[-2, 1\]",
    ),
    (
        "axis of a scalar",
        lambda: baracuda.quantize(X[0, 0], 1.0, scope=PerToken()),
        InvalidProblem,
        "at least one axis",
    ),
    (
        "group does not divide",
        lambda: baracuda.quantize(X, 1.0, scope=PerGroup(4)),
        InvalidProblem,
        "6 elements, not a multiple of 4",
    ),
    (
        "range of another type",
        lambda: baracuda.quantize(X, 1.0, dtype="u4", q_max=16),
        InvalidProblem,
        r"u4's range \[0, 15\], got \[0, 16\]",
    ),
    ("range is turned", lambda: baracuda.quantize(X, 1.0, q_min=1, q_max=0), InvalidProblem, "q_min=1, q_max=0"),
    (
        "q_min is a float",
        lambda: (baracuda.quantize(X, 1.0, q_min=-4), baracuda.quantize(X, 1.0, q_min=-4.0)),
        InvalidProblem,
        r"-4\.0",
    ),
    (
        "q_max is a bool",
        lambda: (baracuda.quantize(X, 1.0, q_max=1), baracuda.quantize(X, 1.0, q_max=True)),
        InvalidProblem,
        "True",
    ),
    (
        "dtype is unknown",
        lambda: baracuda.quantize(X, 1.0, dtype="int7"),
        InvalidProblem,
        "expected an element kind .*'int7'",
    ),
    (
        "arithmetic is unknown",
        lambda: baracuda.quantize(X, 1.0, arithmetic="x"),
        InvalidProblem,
        "'divide', 'reciprocal', got 'x'",
    ),
    ("q is float", lambda: baracuda.dequantize(X, 1.0), Unsupported, "the quantized tensor: .*got f32"),
    (
        "element is not q's",
        lambda: baracuda.dequantize(Q, 1.0, element="u8"),
        InvalidProblem,
        "torch.uint8 tensor for element u8, got torch.int8",
    ),
    (
        "size does not fit",
        lambda: baracuda.dequantize(Q.byte(), 1.0, element="s4", size=9),
        InvalidProblem,
        "expected 12 or 11 .*got 9",
    ),
    (
        "fake range is too wide",
        lambda: baracuda.fake_quantize(X, 1.0, q_min=-1, q_max=200),
        InvalidProblem,
        r"got \[-1, 200\]",
    ),
    (
        "mode is unknown",
        lambda: baracuda.dynamic_quantize(X, mode="both"),
        InvalidProblem,
        "'symmetric', 'asymmetric', got 'both'",
    ),
    (
        "symmetric without a top",
        lambda: baracuda.dynamic_quantize(X, q_min=-8, q_max=0),
        InvalidProblem,
        "expected q_max > 0, got 0",
    ),
    (
        "scale dtype is foreign",
        lambda: baracuda.dynamic_quantize(X, scale_dtype="f16"),
        Unsupported,
        "the stored scale: .*got f16",
    ),
    ("no token to choose", lambda: baracuda.choose_qparams(X[0, 0]), InvalidProblem, "at least one axis"),
    (
        "the preferred backend is unknown",
        lambda: baracuda.PlanPreference(prefer_backend="cuda"),  # type: ignore[arg-type]
        InvalidProblem,
        "prefer_backend: expected one of 'reference', 'cpu', 'triton', got 'cuda'",
    ),
    (
        "a workspace limit in words",
        lambda: baracuda.PlanPreference(max_workspace_bytes="a"),  # type: ignore[arg-type]
        InvalidProblem,
        "max_workspace_bytes: expected an int or None, got 'a'",
    ),
    (
        "a gradient factor in words",
        lambda: baracuda.fake_quantize(X, 1.0, grad_factor="a"),  # type: ignore[arg-type]
        InvalidProblem,
        "grad_factor: expected a number, got 'a'",
    ),
    (
        "a mode that is none",
        lambda: baracuda.dynamic_quantize(X, mode="both"),
        InvalidProblem,
        "^mode: expected one of 'symmetric', 'asymmetric', got 'both'",
    ),
    (
        "an element that cannot be hashed",
        lambda: baracuda.quantize(X, 1.0, dtype=([],)),  # type: ignore[arg-type]
        InvalidProblem,
        "dtype: expected an element kind",
    ),
    (
        "a size of what is not packed",
        lambda: baracuda.dequantize(Q, 1.0, size=6),
        InvalidProblem,
        "size: expected None for s8, which is not packed, got 6; leave it out",
    ),
    (
        "a shape that is a number",
        lambda: baracuda.QuantizePerChannelPlan.select(
            baracuda.QuantizePerChannelDescriptor(4, 0, -128, 127, "f32", "s8"),  # type: ignore[arg-type]
            device="cpu",
        ),
        InvalidProblem,
        "shape: expected a size for each axis, .*got 4",
    ),
    (
        "a scale whose memory was freed",
        lambda: baracuda.quantize(X, _freed(torch.ones(8)[4:]), scope=PerToken()),
        InvalidProblem,
        "scale: expected a tensor with memory, got a Tensor without",
    ),
    (
        "an output that requires a gradient",
        lambda: baracuda.fake_quantize(X, 1.0, out=torch.empty(4, 6, requires_grad=True)),
        InvalidProblem,
        "out= does not record gradients",
    ),
    (
        "a pair without a scope",
        lambda: baracuda.autograd.dequantize(X, 1.0, scope=None),  # type: ignore[arg-type]
        InvalidProblem,
        "scope: expected PerTensor",
    ),
    (
        "packing floats",
        lambda: baracuda.pack_int4(X),
        InvalidProblem,
        "pack_int4: expected an integer tensor, got torch.float32",
    ),
    ("packing bytes", lambda: baracuda.pack_int4(Q, "s8"), InvalidProblem, "a packed element, 's4' or 'u4', got 's8'"),
    (
        "unpacking s8",
        lambda: baracuda.unpack_int4(Q),
        InvalidProblem,
        "unpack_int4: expected a uint8 tensor .*got torch.int8",
    ),
    (
        "unpacking too much",
        lambda: baracuda.unpack_int4(Q.byte(), size=13),
        InvalidProblem,
        "expected size 12 or 11 .*got 13",
    ),
    (
        "packing what is too large",
        lambda: baracuda.pack_int4(torch.tensor([3, 8])),
        InvalidProblem,
        r"expected values of s4, in \[-8, 7\], got \[3, 8\]; clamp them first",
    ),
    ("packing a list", lambda: baracuda.pack_int4([1]), InvalidProblem, "pack_int4: q: expected .*got list"),
    (
        "dtype is no element",
        lambda: baracuda.quantize(X, 1.0, dtype=torch.int16),
        InvalidProblem,
        r"^dtype: expected an element kind .*got torch\.int16$",
    ),
    ("dequantized to integers", lambda: baracuda.dequantize(Q, 1.0, dtype="s32"), Unsupported, "choose .* as f32$"),
    ("q is int32", lambda: baracuda.dequantize(Q.int(), 1.0), Unsupported, r"got s32; convert it, .*torch\.int8"),
    (
        "scales of another scope",
        lambda: baracuda.dequantize(Q, torch.ones(4)),
        InvalidProblem,
        r"expected shape \[\], got \[4\]; scales of PerTensor\(\) have shape \[\]: pass the scope of yours",
    ),
    ("scope is a list", lambda: baracuda.quantize(X, 1.0, scope=["token"]), InvalidProblem, "scope: expected Per"),
    (
        "scope is text, with a gradient",
        lambda: baracuda.fake_quantize(X.clone().requires_grad_(), 1.0, scope="token"),
        InvalidProblem,
        "scope: expected Per.*'token'",
    ),
    ("include_zero is 1", lambda: baracuda.dynamic_quantize(X, include_zero=1), InvalidProblem, "True or False, got 1"),
    ("q_min is text", lambda: baracuda.fake_quantize(X, 1.0, q_min="a"), InvalidProblem, "integers q_min and q_max"),
    (
        "forward-mode differentiation",
        lambda: torch.func.jvp(lambda x: baracuda.fake_quantize(x, 0.1), (X,), (X,)),
        Unsupported,
        "forward-mode differentiation is not supported; use reverse mode",
    ),
    ("a group of nothing", lambda: PerGroup(0), InvalidProblem, "an int size of at least 1, got 0"),
    ("a group of True", lambda: PerGroup(True), InvalidProblem, "an int size of at least 1, got True"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [row[1:] for row in FUNCTIONS], ids=[row[0] for row in FUNCTIONS]
)
def test_a_function_refuses(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("numel", [2**60, 2**70])
def test_a_tensor_that_no_memory_holds_is_an_error_of_ours(numel: int) -> None:
    desc = baracuda.QuantizePerTensorDescriptor(numel, -128, 127, "f32", "s8")
    with pytest.raises(InvalidProblem, match=r"less than 2\*\*58 elements"):
        baracuda.QuantizePerTensorPlan.select(desc, device="cpu")
    with pytest.raises(InvalidProblem, match=r"less than 2\*\*58 elements"):
        baracuda.QuantizedLinearPlan.select(baracuda.QuantizedLinearDescriptor(2**40, 2**40, 8), device="cpu")
