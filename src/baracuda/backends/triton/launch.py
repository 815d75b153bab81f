"""From a bound kernel to the device: compiled once per form of its operands, then launched without looking back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .numerics import INTERPRETED

INTERPRETING = bool(INTERPRETED.value)
#: Vector accesses are this many bytes; a pointer that is not divisible by it gets its own compiled kernel.
ALIGNMENT = 16
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

#: What stands in a kernel's leading parameters: a tensor, a number, or nothing.
Argument = Tensor | int | None


def double_bits(value: float) -> int:
    """A number as kernels take it: the bits of a double, exact for every math type."""
    bits: int = struct.unpack("<q", struct.pack("<d", float(value)))[0]
    return bits


def compile_kernel(
    kernel: Any,
    forms: Sequence[str],
    sizes: Mapping[str, int],
    constants: Mapping[str, object],
    warps: int,
    target: GPUTarget,
    aligned: bool = True,
) -> Any:
    """Compile for operands of these forms ("*bf16", "i64", "constexpr" for none), then sizes, then constants."""
    names = kernel.arg_names
    signature = dict(zip(names, forms, strict=False))
    # Sizes keep their values out of the code, but a power of two that divides them is worth knowing: it makes
    # accesses wide.
    signature |= {name: "i32" if -(2**31) <= size < 2**31 else "i64" for name, size in sizes.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    values |= {(i,): None for i, form in enumerate(forms) if form == "constexpr"}
    divisible = {(i,): ALIGNMENT for i, form in enumerate(forms) if aligned and form.startswith("*")}
    divisible |= {(names.index(name),): size & -size for name, size in sizes.items() if size > 1 and not size & 1}
    attributes = {path: [["tt.divisibility", min(by, ALIGNMENT)]] for path, by in divisible.items()}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})


class Step:
    """One kernel of a plan with its grid, sizes and constants; calling it launches it on the current stream."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        sizes: Mapping[str, int],
        constants: Mapping[str, object],
        warps: int,
        device: torch.device,
    ) -> None:
        self.kernel, self.programs, self.warps = kernel, programs, warps
        self.sizes, self.constants, self.device = dict(sizes), dict(constants), device
        #: Compiled launches by the forms of the leading arguments and whether all pointers are aligned.
        self._compiled: dict[tuple[object, ...], Callable[..., None]] = {}
        self._rest = (*self.sizes.values(), *(None for _ in constants))

    def __call__(self, *arguments: Argument) -> None:
        if INTERPRETING:
            self.kernel[(self.programs,)](*arguments, *self.sizes.values(), **self.constants)
        elif _current_device() == self.device.index:
            self._launch(arguments)
        else:
            with torch.cuda.device(self.device):
                self._launch(arguments)

    def _launch(self, arguments: tuple[Argument, ...]) -> None:
        values: list[int | None] = []
        forms: list[object] = []
        address = 0
        for argument in arguments:
            if argument is None or isinstance(argument, int):
                values.append(argument)
                forms.append(type(argument))
            else:
                pointer = argument.data_ptr()
                address |= pointer
                values.append(pointer)
                forms.append(argument.dtype)
        forms.append(address % ALIGNMENT == 0)
        key = tuple(forms)
        launch = self._compiled.get(key) or self._compile(key)
        launch(_current_stream(self.device.index), *values)

    def _compile(self, key: tuple[object, ...]) -> Callable[..., None]:
        *forms, aligned = key
        names = [_form(form, name) for form, name in zip(forms, self.kernel.arg_names, strict=False)]
        target = triton.runtime.driver.active.get_current_target()
        compiled = compile_kernel(
            self.kernel, names, self.sizes, self.constants, self.warps, target, aligned=bool(aligned)
        )
        run = compiled.run  # loads the module, which sets `function`
        function, metadata, programs, rest = compiled.function, compiled.packed_metadata, self.programs, self._rest
        if run.global_scratch_size or run.profile_scratch_size:

            def launch(stream: int, *values: int | None) -> None:
                run(programs, 1, 1, stream, function, metadata, None, None, None, *values, *rest)
        else:
            # What `run` does when a kernel needs no scratch memory, less its two allocators.
            direct, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl

            def launch(stream: int, *values: int | None) -> None:
                direct(
                    programs,
                    1,
                    1,
                    stream,
                    function,
                    cooperative,
                    dependent,
                    None,
                    None,
                    metadata,
                    None,
                    None,
                    None,
                    *values,
                    *rest,
                )

        self._compiled[key] = launch
        return launch


def _form(form: object, name: str) -> str:
    if form is type(None):
        return "constexpr"
    if form is int:
        return "i64" if name == "scale_ptr" else "i32"
    assert isinstance(form, torch.dtype)
    return _TYPES[form]
