"""The second moments of a linear's input, summed so that no order of summation changes a bit.

Tokens arrive in chunks. The product of a chunk, x.T @ x, is taken by one thread in f32; it is then rounded to a fixed
grid and added as 64-bit integers. Integer sums do not depend on their order: one thread or many, one process or many,
and the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..core.errors import InvalidProblem

#: The grid lies this many bits below the largest moment of the first chunk: finer than f32 rounds a product of it.
GRID_BITS = 36
#: Sums stay below 2 ** 62.
_ROOM = 62
#: Rows of a product that are rounded together.
_ROWS = 128


class Moments:
    """Running sums of x.T @ x over chunks of tokens `[T, K]`."""

    def __init__(self, columns: int, grid: int | None = None) -> None:
        """`grid`: the exponent of the grid, which all processes must share; by default the first chunk decides it."""
        self.columns, self.grid, self.count = columns, grid, 0
        self._sums: Tensor | None = None

    def add(self, product: Tensor, count: int) -> None:
        """Take up the product of a chunk of `count` tokens, as `chunk_product` returns it."""
        if self.grid is None:
            self.grid = grid_of(product)
        largest = float(product.diagonal().max()) if product.numel() else 0.0
        if not math.isfinite(largest):
            raise InvalidProblem("calibration: expected finite inputs, got NaN or infinite ones; give other data")
        if math.frexp(largest)[1] - self.grid > _ROOM - 20:  # a million such chunks fit
            raise InvalidProblem(
                f"calibration: a chunk of tokens has a second moment of {largest:.3g}, too far above that of the first "
                f"one (2 ** {self.grid + GRID_BITS}); shuffle the data"
            )
        if self._sums is None:
            self._sums = torch.zeros(product.shape, dtype=torch.int64)
        for first in range(0, len(product), _ROWS):  # a few rows at a time: f64 copies of all take memory
            rows = product[first : first + _ROWS].double()
            self._sums[first : first + _ROWS] += torch.ldexp(rows, torch.tensor(-self.grid)).round_().to(torch.int64)
        self.count += count

    def merge(self, other: Moments) -> None:
        """Add the sums of another process."""
        if other._sums is None:
            return
        if self.grid is not None and self.grid != other.grid:
            raise InvalidProblem(f"moments: expected one grid for all processes, got {self.grid} and {other.grid}")
        self.grid = other.grid
        self._sums = other._sums.clone() if self._sums is None else self._sums.add_(other._sums)
        self.count += other.count

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add the sums of all processes; `total` adds up a tensor of integers over them."""
        if self._sums is None:
            self._sums = torch.zeros(self.columns, self.columns, dtype=torch.int64)
        self._sums = total(self._sums)
        self.count = int(total(torch.tensor(self.count)))

    def mean(self) -> Tensor:
        """The mean of x[i] * x[j], in f64."""
        if self._sums is None or self.grid is None:
            return torch.zeros(self.columns, self.columns, dtype=torch.float64)
        return self._sums.double().mul_(2.0**self.grid).div_(max(1, self.count))


def chunk_product(x: Tensor) -> Tensor:
    """x.T @ x of one chunk `[T, K]`, in f32. Call it where torch has one thread: products depend on their number."""
    x = x.float()
    return x.t() @ x


def grid_of(product: Tensor) -> int:
    """The exponent of the grid that the first chunk decides."""
    largest = float(product.diagonal().max()) if product.numel() else 0.0
    return (math.frexp(largest)[1] if 0 < largest < math.inf else 0) - GRID_BITS


def dampen(hessian: Tensor, fraction: float) -> Tensor:
    """A positive definite copy in f64: `fraction` of the mean of the diagonal is added to each of its elements."""
    damped = hessian.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    mean = float(diagonal.mean()) if len(diagonal) else 0.0
    diagonal.add_(fraction * mean if mean > 0 else 1.0)
    return damped


def inverse_factor(damped: Tensor) -> Tensor:
    """The upper Cholesky factor U of the inverse, U.T @ U = inverse, in f64; more damping until there is one."""
    extra = 0.0
    while True:
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            factor = torch.cholesky_inverse(factor)
            factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
            if not int(failed):
                upper: Tensor = factor
                return upper
        extra = max(2 * extra, 1e-3 * float(damped.diagonal().mean()))
        if not math.isfinite(extra):
            raise InvalidProblem("calibration: expected finite second moments, got NaN or infinite ones")
        damped = damped + extra * torch.eye(len(damped), dtype=damped.dtype)
