"""The CPU backend beside torch, torch.compile, ONNX Runtime and NumPy, with a plain copy as the ceiling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import baracuda
from baracuda import (
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    PlanPreference,
    QuantizeKind,
    Scope,
    _cpu,
)
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan

from . import _ggml as ggml
from .common import Bar, Body, arguments, interleaved, machine, per_call, show_bars, table, write_json

THREADS = 2
F16, BF16, F32, F64 = ElementKind.F16, ElementKind.BF16, ElementKind.F32, ElementKind.F64
S8, S4 = ElementKind.S8, ElementKind.S4
Q = QuantizeKind
SYMMETRIC, ASYMMETRIC = DynamicRangeMode
SCALE = 0.05


@dataclass
class Row:
    """One operation: the bytes it must move, and the time of everyone who offers it."""

    op: str
    scope: str
    element: str
    quantized: str
    moved: int
    seconds: dict[str, float] = field(default_factory=dict)

    def rate(self, who: str) -> float | None:
        """GB/s."""
        return self.moved / self.seconds[who] / 1e9 if who in self.seconds else None

    def over_copy(self, copied: int) -> float:
        return (self.moved / self.seconds["ours"]) / (copied / self.seconds["copy"])


def main(argv: Sequence[str]) -> None:
    options = arguments("cpu", argv)
    torch.set_num_threads(THREADS)
    shape = (512, 1024) if options.quick else (8192, 4096)
    repeats = 3 if options.quick else 12
    source, target = torch.randn(shape), torch.empty(shape)
    copied = 2 * source.nbytes
    print(f"{machine()}, {_cpu.isa()}, {THREADS} threads, torch {torch.__version__}, {list(shape)} elements")
    interleaved({"copy": lambda: target.copy_(source)}, 4 * repeats)  # clocks and pages warm before the first row
    rows = []
    for row, bodies in _rows(shape):
        row.seconds = interleaved({"copy": lambda: target.copy_(source), **bodies}, repeats)
        rows.append(row)
    _show(rows, copied)
    linears = [] if options.quick else _linears()
    bars = [*_bars(rows, copied), *_linear_bars(linears), *_overheads()]
    show_bars(bars)
    content = {
        "machine": machine(),
        "isa": _cpu.isa(),
        "threads": THREADS,
        "torch": torch.__version__,
        "shape": list(shape),
        "rows": [{**vars(row), "ratio_to_copy": row.over_copy(copied)} for row in rows],
        "linears": linears,
        "bars": bars,
    }
    write_json(options.json, content)


# -- memory-bound operations -------------------------------------------------------------------------------------

EVERYWHERE = [PerTensor(), PerToken(), PerChannel(0), PerChannel(-1), PerGroup(128), PerGroup(128, axis=0)]


def _rows(shape: tuple[int, int]) -> Iterator[tuple[Row, dict[str, Body]]]:
    for element in (F32, BF16, F16, F64):
        for op, scopes in (
            (Q.QUANTIZE, EVERYWHERE),
            (Q.DEQUANTIZE, [PerTensor(), PerChannel(-1)]),
            (Q.FAKE_QUANTIZE, [PerTensor(), PerChannel(0)]),
            (Q.QUANTIZE_BACKWARD, [PerTensor()]),
            (Q.DEQUANTIZE_BACKWARD, [PerTensor()]),
            (Q.FAKE_QUANTIZE_BACKWARD, [PerTensor()]),
        ):
            for scope in scopes:
                yield _case(op, shape, element, S8, scope)
        for op in (Q.QUANTIZE, Q.DEQUANTIZE):
            yield _case(op, shape, element, S4, PerGroup(128))
        for scope in EVERYWHERE:
            yield _case(Q.DYNAMIC_QUANTIZE, shape, element, S8, scope)
        yield _case(Q.DYNAMIC_QUANTIZE, shape, element, S8, PerToken(), ASYMMETRIC)
        yield _case(Q.DYNAMIC_QUANTIZE, shape, element, S4, PerGroup(128))
        yield _case(Q.CHOOSE_QPARAMS, shape, element, S8, PerToken())


def _case(
    op: QuantizeKind,
    shape: tuple[int, int],
    element: ElementKind,
    kind: ElementKind,
    scope: Scope,
    mode: DynamicRangeMode = SYMMETRIC,
) -> tuple[Row, dict[str, Body]]:
    low = -kind.q_max if mode is SYMMETRIC else kind.q_min
    stored = F64 if element is F64 else F32
    problem = Problem(op, shape, element, kind, low, kind.q_max, scope, mode, scale_element=stored)
    plan = SelectedPlan(problem, torch.device("cpu"), PlanPreference(prefer_backend=BackendKind.CPU))
    values: dict[str, Any] = {}
    for operand in OPS[op].operands:
        size, held = operand.shape(problem), operand.elements(problem)[0]
        if operand.name == "zero_point" or (operand.name == "zero_point_out" and mode is SYMMETRIC):
            values[operand.name] = None
        elif operand.name == "scale":
            values["scale"] = torch.full(size, SCALE, dtype=held.dtype)
        elif held.is_float:
            values[operand.name] = torch.randn(size).to(held.dtype)
        else:
            values[operand.name] = torch.randint(0, 100, size, dtype=torch.int32).to(held.dtype)
    if op is Q.DEQUANTIZE_BACKWARD:
        values["input"] = None
    workspace = torch.empty(plan.workspace_size(), dtype=torch.uint8)
    operands = tuple(values.values())
    moved = sum(v.nbytes for v in operands if isinstance(v, Tensor))
    name = op.value + (" asymmetric" if mode is ASYMMETRIC else "")
    bodies: dict[str, Body] = {"ours": lambda: plan.launch(operands, workspace)}
    bodies |= _peers(op, mode, scope, element, kind, values)
    return Row(name, _name(scope), element.value, kind.value, moved), bodies


def _name(scope: Scope) -> str:
    if isinstance(scope, PerGroup):
        return f"group {scope.size}" + ("" if scope.axis == -1 else f" axis {scope.axis}")
    return f"channel {scope.axis}" if isinstance(scope, PerChannel) else scope.name


# -- peers -------------------------------------------------------------------------------------------------------


def _peers(
    op: QuantizeKind, mode: DynamicRangeMode, scope: Scope, element: ElementKind, kind: ElementKind, v: dict[str, Any]
) -> dict[str, Body]:
    """What torch, torch.compile, ONNX Runtime and NumPy have for the same work, each in its usual way."""
    peers: dict[str, Body] = {}
    x, s8 = v.get("input"), kind is S8
    if op is Q.QUANTIZE and s8 and element is F32:
        if scope == PerTensor():
            peers["torch"] = lambda: torch.quantize_per_tensor(x, SCALE, 0, torch.qint8)
            peers["numpy"] = _numpy_quantize(x)
            peers |= _onnxruntime_quantize(x)
        elif isinstance(scope, PerChannel):
            scales, zeros = v["scale"].double(), torch.zeros(v["scale"].shape, dtype=torch.int64)
            peers["torch"] = lambda: torch.quantize_per_channel(x, scales, zeros, scope.axis % 2, torch.qint8)
    elif op is Q.DEQUANTIZE and s8 and element is F32 and scope == PerTensor():
        quantized = torch.quantize_per_tensor(v["output"], SCALE, 0, torch.qint8)
        peers["torch"] = quantized.dequantize
    elif op is Q.FAKE_QUANTIZE and element in (F32, BF16):
        if scope == PerTensor():
            peers["torch"] = lambda: torch.fake_quantize_per_tensor_affine(x, SCALE, 0, -128, 127)
        elif element is F32 and isinstance(scope, PerChannel):
            zeros = torch.zeros(v["scale"].shape, dtype=torch.int32)
            peers["torch"] = lambda: torch.fake_quantize_per_channel_affine(x, v["scale"], zeros, scope.axis, -128, 127)
    elif op is Q.DYNAMIC_QUANTIZE and s8 and mode is SYMMETRIC and scope == PerToken() and element in (F32, BF16):
        peers["torch"] = lambda: _eager_dynamic(x)
        compiled = torch.compile(_eager_dynamic)
        peers["torch.compile"] = lambda: compiled(x)
    return peers


def _eager_dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale


def _numpy_quantize(x: Tensor) -> Body:
    array = x.numpy()

    def body() -> object:
        import numpy as np  # a peer, only where it is installed

        return np.clip(np.rint(array / np.float32(SCALE)), -128, 127).astype(np.int8)

    return body


def _onnxruntime_quantize(x: Tensor) -> dict[str, Body]:
    with contextlib.suppress(ImportError):
        import numpy as np
        import onnx
        import onnxruntime as ort
        from onnx import TensorProto, helper

        constants = [
            helper.make_tensor("scale", TensorProto.FLOAT, [], [SCALE]),
            helper.make_tensor("zero", TensorProto.INT8, [], [0]),
        ]
        graph = helper.make_graph(
            [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])],
            "quantize",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
            [helper.make_tensor_value_info("y", TensorProto.INT8, list(x.shape))],
            constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = THREADS
        session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        binding.bind_cpu_input("x", x.numpy())
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_shape_and_type(list(x.shape), np.int8))
        return {"onnxruntime": lambda: session.run_with_iobinding(binding)}
    return {}


# -- linears -----------------------------------------------------------------------------------------------------


#: What the copies of a weight have together, so that none is in a cache when its turn comes again.
COLD = 128 << 20


def _cold(weight: Tensor, body: Callable[[Tensor], object]) -> Body:
    """The body over copies of the weight in turn, as a decode step meets one weight after the other."""
    copies = cycle([weight.clone() for _ in range(-(-COLD // weight.nbytes))])
    return lambda: body(next(copies))


def _linears() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for m, n, k in ((512, 4096, 4096), (1, 4096, 4096)):
        x, weight = torch.randn(m, k), torch.randn(n, k)
        weight_q, scale, _ = baracuda.dynamic_quantize(weight)
        out = torch.empty(m, n)
        bodies = {
            "f32": _cold(weight, lambda w, x=x: torch.nn.functional.linear(x, w)),  # type: ignore[misc]
            "ours": _cold(weight_q, lambda w, x=x, s=scale, out=out: baracuda.quantized_linear(x, w, s, out=out)),  # type: ignore[misc]
        }
        if m == 1:
            bodies |= _one_token(x, weight)
        seconds = interleaved(bodies, repeats=12 if m > 1 else 600, seconds=4.0)
        results.append({"m": m, "n": n, "k": k, "seconds": seconds, "ratio": seconds["f32"] / seconds["ours"]})
    rows = [
        (f"{r['m']} x {r['n']} x {r['k']}", name, seconds * 1e3, r["seconds"]["f32"] / seconds)
        for r in results
        for name, seconds in r["seconds"].items()
    ]
    table("linears, f32 in and out; ours is W8A8", ("m x n x k", "who", "ms", "times as fast as F.linear"), rows)
    return results


def _one_token(x: Tensor, weight: Tensor) -> dict[str, Body]:
    """Our modules, llama.cpp where it is installed, and what reading the stored weights alone takes."""
    found: dict[str, Body] = {}
    for name, kind in (("W8A8", S8), ("W4A8", S4)):
        q, scale, _ = baracuda.dynamic_quantize(weight, scope=PerChannel(0), dtype=kind)
        modules = cycle([_module(q.clone(), scale, kind, x.shape[1]) for _ in range(-(-COLD // q.nbytes))])
        found[name] = lambda modules=modules: next(modules)(x)  # type: ignore[misc]
        found[f"reading {name}"] = _cold(q, lambda w: w.view(torch.float64).sum())
    for name, each in ggml.bodies(x, weight, THREADS, COLD).items():
        turns = cycle(each)
        found[name] = lambda turns=turns: next(turns)()  # type: ignore[misc]
    return found


def _module(q: Tensor, scale: Tensor, kind: ElementKind, in_features: int) -> torch.nn.Module:
    module = baracuda.nn.QuantizedLinear(in_features, q.shape[0], False, weight_element=kind)
    module.weight, module.weight_scale = q, scale.view(-1, 1)
    return module.eval().requires_grad_(False)


# -- bars --------------------------------------------------------------------------------------------------------


def _bars(rows: list[Row], copied: int) -> Iterator[Bar]:
    def ratio(op: str, scope: str, element: str, peer: str) -> float:
        row = next(r for r in rows if (r.op, r.scope, r.element, r.quantized) == (op, scope, element, "s8"))
        return row.seconds[peer] / row.seconds["ours"]

    yield Bar("quantize f32 over torch.quantize_per_tensor", 1.8, ratio("quantize", "tensor", "f32", "torch"))
    for axis in ("channel 0", "channel -1"):
        yield Bar(f"quantize f32, {axis}, over torch.quantize_per_channel", 8, ratio("quantize", axis, "f32", "torch"))
    for element in ("f32", "bf16"):
        yield Bar(f"fake_quantize {element} over torch's", 8, ratio("fake_quantize", "tensor", element, "torch"))
        yield Bar(
            f"dynamic per token {element} over eager torch", 8, ratio("dynamic_quantize", "token", element, "torch")
        )
        compiled = ratio("dynamic_quantize", "token", element, "torch.compile")
        yield Bar(f"dynamic per token {element} over torch.compile", 2, compiled)
    for row in rows:
        yield Bar(f"copy rate: {row.op} {row.scope} {row.element} {row.quantized}", 0.9, row.over_copy(copied))


def _linear_bars(linears: list[dict[str, Any]]) -> Iterator[Bar]:
    for needed, result in zip((2.5, 3.0), linears, strict=False):
        yield Bar(f"quantized_linear m={result['m']} over F.linear in f32", needed, result["ratio"])
        seconds = result["seconds"]
        for who, peer in (("W8A8", "llama.cpp Q8_0"), ("W4A8", "llama.cpp Q4_0")):
            if who in seconds:
                yield Bar(f"one token, {who}: of the read rate", 0.85, seconds[f"reading {who}"] / seconds[who])
            if who in seconds and peer in seconds:
                yield Bar(f"one token, {who}, over {peer}", 1.0, seconds[peer] / seconds[who])


def _overheads() -> Iterator[Bar]:
    x, out = torch.randn(64), torch.empty(64, dtype=torch.int8)
    desc = baracuda.QuantizePerTensorDescriptor(numel=64, q_min=-128, q_max=127, input_element=F32, output_element=S8)
    plan = baracuda.QuantizePerTensorPlan.select(desc, device="cpu")
    args = baracuda.QuantizePerTensorArgs(input=x, scale=SCALE, zero_point=0, output=out)
    yield Bar("plan.run on 64 elements, us", 4, per_call(lambda: plan.run(args)) * 1e6, below=True)
    yield Bar(
        "baracuda.quantize on 64 elements, us", 12, per_call(lambda: baracuda.quantize(x, SCALE)) * 1e6, below=True
    )


# -- output ------------------------------------------------------------------------------------------------------


def _show(rows: list[Row], copied: int) -> None:
    peers = ("torch", "torch.compile", "onnxruntime", "numpy")
    header = ("op", "scope", "float", "int", "ours", "copy", "ours/copy", *peers, "best peer")
    lines = []
    for row in rows:
        others = [row.seconds[p] for p in peers if p in row.seconds]
        faster = min(others) / row.seconds["ours"] if others else None
        rates = (row.rate("ours"), copied / row.seconds["copy"] / 1e9, row.over_copy(copied))
        lines.append((row.op, row.scope, row.element, row.quantized, *rates, *(row.rate(p) for p in peers), faster))
    table(
        "memory-bound operations (GB/s, every input read and output written once; last column: times faster)",
        header,
        lines,
    )
