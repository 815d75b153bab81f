"""A linear over fake-quantized operands as one node of the graph: a small step takes as long as the host needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .fake_quantize import FakeQuantize
from .rounding import Rounding


def fake_quantized_linear(
    act: FakeQuantize, wgt: FakeQuantize, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """linear(act(x), wgt(weight), bias) in x's type, with the same bits and gradients. For plain tensors alone."""
    of_x, of_weight = act.rounding(x), wgt.rounding(weight)
    x_qparams = (None, None) if of_x.straight else act.qparams(x)
    weight_qparams = (None, None) if of_weight.straight else wgt.qparams(weight)
    y, _, _ = _FakeQuantizedLinear.record(of_x, of_weight, x, weight, bias, *x_qparams, *weight_qparams)
    return y


class _FakeQuantizedLinear(torch.autograd.Function):
    """Returns the rounded operands besides y: a second derivative reaches x and weight through a saved output, which
    knows its place in the graph, and not through anything else computed here."""

    @classmethod
    def record(cls, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`apply` without its search for transforms, which plain tensors are not under."""
        results: tuple[Tensor, Tensor, Tensor] = super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]
        return results

    @staticmethod
    def forward(
        ctx: Any,
        of_x: Rounding,
        of_weight: Rounding,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *qparams: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, saved = x.dtype, []
        x_q, w_q = of_x(x, *qparams[:2]), of_weight(weight, *qparams[2:])
        if weight.dtype is not dtype:
            w_q = w_q.to(dtype)
        if bias is not None and bias.dtype is not dtype:
            bias = bias.to(dtype)
        if not of_x.straight:
            saved += [x, *qparams[:2]]
        if not of_weight.straight:
            saved += [weight, *qparams[2:]]
        ctx.of_x, ctx.of_weight, ctx.weight_dtype = of_x, of_weight, weight.dtype
        ctx.save_for_backward(x_q, w_q, *saved)
        ctx.set_materialize_grads(False)
        return functional.linear(x_q, w_q, bias), x_q, w_q

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None, dw: Tensor | None) -> tuple[Tensor | None, ...]:
        """Where a gradient's type is not that of its tensor, autograd itself converts it."""
        x_q, w_q, *saved = ctx.saved_tensors
        _, _, to_x, to_weight, to_bias, *learned = ctx.needs_input_grad
        x_learns, weight_learns = learned[0] or learned[1], learned[2] or learned[3]
        db: Tensor | None = None
        if dy is not None:
            lines = dy if dy.ndim == 2 else dy.reshape(-1, dy.shape[-1])
            if to_x or x_learns:
                dx = _sum(dx, lines.mm(w_q) if x_q.ndim == 2 else lines.mm(w_q).view(x_q.shape))
            if to_weight or weight_learns:
                dw = _sum(dw, lines.t().mm(x_q if x_q.ndim == 2 else x_q.view(-1, x_q.shape[-1])))
            if to_bias:
                db = lines.sum(0)
        of_x, of_weight = ctx.of_x, ctx.of_weight
        to_qparams: list[Tensor | None] = [None] * 4
        if dx is not None and not of_x.straight:
            dx, *to_qparams[:2] = of_x.gradients(dx, *saved[:3], learned=x_learns)
        if dw is not None and not of_weight.straight:
            dw, *to_qparams[2:] = of_weight.gradients(dw.to(ctx.weight_dtype), *saved[-3:], learned=weight_learns)
        return None, None, dx, dw, db, *to_qparams


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b
