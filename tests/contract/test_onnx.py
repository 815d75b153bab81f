"""ONNX Runtime as an independent oracle, bit for bit. Where it follows another definition, a test by name says so."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
import torch
from compute import BACKENDS, compute
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from baracuda import BackendKind, DynamicRangeMode, ElementKind, PerChannel, PerGroup, PerTensor, QuantizeKind, Scope
from baracuda.core.packing import pack_int4, unpack_int4

Array = np.ndarray[Any, Any]
S8, U8, S4, U4, F16, F32 = (ElementKind[name] for name in ("S8", "U8", "S4", "U4", "F16", "F32"))
INTEGERS = {S8: np.int8, U8: np.uint8, S4: ml_dtypes.int4, U4: ml_dtypes.uint4}
FLOATS = {F16: np.float16, F32: np.float32}
LAYOUTS: list[tuple[Scope, dict[str, int]]] = [
    (PerTensor(), {}),
    (PerChannel(0), {"axis": 0}),
    (PerChannel(-1), {"axis": 2}),
    (PerGroup(4), {"axis": 2, "block_size": 4}),
    (PerGroup(3, axis=1), {"axis": 1, "block_size": 3}),
]
SHAPE = (5, 6, 16)


def onnx(op: str, inputs: dict[str, Any], outputs: int = 1, **attributes: int) -> list[Array]:
    """Run one node. Its 4-bit results come back through a cast, since the Python binding has no type for them."""
    names = [f"y{i}" for i in range(outputs)]
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    nodes = [helper.make_node(op, list(inputs), names, **attributes)]
    if op == "QuantizeLinear" and arrays["z"].dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        nodes.append(helper.make_node("Cast", names, ["cast"], to=TensorProto.INT8))
        names = ["cast"]
    results = [ValueInfoProto(name=name) for name in names]
    graph = helper.make_graph(nodes, "graph", [], results, [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {})


def qparams(scope: Scope, kind: ElementKind, element: ElementKind, seed: int) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    shape = scope.scale_shape(SHAPE)
    scale = (random.random(shape) * 0.2 + 0.003).astype(FLOATS[element])
    return np.asarray(scale), np.asarray(random.integers(kind.q_min, kind.q_max + 1, shape))


def converts_before_it_clamps(scope: Scope, kind: ElementKind) -> bool:
    """Where QuantizeLinear takes its scalar path, whose quotients must fit int32: the exceptions below show it."""
    return scope == PerGroup(3, axis=1) or (scope == PerChannel(-1) and kind.is_packed)


def activations(seed: int, huge: bool = True) -> Array:
    """Ordinary values with ties among them, and NaN and what saturates from any scale when `huge`."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal(SHAPE) * 4).astype(np.float32)
    x.flat[:40] = (random.integers(-300, 300, 40) + 0.5) * 0.0625
    x.flat[40:42] = [0.0, -0.0]
    if huge:
        x.flat[42:47] = [np.nan, np.inf, -np.inf, 3e38, -3e38]
    return random.permutation(x.flat).reshape(SHAPE)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize(("scope", "attributes"), LAYOUTS, ids=str)
def test_quantize_is_quantize_linear(
    scope: Scope, attributes: dict[str, int], kind: ElementKind, backend: BackendKind | None
) -> None:
    x = activations(1, huge=not converts_before_it_clamps(scope, kind))
    scale, zero_point = qparams(scope, kind, F32, 2)
    (want,) = onnx("QuantizeLinear", {"x": x, "s": scale, "z": zero_point.astype(INTEGERS[kind])}, **attributes)
    operands = {
        "input": torch.from_numpy(x),
        "scale": torch.from_numpy(scale),
        "zero_point": torch.from_numpy(zero_point.astype(np.int32)),
    }
    got = compute(QuantizeKind.QUANTIZE, SHAPE, F32, kind, scope=scope, backend=backend, operands=operands)["output"]
    got = unpack_int4(got, kind) if kind.is_packed else got
    np.testing.assert_array_equal(got.numpy(), want.reshape(SHAPE))


