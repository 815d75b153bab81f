"""Plan: chosen once for a problem, then run many times without choosing, allocating or synchronising anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..backends.registry import Value, choose
from ..core.errors import BaracudaError, InvalidProblem, Unsupported, WorkspaceTooSmall
from ..core.host import MISSING
from ..core.memory import LARGE, on_huge_pages
from ..core.notebook import html_table
from ..core.optable import OPS, needed
from ..core.problem import Problem
from ..core.scope import Shape
from ..core.strides import contiguous_strides, row_stride
from ..core.types import BackendKind, ElementKind, KernelSku, PlanPreference, PrecisionGuarantee, QuantizeKind, Support
from .checks import Checker

if MISSING is None:
    from .. import _host

#: Shape, strides and type of an output.
OutputSpec = tuple[Shape, Shape, torch.dtype]
#: Where a workspace must start; torch's own allocations always do.
WORKSPACE_ALIGNMENT = 16


class Descriptor(Protocol):
    """A frozen description that lowers itself to a Problem."""

    def problem(self, op: QuantizeKind) -> Problem: ...


def _workspace(size: int, device: torch.device) -> Tensor:
    return torch.empty_strided((size,), (1,), dtype=torch.uint8, device=device)


class SelectedPlan:
    """A problem, the kernel chosen for it, and the checks that stand before it."""

    def __init__(self, problem: Problem, device: torch.device, preference: PlanPreference | None = None) -> None:
        self.problem, self.device = problem, device
        self.segment_shape = problem.segment_shape
        self.kernel = choose(problem, device, preference)
        self._check = Checker(problem, device, self.kernel.strides)
        #: True if the operands, or the first few, fit; False means that the checks in Python decide.
        self.fits = self._check.fits
        self._is_along = False
        self._launch = self.kernel.bind(problem, device)
        self._workspace_size = self.kernel.workspace(problem, device)
        self._needs_workspace = self._workspace_size > 0 and not self.kernel.scratch(problem, device)
        operands = OPS[problem.op].operands
        self.output_indices = tuple(i for i, operand in enumerate(operands) if operand.output)
        self._take_specs(
            (shape := operand.shape(problem), contiguous_strides(shape), operand.elements(problem)[0].dtype)
            if needed(problem, operand)
            else None
            for operand in operands
            if operand.output
        )

    def _take_specs(self, specs: Iterable[OutputSpec | None]) -> None:
        """Make outputs of these shapes, strides and types from now on."""
        self._output_specs, device = tuple(specs), self.device
        # What torch.empty returns, in two thirds of the time.
        self._makers = tuple(
            None if spec is None else partial(torch.empty_strided, spec[0], spec[1], dtype=spec[2], device=device)
            for spec in self._output_specs
        )
        self._large_on_cpu = device.type == "cpu" and any(
            spec and prod(spec[0]) * spec[2].itemsize >= LARGE for spec in self._output_specs
        )
        self._compute: Callable[[tuple[Value, ...]], tuple[Any, ...] | None] = _not_compiled
        if self._check.native is not None and not self._large_on_cpu:
            # Not the method: the compiled object holds what it is given, and Python sees no cycle through it.
            workspace = partial(_workspace, self._workspace_size, device) if self._needs_workspace else None
            computation = _host.Computation(self._check.native, self._is_along, self._makers, workspace, self._launch)
            self._compute = computation.compute

    def only(self, *read: str, dtype: torch.dtype | None = None) -> Self:
        """This plan for callers that read these outputs alone: its kernel skips the others where it can.

        `dtype` is another float type for the last output; where the kernel cannot store it, the output keeps its own.
        """
        operands, spared = OPS[self.problem.op].operands, self.kernel.spares(self.problem, self.device)
        names = [operands[i].name for i in self.output_indices]
        specs = [
            None if name in spared and name not in read else spec
            for name, spec in zip(names, self._output_specs, strict=True)
        ]
        narrows = self.kernel.narrows and self.problem.element is ElementKind.F32
        if dtype is not None and dtype.itemsize == 2 and narrows and (last := specs[-1]) is not None:
            specs[-1] = (*last[:2], dtype)
        made = copy(self)
        made._take_specs(specs)
        return made

    def along(self, axes: Shape) -> Self:
        """This plan with other axes in place of a matrix's rows: `compute` takes and makes tensors that have them.

        A view of a tensor takes torch as long as a small kernel, and the kernels read memory alone.
        """
        made = copy(self)
        made.fits, made._is_along = self._check.fits_along, True
        if self.kernel.backend is BackendKind.REFERENCE:  # which looks at shapes
            made._launch = lambda operands, workspace: self._launch(self._as_matrices(operands), workspace)
        made._take_specs(
            ((*axes, spec[0][1]), contiguous_strides((*axes, spec[0][1])), spec[2])
            if spec and len(spec[0]) == 2
            else spec
            for spec in self._output_specs
        )
        return made

    def _as_matrices(self, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(
            value.reshape(shape) if isinstance(value, Tensor) and len(shape) == 2 and value.ndim != 2 else value
            for value, (_, _, shape, *_) in zip(operands, self._check.rules, strict=False)
        )

    def allocate_outputs(self) -> tuple[Tensor | None, ...]:
        """Fresh outputs in the order of the op's row; None for those this problem can do without."""
        outputs = tuple([None if make is None else make() for make in self._makers])
        if self._large_on_cpu:
            for output in outputs:
                if output is not None and output.nbytes >= LARGE:
                    on_huge_pages(output)
        return outputs

    def allocate_workspace(self) -> Tensor | None:
        return _workspace(self._workspace_size, self.device) if self._workspace_size else None

    def workspace_size(self) -> int:
        """Bytes of workspace `run` needs."""
        return self._workspace_size

    def sku(self) -> KernelSku:
        """The identity of the selected kernel."""
        return self.kernel.sku(self.problem, self.device)

    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the plan promises about the bits of its result."""
        return self.kernel.guarantee(self.problem)

    def launch(self, operands: tuple[Value, ...], workspace: Tensor | None = None) -> None:
        """Check and run, with the operands in the order of the op's row."""
        if not self.fits(operands):
            self._check(operands)
        if (size := self._workspace_size) and not self._check.holds(workspace, operands, size, WORKSPACE_ALIGNMENT):
            self._check_workspace(workspace, operands)
        self._launch(operands, workspace)
        # As torch's own operators do: autograd, and caches keyed by a tensor's version, must see the change.
        increment_version([value for i in self.output_indices if (value := operands[i]) is not None])  # type: ignore[misc]

    def check_output(self, i: int, value: object, shape: Shape | None = None) -> None:
        """Raises unless operand i can be written to `value`, seen as `shape`, whatever strides the kernel takes."""
        self._check.check_output(i, value, shape)

    def compute(self, inputs: tuple[Value, ...]) -> tuple[Any, ...]:
        """Check the inputs and run into fresh outputs; inputs whose strides the kernel does not take are copied."""
        if (computed := self._compute(inputs)) is not None:
            return computed
        if not self.fits(inputs):
            if self._is_along:
                inputs = self._as_matrices(inputs)
            if not self._check.fit(inputs):
                inputs = self.arrange(inputs)
        outputs = self.allocate_outputs()
        self._launch(inputs + outputs, self.allocate_workspace() if self._needs_workspace else None)
        return outputs

    def arrange(self, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        """The operands with strides the kernel takes; of a row, inputs come first and may keep their row stride."""
        accepted = self.kernel.strides
        if accepted == "any":
            return operands
        rows = len(self._check.rules) - len(self.output_indices) if accepted == "rows" else 0
        return tuple(
            value.contiguous()
            if isinstance(value, Tensor) and not (i < rows and row_stride(value) is not None)
            else value
            for i, value in enumerate(operands)
        )

    def _check_workspace(self, workspace: Tensor | None, operands: tuple[Value, ...]) -> None:
        if workspace is None:
            raise WorkspaceTooSmall(self._workspace_size, 0)
        if not isinstance(workspace, Tensor) or workspace.device != self.device or not workspace.is_contiguous():
            came = type(workspace).__name__
            if isinstance(workspace, Tensor):
                came = f"one with strides {list(workspace.stride())} on {workspace.device}"
            raise InvalidProblem(
                f"workspace: expected a contiguous tensor on {self.device}, got {came}; "
                f"make it with torch.empty({self._workspace_size}, dtype=torch.uint8, device={str(self.device)!r})"
            )
        if workspace.nbytes < self._workspace_size:
            raise WorkspaceTooSmall(self._workspace_size, workspace.nbytes)
        if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
            raise InvalidProblem(
                f"workspace: expected an address divisible by {WORKSPACE_ALIGNMENT}, got one "
                f"{workspace.data_ptr() % WORKSPACE_ALIGNMENT} beyond; pass a whole tensor, not a slice"
            )
        self._check.check_apart(workspace, operands)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.problem}, {self.kernel.backend.value}.{self.kernel.name} on {self.device})"


