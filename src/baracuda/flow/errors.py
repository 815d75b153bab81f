"""What can be wrong with a checkpoint, by name: `verify` lists these, everything else raises them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import BaracudaError


class CheckpointError(BaracudaError):
    """A file that is not what it should be. `code` is the short name `baracuda verify` prints for it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are pickled by `args`, which hold the message alone; a pool of processes hands them on so."""
        return type(self), (self.code, *self.args), self.__dict__


class FlowError(BaracudaError):
    """A run that cannot start or go on: the message says why and what to do."""


def some(names: list[str], shown: int = 3) -> str:
    """A few names, and how many there are besides."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


#: What ends a message about a run that can go on.
RESUME = "repeat the command with --resume (in Python, resume=True)"


_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "choose an output directory that can be written",
    errno.EACCES: "give this user the permission, or choose another directory",
    errno.EPERM: "give this user the permission, or choose another directory",
}


@contextmanager
def told(out: Path, then: str) -> Iterator[None]:
    """What the system refuses while `out` is written, in a sentence; `then` says what to do once that is solved."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise FlowError(str(error)) from error
        remedy = _REMEDIES.get(error.errno, "solve this")
        where = error.filename or out
        raise FlowError(f"{where}: {error.strerror}; {remedy}, then {then}") from error
