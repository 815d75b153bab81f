"""The plans of norms, gated products and linears over tokens: what they compute, promise and refuse."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import baracuda
from baracuda import BackendKind, ElementKind, InvalidProblem, PlanPreference, Unsupported

X, Y, W = (torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(3))
KINDS = ("", "Quantize", "DynamicQuantize")
BACKENDS = [PlanPreference(prefer_backend=backend) for backend in (BackendKind.REFERENCE, BackendKind.CPU)]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype)


def made(family: str, kind: str, **changes: Any) -> tuple[Any, Any]:
    """A descriptor and its arguments."""
    further = {"mode": "asymmetric", "q_min": -128} if kind == "DynamicQuantize" else {}
    sizes: dict[str, Any] = {"n": 4, "d": 6, "input_element": "f32", **further}
    if family == "Norm":
        sizes["adds"] = True
        given: dict[str, Any] = {"input": X, "norm_weight": W[0], "addend": Y, "sum_out": empty(4, 6)}
    else:
        given = {"gate": X, "up": Y}
    given |= {"scale": 0.05, "zero_point": 3} if kind == "Quantize" else {}
    if kind == "DynamicQuantize":
        given |= {"scale_out": empty(4), "zero_point_out": empty(4, dtype=torch.int32)}
    given["output"] = empty(4, 6, dtype=torch.int8 if kind else torch.float32)
    descriptor = getattr(baracuda, f"{family}{kind}Descriptor")(**sizes)
    return descriptor, getattr(baracuda, f"{family}{kind}Args")(**{**given, **changes})


def plan(family: str, kind: str) -> Any:
    return getattr(baracuda, f"{family}{kind}Plan")


@pytest.mark.parametrize("preference", BACKENDS, ids=lambda p: p.prefer_backend.value)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Norm", "Gated"])
def test_a_plan_gives_the_bits_of_the_function(family: str, kind: str, preference: PlanPreference) -> None:
    descriptor, args = made(family, kind)
    chosen = plan(family, kind).select(descriptor, preference, device="cpu")
    workspace = torch.empty(chosen.workspace_size(), dtype=torch.uint8)
    assert chosen.can_implement(args)
    chosen.run(args, workspace)
    floats = baracuda.rms_norm(X, W[0], residual=Y) if family == "Norm" else (baracuda.gated(X, Y),)
    if kind == "":
        assert torch.equal(args.output, floats[0])
    elif kind == "Quantize":
        assert torch.equal(args.output, baracuda.quantize(floats[0], 0.05, 3, q_min=-127))
    else:
        q = baracuda.dynamic_quantize(floats[0], mode="asymmetric")
        assert all(map(torch.equal, (args.output, args.scale_out, args.zero_point_out), q))  # type: ignore[arg-type]
    if family == "Norm":
        assert torch.equal(args.sum_out, floats[1]) and torch.equal(floats[1], X + Y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Norm", "Gated"])
def test_a_plan_promises_the_bits_of_the_reference_and_survives_pickling(family: str, kind: str) -> None:
    descriptor, _ = made(family, kind)
    chosen = plan(family, kind).select(descriptor, device="cpu")
    promise = chosen.precision_guarantee()
    assert promise.matches_reference and promise.batch_invariant and promise.split_invariant and promise.deterministic
    assert promise.accumulator is (ElementKind.F64 if family == "Norm" else ElementKind.F32)
    assert chosen.sku().category is baracuda.OpCategory.FUSED
    assert pickle.loads(pickle.dumps(chosen)).problem == chosen.problem


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Norm", {"addend": None}, "addend: expected a torch.float32 tensor of shape"),
        ("Norm", {"sum_out": None}, "sum_out: expected a torch.float32 tensor"),
        ("Norm", {"norm_weight": W}, r"norm_weight: expected shape \[6\], got \[4, 6\]"),
        ("Norm", {"norm_bias": W[0].double()}, "norm_bias: expected a torch.float32 .* got torch.float64"),
        ("Norm", {"input": X.bfloat16()}, "input: expected a torch.float32 tensor"),
        ("Norm", {"sum_out": X}, "overlaps input in memory"),
        ("Gated", {"up": None}, "up: expected a torch.float32 tensor of shape"),
        ("Gated", {"up": Y[:2]}, r"up: expected shape \[4, 6\], got \[2, 6\]"),
        ("Gated", {"output": Y}, "overlaps up in memory"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_was_expected(family: str, changes: dict[str, Any], message: str) -> None:
    descriptor, args = made(family, "", **changes)
    chosen = plan(family, "").select(descriptor, device="cpu")
    with pytest.raises(InvalidProblem, match=message) as raised:
        chosen.run(args)
    assert chosen.can_implement(args).reason == str(raised.value)


@pytest.mark.parametrize(
    ("descriptor", "error", "message"),
    [
        (baracuda.NormDescriptor(4, 6, eps=-1.0), InvalidProblem, "eps: expected a finite number of at least 0"),
        (baracuda.NormDescriptor(4, 6, eps=float("nan")), InvalidProblem, "eps: expected a finite number"),
        (baracuda.NormDescriptor(4, 6, eps=1), InvalidProblem, "eps: expected a value of type float, got 1"),
        (baracuda.NormDescriptor(4, 6, style="mean"), InvalidProblem, "style: expected one of 'llama'"),
        (baracuda.NormDescriptor(4, 6, input_element="s8"), Unsupported, "the float tensor"),
        (baracuda.NormDescriptor(-4, 6), InvalidProblem, "non-negative integer sizes"),
    ],
)
def test_a_wrong_description_is_refused(descriptor: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        baracuda.NormPlan.select(descriptor, device="cpu")
    with pytest.raises(InvalidProblem, match="activation: expected one of"):
        baracuda.GatedPlan.select(baracuda.GatedDescriptor(4, 6, activation="tanh"), device="cpu")


def test_what_is_not_asked_for_must_not_be_given() -> None:
    descriptor = baracuda.NormDescriptor(4, 6, "f32")
    args = baracuda.NormArgs(X, None, empty(4, 6), addend=Y)
    with pytest.raises(InvalidProblem, match=r"addend: expected shape \[0\], got \[4, 6\]; .*adds"):
        baracuda.NormPlan.select(descriptor, device="cpu").run(args)
    halves = baracuda.GatedPlan.select(baracuda.GatedDescriptor(4, 3, "f32", halves=True), device="cpu")
    with pytest.raises(InvalidProblem, match=r"up: expected shape \[0\], got \[4, 6\]; .*halves"):
        halves.run(baracuda.GatedArgs(X, Y, empty(4, 3)))


@pytest.mark.parametrize("preference", BACKENDS, ids=lambda p: p.prefer_backend.value)
def test_a_linear_over_tokens_multiplies_each_row_by_its_own_scale(preference: PlanPreference) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [2], [3], [4], [0.5]])
    weight = (torch.arange(24) * 37 % 255 - 127).to(torch.int8).view(3, 8)
    q = baracuda.dynamic_quantize(x)
    out = empty(5, 3)
    chosen = baracuda.TokenLinearPlan.select(
        baracuda.TokenLinearDescriptor(5, 3, 8, output_element="f32"), preference, device="cpu"
    )
    workspace = torch.empty(chosen.workspace_size(), dtype=torch.uint8)
    chosen.run(baracuda.TokenLinearArgs(q.q, q.scale, weight, 0.02, out), workspace)
    assert torch.equal(out, baracuda.quantized_linear(x, weight, 0.02))
    assert torch.equal(out, baracuda.smoothquant_linear(q.q, weight, q.scale, 0.02))
    rows = baracuda.smoothquant_linear(q.q.view(5, 1, 8), weight, q.scale.view(5, 1), 0.02)
    assert torch.equal(rows.view(5, 3), out)
