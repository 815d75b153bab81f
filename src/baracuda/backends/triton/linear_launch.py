"""GEMM kernels from operands to the device: compiled once per form of the operands, then launched."""

from __future__ import annotations

import inspect
import struct
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from ..registry import Value
from .numerics import INTERPRETED

INTERPRETING = bool(INTERPRETED.value)
ALIGNMENT = 16
#: Argument lists kept per kernel: a model's weights and its few activation buffers.
REMEMBERED = 256

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


def pointer_form(dtype: torch.dtype) -> str:
    return _TYPES[dtype]


def bits(scale: Value) -> Value:
    """A scale as the portable kernels take it: a number becomes the bits of a double, exact for every math type."""
    return scale if scale is None or isinstance(scale, Tensor) else struct.unpack("<q", struct.pack("<d", scale))[0]


class Program:
    """One compiled kernel, launched through the function under Triton's own wrapper, which would encode TMA descriptors
    anew at every launch."""

    def __init__(self, source: Any, options: dict[str, object], device: torch.device) -> None:
        with torch.cuda.device(device):
            target = triton.runtime.driver.active.get_current_target()
            compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})
            launcher = compiled.run  # loads the module, which sets `function`
        wrapper = launcher.launch
        self._launch = inspect.getclosurevars(wrapper).nonlocals["launcher"] if inspect.isfunction(wrapper) else wrapper
        self._head = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        self._metadata = (compiled.packed_metadata, None, None, None)
        self._tensor_maps = getattr(compiled.metadata, "tensordesc_meta", None)
        self._index = device.index

    def tensor_map(self, i: int, tensor: Tensor) -> list[Any]:
        """The arguments that stand for the i-th descriptor, over a row-major matrix."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        shape, pointer = list(tensor.shape), tensor.data_ptr()
        base = SimpleNamespace(data_ptr=lambda: pointer)
        described = SimpleNamespace(base=base, shape=shape, strides=[shape[1], 1], padding="zero")
        arguments: list[Any] = make_tensordesc_arg(described, self._tensor_maps[i])  # type: ignore[index]
        return arguments

    def __call__(self, programs: int, arguments: list[Any]) -> None:
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                self(programs, arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._launch(programs, 1, 1, stream, *self._head, *self._metadata, *arguments)


def triton_source(
    kernel: Any, forms: dict[str, str], sizes: dict[str, int], constants: dict[str, Any], aligned: bool
) -> Any:
    """Leading operands by form ("*bf16", "i64", "constexpr" for none), then sizes, then constants."""
    names = list(kernel.arg_names)
    signature = forms | {name: "i32" if size < 2**31 else "i64" for name, size in sizes.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    values |= {(names.index(name),): None for name, form in forms.items() if form == "constexpr"}
    divisible = [name for name, form in forms.items() if aligned and form.startswith("*")]
    divisible += [name for name, size in sizes.items() if size % ALIGNMENT == 0]
    attributes = {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in divisible}
    return ASTSource(kernel, signature, values, attributes)


class Step:
    """A portable kernel with its grid, sizes and constants; calling it launches it on the current stream."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        sizes: dict[str, int],
        constants: dict[str, Any],
        options: dict[str, object],
        device: torch.device,
    ) -> None:
        self.kernel, self.programs, self.sizes = kernel, programs, sizes
        self.constants, self.options, self.device = constants, options, device
        self._programs: dict[tuple[object, ...], Program] = {}
        self._rest = [*sizes.values(), *(None for _ in constants)]

    def __call__(self, *operands: Value) -> None:
        if INTERPRETING:
            self.kernel[(self.programs,)](*operands, *self.sizes.values(), **self.constants)
            return
        values = [v.data_ptr() if isinstance(v, Tensor) else v for v in operands]
        key: list[object] = [v.dtype if isinstance(v, Tensor) else type(v) for v in operands]
        key += [all(v % ALIGNMENT == 0 for v, o in zip(values, operands, strict=True) if isinstance(o, Tensor))]  # type: ignore[operator]
        program = self._programs.get(tuple(key)) or self._compile(tuple(key))
        program(self.programs, [*values, *self._rest])

    def _compile(self, key: tuple[object, ...]) -> Program:
        *kinds, aligned = key
        forms: dict[str, str] = {}
        for name, kind in zip(self.kernel.arg_names, kinds, strict=False):
            if kind is type(None):
                forms[name] = "constexpr"
            elif isinstance(kind, torch.dtype):
                forms[name] = _TYPES[kind]
            else:
                forms[name] = "i32" if name == "zp" else "i64"
        source = triton_source(self.kernel, forms, self.sizes, self.constants, bool(aligned))
        self._programs[key] = Program(source, self.options, self.device)
        return self._programs[key]
