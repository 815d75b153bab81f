"""From a bound kernel to the device: compiled once for each kind of arguments, then launched by the compiled module.

Triton compiles and loads. It does not launch, since its own launcher takes as long as a small kernel.

Arguments that travel together are one NamedTuple, in a kernel's parameters as in its sources: a group. Triton flattens
groups into the parameters of the PTX, in order; so does this module.

In a kernel, a member of a constant group that is itself a group, a dataclass or a string must have a `tl.constexpr`
name of its own before it is passed on: Triton 3.6 wraps numbers alone. An assigned tuple keeps None and tensors; its
other constants become tensors. A returned one may hold no None in Triton 3.6.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .sources import Group, Source, Sources, pick, split

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
#: The versions of Triton whose code the tests look at (docs/reference/versions.md).
TESTED = "3.6 to 3.9"
#: From this CUDA version on a driver captures programmatic dependent launches into graphs.
PDL_IN_GRAPHS = 12030
#: The parameter where a number is an integer. Any other number arrives as the bits of a double, exact for every math
#: type.
_INTEGER = "zero_point_ptr"


@cache
def _driver() -> _host.Driver:
    return _host.Driver("libcuda.so.1")


def captures_pdl() -> bool:
    """Whether the driver captures programmatic dependent launches into graphs."""
    return _driver().version >= PDL_IN_GRAPHS


#: Compiles for arguments like these; the flag says whether all that take part in vector accesses are aligned. None
#: where the kernel does not take them.
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
    """How a kernel is compiled: the `stages` of its loops, and the most `registers` a thread may have (0: no limit).

    `pdl` allows programmatic dependent launch, where the kernel and the architecture know it."""

    warps: int = 4
    stages: int | None = None
    registers: int = 0
    pdl: bool = True


#: The type of an argument in Triton's signature: "*bf16", "i64", or "constexpr" for one that is absent.
Form = str | tuple[str, ...]
#: Integers that only the launch knows, by parameter; a group is a NamedTuple.
Sizes = Mapping[str, int | tuple[int, ...]]


def compile_kernel(
    kernel: Any,
    forms: Sequence[Form],
    sizes: Sizes,
    constants: Mapping[str, object],
    build: Build,
    target: GPUTarget,
    aligned: bool = True,
) -> Any:
    """Compile for operands of these forms, then sizes, then constants."""
    names = kernel.arg_names
    pdl = build.pdl and "PDL" in names and target.arch // 10 == 9  # measured on Hopper alone
    if "PDL" in names:
        constants = {**constants, "PDL": pdl}
    signature = dict(zip(names, forms, strict=False))
    signature |= {name: _each(_size_form, size) for name, size in sizes.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    values: dict[tuple[int, ...], object] = {(names.index(name),): value for name, value in constants.items()}
    divisible = {}
    for i, form in enumerate(forms):
        for path, one in _paths(i, form):
            if one == "constexpr":
                values[path] = None
            elif aligned and one.startswith("*"):
                divisible[path] = ALIGNMENT
    # The values of sizes stay out of the code, but a power of two that divides one makes accesses wide.
    for name, size in sizes.items():
        for path, value in _paths(names.index(name), size):
            if value > 1 and not value & 1:
                divisible[path] = min(value & -value, ALIGNMENT)
    attributes = {path: [["tt.divisibility", by]] for path, by in divisible.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": build.warps, "enable_fp_fusion": False, "launch_pdl": pdl}
    options |= {"maxnreg": build.registers} if build.registers else {}
    options |= {} if build.stages is None else {"num_stages": build.stages}
    return compile_source(source, target, options)


def compile_source(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    """What Triton makes of a kernel; where it fails, an error that says with which versions it does not."""
    try:
        return triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever a compiler raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first, *_ = str(cause).strip().splitlines() or [type(cause).__name__]
        raise Unsupported(
            f"{source.fn.__name__}: Triton {triton.__version__} does not compile this kernel for sm_{target.arch}: "
            f"{first}. Tested is Triton {TESTED}: install such a one with its torch, or take a plan with "
            "PlanPreference(prefer_backend='reference'), which is slow"
        ) from error


def _paths(i: int, value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Triton's path of parameter i, or of each member of a group, with its value."""
    if isinstance(value, tuple):
        yield from (((i, j), each) for j, each in enumerate(value))
    else:
        yield (i,), value


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """The function of a value, or of each member of a group."""
    return type(value)(*map(function, value)) if isinstance(value, tuple) else function(value)


def _size_form(size: int) -> str:
    return "i32" if -(2**31) <= size < 2**31 else "i64"


def _flat(values: Sequence[Any]) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, tuple) else (value,))]


_FOUR_WARPS = Build()


class Step:
    """One kernel of a plan with its grid, sizes and constants; its leading arguments come from the operands."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        sizes: Sizes,
        constants: Mapping[str, object],
        device: torch.device,
        build: Build = _FOUR_WARPS,
        unaligned: Mapping[str, object] | None = None,
    ) -> None:
        """`unaligned` are the constants that differ where an operand is not aligned for vectors."""
        self.kernel, self.programs, self.device, self.build = kernel, programs, device, build
        self.sizes, self.constants = dict(sizes), dict(constants)
        self.unaligned = self.constants | dict(unaligned or {})

    def bound(self, *sources: Source | Group) -> Launch:
        """The launch whose arguments come from these sources."""
        named = Sources(sources, self.kernel.arg_names)
        if not INTERPRETING:
            return launching(self.device, named.flat, lambda values, aligned: self._prepare(named, values, aligned))

        def interpret(operands: tuple[Value, ...], workspace: Tensor | None) -> None:
            values = list(map(_as_integer, pick(named.flat, operands, workspace), named.names))
            self.kernel[(self.programs,)](*named.grouped(values), *self.sizes.values(), **self.constants)

        return interpret

    def _prepare(self, sources: Sources, arguments: list[Value], aligned: bool) -> _host.Kernel:
        forms = list(map(_form, arguments, sources.names))
        target = triton.runtime.driver.active.get_current_target()
        constants = self.constants if aligned else self.unaligned
        build = replace(self.build, pdl=self.build.pdl and captures_pdl())
        compiled = compile_kernel(self.kernel, sources.grouped(forms), self.sizes, constants, build, target, aligned)
        kernel = loaded(compiled, self.programs)
        for i, form in enumerate(forms):
            if form.startswith("*"):
                kernel.address(i)
            elif form != "constexpr":
                kernel.number(i, "i32" if form == "i32" else "f64")
        return finish_parameters(kernel, *_flat(list(self.sizes.values())))


def _form(value: Value, name: str) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "i32" if name == _INTEGER else "i64"


def _as_integer(value: Value, name: str) -> Value:
    """An argument as the interpreter takes it."""
    if value is None or isinstance(value, Tensor):
        return value
    if name == _INTEGER:
        return int(value)
    bits: int = struct.unpack("<q", struct.pack("<d", float(value)))[0]
    return bits
