"""The second moments of a linear's input, summed so that no order of summation changes a bit.

Tokens arrive in chunks. The product of a chunk, x.T @ x, is summed by one thread in f32; it is then rounded to a fixed
grid and added as 64-bit integers. Integer sums do not depend on their order: one thread or many, one process or many,
and the result is the same. The product is symmetric: what lies above the panels on its diagonal is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..backends.cpu import gram
from ..core.errors import InvalidProblem

#: The grid lies this many bits below the largest moment of the first chunk: finer than f32 rounds a product of it.
GRID_BITS = 36
#: Sums stay below 2 ** 62.
_ROOM = 62
#: Rows of a product that are made and rounded together, each up to the last column of the panel on the diagonal.
PANEL = 192


class Moments:
    """Running sums of x.T @ x over chunks of tokens `[T, K]`."""

    def __init__(self, columns: int, grid: int | None = None) -> None:
        """`grid`: the exponent of the grid, which all processes must share; by default the first chunk decides it."""
        self.columns, self.grid, self.count = columns, grid, 0
        self._sums: Tensor | None = None
        self._scratch: Tensor | None = None

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
        if self._scratch is None:  # kept: fresh memory costs more time than the sums
            self._scratch = torch.empty(PANEL, len(product), dtype=torch.float64)
        for rows, columns in panels(len(product)):
            panel = self._scratch[: rows.stop - rows.start, columns].copy_(product[rows, columns])
            panel.mul_(2.0**-self.grid).round_()  # a power of two: exact
            self._sums[rows, columns] += panel.to(torch.int64)
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

    def mean(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The mean of x[i] * x[j], computed in f64."""
        mean = torch.zeros(self.columns, self.columns, dtype=dtype)
        if self._sums is None or self.grid is None:
            return mean
        for rows, columns in panels(self.columns):
            mean[rows, columns] = self._sums[rows, columns].double().mul_(2.0**self.grid).div_(max(1, self.count))
            mean[: rows.start, rows] = mean[rows, : rows.start].t()
            corner = mean[rows, rows]
            corner.copy_(corner.tril() + corner.tril(-1).t())
        return mean


def chunk_product(x: Tensor) -> Tensor:
    """x.T @ x of one chunk `[T, K]`, in f32, with zeros above its panels.

    Call it where torch has one thread: products depend on their number.
    """
    if gram.serves(x):
        return gram.product(x)
    x = x.float()
    product = x.new_zeros(x.shape[1], x.shape[1])
    for rows, columns in panels(x.shape[1]):
        product[rows, columns] = x[:, rows].t() @ x[:, columns]
    return product


def panels(columns: int) -> Iterator[tuple[slice, slice]]:
    """The panels of a symmetric matrix, from the top: their rows, and their columns up to the diagonal's last."""
    for first in range(0, columns, PANEL):
        last = min(first + PANEL, columns)
        yield slice(first, last), slice(0, last)


def grid_of(product: Tensor) -> int:
    """The exponent of the grid that the first chunk decides."""
    largest = float(product.diagonal().max()) if product.numel() else 0.0
    return (math.frexp(largest)[1] if 0 < largest < math.inf else 0) - GRID_BITS


def lower_factor(hessian: Tensor, fraction: float) -> tuple[Tensor, float]:
    """The lower Cholesky factor of second moments, which are changed, and the damping that was added to the diagonal.

    It is `fraction` of the mean of the diagonal, or more, until there is a factor.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean(dtype=torch.float64)) if len(diagonal) else 0.0
    if not math.isfinite(mean):
        raise InvalidProblem("calibration: expected finite second moments, got NaN or infinite ones; give other data")
    added, total = fraction * mean if mean > 0 else 1.0, 0.0
    while True:
        diagonal.add_(added)
        total += added
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed) and bool(torch.isfinite(lower.diagonal()).all()):
            return lower, total
        added = max(total, 1e-3 * abs(mean))
