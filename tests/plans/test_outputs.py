"""Outputs that cannot be written to: refused in words, and left as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plan_table import POISON
from torch import Tensor

import baracuda
from baracuda import InvalidProblem, PerGroup

X = torch.linspace(-3, 3, 24).view(4, 6)
W, WS = torch.ones(3, 6, dtype=torch.int8), torch.ones(3)
Q8, LINEAR_OUT = torch.full((4, 6), POISON, dtype=torch.int8), torch.full((4, 3), float(POISON))


def quantize(out: Tensor) -> Tensor:
    return baracuda.quantize(X, 1.0, out=out)


def linear(out: Tensor) -> Tensor:
    return baracuda.quantized_linear(X, W, WS, out=out)


def over_its_neighbour(out: Tensor) -> Tensor:
    return baracuda.fake_quantize(out.view(-1)[:6], 1.0, out=out.view(-1)[1:7])


OUTS: list[tuple[str, Callable[[Tensor], object], Tensor, str]] = [
    ("dtype", quantize, Q8.to(torch.uint8), "int8.*got torch.uint8"),
    ("shape", quantize, Q8.view(6, 4), r"\[4, 6\], got \[6, 4\]"),
    ("expanded", quantize, Q8[:, :1].expand(4, 6), "an element per address"),
    ("packed shape", lambda out: baracuda.quantize(X, 1.0, dtype="s4", out=out), Q8.to(torch.uint8), r"\[4, 3\]"),
    ("elsewhere", lambda out: baracuda.fake_quantize(X, 1.0, out=out), X.to("meta"), "on cpu, got .* on meta"),
    ("overlap", over_its_neighbour, LINEAR_OUT, "overlaps input in memory"),
    ("linear shape", linear, LINEAR_OUT.T, r"\[4, 3\], got \[3, 4\]"),
    ("linear dtype", linear, LINEAR_OUT.long(), "torch.float32.*got torch.int64"),
    ("linear strided dtype", linear, LINEAR_OUT.long().view(3, 4).T, "torch.float32.*got torch.int64"),
    ("linear elsewhere", linear, LINEAR_OUT.view(3, 4).T.to("meta"), "on cpu, got .* on meta"),
    ("linear expanded", linear, LINEAR_OUT[:1].expand(4, 3), "an element per address"),
]


@pytest.mark.parametrize(("call", "out", "message"), [row[1:] for row in OUTS], ids=[row[0] for row in OUTS])
def test_a_wrong_out_is_refused_and_left_alone(call: Callable[[Tensor], object], out: Tensor, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        call(out)
    assert out.device.type == "meta" or (out == POISON).all()


def test_out_and_gradients_exclude_each_other() -> None:
    x, out = X.clone().requires_grad_(), torch.full_like(X, POISON)
    with pytest.raises(InvalidProblem, match=r"out= does not record gradients"):
        baracuda.fake_quantize(x, 1.0, out=out)
    assert (out == POISON).all()
    with torch.no_grad():
        assert baracuda.fake_quantize(x, 1.0, out=out) is out


def test_an_output_over_scales_that_have_its_strides_is_refused() -> None:
    """They are read to the end, so memory that begins alike and is longer is not the same tensor."""
    memory, x = torch.rand(16, 8) + 0.1, torch.randn(16, 8)
    with pytest.raises(InvalidProblem, match="output overlaps scale"):
        baracuda.fake_quantize(x, memory[:4], scope=PerGroup(4, axis=0), out=memory)
    assert torch.equal(baracuda.fake_quantize(x, 0.1, out=x), x), "in place is"


def test_an_output_that_is_no_tensor_is_told_with_and_without_gradients() -> None:
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(InvalidProblem, match=r"expected a torch\.int8 tensor.*got"):
            baracuda.quantize(x, 0.1, out="a")  # type: ignore[call-overload]
