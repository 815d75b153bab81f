"""The four-bit rows of `bench linear`: W4A8 and W4A16 in groups of 128, and torch's int4, on the weight of the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import baracuda
from baracuda import (
    ElementKind,
    SmoothQuantLinearArgs,
    SmoothQuantLinearDescriptor,
    SmoothQuantLinearPlan,
    WeightOnlyLinearArgs,
    WeightOnlyLinearDescriptor,
    WeightOnlyLinearPlan,
)

from .linear_table import Shape

GROUP = 128
#: torch's int4 kernel takes ten times as long as bf16 for more tokens.
FEW = 64


class FourBit:
    """A weight `[N, K]` at four bits: integer factors for W4A8, float scales for W4A16."""

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale
        self.stored = baracuda.pack_int4(q, ElementKind.S4)
        self.channel = scale.float().amax(1) / 15
        self.factor = torch.clamp(torch.round(scale.float() / self.channel[:, None]), 1, 15).to(torch.uint8)

    @classmethod
    def of(cls, wide: Tensor) -> FourBit:
        n, k = wide.shape
        groups = wide.float().view(n, k // GROUP, GROUP)
        scale = (groups.abs().amax(2) / 7.5).to(torch.bfloat16)
        q = torch.clamp(torch.round(groups / scale.float()[:, :, None]), -8, 7).to(torch.int8)
        return cls(q.view(n, k), scale)

    @classmethod
    def zeros(cls, n: int, k: int) -> FourBit:
        scale = torch.ones(n, k // GROUP, dtype=torch.bfloat16, device="cuda")
        return cls(torch.zeros(n, k, dtype=torch.int8, device="cuda"), scale)

    def expanded(self) -> Tensor:
        """The s8 weight that W4A8 multiplies with."""
        n, k = self.q.shape
        return (self.q.view(n, -1, GROUP) * self.factor.view(torch.int8)[:, :, None]).view(n, k)

    def dequantized(self) -> Tensor:
        """The weight of W4A16, in f32."""
        n, k = self.q.shape
        return (self.q.view(n, -1, GROUP).float() * self.scale.float()[:, :, None]).view(n, k)

    def int4pack(self) -> tuple[Tensor, Tensor]:
        """The weight, scales and zeros as torch's int4 kernel takes them."""
        unsigned = (self.q + 8).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack((unsigned[:, ::2] << 4) | unsigned[:, 1::2], 8)
        scale = self.scale.t()
        return packed, torch.stack([scale, torch.zeros_like(scale)], 2).contiguous()


@dataclass
class Contestants:
    """Our linears of both kinds, and the distance from the formula that the second promises."""

    calls: dict[str, Callable[[], object]]
    promised: float


def four_bit_contestants(
    shape: Shape, q: Tensor, x: Tensor, out: Tensor, weight: FourBit, scale_a: float
) -> Contestants:
    m, n, k = shape
    exact = SmoothQuantLinearPlan.select(
        SmoothQuantLinearDescriptor(
            m, n, k, scale_a, output_element=ElementKind.BF16, weight_element=ElementKind.S4, weight_group=GROUP
        ),
        device="cuda",
    )
    near = WeightOnlyLinearPlan.select(WeightOnlyLinearDescriptor(m, n, k, GROUP), device="cuda")
    exact_args = SmoothQuantLinearArgs(q, weight.stored, weight.channel, out, weight_factor=weight.factor)
    near_args = WeightOnlyLinearArgs(x, weight.stored, weight.scale, out)
    rooms = [torch.empty(plan.workspace_size(), dtype=torch.uint8, device="cuda") for plan in (exact, near)]
    calls: dict[str, Callable[[], object]] = {
        "w4a8": lambda: exact.run(exact_args, rooms[0]),
        "w4a16": lambda: near.run(near_args, rooms[1]),
    }
    return Contestants(calls, near.precision_guarantee().relative_error)


def are_right(
    ours: Contestants, q: Tensor, x: Tensor, out: Tensor, weight: FourBit, scale_a: float,
    sums: Callable[[Tensor, Tensor], Tensor],
) -> bool:  # fmt: skip
    """Whether W4A8 has the bits of the formula and W4A16 the distance it promises."""
    good, full = True, out.clone()
    wide, expanded = weight.dequantized().double(), weight.expanded()
    ours.calls["w4a8"]()
    full.copy_(out)
    ours.calls["w4a16"]()
    for rows in torch.arange(x.shape[0], device="cuda").split(2048):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        expected = ((sums(q[part], expanded).float() * scale_a) * weight.channel).to(torch.bfloat16)
        good = good and torch.equal(full[part], expected)
        distance = (out[part].double() - x[part].double() @ wide.T).abs()
        bound = (ours.promised + torch.finfo(out.dtype).eps) * (x[part].double().abs() @ wide.abs().T)
        good = good and bool((distance <= bound).all())
    return good


def torchs_int4(x: Tensor, weight: FourBit) -> dict[str, Callable[[], object]]:
    """torch's int4 kernel, for as few tokens as it is fast for."""
    if x.shape[0] > FEW:
        return {}
    packed, qparams = weight.int4pack()
    return {"int4": lambda: torch._weight_int4pack_mm(x, packed, GROUP, qparams)}
