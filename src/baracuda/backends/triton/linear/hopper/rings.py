"""What the warps of a decoding GEMM share: its rings of stages, and how values of rows reach the bytes of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class PackedWork(NamedTuple):
    """The sizes of the problem, its tiles and their steps along K."""

    M: Any
    N: Any
    K: Any
    tiles_m: Any
    tiles_n: Any
    steps: Any


class Rings(NamedTuple):
    """Buffers and barriers: of stored weights, and of what is multiplied."""

    packed: Any
    packed_full: Any
    packed_empty: Any
    w: Any
    x: Any
    full: Any
    empty: Any


@gluon.jit
def step_on(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def spread(factors, BYTES: gl.constexpr, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """[rows, 16-byte parts] -> [rows, BYTES]."""
    wide, _ = gl.broadcast(gl.expand_dims(factors, 2), gl.zeros([1, 1, 16], factors.dtype, PARTS))
    return gl.convert_layout(gl.reshape(wide, [factors.shape[0], BYTES]), LAYOUT, assert_trivial=True)
