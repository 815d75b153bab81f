"""Checks of a call's operands against the op's row, before anything is written. A problem's rules are derived once.

The compiled module checks first. What it does not accept is checked again here, where the errors are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends.registry import Strides, Value
from ..core.errors import InvalidProblem
from ..core.host import DLPACK_DEVICES, DLPACK_DTYPES, MISSING
from ..core.optable import OPS, Numbers, needed
from ..core.problem import Problem
from ..core.scope import Shape
from ..core.strides import extent, overlaps_itself, row_stride
from ..core.types import QuantizeKind

if MISSING is None:
    from .. import _host


@dataclass(frozen=True, slots=True)
class _Expected:
    """One operand of one problem, its rules worked out."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: Shape
    output: bool
    optional: bool
    number: Numbers | None

    def native(self) -> _host.Rule:
        """The rule in the form the compiled module takes."""
        kind, low, high = (
            (self.number.kind.__name__[0], self.number.low, self.number.high) if self.number else ("", 0, 0)
        )
        return [DLPACK_DTYPES[dtype] for dtype in self.dtypes], self.shape, self.output, self.optional, kind, low, high


#: Operands with an element for each segment.
_OF_SEGMENTS = ("scale", "zero_point", "scale_out", "zero_point_out")
#: Operands that are not tensors. They are tested first: `isinstance(value, Tensor)` takes longer.
_NO_MEMORY = (float, int, type(None))


