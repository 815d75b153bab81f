"""Launches of the compiled kernels: a problem becomes a native plan once, a call passes addresses and numbers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ... import _cpu
from ...core.optable import OPS
from ...core.problem import Problem
from ...core.strides import row_stride
from ...core.types import FLOATS, INTEGERS, Activation, Arithmetic, DynamicRangeMode, ElementKind, QuantizeKind
from ..registry import Launch, Value

#: The codes of the compiled side, in its order.
ELEMENTS: dict[ElementKind, int] = {kind: code for code, kind in enumerate((*FLOATS, *INTEGERS))}
ACTIVATIONS: dict[Activation, int] = {kind: code for code, kind in enumerate(Activation)}
DTYPES: dict[torch.dtype, int] = {kind.dtype: code for kind, code in ELEMENTS.items() if kind.is_float}
F32 = ELEMENTS[ElementKind.F32]
_OPS = {
    op: code
    for code, op in enumerate(
        (
            QuantizeKind.QUANTIZE,
            QuantizeKind.DEQUANTIZE,
            QuantizeKind.FAKE_QUANTIZE,
            QuantizeKind.QUANTIZE_BACKWARD,
            QuantizeKind.DEQUANTIZE_BACKWARD,
            QuantizeKind.FAKE_QUANTIZE_BACKWARD,
            QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD,
            QuantizeKind.DYNAMIC_QUANTIZE,
            QuantizeKind.CHOOSE_QPARAMS,
            QuantizeKind.DYNAMIC_FAKE_QUANTIZE,
        )
    )
}
DENSE = -1
#: Below this many elements one thread does the work, so that the thread count need not be asked for.
SMALL = 65536
#: As many as the kernels share their work among.
MOST_THREADS = 1024


def native_plan(p: Problem) -> _cpu.Plan:
    view, segments = p.view, p.segment_shape
    return _cpu.Plan(
        _OPS[p.op],
        ELEMENTS[p.element],
        ELEMENTS[p.quantized],
        ELEMENTS[p.scale_element if OPS[p.op].dynamic else p.element],
        p.q_min,
        p.q_max,
        p.mode is DynamicRangeMode.ASYMMETRIC,
        p.include_zero,
        p.arithmetic is Arithmetic.RECIPROCAL,
        *view.shape,
        p.shape[-1] if p.shape else 1,
        segments[-1] if segments else 1,
    )


def workspace(p: Problem) -> int:
    return native_plan(p).workspace()


def threads_for(elements: int) -> int:
    return 1 if elements < SMALL else min(torch.get_num_threads(), MOST_THREADS)


def pitch(value: Tensor) -> int:
    """The distance between rows in storage elements; the checks let nothing else through than evenly spaced rows."""
    return DENSE if value.is_contiguous() else cast(int, row_stride(value))


def bind(p: Problem) -> Launch:
    if OPS[p.op].dynamic:
        return _bind_dynamic(p)
    if p.op is QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD:
        return _bind_learned(p)
    if len(OPS[p.op].operands) == 5:
        return _bind_backward(p)
    return _bind_forward(p)


def _bind_forward(p: Problem) -> Launch:
    run, numel = native_plan(p).run, p.view.numel
    small = numel < SMALL

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, scale, zero_point, out = cast("tuple[Tensor, Value, Value, Tensor]", operands)
        threads = 1 if small else torch.get_num_threads()
        x_pitch = DENSE if x.is_contiguous() else pitch(x)
        s, code, s_pitch, number = given_scale(scale)
        z, z_pitch, integer = given_zero_point(zero_point)
        run(
            x.data_ptr(), x_pitch, 0, DENSE, s, code, s_pitch, number, z, z_pitch, integer, out.data_ptr(), threads
        )  # fmt: skip

    return launch


def _bind_backward(p: Problem) -> Launch:
    run, numel = native_plan(p).run, p.view.numel

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, dy, scale, zero_point, dx = cast("tuple[Tensor | None, Tensor, Value, Value, Tensor]", operands)
        address, x_pitch = (0, DENSE) if x is None else (x.data_ptr(), pitch(x))
        s, code, s_pitch, number = given_scale(scale)
        z, z_pitch, integer = given_zero_point(zero_point)
        run(
            address, x_pitch, dy.data_ptr(), pitch(dy), s, code, s_pitch, number, z, z_pitch, integer, dx.data_ptr(),
            threads_for(numel),
        )  # fmt: skip

    return launch


def _bind_learned(p: Problem) -> Launch:
    plan, numel = native_plan(p), p.view.numel
    run, works = plan.run_learned, plan.workspace() > 0

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, dy = cast("tuple[Tensor, Tensor]", operands[:2])
        s, code, s_pitch, number = given_scale(operands[2])
        z, z_pitch, integer = given_zero_point(operands[3])
        dx, grad_scale, grad_zero_point = cast("tuple[Tensor, Tensor, Tensor]", operands[4:])
        run(
            x.data_ptr(), pitch(x), dy.data_ptr(), pitch(dy), s, code, s_pitch, number, z, z_pitch, integer,
            dx.data_ptr(), grad_scale.data_ptr(), grad_zero_point.data_ptr(),
            cast(Tensor, workspace).data_ptr() if works else 0, threads_for(numel),
        )  # fmt: skip

    return launch


def _bind_dynamic(p: Problem) -> Launch:
    plan, numel = native_plan(p), p.view.numel
    run, writes, works = plan.run_dynamic, p.op is not QuantizeKind.CHOOSE_QPARAMS, plan.workspace() > 0

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        x, scale_out, zero_point_out = cast("tuple[Tensor, Tensor, Tensor | None]", operands[:3])
        run(
            x.data_ptr(),
            pitch(x),
            scale_out.data_ptr(),
            0 if zero_point_out is None else zero_point_out.data_ptr(),
            cast(Tensor, operands[3]).data_ptr() if writes else 0,
            cast(Tensor, workspace).data_ptr() if works else 0,
            threads_for(numel),
        )

    return launch


def given_scale(scale: Value) -> tuple[int, int, int, float]:
    if isinstance(scale, Tensor):
        return scale.data_ptr(), DTYPES[scale.dtype], pitch(scale), 1.0
    return 0, F32, DENSE, float(cast(float, scale))


def given_zero_point(zero_point: Value) -> tuple[int, int, int]:
    if isinstance(zero_point, Tensor):
        return zero_point.data_ptr(), pitch(zero_point), 0
    return 0, DENSE, 0 if zero_point is None else int(zero_point)
