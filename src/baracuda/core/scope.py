"""Scopes: which elements share one (scale, zero point). A scope turns a shape into a view of four integers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from .errors import InvalidProblem

__all__ = [
    "DynamicRangeScope",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Scope",
]
from .types import SUM_LANES, SUM_STEPS

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A contiguous tensor seen as `[repeat, rows, run, inner]`; its scales are `[rows, inner]`.

    The elements of one segment, those that share scale `(row, i)`, differ in `repeat` and `run` only. Kernels see
    nothing but these integers: `inner > 1` means strided segments, `repeat > 1` segments made of several runs.
    """

    repeat: int
    rows: int
    run: int
    inner: int

    @classmethod
    def of(cls, repeat: int, rows: int, run: int, inner: int) -> View:
        """The canonical view: views that index alike become one form, so that schedules have fewer cases."""
        if rows == 1:
            return cls(1, 1, repeat * run, inner)
        if run == 1:
            return cls(1, 1, repeat, rows * inner)
        return cls(repeat, rows, run, inner)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.repeat, self.rows, self.run, self.inner)

    @property
    def segments(self) -> int:
        return self.rows * self.inner

    @property
    def segment_length(self) -> int:
        return self.repeat * self.run

    @property
    def numel(self) -> int:
        return self.segments * self.segment_length

    @property
    def sum_lanes(self) -> int:
        """The lanes of a sum along the run: fewer where so many neighbouring segments are summed side by side."""
        return max(8, SUM_LANES >> max(0, self.inner - 1).bit_length())

    @property
    def sum_blocks(self) -> int:
        """The blocks that a sum cuts each run into."""
        return -(-self.run // (self.sum_lanes * SUM_STEPS))


class Scope:
    """Base of the four scopes. A new one has a name, a view and a scale shape, and stands in SCOPES."""

    __slots__ = ()
    name: ClassVar[str]

    def view(self, shape: Shape) -> View:
        raise NotImplementedError

    def scale_shape(self, shape: Shape) -> Shape:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class PerTensor(Scope):
    """One scale for the whole tensor; scales have shape `[]`."""

    name: ClassVar[str] = "tensor"

    def view(self, shape: Shape) -> View:
        return View.of(1, 1, prod(shape), 1)

    def scale_shape(self, shape: Shape) -> Shape:
        return ()


@dataclass(frozen=True, slots=True)
class PerChannel(Scope):
    """One scale for each index of `axis`; scales have shape `[C]`."""

    axis: int
    name: ClassVar[str] = "channel"

    def __post_init__(self) -> None:
        _require_integer_axis(self, self.axis)

    def view(self, shape: Shape) -> View:
        axis = _axis(self, shape)
        return View.of(prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]), 1)

    def scale_shape(self, shape: Shape) -> Shape:
        return (shape[_axis(self, shape)],)


@dataclass(frozen=True, slots=True)
class PerToken(Scope):
    """One scale for each row along the last axis; scales have shape `x.shape[:-1]`."""

    name: ClassVar[str] = "token"
    axis: ClassVar[int] = -1

    def view(self, shape: Shape) -> View:
        _axis(self, shape)
        return View.of(1, prod(shape[:-1]), shape[-1], 1)

    def scale_shape(self, shape: Shape) -> Shape:
        _axis(self, shape)
        return shape[:-1]


@dataclass(frozen=True, slots=True)
class PerGroup(Scope):
    """One scale for each `size` consecutive elements along `axis`; scales have the shape with that axis divided."""

    size: int
    axis: int = -1
    name: ClassVar[str] = "group"

    def __post_init__(self) -> None:
        _require_integer_axis(self, self.axis)
        if type(self.size) is not int or self.size < 1:
            raise InvalidProblem(f"PerGroup: expected an int size of at least 1, got {self.size!r}")

    def view(self, shape: Shape) -> View:
        axis, groups = self._groups(shape)
        return View.of(1, prod(shape[:axis]) * groups, self.size, prod(shape[axis + 1 :]))

    def scale_shape(self, shape: Shape) -> Shape:
        axis, groups = self._groups(shape)
        return (*shape[:axis], groups, *shape[axis + 1 :])

    def _groups(self, shape: Shape) -> tuple[int, int]:
        axis = _axis(self, shape)
        if shape[axis] % self.size:
            raise InvalidProblem(
                f"{self}: axis {axis} has {shape[axis]} elements, not a multiple of {self.size}; "
                "pad it or choose a divisor"
            )
        return axis, shape[axis] // self.size


#: All scopes there are. Their fields are integers called `axis` and `size`, as the operators of torch take them.
SCOPES = (PerTensor, PerChannel, PerToken, PerGroup)


def require_scope(value: object) -> None:
    if not isinstance(value, Scope):
        scopes = "PerTensor(), PerChannel(axis), PerToken() or PerGroup(size)"
        raise InvalidProblem(f"scope: expected {scopes}, got {value!r}")


def _require_integer_axis(scope: PerChannel | PerGroup, axis: object) -> None:
    """At construction: to a cache of plans 1.0 and True are the same as 1."""
    if type(axis) is not int:
        raise InvalidProblem(f"{type(scope).__name__}: expected an axis that is an int, got {axis!r}")


def _axis(scope: PerChannel | PerToken | PerGroup, shape: Shape) -> int:
    rank, axis = len(shape), scope.axis
    if not -rank <= axis < rank:
        expected = f"an axis in [{-rank}, {rank - 1}]" if rank else "a tensor with at least one axis"
        raise InvalidProblem(f"{scope}: expected {expected} for shape {list(shape)}, got axis {axis!r}")
    return axis % rank


class DynamicRangeScope:
    """The original's spelling of the scopes."""

    TENSOR = PerTensor()
    TOKEN = PerToken()

    @staticmethod
    def channel(axis: int) -> PerChannel:
        return PerChannel(axis)

    @staticmethod
    def group(axis: int, group_size: int) -> PerGroup:
        return PerGroup(group_size, axis)
