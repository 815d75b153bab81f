"""GPTQ: integers chosen by what the layer does with them.

They keep the error of the layer's output on calibration data small, the sum over rows of (w - w_hat) H (w - w_hat),
where H holds the second moments of the input. Rows do not depend on each other. Tensors are kept transposed, `[K, N]`,
so that a column of the weight is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.cpu import columns
from .hessian import lower_factor

#: Of the mean of the diagonal, added to the diagonal.
DAMPING = 0.01
#: Columns whose errors are handed on one by one; the errors of all columns before them come in one product.
BLOCK = 64


@dataclass(frozen=True)
class FactoredHessian:
    """What does not depend on the rows of a weight: made once for all linears that read the same input.

    With columns in `order`, the damped hessian is G.T @ G for a lower triangle G. For residuals e = w - w_hat of the
    columns before a block B, the block's best values are w[B] + inverse(G[B, B]) @ G[B, before] @ e. Inside the block
    errors are handed on by the upper factor of the inverse of its own hessian, which is inverse(G[B, B]).T. So nothing
    larger than a block is inverted.
    """

    order: Tensor
    """The order in which columns are rounded."""
    factor: Tensor
    """`[K, K]`: inverse(G[B, B]) @ G[B, before] before the block on the diagonal, inverse(G[B, B]).T in it."""
    damping: float
    """What was added to the diagonal."""

    @classmethod
    def of(cls, hessian: Tensor, damping: float = DAMPING) -> FactoredHessian:
        """From second moments `[K, K]`, in their type; the columns that matter most are rounded first.

        f32 is enough: damping keeps the pivots above a hundredth of the mean of the diagonal.
        """
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        # The lower factor of the matrix in reverse order is G.T in reverse order.
        reverse = order.flip(0)
        lower, added = lower_factor(hessian.index_select(0, reverse).index_select(1, reverse), damping)
        triangle, factor = lower.flip(0, 1).t(), torch.zeros_like(hessian)
        for start in range(0, len(order), BLOCK):
            block = slice(start, min(start + BLOCK, len(order)))
            own = triangle[block, block]
            inverse = torch.linalg.solve_triangular(own, torch.eye(len(own), dtype=own.dtype), upper=False)
            factor[block, :start] = inverse @ triangle[block, :start]
            factor[block, block] = inverse.t()
        return cls(order, factor, added)

    def to(self, device: torch.device) -> FactoredHessian:
        return FactoredHessian(self.order.to(device), self.factor.to(device), self.damping)


@dataclass(frozen=True)
class Rounded:
    """What GPTQ makes of the rows of a weight."""

    integers: Tensor
    """`[N, K]`, as floats."""
    error: Tensor
    """The squared error of each row's output, `[N]`, damping included."""


def gptq(weight: Tensor, scale: Tensor, group: int, low: int, high: int, factored: FactoredHessian) -> Rounded:
    """Integers for f32 rows `[N, K]` and fixed scales `[N, K / group]`.

    Columns are rounded in the order of `factored`; each one's rounding error is compensated by those still to come.
    """
    width = weight.shape[1]
    target = weight.t().contiguous().index_select(0, factored.order)
    integers, left = torch.empty_like(target), torch.empty_like(target)
    scales, groups, factor = scale.t().contiguous(), factored.order // group, factored.factor
    handed, squares = torch.empty_like(target[:BLOCK]), torch.zeros_like(target[:BLOCK])
    for start in range(0, width, BLOCK):
        span = slice(start, min(start + BLOCK, width))
        values = torch.addmm(target[span], factor[span, :start], left[:start])
        errors = handed[: len(values)]
        _round_block(values, factor[span, span], scales, groups[span], low, high, integers[span], errors)
        torch.addcmul(target[span], integers[span], scales.index_select(0, groups[span]), value=-1, out=left[span])
        squares[: len(values)].addcmul_(errors, errors)  # errors are G @ (w - w_hat)
    places = torch.argsort(factored.order)
    return Rounded(integers.index_select(0, places).t().contiguous(), _column_sums(squares))


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
