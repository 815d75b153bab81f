"""Programmatic dependent launch (PDL): a kernel is launched while the kernel before it in the stream still runs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Called before a kernel first touches memory, to read or to write.

    With PDL, waits until the previous kernel has ended, and with it all that came before. Then lets the next kernel
    start as multiprocessors become free; it waits in its turn, here or to be launched at all.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
