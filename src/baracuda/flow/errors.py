"""The errors of the model flow: `verify` lists what is wrong with a checkpoint, everything else raises."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import BaracudaError
from ..core.patterns import MAX_STEPS, flaw, steps


class CheckpointError(BaracudaError):
    """A file that is not what it should be. `code` is the short name `baracuda verify` prints for it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the code too: by default only `args`, the message, would reach another process."""
        return type(self), (self.code, *self.args), self.__dict__


class FlowError(BaracudaError):
    """A run that cannot start or go on: the message says why and what to do."""


def some(names: list[str], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def shown(value: object, limit: int = 60) -> str:
    """A value from a file as an error shows it: short, and in ASCII, whatever it holds."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    try:
        text = ascii(value if not isinstance(value, str) else value[: limit + 1])
    except ValueError:  # an integer of more digits than Python prints
        text = "a huge number"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def require_pattern(pattern: str, where: str = "--ignore") -> None:
    """Raise unless this is a usable pattern over module names; `where` says who wrote it."""
    if (error := flaw(pattern)) is not None:
        raise FlowError(
            f"{where} {pattern[:80]}: not a regular expression: {error}; correct it, or drop re: for a shell pattern"
        )


def require_quick(patterns: Iterable[str], names: Collection[str], where: str) -> None:
    """Raise where matching a stranger's patterns with these names may never end."""
    patterns = list(patterns)
    if steps(patterns, names) <= MAX_STEPS:
        return
    worst = max(patterns, key=lambda pattern: steps([pattern], names))
    raise FlowError(
        f"{where}: matching {shown(worst)} with the names of the layers may take forever; expected a regular "
        "expression without repetitions inside each other, and with few of them: correct it, or name the layers"
    )


#: How a message ends when the run can be resumed.
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
def os_errors_explained(out: Path, then: str) -> Iterator[None]:
    """Turn an OSError raised while `out` is written into a FlowError with a remedy; `then` is the step after that."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise FlowError(str(error)) from error
        remedy = _REMEDIES.get(error.errno, "solve this")
        where = error.filename or out
        raise FlowError(f"{where}: {error.strerror}; {remedy}, then {then}") from error
