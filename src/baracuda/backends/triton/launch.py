"""From a bound kernel to the device: compiled once per kind of its arguments, then launched without looking back.

Triton compiles and loads; the compiled module launches, since Triton's own launcher takes as long as a small kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...core.errors import Unsupported
from ...core.host import DLPACK_DTYPES
from ..registry import Launch, Value
from .numerics.conversions import INTERPRETED
from .sources import Source, pick, split

if not (INTERPRETING := bool(INTERPRETED.value)):
    from ... import _host

#: Vector accesses are this many bytes; a pointer that is not divisible by it gets its own compiled kernel.
ALIGNMENT = 16
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
#: From this CUDA on a driver captures kernels that come early into graphs.
EARLY_IN_GRAPHS = 12030
#: The parameters where a number is an integer. Any other number arrives as the bits of a double, exact for every math
#: type.
_INTEGERS = ("zero_point_ptr", "zp")


@cache
def _driver() -> _host.Driver:
    return _host.Driver("libcuda.so.1")


#: Compiles for arguments like these, where all that take part in wide accesses are aligned or not all are; None where
#: the kernel does not take them.
Prepare = Callable[[list[Value], bool], "_host.Kernel | None"]


def launching(
    device: torch.device,
    sources: Sequence[Source],
    prepare: Prepare,
    vectors: Sequence[int] | None = None,
    then: Launch | None = None,
    otherwise: Launch | None = None,
) -> Launch:
    """The launch of a kernel, and `then` the next; or `otherwise`, where the kernel does not take the arguments.

    `vectors` are the arguments whose alignment matters, all unless given.
    """
    vectors = range(len(sources)) if vectors is None else vectors
    mask = sum(1 << i for i in vectors)
    launcher = _host.Launcher(_driver(), device.index, [_native(source) for source in sources], mask, ALIGNMENT)
    fire = launcher.launch

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        if (fire(operands, workspace) or first_or_elsewhere(operands, workspace)) and then is not None:
            then(operands, workspace)

    def first_or_elsewhere(operands: tuple[Value, ...], workspace: Tensor | None) -> bool:
        with torch.cuda.device(device):
            launcher.use_context()
            if fire(operands, workspace):
                return True
            arguments = pick(sources, operands, workspace)
            addresses = [value.data_ptr() for i in vectors if isinstance(value := arguments[i], Tensor)]
            kernel = prepare(arguments, all(address % ALIGNMENT == 0 for address in addresses))
            if kernel is not None:
                launcher.add(operands, workspace, kernel)
                return fire(operands, workspace)
        assert otherwise is not None
        otherwise(operands, workspace)
        return False

    return launch


def in_turn(*launches: Launch) -> Launch:
    """One after the other on the same operands."""
    if len(launches) == 1:
        return launches[0]

    def launch(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
        for each in launches:
            each(operands, workspace)

    return launch


def _native(source: Source) -> _host.Source:
    operand, part = split(source)
    code, bits = DLPACK_DTYPES[part.dtype] if part is not None else (0, 0)
    return -1 if operand is None else operand, -1 if part is None else part.offset, code, bits


def loaded(compiled: Any, programs: int) -> _host.Kernel:
    """A compiled kernel on the current device, its parameters still to be named."""
    run = compiled.run  # loads the module, which sets `function`
    warps, clusters, shared = compiled.packed_metadata
    scratch = run.global_scratch_size or run.profile_scratch_size
    if scratch or clusters != 1 or run.launch_cooperative_grid:
        raise Unsupported(
            f"{compiled.name}: expected a plain grid without scratch memory, got one that Triton must launch itself; "
            "turn instrumentation off"
        )
    return _host.Kernel(compiled.name, compiled.function, programs, 32 * warps, shared, bool(run.launch_pdl))


def finish_parameters(kernel: _host.Kernel, *sizes: int) -> _host.Kernel:
    """The kernel with its sizes and the two addresses, of scratch memory, that end the parameters Triton gives it."""
    for size in (*sizes, 0, 0):
        kernel.constant(size & (2**64 - 1))
    return kernel


@dataclass(frozen=True, slots=True)
class Build:
    """How a kernel is compiled: `stages` of its loops and the most `registers` of a thread, where there is a limit;
    `early` says that it may come while the kernel before it still runs."""

    warps: int = 4
    stages: int | None = None
    registers: int = 0
    early: bool = True


def compile_kernel(
    kernel: Any,
    forms: Sequence[str],
    sizes: Mapping[str, int],
    constants: Mapping[str, object],
    build: Build,
    target: GPUTarget,
    aligned: bool = True,
) -> Any:
    """Compile for operands of these forms ("*bf16", "i64", "constexpr" for none), then sizes, then constants."""
    names = kernel.arg_names
    signature = dict(zip(names, forms, strict=False))
    # Sizes keep their values out of the code, but a power of two that divides them is worth knowing: it makes
    # accesses wide.
    signature |= {name: "i32" if -(2**31) <= size < 2**31 else "i64" for name, size in sizes.items()}
    # A kernel that says where it takes over may come while the one before it still runs, on Hopper, where it was seen.
    early = build.early and "EARLY" in names and target.arch // 10 == 9
    if "EARLY" in names:
        constants = {**constants, "EARLY": early}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    values |= {(i,): None for i, form in enumerate(forms) if form == "constexpr"}
    divisible = {(i,): ALIGNMENT for i, form in enumerate(forms) if aligned and form.startswith("*")}
    divisible |= {(names.index(name),): size & -size for name, size in sizes.items() if size > 1 and not size & 1}
    attributes = {path: [["tt.divisibility", min(by, ALIGNMENT)]] for path, by in divisible.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": build.warps, "enable_fp_fusion": False, "launch_pdl": early}
    options |= {"maxnreg": build.registers} if build.registers else {}
    options |= {} if build.stages is None else {"num_stages": build.stages}
    return triton.compile(source, target=target, options=options)


_FOUR_WARPS = Build()


class Step:
    """One kernel of a plan with its grid, sizes and constants; its leading arguments come from the operands."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        sizes: Mapping[str, int],
        constants: Mapping[str, object],
        device: torch.device,
        build: Build = _FOUR_WARPS,
        unaligned: Mapping[str, object] | None = None,
    ) -> None:
        """`unaligned` are the constants that are others where an operand is not aligned for vectors."""
        self.kernel, self.programs, self.device, self.build = kernel, programs, device, build
        self.sizes, self.constants = dict(sizes), dict(constants)
        self.unaligned = self.constants | dict(unaligned or {})

    def bound(self, *sources: Source) -> Launch:
        """The launch whose arguments come from these sources."""
        if not INTERPRETING:
            return launching(self.device, sources, self._prepare)

        def interpret(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
            arguments = map(_as_integer, pick(sources, operands, workspace), self.kernel.arg_names)
            self.kernel[(self.programs,)](*arguments, *self.sizes.values(), **self.constants)

        return interpret

    def _prepare(self, arguments: list[Value], aligned: bool) -> _host.Kernel:
        forms = list(map(_form, arguments, self.kernel.arg_names))
        target = triton.runtime.driver.active.get_current_target()
        constants = self.constants if aligned else self.unaligned
        build = replace(self.build, early=self.build.early and _driver().version >= EARLY_IN_GRAPHS)
        compiled = compile_kernel(self.kernel, forms, self.sizes, constants, build, target, aligned)
        kernel = loaded(compiled, self.programs)
        for i, form in enumerate(forms):
            if form.startswith("*"):
                kernel.address(i)
            elif form != "constexpr":
                kernel.number(i, "i32" if form == "i32" else "f64")
        return finish_parameters(kernel, *self.sizes.values())


def _form(value: Value, name: str) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "i32" if name in _INTEGERS else "i64"


def _as_integer(value: Value, name: str) -> Value:
    """An argument as the interpreter takes it."""
    if value is None or isinstance(value, Tensor):
        return value
    if name in _INTEGERS:
        return int(value)
    bits: int = struct.unpack("<q", struct.pack("<d", float(value)))[0]
    return bits