@pytest.mark.parametrize(
    "scale", [1.0, 0.1, 1 / 3, 0.007874016, 3e-39, 1e-30, 1e30, 0.0, -0.25, float("nan"), float("inf")]
)
@pytest.mark.parametrize("zero_point", [-128, 0, 5, 127])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_quantize_is_quantize_linear_for_any_scale_and_bit_pattern(scale: float, zero_point: int) -> None:
    x = np.random.default_rng(3).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    s, z = np.array(scale, np.float32), np.array(zero_point, np.int8)
    x[:600] = (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5)) * s
    (want,) = onnx("QuantizeLinear", {"x": x, "s": s, "z": z})
    operands = {"input": torch.from_numpy(x), "scale": torch.from_numpy(s), "zero_point": zero_point}
    got = compute(QuantizeKind.QUANTIZE, x.shape, F32, operands=operands)["output"]
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("element", FLOATS, ids=str)
@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize(("scope", "attributes"), LAYOUTS, ids=str)
def test_dequantize_is_dequantize_linear(
    scope: Scope, attributes: dict[str, int], kind: ElementKind, element: ElementKind, backend: BackendKind | None
) -> None:
    q = np.random.default_rng(4).integers(kind.q_min, kind.q_max + 1, SHAPE)
    scale, zero_point = qparams(scope, kind, element, 5)
    inputs = {"x": q.astype(INTEGERS[kind]), "s": scale, "z": zero_point.astype(INTEGERS[kind])}
    (want,) = onnx("DequantizeLinear", inputs, **attributes)
    stored = pack_int4(torch.from_numpy(q), kind) if kind.is_packed else torch.from_numpy(q).to(kind.dtype)
    operands = {
        "input": stored,
        "scale": torch.from_numpy(scale),
        "zero_point": torch.from_numpy(zero_point.astype(np.int32)),
    }
    got = compute(QuantizeKind.DEQUANTIZE, SHAPE, element, kind, scope=scope, backend=backend, operands=operands)[
        "output"
    ]
    np.testing.assert_array_equal(got.numpy().view(f"u{element.bits // 8}"), want.view(f"u{element.bits // 8}"))


def dynamic(x: Array, backend: BackendKind | None = BackendKind.REFERENCE) -> list[Array]:
    """Dynamic, asymmetric u8 with zero kept in the range: what DynamicQuantizeLinear defines."""
    fields = {"mode": DynamicRangeMode.ASYMMETRIC, "include_zero": True}
    operands = {"input": torch.from_numpy(x)}
    out = compute(QuantizeKind.DYNAMIC_QUANTIZE, x.shape, F32, U8, backend=backend, operands=operands, **fields)
    return [out["output"].numpy(), out["scale_out"].numpy(), out["zero_point_out"].numpy()]


def dynamic_inputs() -> list[Array]:
    random = np.random.default_rng(6)
    inputs = [
        np.array(v, np.float32) for v in ([0, 0], [1, 1, 1], [-1, -1], [5, 10], [-5, -10], [-3, 8], [7], [np.inf, 1])
    ]
    for spread, offset in ((1, 0), (0.01, 5), (1e20, -1e20), (1e-30, 0), (3, 100), (1e-3, -0.2)):
        inputs += [(random.standard_normal((17, 19)) * spread + offset).astype(np.float32) for _ in range(5)]
    return inputs


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("x", dynamic_inputs(), ids=lambda x: f"{x.size}-{x.flat[0]:.3g}")
def test_asymmetric_u8_with_zero_included_is_dynamic_quantize_linear(x: Array, backend: BackendKind | None) -> None:
    want_q, want_scale, want_zero_point = onnx("DynamicQuantizeLinear", {"x": x}, outputs=3)
    q, scale, zero_point = dynamic(x, backend)
    np.testing.assert_array_equal(scale.view(np.uint32), want_scale.view(np.uint32))
    np.testing.assert_array_equal(zero_point, want_zero_point)
    np.testing.assert_array_equal(q, want_q)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(("kind", "zero_point"), [(S8, 0), (S8, -7), (U8, 0), (U8, 131)], ids=str)
def test_a_linears_sums_are_matmul_integer(kind: ElementKind, zero_point: int, backend: BackendKind | None) -> None:
    random = np.random.default_rng(7)
    m, n, k = 7, 11, 133
    a = random.integers(kind.q_min, kind.q_max + 1, (m, k)).astype(INTEGERS[kind])
    w = random.integers(-128, 128, (n, k)).astype(np.int8)
    (want,) = onnx("MatMulInteger", {"a": a, "b": w.T.copy(), "za": np.array(zero_point, a.dtype)})
    operands = {
        "act_q": torch.from_numpy(a),
        "act_scale": 1.0,
        "act_zero_point": zero_point or None,
        "weight_q": torch.from_numpy(w),
        "weight_scale": 1.0,
    }
    mode = DynamicRangeMode.ASYMMETRIC if zero_point else DynamicRangeMode.SYMMETRIC
    got = compute(QuantizeKind.SMOOTHQUANT_LINEAR, (m, n, k), F32, kind, mode=mode, backend=backend, operands=operands)
    assert abs(want).max() < 2**24  # so that f32 holds the sums and nothing hides in a rounding
    np.testing.assert_array_equal(got["output"].numpy(), want.astype(np.float32))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("mode", DynamicRangeMode)
