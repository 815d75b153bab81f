"""Products of matrices by the four warps of a warp group (wgmma), done as soon as they are issued."""

from __future__ import annotations

import re

import numpy as np

from .alu import makes
from .copies import swizzled
from .floats import Array
from .memory import SHARED, Fault
from .parse import Instruction, Number, Several, Unknown
from .registers import DTYPES, Action, Reader, put
from .warps import elements, fragments, spread_result, whole_warps

_SHAPE = re.compile(r"m64n(\d+)k(16|32)$")
#: Bytes between rows and the bits that are mixed in, by the swizzle's number in a descriptor.
_SWIZZLES = {1: (128, 7), 2: (64, 3), 3: (32, 1)}


def matrix(program, descriptor: int, rows: int) -> Array:
    """[rows, 32 bytes] of shared memory: 8 rows side by side, then the next 8 at the descriptor's stride."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 not in _SWIZZLES or descriptor >> 49 & 7:
        raise Fault(f"the descriptor {descriptor:#x} has a swizzle that is not known")
    pitch, bits = _SWIZZLES[descriptor >> 62]
    row = np.arange(rows)[:, None]
    places = start + row // 8 * stride + row % 8 * pitch + np.arange(32)
    index = swizzled(places, bits).reshape(-1, 1) - SHARED
    return program.shared.read_together(index).reshape(rows, 32)


@makes("wgmma.mma_async")
def multiply(instruction: Instruction, reader: Reader) -> Action:
    """Warp w of a group has rows 16w to 16w + 15 of the left operand and of the sums, in the order of mma."""
    words = instruction.words
    shape, (result, kind, other) = _SHAPE.match(words[4]), words[5:8]
    target, left, right, keep, *rest = instruction.operands
    integers = (result, kind) == ("s32", "s8")
    known = integers or (result == "f32" and kind in ("f16", "bf16"))
    plain = [number.value for number in rest if isinstance(number, Number)] in ([], [1, 1, 0], [1, 1, 0, 0])
    if shape is None or kind != other or not known or not plain or not isinstance(target, Several):
        raise Unknown(instruction.name)
    columns, writes = int(shape.group(1)), [put(part) for part in target.parts]
    dtype = np.dtype(np.int32 if integers else np.float32)
    before = [reader.get(part, DTYPES["b32"]) for part in target.parts]
    held = [reader.get(part, DTYPES["b32"]) for part in left.parts] if isinstance(left, Several) else None
    at_left = None if held else reader.get(left, DTYPES["u64"])
    at_right, kept = reader.get(right, DTYPES["u64"]), reader.get(keep, DTYPES["pred"])

    def run(program, mask) -> None:
        warps = whole_warps(program, mask)
        if len(warps) % 4 or (warps.reshape(-1, 4)[:, 0] % 4).any():
            raise Fault("expected all warps of a warp group to take part")
        descriptors = [program.spread(x(program))[32 * warps[::4]] for x in (at_left, at_right) if x is not None]
        b = np.stack([elements(matrix(program, int(d), columns), kind) for d in descriptors[-1]])
        if held:
            # [warp, 8, 4, k half, row half, bytes]
            a = fragments(program, held, warps, np.uint8).reshape(len(warps), 8, 4, 2, 2, 4)
            data = a.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 64, 32)
        else:
            data = np.stack([matrix(program, int(d), 64) for d in descriptors[0]])
        product = elements(np.ascontiguousarray(data), kind) @ b.transpose(0, 2, 1)
        c = fragments(program, before, warps, dtype).reshape(len(warps), 8, 4, columns // 8, 2, 2)
        c = np.where(program.spread(kept(program))[32 * warps][:, None, None, None, None, None], c, dtype.type(0))
        mine = product.reshape(len(warps), 2, 8, columns // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
        total = (mine + c.astype(np.float64)).astype(np.int64).astype(np.int32) if integers else mine + c
        values = total.astype(dtype).reshape(len(warps), 32, -1)
        spread_result(program, values, warps, writes, mask)

    return run


@makes("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "setmaxnreg")
def nothing(instruction: Instruction, reader: Reader) -> Action:
    return lambda program, mask: None
