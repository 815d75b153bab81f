"""Kernels that follow each other closely: the next one comes to the multiprocessors while the one before still runs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_over(EARLY: tl.constexpr):
    """What a kernel does before it touches memory, to read or to write.

    EARLY where it is launched before the one in front of it has ended: waits for that end, and so for all that came
    before. Then the next kernel may come too, as room gets free; it waits in its turn, here or to be launched at all.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
