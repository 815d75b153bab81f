"""What can be wrong with a checkpoint, by name: `verify` lists these, everything else raises them."""

from __future__ import annotations

from ..errors import BaracudaError


class CheckpointError(BaracudaError):
    """A file that is not what it should be. `code` is the short name `baracuda verify` prints for it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class FlowError(BaracudaError):
    """A run that cannot start or go on: the message says why and what to do."""