class Checker:
    """Raises InvalidProblem for the first operand that does not fit the problem."""

    def __init__(self, problem: Problem, device: torch.device, strides: Strides) -> None:
        row = OPS[problem.op]
        self.problem, self.device, self.strides = problem, device, strides
        self.elementwise = row.elementwise
        self.expected = tuple(
            _Expected(
                operand.name,
                tuple(kind.dtype for kind in operand.elements(problem)),
                operand.shape(problem),
                operand.output,
                not needed(problem, operand),
                operand.number(problem) if operand.number is not None else None,
            )
            for operand in row.operands
        )
        #: The fields that `fit` reads for every operand of every call, unpacked.
        self.rules = tuple(
            (e, e.dtypes, e.shape, *((e.number.kind, e.number.low, e.number.high) if e.number else (None, 0, 0)))
            for e in self.expected
        )
        self.outputs = tuple(i for i, operand in enumerate(row.operands) if operand.output)
        #: True if all operands, or the first few, have strides the kernel takes, and fit; True if a workspace of so
        #: many bytes fits.
        #: False means that the checks in Python decide.
        self.native: _host.Checker | None = None
        self.fits: Callable[[tuple[Value, ...]], bool] = _perhaps
        #: The same, where contiguous tensors may have other axes in place of a matrix's rows.
        self.fits_along: Callable[[tuple[Value, ...]], bool] = _perhaps
        self.holds: Callable[[Tensor | None, tuple[Value, ...], int, int], bool] = _perhaps
        if MISSING is None and device.type in DLPACK_DEVICES:
            rules = [expected.native() for expected in self.expected]
            place = DLPACK_DEVICES[device.type], device.index or 0
            self.native = native = _host.Checker(
                rules, *place, row.elementwise, device.type == "cpu" and strides != "contiguous"
            )
            self.fits, self.fits_along, self.holds = native.fits, native.fits_along, native.holds

    def __call__(self, operands: tuple[Value, ...]) -> None:
        contiguous = self.fit(operands)
        if not contiguous:
            for value, expected in zip(operands, self.expected, strict=True):
                if isinstance(value, Tensor) and not value.is_contiguous():
                    self._check_strides(value, expected)
        for i in self.outputs:
            out = operands[i]
            if isinstance(out, Tensor):
                self._check_overlap(operands, i, out, contiguous)

    def fit(self, operands: tuple[Value, ...]) -> bool:
        """Raises for the first operand that breaks its rule, strides aside; says whether all are contiguous."""
        device, contiguous = self.device, True
        for value, (expected, dtypes, shape, number, low, high) in zip(operands, self.rules, strict=False):
            if type(value) is number and low < value < high:
                continue
            if isinstance(value, Tensor):
                if (
                    value.dtype not in dtypes
                    or value.shape != shape
                    or value.device != device
                    or value.layout is not torch.strided
                ):
                    self._require_tensor(value, expected)
                if value.numel() and _address(value) < 4096:
                    raise InvalidProblem(
                        f"{self._where(expected)}: expected a tensor with memory, got a {type(value).__name__} "
                        "without; give what was freed its memory again, and of a wrapper the tensor inside"
                    )
                if contiguous and not value.is_contiguous():
                    contiguous = False
            elif value is None and expected.optional:
                continue
            elif value is not None and expected.number is not None:
                expected.number.require(expected.name, value)
            else:
                raise InvalidProblem(f"{self._where(expected)}: expected {_describe(expected)}, got {value!r}")
        return contiguous

    def _where(self, expected: _Expected) -> str:
        return f"{self.problem.op.value}: {expected.name}"

    def _require_tensor(self, value: Tensor, expected: _Expected) -> None:
        where = self._where(expected)
        if value.dtype not in expected.dtypes:
            raise InvalidProblem(f"{where}: expected {_describe(expected)}, got {value.dtype}; convert it with .to()")
        if value.shape != expected.shape:
            raise InvalidProblem(
                f"{where}: expected shape {list(expected.shape)}, got {list(value.shape)}{self._shape_remedy(expected)}"
            )
        if value.device != self.device:
            raise InvalidProblem(f"{where}: expected a tensor on {self.device}, got one on {value.device}; move it")
        if value.layout is not torch.strided:
            raise InvalidProblem(f"{where}: expected a dense tensor, got layout {value.layout}")

    def _shape_remedy(self, expected: _Expected) -> str:
        """A hint at the likely mistake, for operands whose shape follows from an option."""
        if expected.name in _OF_SEGMENTS:
            whole = ", or the Quantized itself" if self.problem.op is QuantizeKind.DEQUANTIZE else ""
            shape = list(expected.shape)
            return f"; scales of {self.problem.scope} have shape {shape}: pass the scope of yours{whole}"
        if expected.name in ("addend", "sum_out") and not self.problem.adds:
            return "; leave it out, or say adds=True"
        if expected.name == "up" and self.problem.halves:
            return "; leave it out, or say halves=False"
        if expected.name == "weight_q":
            return f"; weights are [N, K], and these activations have K = {self.problem.shape[2]}"
        return ""

    def _check_strides(self, value: Tensor, expected: _Expected) -> None:
        if expected.output:
            self._check_own_memory(value, expected)
        if self.strides == "any":
            return
        if self.strides == "rows" and not expected.output and row_stride(value) is not None:
            return
        accepted = "contiguous or row-strided" if self.strides == "rows" and not expected.output else "contiguous"
        raise InvalidProblem(
            f"{self._where(expected)}: this kernel takes {accepted} tensors, got strides {list(value.stride())} "
            f"for shape {list(value.shape)}; call .contiguous(), or the function instead of the plan"
        )

    def _check_own_memory(self, value: Tensor, expected: _Expected) -> None:
        if overlaps_itself(value):
            raise InvalidProblem(
                f"{self._where(expected)}: expected an element per address, "
                f"got strides {list(value.stride())} for shape {list(value.shape)}; "
                "give it memory of its own, as torch.empty does"
            )

    def check_output(self, i: int, value: object, shape: Shape | None = None) -> None:
        """Raises unless operand i can be written there, by a copy where the kernel does not take the strides."""
        expected = self.expected[i] if shape is None else replace(self.expected[i], shape=shape)
        if not isinstance(value, Tensor):
            raise InvalidProblem(f"{self._where(expected)}: expected {_describe(expected)}, got {type(value).__name__}")
        self._require_tensor(value, expected)
        self._check_own_memory(value, expected)

    def check_signs(self, operands: tuple[Value, ...]) -> None:
        """Raises for a view with the negative bit set: it has not been negated in memory, which kernels read."""
        for value in operands:
            if type(value) is Tensor and value.is_neg():
                name = next(e.name for v, e in zip(operands, self.expected, strict=True) if v is value)
                raise InvalidProblem(
                    f"{self.problem.op.value}: {name}: expected a tensor as it is in memory, got a view of its "
                    "negative; call .resolve_neg()"
                )

    def check_apart(self, workspace: Tensor, operands: tuple[Value, ...]) -> None:
        """Raises if the workspace, which is contiguous, shares memory with an operand."""
        start = workspace.data_ptr()
        for value, expected in zip(operands, self.expected, strict=True):
            if not isinstance(value, Tensor) or value.data_ptr() >= start + workspace.nbytes:
                continue
            if start < value.data_ptr() + extent(value):
                raise InvalidProblem(
                    f"{self.problem.op.value}: the workspace overlaps {expected.name} in memory; "
                    "give it memory of its own"
                )

    def _check_overlap(self, operands: tuple[Value, ...], i: int, out: Tensor, contiguous: bool) -> None:
        """An output may be one of the inputs of an elementwise op, and otherwise shares memory with nothing."""
        start = out.data_ptr()
        end = start + (out.nbytes if contiguous else extent(out))
        for j, other in enumerate(operands):
            if i == j or type(other) in _NO_MEMORY or not isinstance(other, Tensor):
                continue
            other_start = other.data_ptr()
            if other_start >= end or start >= other_start + (other.nbytes if contiguous else extent(other)):
                continue
            alike = other.dtype == out.dtype and other.stride() == out.stride() and other.shape == out.shape
            if not (self.elementwise and other_start == start and alike):
                raise InvalidProblem(
                    f"{self._where(self.expected[i])} overlaps {self.expected[j].name} in memory; "
                    "give it memory of its own"
                )


def _address(value: Tensor) -> int:
    """The address of the data; below 4096 for a tensor without memory: a freed storage, or a wrapper subclass."""
    try:
        return value.data_ptr()
    except RuntimeError:
        return 0


def _perhaps(*_: object) -> bool:
    """The quick check where there is no compiled module: the checks in Python decide."""
    return False


def _describe(expected: _Expected) -> str:
    dtypes = " or ".join(dict.fromkeys(str(dtype) for dtype in expected.dtypes))
    number = "a number or " if expected.number is not None else ""
    return f"{number}a {dtypes} tensor of shape {list(expected.shape)}"
