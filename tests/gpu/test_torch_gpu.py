"""Torch on a CUDA device: operators, compilation, learned gradients, modules, other people's arrays, and overheads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from learned import FULL_BLOCKS, assert_alike, problems
from learned import run as run_learned
from narrowed import assert_kernels_store_16_bits, assert_scales_nobody_reads_are_not_stored
from test_operators import Mlp, arguments, everything, weights
from torch import Tensor, nn

import baracuda
from baracuda import BackendKind, PerChannel, PerGroup, PerTensor, PerToken, Scope
from baracuda.core.optable import OPS
from baracuda.dispatch.operators import OPERATORS
from baracuda.nn import FakeQuantize, QATLinear, QuantizedLinear, SmoothQuantLinear
from cases import LARGE_LAYOUTS, LAYOUTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
SCOPES: list[Scope] = [PerTensor(), PerChannel(0), PerChannel(1), PerToken(), PerGroup(8), PerGroup(4, axis=0)]


def there(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op.value)
def test_torchs_own_checks_pass_for_every_operator(op: baracuda.QuantizeKind) -> None:
    args = arguments(op, PerToken(), baracuda.ElementKind.S8, baracuda.DynamicRangeMode.SYMMETRIC, numbers=False)
    torch.library.opcheck(OPERATORS[op].call, tuple(map(there, args)))


def test_functions_have_the_bits_of_the_cpu_eager_and_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, dynamic=True)
    for rows in (5, 64):
        x = torch.randn(rows, 3, 16)
        on_cpu = everything(x, *weights())
        given = [there(v) for v in (x, *weights())]
        assert torch.equal(everything(*given).cpu(), on_cpu)
        assert torch.equal(compiled(*given).cpu(), on_cpu)


def test_an_exported_model_runs_on_the_device() -> None:
    model, x = Mlp().eval().to(DEVICE), torch.randn(8, 16, device=DEVICE)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2, max=64)}})
    assert torch.equal(program.module()(x[:5]), model(x[:5]))


@pytest.mark.parametrize("layouts", [LAYOUTS, FULL_BLOCKS, LARGE_LAYOUTS], ids=["small", "full", "large"])
def test_the_learned_backward_has_the_bits_of_the_reference(layouts: Any) -> None:
    for p in problems(layouts):
        assert_alike(p, run_learned(p, BackendKind.TRITON, DEVICE), run_learned(p, BackendKind.REFERENCE))


def test_a_training_step_launches_one_kernel_for_each_fake_quantization() -> None:
    """Forward finds the range and rounds in one pass; backward lets the gradient through and launches nothing."""
    from baracuda.backends.triton.dynamic import kernels as ranges
    from baracuda.backends.triton.elementwise import kernels as elementwise

    torch.manual_seed(3)
    x = torch.randn(64, 256, device=DEVICE, requires_grad=True)
    module = QATLinear.from_float(nn.Linear(256, 128, device=DEVICE))
    module(x).sum().backward()
    # Kept over cycles, of which there is one: torch warns of those it would clear.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as watched:
        module(x).sum().backward()
    names = [event.name for event in watched.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in names if name in vars(ranges) or name in vars(elementwise)] == ["rows", "rows"], names


def test_fake_quantized_values_are_stored_as_16_bits_where_asked() -> None:
    assert_kernels_store_16_bits(DEVICE)


def test_scales_that_nobody_reads_are_not_stored() -> None:
    assert_scales_nobody_reads_are_not_stored(DEVICE)


@pytest.mark.parametrize("strategy", ["dynamic", "learned"])
def test_a_training_step_is_captured_as_a_cuda_graph_and_replayed_on_new_data(strategy: Any) -> None:
    """Nothing waits for the device or allocates behind torch's back, or the capture would fail."""
    torch.manual_seed(4)
    module = QATLinear.from_float(
        nn.Linear(256, 128, device=DEVICE), activation_strategy=strategy, weight_strategy=strategy
    )
    x, new = torch.randn(64, 256, device=DEVICE), torch.randn(64, 256, device=DEVICE)

    def step() -> list[Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = module(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(module.parameters()))]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(captured, step(), strict=True):  # of matrix products that may have another algorithm
        torch.testing.assert_close(replayed, eager, rtol=0.02, atol=0.02)


