"""The host's part of a call. Private: baracuda.plans.checks and baracuda.backends.triton stand before it."""

from collections.abc import Sequence

#: (dtypes, shape, output, optional, "f" or "i" where a number may stand for the tensor, and its open limits)
Rule = tuple[Sequence[tuple[int, int]], Sequence[int], bool, bool, str, float, float]

class Checker:
    """The rules of a row's operands on one device. True is certain; False leaves the answer to Python."""

    def __init__(
        self, rules: Sequence[Rule], device_type: int, device_index: int, elementwise: bool, rows: bool, /
    ) -> None: ...
    def fits(self, operands: tuple[object, ...], /) -> bool: ...
    def holds(self, workspace: object, operands: tuple[object, ...], size: int, alignment: int, /) -> bool: ...

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
