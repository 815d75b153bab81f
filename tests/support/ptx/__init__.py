"""An interpreter of PTX: runs the kernels that Triton compiles for a GPU, without one.

`run` executes a kernel on NumPy arrays, instruction by instruction: the threads of a program in step, and warps with
parts of their own until they wait for each other. It checks what a kernel does to memory: every access is within a
buffer and aligned, and no warp touches bytes of shared memory that another has written or read since the last barrier,
or that a copy has not brought or still reads. It knows the instructions that this library's kernels are made of and
refuses all others. It cannot see what only a GPU shows: speed, what depends on the order of programs and kernels, and a
product of matrices that still reads its operands when they change.
"""

from __future__ import annotations

from .machine import run
from .memory import Fault
from .parse import Unknown

__all__ = ["Fault", "Unknown", "run"]