class Foreign:
    """An array of nobody's: all that can be said to it is DLPack."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_anything_that_speaks_dlpack_comes_in_without_a_copy() -> None:
    x = torch.randn(4, 8, device=DEVICE)
    assert baracuda.core.arrays.as_tensor(Foreign(x), "x").data_ptr() == x.data_ptr()
    assert torch.equal(baracuda.dynamic_quantize(Foreign(x)).q, baracuda.dynamic_quantize(x).q)


@pytest.mark.parametrize("scope", SCOPES, ids=str)
@pytest.mark.parametrize("strategy", ["static", "dynamic", "learned"])
def test_fake_quantize_trains_with_the_gradients_of_the_cpu(strategy: Any, scope: Scope) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(16, 64) * 3, torch.randn(16, 64)
    results = []
    for device in ("cpu", DEVICE):
        module = FakeQuantize(strategy, scope, scope.scale_shape((16, 64)), mode="asymmetric").to(device)
        leaf = x.clone().to(device).requires_grad_()
        y = module(leaf)
        y.backward(dy.to(device))
        results.append([y.detach().cpu(), leaf.grad.cpu(), *(p.grad.cpu() for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_integer_linears_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(128, 96, dtype=dtype), torch.randn(33, 128, dtype=dtype)
    for module in (
        QuantizedLinear.from_float(linear),
        QuantizedLinear.from_float(linear, mode="asymmetric"),
        SmoothQuantLinear.from_float(linear, 0.03),
    ):
        expected = module(x)
        assert torch.equal(module.to(DEVICE)(x.to(DEVICE)).cpu(), expected), module


def test_a_converted_linear_agrees_with_its_training_self_under_autocast() -> None:
    torch.manual_seed(2)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    module = QATLinear.from_float(nn.Linear(256, 64, device=DEVICE))
    x = torch.randn(128, 256, device=DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        module(x).square().mean().backward()
        module.eval()
        difference = (module(x).double() - module.convert()(x).double()).abs()
        assert (difference <= module.conversion_bound(x)).all()


# -- other people's arrays ---------------------------------------------------------------------------------------


def test_numpy_arrays_come_in_without_a_copy() -> None:
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    assert torch.equal(baracuda.quantize(x, 0.1), baracuda.quantize(torch.from_numpy(x), 0.1))


def test_cupy_arrays_come_in_without_a_copy() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    x = cupy.random.standard_normal((4, 8)).astype(cupy.float32)
    tensor = baracuda.core.arrays.as_tensor(x, "x")
    assert tensor.is_cuda and tensor.data_ptr() == x.data.ptr
    q = baracuda.dynamic_quantize(x)
    assert torch.equal(q.q, baracuda.dynamic_quantize(tensor).q)


def test_jax_arrays_come_in_without_a_copy() -> None:
    jax = pytest.importorskip("jax", reason="needs JAX")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU")
    x = jax.random.normal(jax.random.key(0), (4, 8))
    tensor = baracuda.core.arrays.as_tensor(x, "x")
    assert tensor.is_cuda and tensor.data_ptr() == x.unsafe_buffer_pointer()
    assert torch.equal(baracuda.quantize(x, 0.1), baracuda.quantize(tensor, 0.1))


# -- overhead ----------------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], object], seconds: float = 2.0) -> float:
    """The host time of a call: the least of many short batches, so that neighbours on the same cores do not count."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, (time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return best


@pytest.mark.alone
def test_a_call_on_a_small_tensor_takes_at_most_15_microseconds() -> None:
    x = torch.randn(8, 128, device=DEVICE)
    calls = {
        "quantize": lambda: baracuda.quantize(x, 0.1),
        "fake_quantize": lambda: baracuda.fake_quantize(x, 0.1),
        "dynamic_quantize": lambda: baracuda.dynamic_quantize(x),
    }
    spent = {name: microseconds(call) for name, call in calls.items()}
    assert all(t <= 15 for t in spent.values()), spent
