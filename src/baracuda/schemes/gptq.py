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

from ..backends.cpu import columns
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
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        # Damped twice, so that no copy in f64 is kept while the other one is factored.
        kept = dampen(hessian, damping).float()
        factor = inverse_factor(dampen(hessian[order[:, None], order], damping))
        return cls(kept, order, factor.float().contiguous())

    def to(self, device: torch.device) -> FactoredHessian:
        return FactoredHessian(self.hessian.to(device), self.order.to(device), self.factor.to(device))


def gptq(weight: Tensor, scale: Tensor, group: int, low: int, high: int, factored: FactoredHessian) -> Tensor:
    """Integers `[N, K]`, as floats, for f32 rows `[N, K]` and fixed scales `[N, K / group]`.

    Columns are rounded in the order of `factored`; each one's rounding error is compensated by those still to come.
    """
    width = weight.shape[1]
    rest = weight.t()[factored.order].contiguous()
    integers = torch.empty_like(rest)
    scales, groups, upper = scale.t().contiguous(), factored.order // group, factored.factor
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        span, errors = slice(start, end), torch.empty_like(rest[start:end])
        _round_block(rest[span], upper[span, span], scales, groups[span], low, high, integers[span], errors)
        if end < width:
            rest[end:].addmm_(upper[span, end:].t(), errors, alpha=-1)
    ordered = torch.empty_like(integers)
    ordered[factored.order] = integers
    return ordered.t().contiguous()


def _round_block(
    rest: Tensor, upper: Tensor, scales: Tensor, groups: Tensor, low: int, high: int, integers: Tensor, errors: Tensor
) -> None:
    """Round the columns of a block one by one; the compiled loop does the same without a call for each of them."""
    if columns.serves(rest, upper, scales):
        columns.round_columns(rest, upper, scales, groups, low, high, integers, errors)
        return
    diagonal = upper.diagonal().tolist()
    for i, group in enumerate(groups.tolist()):
        s, w, q = scales[group], rest[i], integers[i]
        torch.div(w, s, out=q).round_().clamp_(low, high)
        torch.addcmul(w, q, s, value=-1, out=errors[i]).div_(diagonal[i])
        rest[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)


@dataclass(frozen=True)
class Descent:
    """What a descent ends with."""

    integers: Tensor
    """`[N, K]`, as floats."""
    scale: Tensor
    """`[N, K / group]`."""
    error: Tensor
    """The squared error of each row's output, `[N]`."""


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
) -> Descent:
    """Better integers and scales: each in turn is set to its best value while all others stay.

    `stored` rounds the scales `[N]` of a group to ones that can be stored; None keeps the scales as they are.
    """
    hessian = factored.hessian
    target, q, s = (x.t().contiguous() for x in (weight, integers, scale))
    # gradient[k] = sum over j of hessian[k, j] * (target[j] - w_hat[j])
    gradient = hessian @ (target - q * s.repeat_interleave(group, 0))
    for _ in range(sweeps):
        for index in range(s.shape[0]):
            span = slice(index * group, (index + 1) * group)
            own, codes, slope = hessian[span, span], q[span], gradient[span].clone()
            before = codes * s[index]
            if stored is not None:
                s[index] = _best_scale(own, codes, slope, s[index], stored)
                slope -= own @ (codes * s[index] - before)
            for start in range(0, group, BLOCK):
                block = slice(start, min(start + BLOCK, group))
                moved = torch.empty_like(slope[block])
                _descend_block(slope[block], own[block, block], s[index], low, high, codes[block], moved)
                if block.stop < group:
                    slope[block.stop :].addmm_(own[block.stop :, block], moved, alpha=-1)
            gradient.addmm_(hessian[:, span], (codes * s[index]).sub_(before), alpha=-1)
    error = _column_sums((target - q * s.repeat_interleave(group, 0)).mul_(gradient))
    return Descent(q.t().contiguous(), s.t().contiguous(), error)


def _descend_block(
    slope: Tensor, own: Tensor, scale: Tensor, low: int, high: int, codes: Tensor, moved: Tensor
) -> None:
    """Set the integers of a block to their best values one by one; `moved` is by how much the weights change."""
    if columns.serves(slope, own, scale):
        columns.round_columns(slope, own, scale, None, low, high, codes, moved, descends=True)
        return
    diagonal = own.diagonal().tolist()
    for j in range(len(slope)):
        step = slope[j].div(diagonal[j]).div_(scale).add_(codes[j])
        step.round_().clamp_(low, high)
        torch.sub(step, codes[j], out=moved[j]).mul_(scale)
        codes[j] = step
        slope[j + 1 :].addr_(own[j, j + 1 :], moved[j], alpha=-1)


def _best_scale(
    hessian: Tensor, codes: Tensor, slope: Tensor, scale: Tensor, stored: Callable[[Tensor], Tensor]
) -> Tensor:
    """The scales `[N]` of a group that its integers would like best, where storing them leaves them better."""
    along = _column_sums(codes * slope)
    curvature = _column_sums(codes * (hessian @ codes))
    wanted = scale + along / curvature
    rounded = stored(torch.where((curvature > 0) & (wanted > 0), wanted, scale))
    # The error is a parabola around `wanted`: rounding may have moved the scale further away than it was.
    return torch.where((rounded - wanted).abs() < (scale - wanted).abs(), rounded, scale)


def _column_sums(x: Tensor) -> Tensor:
    """The sum of each column in one order. That of torch depends on how many columns there are, and on the threads."""
    while len(x) > 1:
        half = len(x) // 2
        x = torch.cat([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]


def output_error(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> Tensor:
    """The squared error of each row's output, `[N]`, f64."""
    difference = weight.double() - dequantized.double()
    return ((difference @ hessian.double()) * difference).sum(1)