def test_quantized_linear_is_matmul_integer_between_float_steps(
    mode: DynamicRangeMode, backend: BackendKind | None
) -> None:
    """Asymmetric rows come from DynamicQuantizeLinear itself, symmetric ones from QuantizeLinear at max / 127."""
    random = np.random.default_rng(8)
    m, n, k = 6, 9, 65
    x = (random.standard_normal((m, k)) * random.random((m, 1)) * 5).astype(np.float32)
    w = random.integers(-128, 128, (n, k)).astype(np.int8)
    weight_scale, bias = random.random(n).astype(np.float32), random.standard_normal(n).astype(np.float32)
    rows = []
    for row in x:
        if mode is DynamicRangeMode.ASYMMETRIC:
            q, scale, zero = onnx("DynamicQuantizeLinear", {"x": row}, outputs=3)
        else:
            scale, zero = np.abs(row).max() / np.float32(127), np.array(0, np.int8)
            (q,) = onnx("QuantizeLinear", {"x": row, "s": scale, "z": zero})
        (acc,) = onnx("MatMulInteger", {"a": q[None], "b": w.T.copy(), "za": zero})
        rows.append(acc[0].astype(np.float32) * scale * weight_scale + bias)
    kind, low = (U8, 0) if mode is DynamicRangeMode.ASYMMETRIC else (S8, -127)
    operands = {
        name: torch.from_numpy(a)
        for name, a in {"activation": x, "weight_q": w, "weight_scale": weight_scale, "bias": bias}.items()
    }
    got = compute(
        QuantizeKind.QUANTIZED_LINEAR, (m, n, k), F32, kind, q_min=low, mode=mode, backend=backend, operands=operands
    )
    np.testing.assert_array_equal(got["output"].numpy().view(np.uint32), np.stack(rows).view(np.uint32))


# -- named exceptions: where ONNX Runtime computes something else ------------------------------------------------


def test_exception_float16_quantize_linear_turns_plus_infinity_into_q_min() -> None:
    """It converts to an integer before it clamps; an infinity, or a quotient beyond int32, becomes INT_MIN."""
    x, s = np.array([np.inf, 65504.0, 1.0], np.float16), np.array(2.0**-24, np.float16)
    (theirs,) = onnx("QuantizeLinear", {"x": x, "s": s, "z": np.array(0, np.int8)})
    operands = {"input": torch.from_numpy(x), "scale": torch.from_numpy(s)}
    ours = compute(QuantizeKind.QUANTIZE, x.shape, F16, operands=operands)["output"]
    assert theirs.tolist() == [-128, -128, 127]
    assert ours.tolist() == [127, 127, 127]


@pytest.mark.parametrize(("kind", "channels"), [(S4, True), (U4, True), (S8, False), (U8, False), (S4, False)], ids=str)
def test_exception_scalar_quantize_linear_turns_plus_infinity_into_q_min(kind: ElementKind, channels: bool) -> None:
    """4 bits per channel of the last axis, and blocks along any other axis, are converted before they are clamped."""
    x = np.full((1, 6) if channels else (6, 2), np.inf, np.float32)
    attributes = {"axis": 1} if channels else {"axis": 0, "block_size": 3}
    shape = (6,) if channels else (2, 2)
    s, z = np.ones(shape, np.float32), np.zeros(shape, INTEGERS[kind])
    (theirs,) = onnx("QuantizeLinear", {"x": x, "s": s, "z": z}, **attributes)
    scope = PerChannel(1) if channels else PerGroup(3, axis=0)
    operands = {"input": torch.from_numpy(x), "scale": torch.from_numpy(s)}
    ours = compute(QuantizeKind.QUANTIZE, x.shape, F32, kind, scope=scope, operands=operands)["output"]
    ours = unpack_int4(ours, kind, x.shape[1]) if kind.is_packed else ours
    assert theirs.flat[0] == kind.q_min
    assert ours.flatten()[0] == kind.q_max


def test_exception_dynamic_quantize_linear_overlooks_nan() -> None:
    x = np.array([np.nan, 1.0], np.float32)
    _, their_scale, _ = onnx("DynamicQuantizeLinear", {"x": x}, outputs=3)
    q, scale, _ = dynamic(x)
    assert np.isfinite(their_scale)
    assert np.isnan(scale)
    assert q.tolist() == [0, 0]


def test_exception_dynamic_quantize_linear_overflows_to_an_infinite_scale() -> None:
    x = np.array([3e38, -3e38], np.float32)
    _, their_scale, _ = onnx("DynamicQuantizeLinear", {"x": x}, outputs=3)
    q, scale, _ = dynamic(x)
    assert np.isinf(their_scale)
    assert scale == np.float32(6e38 / 255)
    assert q.tolist() == [255, 0]


def test_exception_dynamic_quantize_linear_divides_by_a_scale_that_underflowed_to_zero() -> None:
    x = np.array([1e-44, 3e-44], np.float32)
    _, their_scale, _ = onnx("DynamicQuantizeLinear", {"x": x}, outputs=3)
    _, scale, _ = dynamic(x)
    assert their_scale == 0
    assert scale == np.float32(2.0**-126)


def test_exception_dynamic_quantize_linear_keeps_subnormal_scales() -> None:
    x = np.array([1e-38, 2e-38], np.float32)
    _, their_scale, _ = onnx("DynamicQuantizeLinear", {"x": x}, outputs=3)
    _, scale, _ = dynamic(x)
    assert 0 < their_scale < np.float32(2.0**-126)
    assert scale == np.float32(2.0**-126)


def test_exception_matmul_integer_takes_no_zero_point_per_row() -> None:
    a, w = np.ones((2, 3), np.uint8), np.ones((3, 4), np.int8)
    with pytest.raises(Exception, match="zero point must be a scalar"):
        onnx("MatMulInteger", {"a": a, "b": w, "za": np.array([1, 2], np.uint8)})
