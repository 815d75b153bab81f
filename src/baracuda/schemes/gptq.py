"""Integers chosen by what the layer does with them: GPTQ, and a descent that goes on from its result.

Both minimise the error of the layer's output on calibration data, the sum over rows of (w - w_hat) H (w - w_hat), where
H holds the second moments of the input. Rows do not depend on each other. Tensors are kept transposed, `[K, N]`, so
that a column of the weight is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .hessian import dampen, inverse_factor

#: Of the mean of the diagonal, added to the diagonal.
DAMPING = 0.01
#: Columns whose errors are handed on one by one; the columns behind them get all of a block's in one product.
BLOCK = 64


@dataclass(frozen=True)
class FactoredHessian:
    """What does not depend on the rows of a weight: made once for all linears that read the same input."""

    hessian: Tensor
    """Damped, `[K, K]`, f32."""
    order: Tensor
    """The order in which columns are rounded."""
    factor: Tensor
    """The upper Cholesky factor of the inverse of the hessian in this order, f32."""

    @classmethod
    def of(cls, hessian: Tensor, damping: float = DAMPING) -> FactoredHessian:
        """From second moments `[K, K]`; the columns that matter most are rounded first, in f64 until the end."""
        damped = dampen(hessian, damping)
        order, kept = torch.argsort(hessian.diagonal(), descending=True, stable=True), damped.float()
        damped = damped[order[:, None], order]  # under the same name: another copy in f64 would only take memory
        return cls(kept, order, inverse_factor(damped).float())

    def to(self, device: torch.device) -> FactoredHessian:
        return FactoredHessian(self.hessian.to(device), self.order.to(device), self.factor.to(device))


def gptq(weight: Tensor, scale: Tensor, group: int, low: int, high: int, factored: FactoredHessian) -> Tensor:
    """Integers `[N, K]`, as floats, for f32 rows `[N, K]` and fixed scales `[N, K / group]`.

    Columns are rounded in the order of `factored`; each one's rounding error is compensated by those still to come.
    """
    columns = weight.shape[1]
    rest = weight.t()[factored.order].contiguous()
    integers = torch.empty_like(rest)
    scales, groups = scale.t().contiguous(), (factored.order // group).tolist()
    upper, diagonal = factored.factor, factored.factor.diagonal().tolist()
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.empty_like(rest[start:end])
        for i in range(start, end):
            s, w, q = scales[groups[i]], rest[i], integers[i]
            torch.div(w, s, out=q).round_().clamp_(low, high)
            torch.addcmul(w, q, s, value=-1, out=errors[i - start]).div_(diagonal[i])
            if i + 1 < end:
                rest[i + 1 : end].addr_(upper[i, i + 1 : end], errors[i - start], alpha=-1)
        if end < columns:
            rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    ordered = torch.empty_like(integers)
    ordered[factored.order] = integers
    return ordered.t().contiguous()


def descend(
    weight: Tensor,
    integers: Tensor,
    scale: Tensor,
    group: int,
    low: int,
    high: int,
    factored: FactoredHessian,
    stored: Callable[[Tensor], Tensor] | None,
    sweeps: int,
) -> tuple[Tensor, Tensor]:
    """Better integers and scales: each in turn is set to its best value while all others stay.

    `stored` rounds the scales `[N]` of a group to ones that can be stored; None keeps the scales as they are.
    """
    hessian = factored.hessian
    target, q, s = (x.t().contiguous() for x in (weight, integers, scale))
    diagonal = hessian.diagonal().tolist()
    for _ in range(sweeps):
        # gradient[k] = sum over j of hessian[k, j] * (target[j] - w_hat[j])
        gradient = hessian @ (target - q * s.repeat_interleave(group, 0))
        for index in range(s.shape[0]):
            span = slice(index * group, (index + 1) * group)
            own, codes, slope = hessian[span, span], q[span], gradient[span].clone()
            before = codes * s[index]
            if stored is not None:
                s[index] = _best_scale(own, codes, slope, s[index], stored)
                slope -= own @ (codes * s[index] - before)
            for start in range(0, group, BLOCK):
                end = min(start + BLOCK, group)
                earlier = codes[start:end].clone()
                for j in range(start, end):
                    step = slope[j].div(diagonal[span.start + j]).div_(s[index]).add_(codes[j])
                    step.round_().clamp_(low, high)
                    moved = (step - codes[j]).mul_(s[index])
                    codes[j] = step
                    slope[j + 1 : end].addr_(own[j, j + 1 : end], moved, alpha=-1)
                if end < group:
                    moved = (codes[start:end] - earlier).mul_(s[index])
                    slope[end:].addmm_(own[end:, start:end], moved, alpha=-1)
            gradient.addmm_(hessian[:, span], codes * s[index] - before, alpha=-1)
    return q.t().contiguous(), s.t().contiguous()


def _best_scale(
    hessian: Tensor, codes: Tensor, slope: Tensor, scale: Tensor, stored: Callable[[Tensor], Tensor]
) -> Tensor:
    """The scales `[N]` of a group that its integers would like best, where storing them leaves them better."""
    along = (codes * slope).sum(0)
    curvature = (codes * (hessian @ codes)).sum(0)
    wanted = scale + along / curvature
    rounded = stored(torch.where((curvature > 0) & (wanted > 0), wanted, scale))
    # The error is a parabola around `wanted`: rounding may have moved the scale further away than it was.
    return torch.where((rounded - wanted).abs() < (scale - wanted).abs(), rounded, scale)


def output_error(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> Tensor:
    """The squared error of each row's output, `[N]`, f64."""
    difference = weight.double() - dequantized.double()
    return ((difference @ hessian.double()) * difference).sum(1)