D = TypeVar("D", bound=Descriptor)
A = TypeVar("A")


class Plan(SelectedPlan, Generic[D, A]):
    """Base of the named plans, which declare an op, a descriptor and its arguments, and nothing else."""

    op: ClassVar[QuantizeKind]
    _from_args: ClassVar[attrgetter[tuple[Any, ...]]]
    _descriptor_type: ClassVar[type]
    _args_type: ClassVar[type]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        declared = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        cls._descriptor_type, cls._args_type = declared or (object, object)
        names = [operand.name for operand in OPS[cls.op].operands]
        if is_dataclass(cls._args_type):
            given = {field.name for field in fields(cls._args_type)}
            names = [name for name in names if name in given]
        cls._from_args = attrgetter(*names)

    def __init__(self, desc: D, device: torch.device, preference: PlanPreference | None = None) -> None:
        _require_type(f"{type(self).__name__}.select", desc, self._descriptor_type)
        if preference is not None:
            _require_type("preference", preference, PlanPreference, "; a device is a keyword, as in device='cpu'")
        super().__init__(desc.problem(self.op), device, preference)
        self.descriptor, self.preference = desc, preference

    def _repr_html_(self) -> str:
        sku, promised = self.sku(), self.precision_guarantee()
        rows = [
            ("descriptor", str(self.descriptor)),
            ("kernel", f"{sku.kernel} of {sku.backend.value}, {sku.arch}"),
            ("device", str(self.device)),
            ("workspace", f"{self.workspace_size()} bytes"),
            ("arithmetic", f"{promised.math_precision.value}, sums in {promised.accumulator.value}"),
            ("the bits of the reference", "yes" if promised.matches_reference else "no"),
        ]
        return html_table(type(self).__name__, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the selection, not the kernel: a copy selects again in its own process."""
        return type(self), (self.descriptor, self.device, self.preference)

    @classmethod
    def select(
        cls, desc: D, preference: PlanPreference | None = None, *, device: torch.device | str | None = None
    ) -> Self:
        """Choose a kernel for `desc` on `device` (torch's default device unless given)."""
        return cls(desc, resolve_device(device), preference)

    def operands(self, args: A) -> tuple[Value, ...]:
        """The arguments in the order of the op's row; values that the descriptor holds are not among them."""
        try:
            return self._from_args(args)
        except AttributeError:
            _require_type(type(self).__name__, args, self._args_type)
            raise

    def can_implement(self, args: A) -> Support:
        """Truthy, or falsy with the reason `run` would raise. Touches no data."""
        try:
            operands = self.operands(args)
            self._check(operands)
            self._check.check_signs(operands)
        except BaracudaError as error:
            return Support(str(error))
        return Support()

    def run(self, args: A, workspace: Tensor | None = None, *, stream: torch.cuda.Stream | None = None) -> None:
        """Launch on torch's current stream, or on `stream`. The workspace must not share memory with an argument."""
        operands = self.operands(args)
        self._check.check_signs(operands)
        if stream is None:
            self.launch(operands, workspace)
            return
        _require_type("stream", stream, torch.cuda.Stream)
        with torch.cuda.stream(stream):
            self.launch(operands, workspace)


def _not_compiled(inputs: tuple[Value, ...]) -> None:
    """The quick computation where there is none."""


def _require_type(name: str, value: object, expected: type, remedy: str = "") -> None:
    if not isinstance(value, expected):
        raise InvalidProblem(f"{name}: expected {expected.__name__}, got {type(value).__name__}{remedy}")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """A device as tensors report it: a CUDA device always has its index."""
    try:
        resolved = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidProblem(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}") from None
    if resolved.type != "cuda":
        return torch.device(resolved.type)  # the index of another device has no meaning
    if not torch.cuda.is_available():
        raise Unsupported(f"device {resolved}: torch {torch.__version__} sees no CUDA GPU here; use device='cpu'")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise Unsupported(f"device {resolved}: torch sees {torch.cuda.device_count()} GPUs, numbered from 0")
    return torch.device("cuda", index)
