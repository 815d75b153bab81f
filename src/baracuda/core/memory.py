"""Memory for large results on the CPU: huge pages that are reused.

The first touch of a page is a trip to the kernel, which clears it. For a result of many pages that costs several times
what computing the values does with pages of 4 KiB, and as much with huge ones; memory that was touched before costs
nothing. Idle blocks are marked MADV_FREE, so the system can reclaim them.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

#: Results from this size on live in memory of this kind.
LARGE = 2**22
#: The most bytes kept for reuse.
IDLE = 2**30

_PAGE = 2**21
_KNOWN = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_FREE")
#: Blocks kept for reuse, the latest last.
_idle: list[mmap.mmap] = []


def on_huge_pages(fresh: Tensor) -> Tensor:
    """Move a tensor that has not been written yet onto huge pages, reused ones if there are any.

    Without MADV_HUGEPAGE nothing changes. The block is kept for reuse when the last tensor over it is freed. Its
    storage cannot be resized.
    """
    if _KNOWN:
        try:
            block = _block(-(-fresh.nbytes // _PAGE) * _PAGE)
        except OSError:  # no room for a second one
            return fresh
        view = memoryview(block)
        weakref.finalize(view, _release, block).atexit = False
        storage = torch.frombuffer(view, dtype=torch.uint8, count=fresh.nbytes).untyped_storage()
        fresh.set_(storage, 0, fresh.shape, fresh.stride())
    return fresh


def _block(size: int) -> mmap.mmap:
    for block in reversed(list(_idle)):
        if len(block) == size:
            try:
                _idle.remove(block)
            except ValueError:  # another thread has it
                continue
            return block
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(block, mmap.MADV_HUGEPAGE)
    return block


def _advise(block: mmap.mmap, advice: int) -> None:
    """An operating system without this advice raises an error; ignoring it costs time only."""
    with suppress(OSError):
        block.madvise(advice)


def _release(block: mmap.mmap) -> None:
    _advise(block, mmap.MADV_FREE)
    _idle.append(block)
    while sum(map(len, list(_idle))) > IDLE:
        _idle.pop(0)
