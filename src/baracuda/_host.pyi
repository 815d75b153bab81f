"""The host's part of a call. Private: baracuda.plans.checks and baracuda.backends.triton stand before it."""

from collections.abc import Callable, Sequence
from typing import Any

#: (dtypes, shape, output, optional, "f" or "i" where a number may stand for the tensor, and its open limits)
Rule = tuple[Sequence[tuple[int, int]], Sequence[int], bool, bool, str, float, float]

class Checker:
    """The rules of a row's operands on one device. True is certain; False leaves the answer to Python."""

    def __init__(
        self, rules: Sequence[Rule], device_type: int, device_index: int, elementwise: bool, rows: bool, /
    ) -> None: ...
    def fits(self, operands: tuple[object, ...], /) -> bool: ...
    def fits_along(self, operands: tuple[object, ...], /) -> bool:
        """The same, where contiguous tensors may have other axes in place of a matrix's rows."""

    def holds(self, workspace: object, operands: tuple[object, ...], size: int, alignment: int, /) -> bool: ...

def is_plain_call(x: object) -> bool:
    """Whether a call on x may skip torch's dispatcher: no tracer, mode, transform, autocast or subclass sees it."""

class Computation:
    """The inputs are checked, the outputs and the workspace made by these functions (None makes none), and launched."""

    def __init__(
        self,
        checker: Checker,
        along: bool,
        makers: tuple[Callable[[], object] | None, ...],
        workspace: Callable[[], object] | None,
        launch: Callable[..., None],
        /,
    ) -> None: ...
    def compute(self, inputs: tuple[object, ...], /) -> tuple[Any, ...] | None:
        """The outputs; None, and nothing is done, where the inputs may not fit."""

class Lookup:
    """What a module keeps for each kind of input, as long as its own tensors are those it was found for.

    Copies and pickles are empty.
    """

    def __init__(self) -> None: ...
    def take(self, tensors: dict[str, object], bias: object, /) -> None:
        """Start over with these tensors."""

    def add(self, x: object, tag: object, value: object, most: int, /) -> None:
        """Keep a value for inputs of this shape, type and device; no more than `most`."""

    def find(self, x: object, tensors: dict[str, Any], bias: object, tag: object, /) -> Any:
        """The value for an input like this; None where there is none, or where Python must decide."""

class Driver:
    """The CUDA driver, from the library of this name; the newest CUDA it knows, 12030 for 12.3."""

    version: int
    def __init__(self, name: str, /) -> None: ...

class Kernel:
    """A compiled kernel and its parameters, added in their order; arguments are named by their index.

    An `early` one may come while the kernel before it still runs: it waits by itself before it touches memory.
    """

    def __init__(self, name: str, function: int, programs: int, threads: int, shared: int, early: bool, /) -> None: ...
    def constant(self, bits: int, /) -> None: ...
    def address(self, argument: int, /) -> None:
        """0 where the argument is no tensor."""

    def number(self, argument: int, form: str, /) -> None:
        """As "i32", "f32" or "f64"; 0 where the argument is no number."""

    def matrix(
        self,
        argument: int,
        type: int,
        swizzle: int,
        bytes: int,
        rows: int,
        columns: int,
        box_rows: int,
        box_columns: int,
        /,
    ) -> None:
        """The argument as a row-major matrix for the copy engine."""

    def parameters(self) -> list[str]:
        """What fills each parameter: "constant", "address", a form of numbers, "matrix"."""

#: (operand or -1, offset into the workspace or -1, code and bits of the dtype there)
Source = tuple[int, int, int, int]

class Launcher:
    """The kernels of one launch, by the kinds of its arguments; bit i of `vectors`: argument i must be aligned."""

    def __init__(
        self, driver: Driver, device_index: int, sources: Sequence[Source], vectors: int, alignment: int, /
    ) -> None: ...
    def add(self, operands: tuple[object, ...], workspace: object, kernel: Kernel, /) -> None:
        """`kernel` is the one for operands like these."""

    def launch(self, operands: tuple[object, ...], workspace: object, /) -> bool:
        """False where no kernel is known for such operands, or the current device is another one."""

    def use_context(self) -> None:
        """Make the device's primary context current where this thread has none."""
