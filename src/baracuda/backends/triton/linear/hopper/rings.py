"""What the warps of a decoding GEMM share: its rings of stages, and how values of rows reach the bytes of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..kernels import tile_at


class PackedWork(NamedTuple):
    """The sizes of the problem, its tiles and their steps along K, the steps of a part of K, and all units of work."""

    M: Any
    N: Any
    K: Any
    tiles_m: Any
    tiles_n: Any
    steps: Any
    part_steps: Any
    units: Any


class Ring(NamedTuple):
    """Stages of shared memory, and the barriers that say which are full and which are empty."""

    stages: Any
    full: Any
    empty: Any


class Rings(NamedTuple):
    """Of stored weights, of decoded ones, and of activations."""

    stored: Any
    w: Any
    x: Any


@gluon.jit
def ring_of(stages, READERS: gl.constexpr):
    """A ring whose stages are filled by one arrival each and emptied by READERS."""
    STAGES: gl.constexpr = stages.shape[0]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(stages=stages, full=full, empty=empty)


@gluon.jit
def unit_at(unit, work, TILE: gl.constexpr):
    """Row and column of a unit's tile, its part of K, its first step and how many it has.

    A unit is a tile, or one of TILE.split parts of a tile that lie apart.
    """
    APART: gl.constexpr = TILE.split if TILE.apart else 1
    m, n = tile_at(unit // APART, work.tiles_m, work.tiles_n, TILE.group, TILE.across)
    part = unit % APART
    first = part * work.part_steps
    count = work.steps
    if APART > 1:
        count = min(work.part_steps, work.steps - first)
    return m, n, part, first, count


@gluon.jit
def step_on(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def at_step(i, STAGES: gl.constexpr):
    """The stage of the i-th step, and the phase in which it is full."""
    return i % STAGES, i // STAGES & 1


@gluon.jit
def spread(factors, BYTES: gl.constexpr, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """[rows, 16-byte parts] -> [rows, BYTES]."""
    wide, _ = gl.broadcast(gl.expand_dims(factors, 2), gl.zeros([1, 1, 16], factors.dtype, PARTS))
    return gl.convert_layout(gl.reshape(wide, [factors.shape[0], BYTES]), LAYOUT, assert_trivial=True)
