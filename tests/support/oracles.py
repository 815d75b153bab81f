"""The numerical contract a second time, in NumPy and plain indexing: what the reference can be wrong against.

Nothing here imports baracuda's arithmetic, views or packing, but for the coefficients of the activations. Scopes are
slices, 16-bit floats are bit patterns, integer sums are int64. Every float result carries the canonical NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baracuda import (
    Activation,
    Arithmetic,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantizeKind,
    Scope,
)
from baracuda.backends.nonlinearity import F32, F64
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem, quantization_problem
from baracuda.core.scope import View
from baracuda.core.types import SUM_LANES, SUM_STEPS, NormStyle, OpCategory

Array = np.ndarray[Any, Any]
ZERO_POINT_LIMIT = 16776960
RANGES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7), "u4": (0, 15)}
SMALLEST_SCALE = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}


def quiet() -> np.errstate:
    """Overflow, 0/0 and inf - inf are results here, not accidents."""
    return np.errstate(all="ignore")


# -- bit patterns: NumPy has no bfloat16 -------------------------------------------------------------------------


def decode(x: Tensor) -> Array:
    """A float tensor as float64, or an integer one as int64: both hold every value exactly."""
    if x.dtype is torch.bfloat16:
        return (x.contiguous().view(torch.int16).numpy().astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    a = x.contiguous().numpy()
    return a.astype(np.float64 if a.dtype.kind == "f" else np.int64)


def encode(values: Array, kind: ElementKind) -> Array:
    """The bits of `values` (in their math type) rounded once to `kind`, NaN canonical, as unsigned integers."""
    with quiet():
        if kind is ElementKind.BF16:
            word = np.asarray(values, dtype=np.float32, order="C").view(np.uint32).astype(np.uint64)
            rounded = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
        dtype, nan = {
            ElementKind.F16: (np.float16, 0x7E00),
            ElementKind.F32: (np.float32, 0x7FC00000),
            ElementKind.F64: (np.float64, 0x7FF8000000000000),
        }[kind]
        stored = np.asarray(values.astype(dtype), order="C")
    unsigned = np.dtype(f"u{stored.itemsize}").type
    return np.where(np.isnan(stored), unsigned(nan), stored.view(unsigned))


def bits_of(x: Tensor) -> Array:
    """The bits of a tensor as unsigned integers."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.contiguous().view(signed).numpy().view(f"u{x.dtype.itemsize}")


