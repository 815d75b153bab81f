"""The exceptions. Every message says what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

__all__ = [
    "BaracudaError",
    "InvalidProblem",
    "Unsupported",
    "WorkspaceTooSmall",
]


class BaracudaError(Exception):
    """Anything baracuda raises on purpose."""


class InvalidProblem(BaracudaError, ValueError):
    """The descriptor or the arguments contradict themselves, each other or the contract."""


class Unsupported(BaracudaError, NotImplementedError):
    """Lawful, but not supported here.

    When a plan is selected, `reasons` holds each kernel's answer; otherwise it is empty.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        super().__init__("\n".join([message, *(f"  {kernel}: {why}" for kernel, why in self.reasons.items())]))


class WorkspaceTooSmall(BaracudaError, ValueError):
    """The workspace handed to `run` is smaller than `plan.workspace_size()`."""

    def __init__(self, needed: int, got: int) -> None:
        self.needed = needed
        self.got = got
        super().__init__(
            f"workspace: expected at least {needed} bytes, got {got}; "
            "allocate torch.empty(plan.workspace_size(), dtype=torch.uint8, device=plan.device)"
        )

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        return type(self), (self.needed, self.got)


# Tracebacks show the name that users import.
for _error in (BaracudaError, InvalidProblem, Unsupported, WorkspaceTooSmall):
    _error.__module__ = "baracuda"
