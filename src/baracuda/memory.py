"""Fresh memory for large results on the CPU."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

#: Results from this size on ask for huge pages.
LARGE = 2**22

_PAGE = 4096
_MADV_HUGEPAGE = 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def on_huge_pages(fresh: Tensor) -> Tensor:
    """Ask for huge pages under a tensor nobody has written to yet.

    The first touch of each 4 KiB page is a trip to the kernel, and together those cost several times what computing
    the values does. Where the system does not know the request, nothing changes.
    """
    if _madvise is not None:
        start = -(-fresh.data_ptr() // _PAGE) * _PAGE
        length = (fresh.data_ptr() + fresh.nbytes - start) // _PAGE * _PAGE
        if length > 0:
            _madvise(start, length, _MADV_HUGEPAGE)
    return fresh