def unpack(packed: Array, kind: ElementKind, size: int) -> Array:
    """4-bit values out of bytes, one at a time along the last axis."""
    values = np.zeros((*packed.shape[:-1], size), dtype=np.int64)
    for i in range(size):
        nibble = packed[..., i // 2] // 16 if i % 2 else packed[..., i // 2] % 16
        values[..., i] = np.where((kind is ElementKind.S4) & (nibble > 7), nibble - 16, nibble)
    return values


def store(q: Array, kind: ElementKind) -> Array:
    """The bytes of integers in storage: two's complement, the even index of a pair in the low half."""
    if kind in (ElementKind.S8, ElementKind.U8):
        return (q % 256).astype(np.uint8)
    nibbles = q % 16
    if not q.ndim:
        return nibbles.astype(np.uint8)
    stored = np.zeros((*q.shape[:-1], -(-q.shape[-1] // 2)), dtype=np.uint8)
    for i in range(q.shape[-1]):
        stored[..., i // 2] += (nibbles[..., i] * (16 if i % 2 else 1)).astype(np.uint8)
    return stored


# -- scopes as slices --------------------------------------------------------------------------------------------


def segments(shape: tuple[int, ...], scope: Scope) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Each scale's index, and the index of the elements that share it."""
    match scope:
        case PerTensor():
            yield (), (...,)
        case PerChannel(axis):
            for c in range(shape[axis]):
                yield (c,), (slice(None),) * (axis % len(shape)) + (c,)
        case PerToken():
            for row in itertools.product(*map(range, shape[:-1])):
                yield row, row
        case PerGroup(size, axis):
            axis %= len(shape)
            for at in itertools.product(*(range(n // size if i == axis else n) for i, n in enumerate(shape))):
                yield at, (*at[:axis], slice(at[axis] * size, (at[axis] + 1) * size), *at[axis + 1 :])


def spread(value: Any, shape: tuple[int, ...], scope: Scope, dtype: Any) -> Array:
    """A number or the scales of a scope, repeated for every element."""
    whole = np.empty(shape, dtype=dtype)
    if not isinstance(value, Tensor | np.ndarray):
        whole[...] = 0 if value is None else value
        return whole
    values = decode(value) if isinstance(value, Tensor) else value
    for at, where in segments(shape, scope):
        whole[where] = values[at]
    return whole


# -- the ops -----------------------------------------------------------------------------------------------------


def math_type(p: Problem) -> Any:
    return np.float64 if p.element is ElementKind.F64 else np.float32


def ratio(x: Array, scale: Array, p: Problem) -> Array:
    return x * (x.dtype.type(1) / scale) if p.arithmetic is Arithmetic.RECIPROCAL else x / scale


def quantized(x: Array, scale: Array, zero_point: Array, p: Problem) -> Array:
    """Saturation spelled as comparisons: at or below the low end, or NaN, is q_min; at or above the high end q_max."""
    t = np.rint(ratio(x, scale, p)).astype(np.float64)
    low, high = p.q_min - zero_point, p.q_max - zero_point
    inside = np.where((t > low) & (t < high), t, 0).astype(np.int64) + zero_point
    return np.where(t >= high, p.q_max, np.where(t > low, inside, p.q_min))


def passes(x: Array, scale: Array, zero_point: Array, p: Problem) -> Array:
    t = np.rint(ratio(x, scale, p)).astype(np.float64)
    return (t >= p.q_min - zero_point) & (t <= p.q_max - zero_point)


def dequantized(q: Array, scale: Array, zero_point: Array) -> Array:
    return (q - zero_point).astype(scale.dtype) * scale


def qparams(segment: Array, p: Problem) -> tuple[Any, int]:
    """The stored scale, in the math type, and the zero point of one segment."""
    math = segment.dtype.type
    symmetric = p.mode is DynamicRangeMode.SYMMETRIC
    if segment.size == 0 or not segment.any():
        return math(1), 0 if symmetric else p.q_min
    if np.isnan(segment).any():
        return math(np.nan), 0 if symmetric else p.q_min
    low, high = segment.min(), segment.max()
    if symmetric:
        return keep(max(abs(low), abs(high)) / math(p.q_max), p), 0
    zero = math(0)
    if p.include_zero:
        low, high = min(low, zero), max(high, zero)
    scale = asymmetric_scale(low, high, p)
    if abs(low / scale) > 2**22:
        low, high = min(low, zero), max(high, zero)
        scale = asymmetric_scale(low, high, p)
    t = np.rint(ratio(low, scale, p))
    return scale, p.q_min if np.isnan(t) else int(np.clip(p.q_min - float(t), -ZERO_POINT_LIMIT, ZERO_POINT_LIMIT))


def asymmetric_scale(low: Any, high: Any, p: Problem) -> Any:
    math = type(low)
    if low == high:
        return keep(abs(low), p)
    width = high - low
    if np.isinf(width):
        return keep((high / 2 - low / 2) / math((p.q_max - p.q_min) / 2), p)
    return keep(width / math(p.q_max - p.q_min), p)


def keep(scale: Any, p: Problem) -> Any:
    """A scale after a round trip through its storage type, never below that type's floor."""
    kind = p.scale_element
    pattern = encode(np.asarray(scale), kind)
    if kind is ElementKind.BF16:
        stored = (np.asarray(pattern, dtype=np.uint32) << 16).view(np.float32)
    else:
        stored = np.asarray(pattern).view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind.value])
    math = type(scale)
    return max(math(stored[()]), math(SMALLEST_SCALE[kind.value]))


def expected(p: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    """The bits of every output of a problem, from operands by name."""
    with quiet():
        if p.op in (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR):
            return _linear(p, operands)
        if OPS[p.op].category is OpCategory.FUSED:
            return _fused(p, operands)
        if OPS[p.op].dynamic:
            return _dynamic(p, operands)
        return _static(p, operands)


def _static(p: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    scale = spread(operands["scale"], p.shape, p.scope, math_type(p))
    zero_point = spread(operands["zero_point"], p.shape, p.scope, np.int64)
    zero_point = np.minimum(np.maximum(zero_point, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)
    x, dy = operands["input"], operands.get("grad_output")
    if dy is not None:
        dy = decode(dy).astype(math_type(p))
    match p.op:
        case QuantizeKind.DEQUANTIZE:
            return {"output": encode(dequantized(integers(x, p.quantized, p.shape), scale, zero_point), p.element)}
        case QuantizeKind.DEQUANTIZE_BACKWARD:
            return {"grad_input": encode(dy * scale, p.element)}
    x = decode(x).astype(math_type(p))
    match p.op:
        case QuantizeKind.QUANTIZE:
            return {"output": store(quantized(x, scale, zero_point, p), p.quantized)}
        case QuantizeKind.FAKE_QUANTIZE:
            return {"output": encode(dequantized(quantized(x, scale, zero_point, p), scale, zero_point), p.element)}
    dx = ratio(dy, scale, p) if p.op is QuantizeKind.QUANTIZE_BACKWARD else dy
    return {"grad_input": encode(np.where(passes(x, scale, zero_point, p), dx, dx.dtype.type(0)), p.element)}


def integers(x: Tensor, kind: ElementKind, shape: tuple[int, ...]) -> Array:
    values = decode(x)
    if kind in (ElementKind.S8, ElementKind.U8):
        return values
    return unpack(values, kind, shape[-1]) if shape else unpack(values[None], kind, 1)[0]


def _dynamic(p: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    scale, zero_point, q = dynamic(decode(operands["input"]).astype(math_type(p)), p)
    results = {"scale_out": encode(scale, p.scale_element), "output": store(q, p.quantized)}
    if operands.get("zero_point_out") is not None:
        results["zero_point_out"] = zero_point.astype(np.int32).view(np.uint32)
    if p.op is QuantizeKind.CHOOSE_QPARAMS:
        del results["output"]
    if p.op is QuantizeKind.DYNAMIC_FAKE_QUANTIZE:
        spread_scale, spread_zero_point = (spread(v, p.shape, p.scope, v.dtype) for v in (scale, zero_point))
        results["output"] = encode(dequantized(q, spread_scale, spread_zero_point), p.element)
    return results


def dynamic(x: Array, p: Problem) -> tuple[Array, Array, Array]:
    """Scale, zero point and integers of a tensor, segment by segment."""
    shape = {at: None for at, _ in segments(x.shape, p.scope)}
    scale_shape = tuple(max(index) + 1 for index in zip(*shape, strict=True)) if shape else p.segment_shape
    scale, zero_point = np.empty(scale_shape, x.dtype), np.empty(scale_shape, np.int64)
    q = np.empty(x.shape, np.int64)
    for at, where in segments(x.shape, p.scope):
        segment = np.atleast_1d(x[where])
        scale[at], zero_point[at] = qparams(segment, p)
        values = quantized(segment, np.full_like(segment, scale[at]), np.full(segment.shape, zero_point[at]), p)
        q[where] = values if x[where].ndim else values[0]
    return scale, zero_point, q


def activated(y: Array, kind: Activation) -> Array:
    """docs/numerics.md's recipe, sign and size apart; ldexp rounds once where the recipe's powers round once."""
    if kind is Activation.NONE:
        return y
    if kind is Activation.RELU:
        return np.where(y < 0, y.dtype.type(0), y)
    terms = F64 if y.dtype == np.float64 else F32
    math, limit = y.dtype.type, terms.gelu_limit if kind is Activation.GELU else terms.silu_limit
    z = np.fmin(np.abs(y), math(limit))

    def horner(coefficients: tuple[float, ...], x: Array) -> Array:
        total = np.full_like(x, coefficients[0])
        for coefficient in coefficients[1:]:
            total = total * x + math(coefficient)
        return total

    def exponential(a: Array, rest: Array) -> tuple[Array, Array]:
        n = np.rint(a * math(terms.log2e))
        r = ((a - n * math(terms.ln2_high)) - n * math(terms.ln2_low)) - rest
        return ((r * r) * horner(terms.exponential, r) + r) + math(1), n.astype(np.int32)

    if kind is Activation.SILU:
        e, n = exponential(-z, np.zeros_like(z))
        quotient = np.where(y < 0, -(z * e), y) / (np.ldexp(e, n) + math(1))
        return np.where(y < 0, np.ldexp(quotient, n), quotient)
    unit = np.ldexp(math(1), np.frexp(z)[1] - (12 if y.dtype == np.float32 else 26))
    head = np.where(z > 2.0**-60, np.floor(z / unit) * unit, math(0))
    e, n = exponential((head * head) * math(-0.5), ((z - head) * (z + head)) * math(0.5))
    tail = np.ldexp(((z * e) * horner(terms.upper, z)) / horner(terms.lower, z), n)
    return np.where(y < 0, -tail, y - tail)


def _linear(p: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    math = math_type(p)
    _, n, k = p.shape
    weight = integers(operands["weight_q"], p.weight, (n, k))
    if p.weight_group:
        weight = weight * np.repeat(decode(operands["weight_factor"]).astype(np.int64) & 15, p.weight_group, axis=1)
    weight_scale = spread(operands["weight_scale"], (n,), PerChannel(0), math)
    results = {}
    if p.op is QuantizeKind.SMOOTHQUANT_LINEAR:
        act_scale = operands["act_scale"]
        scale = np.asarray(decode(act_scale) if isinstance(act_scale, Tensor) else act_scale).astype(math)
        scale = scale[:, None] if scale.ndim else scale[()]
        zero_point, q = np.int64(operands["act_zero_point"] or 0), decode(operands["act_q"])
    else:
        activation = Problem(
            QuantizeKind.DYNAMIC_QUANTIZE, (p.shape[0], k), p.element, p.quantized, p.q_min, p.q_max, PerToken(),
            p.mode, p.arithmetic, p.scale_element, include_zero=True,
        )  # fmt: skip
        scale, zero_point, q = dynamic(decode(operands["activation"]).astype(math), activation)
        if operands.get("act_q_scratch") is not None:
            results |= {"act_q_scratch": store(q, p.quantized), "act_scale_scratch": encode(scale, p.scale_element)}
        scale, zero_point = scale[:, None], zero_point[:, None]
    acc = q @ weight.T - zero_point * weight.sum(axis=1)
    y = acc.astype(math) * scale * weight_scale
    if operands["bias"] is not None:
        y = y + decode(operands["bias"]).astype(math)
    y = activated(y, p.nonlinearity)
    if operands["residual"] is not None:
        y = y + decode(operands["residual"]).astype(math)
    return results | {"output": encode(y, p.element)}


# -- norms and gated products ------------------------------------------------------------------------------------


def held(values: Array, kind: ElementKind) -> Array:
    """The values after a round trip through a float type."""
    pattern = np.asarray(encode(values, kind))
    if kind is ElementKind.BF16:
        return (pattern.astype(np.uint32) << 16).view(np.float32)
    return pattern.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind.value])


def row_sum(row: Array) -> np.float64:
    """The sum of a row in the order of the contract: lanes, neighbouring ones, and the blocks of them as one more."""

    def blocks(values: list[Any], lanes: int, steps: int) -> list[Any]:
        found = []
        for first in range(0, max(1, len(values)), lanes * steps):
            sums = [np.float64(0.0)] * lanes
            for i, value in enumerate(values[first : first + lanes * steps]):
                sums[i % lanes] = sums[i % lanes] + value
            while len(sums) > 1:
                sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
            found.append(sums[0])
        return found

    parts = blocks(list(row), View(1, 1, len(row), 1).sum_lanes, SUM_STEPS)
    return blocks(parts, SUM_LANES, max(1, -(-len(parts) // SUM_LANES)))[0]


def _fused(p: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    math, results = math_type(p), {}
    if "gate" in operands:
        gate = decode(operands["gate"]).astype(math)
        up = gate[..., p.shape[-1] :] if p.halves else decode(operands["up"]).astype(math)
        y = held(activated(gate[..., : p.shape[-1]], p.nonlinearity), p.element).astype(math) * up
    else:
        x = decode(operands["input"])
        if p.adds:
            x = held(x.astype(math) + decode(operands["addend"]).astype(math), p.element)
            results["sum_out"] = encode(x, p.element)
        y = _normed(x.reshape(-1, p.shape[-1]) if x.size else x.reshape(0, p.shape[-1]), p, operands).reshape(p.shape)
    if p.op in (QuantizeKind.NORM, QuantizeKind.GATED):
        return results | {"output": encode(y, p.element)}
    y, inner = held(y, p.element).astype(math), quantization_problem(p)
    if not OPS[p.op].dynamic:
        scale = spread(operands["scale"], p.shape, p.scope, math)
        zero_point = spread(operands["zero_point"], p.shape, p.scope, np.int64)
        zero_point = np.minimum(np.maximum(zero_point, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)
        return results | {"output": store(quantized(y, scale, zero_point, inner), p.quantized)}
    scale, zero_point, q = dynamic(y, inner)
    results |= {"scale_out": encode(scale, p.scale_element), "output": store(q, p.quantized)}
    if operands.get("zero_point_out") is not None:
        results["zero_point_out"] = zero_point.astype(np.int32).view(np.uint32)
    return results


def _normed(rows: Array, p: Problem, operands: dict[str, Any]) -> Array:
    math, wide = math_type(p), rows.astype(np.float64)
    size = np.float64(p.shape[-1])
    if p.norm is NormStyle.LAYER:
        wide = np.stack([row - row_sum(row) / size for row in wide]) if len(wide) else wide
    y = np.empty(rows.shape, math)
    for i, row in enumerate(wide):
        inverse = np.float64(1) / np.sqrt(row_sum(row * row) / size + np.float64(p.eps))
        y[i] = row.astype(math) * math(inverse)
    if p.norm is NormStyle.LLAMA:
        y = held(y, p.element).astype(math)
    if operands["norm_weight"] is not None:
        weight = decode(operands["norm_weight"]).astype(math)
        y = y * (math(1) + weight if p.norm is NormStyle.GEMMA else weight)
    if operands["norm_bias"] is not None:
        y = y + decode(operands["norm_bias"]).astype(math)
    return y
