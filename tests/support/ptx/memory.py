"""The memory of a kernel, checked at every access: bounds, alignment, and in shared memory what was never written and
what another warp has touched since the last barrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from .floats import Array


class Fault(Exception):
    """An access that a kernel must not make."""


#: Each region of global memory has a space of its own, so that no arithmetic on one's address reaches another.
SPACE = 40
#: Where parameters lie, for those whose address a kernel takes: 32 bits hold it.
PARAMETERS = 1 << 31
#: Where shared memory begins: an address of 0 is always wrong.
SHARED = 1024


def bytes_at(data: Array, offsets: Array, size: int) -> Array:
    """[access, byte]"""
    return data[offsets[:, None] + np.arange(size)]


def require_aligned(addresses: Array, size: int) -> None:
    wrong = addresses & np.uint64(size - 1) != 0
    if wrong.any():
        raise Fault(f"the address {int(addresses[wrong][0]):#x} is not a multiple of the {size} bytes accessed")


class Global:
    """Buffers of the host under addresses of their own.

    `buffers` are arrays of bytes by the address where the kernel's parameters have them. A buffer of which several
    parameters point to different places is cut there.
    """

    def __init__(self, buffers: Mapping[int, Array], pointers: Sequence[int]) -> None:
        self.regions: list[tuple[int, Array]] = []
        self.addresses: dict[int, int] = {}
        for start, data in sorted(buffers.items()):
            inside = {at - start for at in pointers if start <= at < start + len(data)}
            cuts = sorted({0, len(data)} | inside)
            for first, last in pairwise(cuts):
                # In the middle of its space. The low bits stay: they decide what is aligned.
                address = (len(self.regions) + 1 << SPACE) + (1 << SPACE - 1) + ((start + first) & 0xFFF)
                self.regions.append((address, data[first:last]))
                self.addresses[start + first] = address

    def _places(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        """(which accesses, the bytes of their region, where in it)"""
        spaces = addresses >> np.uint64(SPACE)
        found = []
        for space in np.unique(spaces):
            if not 0 < space <= len(self.regions):
                raise Fault(f"the address {int(addresses[spaces == space][0]):#x} is in no buffer")
            start, data = self.regions[int(space) - 1]
            which = np.flatnonzero(spaces == space)
            offsets = addresses[which].astype(np.int64) - start
            wrong = (offsets < 0) | (offsets + size > len(data))
            if wrong.any():
                raise Fault(f"{size} bytes at byte {int(offsets[wrong][0])} of a buffer of {len(data)}")
            found.append((which, data, offsets))
        return found

    def check(self, addresses: Array, size: int) -> None:
        """As if the bytes were read."""
        self._places(addresses, size)

    def read(self, addresses: Array, size: int) -> Array:
        require_aligned(addresses, size)
        result = np.empty((len(addresses), size), np.uint8)
        for which, data, offsets in self._places(addresses, size):
            result[which] = bytes_at(data, offsets, size)
        return result

    def read_bytes(self, addresses: Array, size: int) -> Array:
        """What a copy reads: any number of bytes, from multiples of 16."""
        require_aligned(addresses, 16)
        ((_, data, offsets),) = self._places(addresses, size)
        return bytes_at(data, offsets, size)

    def write_bytes(self, addresses: Array, values: Array) -> None:
        """What a copy writes: any number of bytes, at multiples of 16."""
        require_aligned(addresses, 16)
        ((_, data, offsets),) = self._places(addresses, values.shape[1])
        data[offsets[:, None] + np.arange(values.shape[1])] = values

    def write(self, addresses: Array, values: Array) -> None:
        size = values.shape[1]
        require_aligned(addresses, size)
        for which, data, offsets in self._places(addresses, size):
            index = offsets[:, None] + np.arange(size)
            data[index] = values[which]
            if (data[index] != values[which]).any():
                raise Fault("two threads write different values to the same place")


class Shared:
    """Shared memory of one program. A warp must not touch what another has written since the last barrier, nor write
    what another has read. Copies that run by themselves are like a further warp, but what they have written may be read
    as soon as their own barrier (mbarrier) was waited for."""

    COPY = -3
    _MANY = -2

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)
        self.written = np.zeros(size, bool)
        self.period = 1
        self.writer, self.reader = np.full(size, -1, np.int16), np.full(size, -1, np.int16)
        self.written_in, self.read_in = np.zeros(size, np.int32), np.zeros(size, np.int32)
        #: Bytes on their way, and those of each barrier that will say that they have come.
        self.coming = np.zeros(size, bool)
        self.expected: dict[int, list[Array]] = {}
        #: Bytes that a copy may still read.
        self.going = np.zeros(size, bool)

    def barrier(self) -> None:
        self.period += 1

    def expect(self, barrier: int, index: Array) -> None:
        """What a copy has just written is on its way until the barrier was waited for."""
        self.coming[index] = True
        self.written_in[index] = 0
        self.expected.setdefault(barrier, []).append(index)

    def arrived(self, barrier: int) -> None:
        for index in self.expected.pop(barrier, []):
            self.coming[index] = False

    def leave(self, index: Array) -> None:
        """A copy reads these bytes until it was waited for."""
        self.going[index] = True

    def left(self, index: Array) -> None:
        self.going[index] = False

    def read_together(self, index: Array) -> Array:
        """By all warps of a group."""
        return self.read_at(index, np.full(len(index), self._MANY))

    def places(self, addresses: Array, size: int) -> Array:
        """The bytes of accesses: [access, byte]."""
        require_aligned(addresses, size)
        offsets = addresses.astype(np.int64) - SHARED
        wrong = (offsets < 0) | (offsets + size > len(self.data))
        if wrong.any():
            raise Fault(f"{size} bytes at byte {int(offsets[wrong][0])} of {len(self.data)} in shared memory")
        return offsets[:, None] + np.arange(size)

    def read(self, addresses: Array, size: int, warps: Array) -> Array:
        return self.read_at(self.places(addresses, size), warps)

    def read_at(self, index: Array, warps: Array) -> Array:
        if not self.written[index].all():
            at = index[~self.written[index]].min()
            raise Fault(f"byte {at} of shared memory is read and was never written")
        if self.coming[index].any():
            raise Fault(
                f"byte {index[self.coming[index]].min()} of shared memory is read before its copy was waited for"
            )
        warp = np.broadcast_to(warps[:, None], index.shape)
        self._refuse((self.written_in[index] == self.period) & (self.writer[index] != warp), index, "reads", "written")
        stale = self.read_in[index] < self.period
        self.reader[index[stale]] = warp[stale]
        self.read_in[index] = self.period
        self.reader[index[self.reader[index] != warp]] = self._MANY
        return self.data[index]

    def write(self, addresses: Array, values: Array, warps: Array) -> None:
        self.write_at(self.places(addresses, values.shape[1]), values, warps)

    def write_at(self, index: Array, values: Array, warps: Array) -> None:
        warp = np.broadcast_to(warps[:, None], index.shape)
        self._refuse((self.written_in[index] == self.period) & (self.writer[index] != warp), index, "writes", "written")
        self._refuse((self.read_in[index] == self.period) & (self.reader[index] != warp), index, "writes", "read")
        if self.going[index].any():
            at = index[self.going[index]].min()
            raise Fault(f"byte {at} of shared memory is written before the copy that reads it was waited for")
        self.data[index] = values
        if (self.data[index] != values).any():
            raise Fault("two threads write different values to the same place in shared memory")
        self.written[index] = True
        self.writer[index], self.written_in[index] = warp, self.period

    def _refuse(self, wrong: Array, index: Array, does: str, done: str) -> None:
        if wrong.any():
            at = index[wrong].min()
            raise Fault(f"a warp {does} byte {at} of shared memory, which another has {done} since the last barrier")
