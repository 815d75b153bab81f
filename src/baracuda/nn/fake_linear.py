"""A linear over fake-quantized operands as one node of the graph: a small step takes as long as the host needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .rounding import Rounding


def fake_quantized_linear(
    of_x: Rounding, of_weight: Rounding, x: Tensor, weight: Tensor, bias: Tensor | None, *qparams: Tensor | None
) -> Tensor:
    """linear(of_x(x), of_weight(weight), bias) in x's type, for plain tensors.

    `qparams` are the scale and zero point of x, then those of the weight; none where both find their own.
    """
    y: Tensor = _apply(of_x, of_weight, x, weight, bias, *qparams)[0]
    return y


class _FakeQuantizedLinear(torch.autograd.Function):
    """Returns the rounded operands besides y: a second derivative reaches x and weight through a saved output, which
    knows its place in the graph, and not through anything else computed here."""

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
        x_q, w_q = of_x(dtype, x, *qparams[:2]), of_weight(dtype, weight, *qparams[2:])
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
        x_learns, weight_learns = any(learned[:2]), any(learned[2:])
        db: Tensor | None = None
        if dy is not None:
            if to_x or x_learns:
                dx = _sum(dx, dy.matmul(w_q))
            if dy.ndim > 2:
                dy, x_q = dy.flatten(0, -2), x_q.flatten(0, -2)
            if to_weight or weight_learns:
                dw = _sum(dw, dy.t().mm(x_q))
            if to_bias:
                db = dy.sum(0)
        of_x, of_weight = ctx.of_x, ctx.of_weight
        to_qparams: list[Tensor | None] = [None] * len(learned)
        if dx is not None and not of_x.straight:
            dx, *to_qparams[:2] = of_x.gradients(dx, *saved[:3], learned=x_learns)
        if dw is not None and not of_weight.straight:
            dw, *to_qparams[2:] = of_weight.gradients(dw.to(ctx.weight_dtype), *saved[-3:], learned=weight_learns)
        return None, None, dx, dw, db, *to_qparams


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


#: `apply` without its search for transforms, which plain tensors are not under.
_apply: Any = super(torch.autograd.Function, _FakeQuantizedLinear).apply
