"""Linears: our quantization before, torch's integer matrix product (oneDNN) in the middle, our scaling after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import cast

import torch
from torch import Tensor

from ... import _cpu
from ...core.problem import Problem, activation_problem
from ...core.types import DynamicRangeMode, ElementKind, QuantizeKind
from ..registry import Value
from .elementwise import ACTIVATIONS, DENSE, DTYPES, ELEMENTS, F32, native_plan, pitch, threads_for

#: K up to which |a| <= 128 times |w| <= 128 cannot leave 32 bits, whatever the data.
_LIBRARY_LIMIT = (2**31 - 1) // 2**14
#: An s4 weight is unpacked for the library; for fewer rows than this our own product reads it packed.
_UNPACK_FROM = 8
_ALIGN = 64


@cache
def _library_is_exact() -> bool:
    """Whether the library sums in 32 bits throughout. It may be told not to use what the processor can do."""
    if not _cpu.has_exact_int8_dot():
        return False
    for rows, a, w in product((1, 16), (-128, 127), (-128, 127)):
        sums = torch._int_mm(*(torch.full(size, v, dtype=torch.int8) for size, v in (((rows, 64), a), ((64, 16), w))))
        if not bool((sums == 64 * a * w).all()):
            return False
    return True


class Layout:
    """What the workspace holds: (offset, bytes) of each part, and whether the matrix library does the sums."""

    def __init__(self, p: Problem) -> None:
        m, n, k = p.shape
        self.dynamic = p.op is QuantizeKind.QUANTIZED_LINEAR
        rows_worth_unpacking = m >= _UNPACK_FROM or not p.weight.is_packed
        # A zero point that comes with a symmetric problem still counts.
        limit = (p if self.dynamic else replace(p, mode=DynamicRangeMode.ASYMMETRIC)).accumulator_limit
        self.library = (
            _library_is_exact()
            and 1 < k <= min(limit, _LIBRARY_LIMIT)  # of one column torch._int_mm writes nothing
            and rows_worth_unpacking
            and min(m, n) > 0
        )
        self.shifts = self.library and p.quantized is ElementKind.U8
        # The zero point of a static linear may be given or not; only a call knows.
        self.sums = self.library and (self.shifts or not self.dynamic or p.mode is DynamicRangeMode.ASYMMETRIC)
        self.size = 0
        self.act_q = self._part(m * k if self.dynamic else 0)
        self.act_scale = self._part(m * 8 if self.dynamic else 0)
        self.act_zero_point = self._part(m * 4 if self.dynamic else 0)
        self.shifted = self._part(m * k if self.shifts else 0)
        self.weight = self._part(n * k if self.library and p.weight.is_packed else 0)
        self.weight_sum = self._part(n * 4 if self.sums else 0)
        self.acc = self._part(m * n * 4 if self.library else 0)
        self.keys = self._part(native_plan(activation_problem(p)).workspace() if self.dynamic else 0)

    def _part(self, size: int) -> slice:
        start = self.size
        self.size += -(-size // _ALIGN) * _ALIGN
        return slice(start, start + size)


class Bound:
    """A linear bound to one problem: the launch."""

    def __init__(self, p: Problem) -> None:
        self.p, self.layout = p, Layout(p)
        m, n, k = self.shape = p.shape
        self.native = _cpu.Linear(
            m, n, k, ELEMENTS[p.element], ELEMENTS[p.quantized], ELEMENTS[p.weight], ACTIVATIONS[p.nonlinearity]
        )
        self.quantize = native_plan(activation_problem(p)) if self.layout.dynamic else None
        self.asymmetric = p.mode is DynamicRangeMode.ASYMMETRIC
        self.scale_code = ELEMENTS[p.scale_element]

    def __call__(self, operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        if self.layout.dynamic:
            self._dynamic(operands, cast(Tensor, workspace))
        else:
            self._static(operands, workspace)

    def _dynamic(self, operands: tuple[Value, ...], workspace: Tensor) -> None:
        x, weight, weight_scale, bias, weight_sum, residual, _, act_q, act_scale, out = operands
        base, layout = workspace.data_ptr() if workspace is not None else 0, self.layout
        m, _, k = self.shape
        act = base + layout.act_q.start if act_q is None else _address(act_q)
        scale = base + layout.act_scale.start if act_scale is None else _address(act_scale)
        zero_point = base + layout.act_zero_point.start if self.asymmetric else 0
        plan = cast("_cpu.Plan", self.quantize)
        x = cast(Tensor, x)
        plan.run_dynamic(x.data_ptr(), pitch(x), scale, zero_point, act, base + layout.keys.start, threads_for(m * k))
        if layout.library:
            stored = _view(workspace, layout.act_q, self.p.quantized.dtype, (m, k)) if act_q is None else act_q
        else:
            stored = None
        scales = cast(
            "_cpu.Scales", (scale, self.scale_code, 1.0, zero_point, 0, *_others(weight_scale, bias, residual))
        )
        self._multiply(act, DENSE, cast("Tensor | None", stored), scales, weight, weight_sum, out, workspace)

    def _static(self, operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        act_q, act_scale, act_zero_point, weight, weight_scale, bias, weight_sum, residual, _, out = operands
        act = cast(Tensor, act_q)
        kind = self.p.quantized
        zero_point = int(act_zero_point) if act_zero_point is not None else 0
        zero_point = min(max(zero_point, kind.q_min), kind.q_max)
        scale = (0, F32, float(cast(float, act_scale)), 0, zero_point)
        scales = cast("_cpu.Scales", (*scale, *_others(weight_scale, bias, residual)))
        self._multiply(act.data_ptr(), pitch(act), act, scales, weight, weight_sum, out, workspace)

    def _multiply(
        self,
        act: int,
        act_pitch: int,
        act_q: Tensor | None,
        scales: _cpu.Scales,
        weight: Value,
        weight_sum: Value,
        out: Value,
        workspace: Tensor | None,
    ) -> None:
        native, layout, weight = self.native, self.layout, cast(Tensor, weight)
        m, n, k = self.shape
        address, weight_pitch = weight.data_ptr(), pitch(weight)
        if not layout.library or _overlap(act_pitch, k) or _overlap(weight_pitch, weight.shape[1]):
            threads = threads_for(m * n * max(k, 1))
            native.small(act, act_pitch, address, weight_pitch, scales, _address(out), threads)
            return
        workspace = cast(Tensor, workspace)
        base = workspace.data_ptr()
        threads = threads_for(n * k)
        if weight_sum is None and layout.sums and (self.layout.shifts or self.asymmetric or scales[4]):
            native.weight_sums(address, weight_pitch, base + layout.weight_sum.start, threads)
            sums = base + layout.weight_sum.start
        else:
            sums = 0 if weight_sum is None else _address(weight_sum)
        if self.p.weight.is_packed:
            native.unpack(address, weight_pitch, base + layout.weight.start, threads)
            weight = _view(workspace, layout.weight, torch.int8, (n, k))
        if layout.shifts:
            native.shift(act, act_pitch, base + layout.shifted.start, threads_for(m * k))
            act_q = _view(workspace, layout.shifted, torch.int8, (m, k))
        acc = _view(workspace, layout.acc, torch.int32, (m, n))
        torch._int_mm(_rows(cast(Tensor, act_q)), _rows(weight).t(), out=acc)
        shift = 128 if layout.shifts else 0
        native.epilogue(acc.data_ptr(), scales, sums, shift, _address(out), threads_for(m * n))


def _overlap(row_pitch: int, length: int) -> bool:
    """Whether rows begin inside each other, which the library does not take."""
    return row_pitch != DENSE and row_pitch < length


def _rows(matrix: Tensor) -> Tensor:
    """The same; a lone row, which may have any stride, with one that the library understands."""
    return matrix if matrix.shape[0] > 1 else matrix.as_strided(matrix.shape, (matrix.shape[1], 1))


def _address(value: Value) -> int:
    return cast(Tensor, value).data_ptr()


def _others(weight_scale: Value, bias: Value, residual: Value) -> Iterator[float]:
    """What the epilogue reads beside the activations' scales: addresses, codes, numbers, a pitch."""
    if isinstance(weight_scale, Tensor):
        yield from (weight_scale.data_ptr(), DTYPES[weight_scale.dtype], 1.0)
    else:
        yield from (0, F32, float(cast(float, weight_scale)))
    yield from (0, F32) if bias is None else (_address(bias), DTYPES[cast(Tensor, bias).dtype])
    yield from (0, DENSE) if residual is None else (_address(residual), pitch(cast(Tensor, residual)))


def _view(workspace: Tensor, part: slice, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    return workspace.view(-1).view(torch.uint8)[part].view(dtype).view(shape)
