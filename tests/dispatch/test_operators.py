"""The `baracuda::` operators: torch's own checks, compilation without graph breaks, export, modes and subclasses."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import baracuda
from baracuda import (
    Activation,
    DynamicRangeMode,
    ElementKind,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantizeKind,
    Scope,
)
from baracuda.autograd import dequantize, quantize, straight_through
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem, Spec
from baracuda.dispatch.operators import OPERATORS
from baracuda.dispatch.schema import encode
from baracuda.nn import QuantizedLinear, SmoothQuantLinear

BACKENDS = ["eager", "aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]
SCOPES: list[Scope] = [PerTensor(), PerChannel(0), PerToken(), PerGroup(4)]


def arguments(
    op: QuantizeKind, scope: Scope, kind: ElementKind, mode: DynamicRangeMode, numbers: bool
) -> tuple[Any, ...]:
    """Lawful arguments of an operator, made from its row."""
    gemm = OPS[op].category is baracuda.OpCategory.GEMM
    shape = (5, 6, 8) if gemm else (3, 8)
    scope = PerTensor() if gemm else scope
    if OPS[op].category is baracuda.OpCategory.FUSED:
        scope = PerTensor() if op.value.endswith("d_quantize") or op.value == "norm_quantize" else PerToken()
    fake = op.value.startswith("fake_quantize")
    kind = {ElementKind.S4: ElementKind.S8, ElementKind.U4: ElementKind.U8}.get(kind, kind) if fake or gemm else kind
    nonlinearity = Activation.GELU if gemm else Activation.NONE
    spec = Spec(ElementKind.F32, kind, kind.q_min, kind.q_max, scope, mode, nonlinearity=nonlinearity)
    problem = Problem.of(op, shape, spec)
    torch.manual_seed(0)
    given: list[Any] = []
    for operand in OPERATORS[op].inputs:
        wanted, element = operand.shape(problem), operand.elements(problem)[0]
        if operand.name in ("addend",):
            value: Any = None
        elif operand.name in ("bias", "weight_sum"):
            value = torch.randn(wanted) if operand.name == "bias" else None
        elif operand.number is not None:
            zero_point = operand.name.endswith("zero_point")
            number = 1 if zero_point else 0.1
            value = number if numbers else torch.full(wanted, number, dtype=element.dtype)
            given += [None, value] if numbers else [value, None]
            continue
        elif element.is_float:
            value = torch.randn(wanted)
        else:
            info = torch.iinfo(element.dtype)
            value = torch.randint(info.min, info.max + 1, wanted, dtype=element.dtype)
        given.append(value)
    return (*given, *encode(spec), 8 if kind.is_packed else None, 1.0)


@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op.value)
def test_torchs_own_checks_pass_for_every_operator(op: QuantizeKind) -> None:
    kinds = [ElementKind.S8, ElementKind.U4]
    for scope, kind in zip(itertools.islice(itertools.cycle(SCOPES), 8), itertools.cycle(kinds), strict=False):
        mode = DynamicRangeMode.ASYMMETRIC if kind is ElementKind.U4 else DynamicRangeMode.SYMMETRIC
        args = arguments(op, scope, kind, mode, numbers=kind is ElementKind.S8)
        differentiable = tuple(
            a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
        )
        torch.library.opcheck(OPERATORS[op].call, args, test_utils=["test_schema", "test_faketensor"])
        torch.library.opcheck(OPERATORS[op].call, differentiable, test_utils=["test_autograd_registration"])
    torch.library.opcheck(OPERATORS[op].call, args)


def test_every_row_of_the_op_table_is_an_operator() -> None:
    for op in OPS:
        assert str(getattr(torch.ops.baracuda, op.value).default._schema).startswith(f"baracuda::{op.value}(")


def everything(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """A little of every function, in every scope."""
    y = baracuda.fake_quantize(x, 0.02, 3, q_min=0, q_max=255, arithmetic="reciprocal")
    y = y + baracuda.fake_quantize(x, x.detach().abs().amax(-1) / 128 + 1e-6, scope=PerToken())
    q = baracuda.dynamic_quantize(y)
    z = baracuda.dequantize(q.q, q.scale, scope=PerToken())
    g = baracuda.dynamic_quantize(y, scope=PerGroup(8), mode="asymmetric", dtype="u4")
    z = z + baracuda.dequantize(g.q, g.scale, g.zero_point, scope=PerGroup(8), element="u4")
    scale, _ = baracuda.choose_qparams(z, scope=PerChannel(-1))
    c = baracuda.quantize(z, scale, scope=PerChannel(-1))
    z = z + baracuda.dequantize(c, scale, scope=PerChannel(-1))
    z = baracuda.quantized_linear(z, weight, weight_scale, mode="asymmetric", activation="silu")
    return baracuda.smoothquant_linear(baracuda.quantize(x, 0.05), weight, 0.05, weight_scale, residual=z)


def weights() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(-127, 128, (7, 16), dtype=torch.int8), torch.rand(7, 1) + 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_has_one_graph_for_every_size_and_the_eager_bits(backend: str) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for rows in (5, 6, 11):
        x = torch.randn(rows, 3, 16)
        assert torch.equal(compiled(x, *weights()), everything(x, *weights()))
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1, counts


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_compiled_qat_model_has_the_gradients_of_the_eager_one(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    baracuda.prepare_qat(model, weight_strategy="learned")
    x = torch.randn(10, 16)
    expected = train(model, x)
    got = train(torch.compile(model, fullgraph=True, dynamic=True, backend=backend), x)
    assert len(got) == len(expected) == 7
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_differentiable_pair_has_the_values_and_gradients_of_the_eager_one(dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        y = dequantize(quantize(x, 0.1), scale, zero_point)
        return straight_through(x, y).square().sum() + y.sum()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        x = (torch.arange(64) / 2).view(8, 8)
        given = [value.to(dtype).requires_grad_() for value in (x, torch.tensor(0.1), torch.tensor(2.0))]
        result = function(*given)
        return [result.detach(), *torch.autograd.grad(result, given)]

    expected, compiled = gradients(loss), torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert all(value.count_nonzero() for value in expected)
    for got, wanted in zip(gradients(compiled), expected, strict=True):
        assert torch.equal(got, wanted)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = QuantizedLinear.from_float(nn.Linear(16, 32))
        self.down = SmoothQuantLinear.from_float(nn.Linear(32, 5), 0.02, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own reader
def test_an_exported_model_runs_at_other_sizes_and_after_a_round_trip_through_a_file(tmp_path: Any) -> None:
    model = Mlp().eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (torch.randn(4, 16),), dynamic_shapes={"x": {0: rows}})
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"baracuda.quantized_linear.default", "baracuda.smoothquant_linear.default"} <= targets
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    for n in (4, 9):
        x = torch.randn(n, 16)
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(loaded.module()(x), model(x))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator() -> None:
    with Recorder() as recorder:
        baracuda.quantize(torch.randn(4), 0.1)
    assert "baracuda.quantize.default" in recorder.seen


def test_fake_and_meta_tensors_get_shapes_without_data() -> None:
    with FakeTensorMode():
        x = torch.empty(6, 10)
        q = baracuda.dynamic_quantize(x, scope=PerGroup(5), dtype="s4")
    assert (q.q.shape, q.q.dtype, q.scale.shape, q.zero_point) == ((6, 5), torch.uint8, (6, 2), None)
    meta = baracuda.fake_quantize(torch.empty(3, 4, device="meta", dtype=torch.bfloat16), 0.1)
    assert meta.device.type == "meta" and meta.shape == (3, 4) and meta.dtype is torch.bfloat16


class Wrapped(Tensor):
    """A subclass that counts what reaches it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_sees_the_operator() -> None:
    x = torch.randn(4).as_subclass(Wrapped)
    y = baracuda.fake_quantize(x, 0.1)
    assert any("fake_quantize" in name for name in Wrapped.seen)
    assert torch.equal(y.as_subclass(Tensor), baracuda.fake_quantize(x.as_subclass(Tensor), 0.1))


def test_out_works_under_a_mode_and_is_checked_there_too() -> None:
    x, out = torch.randn(5), torch.empty(5, dtype=torch.int8)
    with Recorder():
        assert baracuda.quantize(x, 0.1, out=out) is out
        with pytest.raises(baracuda.InvalidProblem, match=r"out: expected torch.int8 of shape \[5\]"):
            baracuda.quantize(x, 0.1, out=torch.empty(6, dtype=torch.int8))
    assert torch.equal(out, baracuda.quantize(x, 0.1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: baracuda.quantize(x, 0.1, scope=PerGroup(3)),
        lambda x: baracuda.quantize(x, torch.ones(5), scope=PerChannel(0)),
        lambda x: baracuda.fake_quantize(x, -1.0),
    ],
)
def test_bad_input_raises_the_same_error_through_the_operator(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(baracuda.InvalidProblem) as direct:
        call(x)
    with pytest.raises(baracuda.InvalidProblem) as observed, Recorder():
        call(x)
    assert str(direct.value) == str(observed.value)
