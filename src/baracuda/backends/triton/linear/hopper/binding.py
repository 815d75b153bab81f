"""How the sm_90 GEMMs are compiled and get their arguments: descriptors for TMA, the terms of the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ..... import _host
from .....core.types import Activation
from ....registry import Value
from ...launch import POINTERS, Prepare, compile_source
from .epilogue import HopperTerms, TermKinds

#: What TMA copies, and its name in a signature.
_ELEMENTS = {
    torch.float16: (gl.float16, "fp16"),
    torch.bfloat16: (gl.bfloat16, "bf16"),
    torch.float32: (gl.float32, "fp32"),
    torch.int8: (gl.int8, "i8"),
    torch.int16: (gl.int16, "i16"),
}

#: The arguments of the GEMMs in the order of `GemmSources`, then the workspace for the sums of K's parts, and the zero
#: points of groups.
X, SCALE, ZERO_POINT, WEIGHT, WEIGHT_SCALE, BIAS, WEIGHT_SUM, RESIDUAL, OUTPUT, FACTOR, PARTS, ZEROS = range(12)
#: Those that TMA reads and writes, or threads do in vectors.
VECTORS = (X, WEIGHT, RESIDUAL, OUTPUT)


# -- what is compiled --------------------------------------------------------------------------------------------


def descriptor_form(dtype: torch.dtype, block: list[int]) -> str:
    element, name = _ELEMENTS[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return f"tensordesc<{name}{block},{layout!r}>"


def _pointer(value: Value) -> str:
    return POINTERS[value.dtype] if isinstance(value, Tensor) else "*fp32"


def _kind(value: Value) -> str:
    return "number" if not isinstance(value, Tensor) else "vector" if value.dim() else "scalar"


def term_forms(
    scale: Value,
    zero_point: Value,
    weight_scale: Value,
    bias: Value,
    token_axis: int,
    residual: Value = None,
    nonlinearity: Activation = Activation.NONE,
) -> tuple[HopperTerms, TermKinds]:
    """The types of the epilogue's arguments, and the constant that says what to do with them."""
    forms = HopperTerms(
        scale_ptr=_pointer(scale),
        scale="fp32",
        weight_scale_ptr=_pointer(weight_scale),
        weight_scale="fp32",
        bias_ptr=_pointer(bias),
        zero_point_ptr="*i32",
        zero_point="i32",
        weight_sum_ptr="*i32",
        residual_ptr=_pointer(residual),
    )
    kinds = TermKinds(
        scale=_kind(scale),
        weight_scale=_kind(weight_scale),
        zero_point="none" if zero_point is None else _kind(zero_point),
        bias=bias is not None,
        residual=residual is not None,
        nonlinearity=nonlinearity.value,
        token_axis=token_axis,
    )
    return forms, kinds


def terms_of(
    arguments: list[Value], token_axis: int, nonlinearity: Activation, given: bool = False
) -> tuple[HopperTerms, TermKinds]:
    """`term_forms` of a GEMM's arguments; the tokens' scales may be `given` by the kernel itself."""
    scale, zero_point, weight_scale, bias, residual = (
        arguments[i] for i in (SCALE, ZERO_POINT, WEIGHT_SCALE, BIAS, RESIDUAL)
    )
    forms, kinds = term_forms(scale, zero_point, weight_scale, bias, token_axis, residual, nonlinearity)
    return forms, kinds._replace(scale="given") if given else kinds


def aligned_only(make: Callable[[list[Value]], _host.Kernel]) -> Prepare:
    """TMA addresses nothing else: other operands go to the portable kernel."""
    return lambda arguments, aligned: make(arguments) if aligned else None


def source_of(
    kernel: Any, signature: dict[str, Any], constants: Mapping[str, object], divisible: Any
) -> GluonASTSource:
    """`divisible` says by what: of a parameter, or of a (group, member)."""
    names = list(signature)
    attributes = {}
    for name, by in divisible.items():
        group, *member = name if isinstance(name, tuple) else (name,)
        path = (names.index(group), *(signature[group]._fields.index(one) for one in member))
        attributes[path] = [["tt.divisibility", by]]
    return GluonASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)


def compiled(source: GluonASTSource, warps: int, pdl: bool = False, registers: int = 0) -> Any:
    """`registers` limits those of a thread on average, so that several programs fit a multiprocessor; 0: no limit."""
    target = triton.runtime.driver.active.get_current_target()
    options = {"enable_fp_fusion": False, "num_warps": warps, "launch_pdl": pdl}
    options |= {"maxnreg": registers} if registers else {}
    return compile_source(source, target, options)


# -- what is launched --------------------------------------------------------------------------------------------


def term_parameters(kernel: _host.Kernel) -> None:
    """Addresses and numbers in the order of `HopperTerms`; of each pair, the one that did not come is 0."""
    for argument in (SCALE, WEIGHT_SCALE):
        kernel.address(argument)
        kernel.number(argument, "f32")
    kernel.address(BIAS)
    kernel.address(ZERO_POINT)
    kernel.number(ZERO_POINT, "i32")
    kernel.address(WEIGHT_SUM)
    kernel.address(RESIDUAL)


def matrix(kernel: _host.Kernel, argument: int, meta: dict[str, Any], rows: int, columns: int) -> None:
    """A descriptor's parameters: the map for TMA, then the matrix's sizes and strides."""
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    kernel.matrix(argument, element, meta["swizzle"], meta["elem_size"], rows, columns, *meta["block_size"])
    for value in (rows, columns, columns, 1):
        kernel.constant(value)
