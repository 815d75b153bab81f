"""Linears: one native call for few rows; for many, torch's integer matrix product (oneDNN) between our kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import cast

import torch
from torch import Tensor

from ... import _cpu
from ...core.problem import Problem, activation_problem
from ...core.types import DynamicRangeMode, ElementKind, QuantizeKind
from ..registry import Launch, Value
from .elementwise import ACTIVATIONS, DENSE, DTYPES, ELEMENTS, F32, native_plan, pitch, threads_for

#: K up to which |a| <= 128 times |w| <= 128 cannot leave 32 bits, whatever the data.
_LIBRARY_LIMIT = (2**31 - 1) // 2**14
#: Up to this many rows our own product, which reads each weight once as it is stored, beats the library.
_FEW_ROWS = 16
#: The library multiplies at most this many rows at a time. The sums of more take longer to get from the system, page by
#: page, than to compute.
_ROWS_AT_ONCE = 1024
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
        # A zero point that comes with a symmetric problem still counts.
        limit = (p if self.dynamic else replace(p, mode=DynamicRangeMode.ASYMMETRIC)).accumulator_limit
        self.library = (
            _library_is_exact()
            and 1 < k <= min(limit, _LIBRARY_LIMIT)  # of one column torch._int_mm writes nothing
            and m > _FEW_ROWS
            and n > 0
        )
        self.shifts = self.library and p.quantized is ElementKind.U8
        # The zero point of a static linear may be given or not; only a call knows.
        self.sums = self.library and (self.shifts or not self.dynamic or p.mode is DynamicRangeMode.ASYMMETRIC)
        self.size = 0
        self.act_q = self._part(m * k if self.dynamic else 0)
        self.act_scale = self._part(m * 8 if self.dynamic else 0)
        self.act_zero_point = self._part(m * 4 if self.dynamic else 0)
        self.keys = self._part(native_plan(activation_problem(p)).workspace() if self.dynamic and self.library else 0)
        self.shifted = self._part(m * k if self.shifts else 0)
        self.weight = self._part(n * k if self.library and p.weight.is_packed else 0)
        self.weight_sum = self._part(n * 4 if self.sums else 0)
        blocks = -(-m // _ROWS_AT_ONCE)
        self.rows = -(-m // (blocks * _ALIGN)) * _ALIGN if blocks > 1 else m
        self.acc = self._part(self.rows * n * 4 if self.library else 0)
        # A call either multiplies with the library or not, so both ways use the same bytes.
        self.size = max(self.size, native_linear(p).workspace())

    def _part(self, size: int) -> slice:
        start = self.size
        self.size += -(-size // _ALIGN) * _ALIGN
        return slice(start, start + size)


def native_linear(p: Problem) -> _cpu.Linear:
    (m, n, k), element, quantized, weight = p.shape, ELEMENTS[p.element], ELEMENTS[p.quantized], ELEMENTS[p.weight]
    quantization = native_plan(activation_problem(p)) if p.op is QuantizeKind.QUANTIZED_LINEAR else None
    return _cpu.Linear(m, n, k, element, quantized, weight, ACTIVATIONS[p.nonlinearity], p.weight_group, quantization)


def bind(p: Problem) -> Launch:
    """One native call; for many rows the library's product, where the call's strides allow it."""
    layout, native = Layout(p), native_linear(p)
    return ByLibrary(p, layout, native) if layout.library else native.launch


class ByLibrary:
    """A linear bound to one problem: the launch."""

    def __init__(self, p: Problem, layout: Layout, native: _cpu.Linear) -> None:
        self.p, self.layout, self.native, self.shape = p, layout, native, p.shape
        self.quantize = native_plan(activation_problem(p)) if layout.dynamic else None
        self.asymmetric = p.mode is DynamicRangeMode.ASYMMETRIC
        self.scale_code = ELEMENTS[p.scale_element]

    def __call__(self, operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        weight = cast(Tensor, operands[1 if self.layout.dynamic else 3])
        if _overlaps(weight) or (not self.layout.dynamic and _overlaps(cast(Tensor, operands[0]))):
            self.native.launch(operands, workspace)
        elif self.layout.dynamic:
            self._dynamic(operands, cast(Tensor, workspace))
        else:
            self._static(operands, cast(Tensor, workspace))

    def _dynamic(self, operands: tuple[Value, ...], workspace: Tensor) -> None:
        x, weight, weight_scale, bias, weight_sum, residual, factor, act_q, act_scale, out = operands
        base, layout = workspace.data_ptr(), self.layout
        act = base + layout.act_q.start if act_q is None else _address(act_q)
        scale = base + layout.act_scale.start if act_scale is None else _address(act_scale)
        zero_point = base + layout.act_zero_point.start if self.asymmetric else 0
        scales = (scale, self.scale_code, 1.0, zero_point, 0, *_others(weight_scale, bias, residual))
        x, weight = cast(Tensor, x), cast(Tensor, weight)
        m, _, k = self.shape
        plan = cast("_cpu.Plan", self.quantize)
        keys, threads = base + layout.keys.start, threads_for(m * k)
        plan.run_dynamic(x.data_ptr(), pitch(x), scale, zero_point, act, keys, threads)
        stored = _view(workspace, layout.act_q, self.p.quantized.dtype, (m, k)) if act_q is None else act_q
        self._multiply(cast(Tensor, stored), scales, weight, weight_sum, factor, out, workspace)

    def _static(self, operands: tuple[Value, ...], workspace: Tensor) -> None:
        act_q, act_scale, act_zero_point, weight, weight_scale, bias, weight_sum, residual, factor, out = operands
        act, weight, kind = cast(Tensor, act_q), cast(Tensor, weight), self.p.quantized
        zero_point = int(act_zero_point) if act_zero_point is not None else 0
        zero_point = min(max(zero_point, kind.q_min), kind.q_max)
        scale: tuple[int, int, float] = (0, F32, 1.0)
        if isinstance(act_scale, Tensor) and act_scale.ndim:
            scale = act_scale.data_ptr(), DTYPES[act_scale.dtype], 1.0
        else:
            scale = 0, F32, float(cast(float, act_scale))
        scales = (*scale, 0, zero_point, *_others(weight_scale, bias, residual))
        matrix = act if act.ndim == 2 else act.view(self.shape[0], self.shape[2])
        self._multiply(matrix, scales, weight, weight_sum, factor, out, workspace)

    def _multiply(
        self, act_q: Tensor, scales: _cpu.Scales, weight: Tensor, weight_sum: Value, factor: Value, out: Value,
        workspace: Tensor,
    ) -> None:  # fmt: skip
        native, layout = self.native, self.layout
        m, n, k = self.shape
        address, weight_pitch = weight.data_ptr(), pitch(weight)
        base = workspace.data_ptr()
        threads = threads_for(n * k)
        if weight_sum is None and layout.sums and (self.layout.shifts or self.asymmetric or scales[4]):
            native.weight_sums(address, weight_pitch, *_factors(factor), base + layout.weight_sum.start, threads)
            sums = base + layout.weight_sum.start
        else:
            sums = 0 if weight_sum is None else _address(weight_sum)
        if self.p.weight.is_packed:
            native.unpack(address, weight_pitch, *_factors(factor), base + layout.weight.start, threads)
            weight = _view(workspace, layout.weight, torch.int8, (n, k))
        if layout.shifts:
            native.shift(act_q.data_ptr(), pitch(act_q), base + layout.shifted.start, threads_for(m * k))
            act_q = _view(workspace, layout.shifted, torch.int8, (m, k))
        columns, acc = _rows(weight).t(), _view(workspace, layout.acc, torch.int32, (layout.rows, n))
        shift = 128 if layout.shifts else 0
        for first in range(0, m, layout.rows):
            rows = min(layout.rows, m - first)
            torch._int_mm(act_q[first : first + rows], columns, out=acc[:rows])
            native.epilogue(acc.data_ptr(), scales, sums, shift, _address(out), first, rows, threads_for(rows * n))


def _overlaps(matrix: Tensor) -> bool:
    """Whether rows begin inside each other, which the library does not take."""
    return not matrix.is_contiguous() and pitch(matrix) < matrix.shape[1]


def _rows(matrix: Tensor) -> Tensor:
    """The same; a lone row, which may have any stride, with one that the library understands."""
    return matrix if matrix.shape[0] > 1 else matrix.as_strided(matrix.shape, (matrix.shape[1], 1))


def _address(value: Value) -> int:
    return cast(Tensor, value).data_ptr()


def _factors(factor: Value) -> tuple[int, int]:
    return (0, DENSE) if factor is None else (_address(factor), pitch(cast(Tensor, factor)))


def _others(weight_scale: Value, bias: Value, residual: Value) -> tuple[int, int, float, int, int, int, int]:
    """What the epilogue reads beside the activations' scales: addresses, codes, numbers, a pitch."""
    if isinstance(weight_scale, Tensor):
        address, code, number = weight_scale.data_ptr(), DTYPES[weight_scale.dtype], 1.0
    else:
        address, code, number = 0, F32, float(cast(float, weight_scale))
    bias_address, bias_code = (0, F32) if bias is None else (_address(bias), DTYPES[cast(Tensor, bias).dtype])
    added, added_pitch = (0, DENSE) if residual is None else (_address(residual), pitch(cast(Tensor, residual)))
    return address, code, number, bias_address, bias_code, added, added_pitch


def _view(workspace: Tensor, part: slice, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    return workspace.view(-1).view(torch.uint8)[part].view(dtype).view(shape)
