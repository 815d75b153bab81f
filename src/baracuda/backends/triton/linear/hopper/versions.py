"""What Gluon calls by another name in another version of Triton."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Of the program's threads; renamed in Triton 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Copies of the tensor memory accelerator to and from shared memory; renamed in Triton 3.8.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_PRIVATE = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpreted(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with elements of another type; a private method before Triton 3.9."""
    if _PRIVATE:
        return buffer._reinterpret(dtype, shape, layout)
    else:
        return buffer.reinterpret(dtype, shape, layout)
