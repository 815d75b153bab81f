"""Safetensors files, read and written a block at a time. A header is checked before its offsets are used."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.printable import printable
from ..errors import RESUME, CheckpointError
from .json_text import parse_json

#: On Linux this starts the writeback of dirty pages without waiting. Elsewhere the last fsync writes all of them.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2
#: No module, and no tensor of one, has a longer name: matching patterns with names takes time that grows with them.
MAX_NAME = 512
#: The format's own limit. A file with a longer header is damaged or an attack.
MAX_HEADER_BYTES = 100_000_000
#: Start writeback after this many bytes, so that the disk works while the rest is computed.
WRITEBACK_BYTES = 32 << 20

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `start` and `end` count from the first byte after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The bytes of one index of the first axis."""
        return prod(self.shape[1:]) * self.dtype.itemsize if self.shape else self.dtype.itemsize


_VERSION = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
_FETCH = "copy or download it again"


def _differs(one: os.stat_result, other: os.stat_result) -> bool:
    return any(getattr(one, key) != getattr(other, key) for key in _VERSION)


class Descriptors:
    """Open files, the least recently used of which are closed: a model may have more shards than a process may open.

    A descriptor that is in use is never closed, so several threads may read.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        #: File -> its descriptor and how many are reading it, in the order of their last use.
        self._open: OrderedDict[TensorFile, list[int]] = OrderedDict()

    @contextmanager
    def of(self, file: TensorFile) -> Iterator[int]:
        with self._lock:
            if file not in self._open:
                self._open[file] = [file.reopen(), 0]
            self._open.move_to_end(file)
            held = self._open[file]
            held[1] += 1
        try:
            yield held[0]
        finally:
            with self._lock:
                held[1] -= 1
                idle = [other for other, (_, users) in self._open.items() if not users]
                for other in idle[: max(0, len(self._open) - self.limit)]:
                    os.close(self._open.pop(other)[0])

    def close(self, file: TensorFile) -> None:
        with self._lock:
            if (held := self._open.pop(file, None)) is not None:
                os.close(held[0])


#: Far below the limit of 1024 that most systems have.
DESCRIPTORS = Descriptors(256)


class TensorFile:
    """An open safetensors file. Nothing is mapped: blocks are read into memory of their own, so RSS stays bounded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: os.stat_result | None = None
        self._closed = False
        if not path.is_file():  # opening a pipe would block
            raise CheckpointError("unreadable", f"{path.name}: not a regular file")
        try:
            with DESCRIPTORS.of(self) as fd:
                self.header, self.data_start = _read_header(fd, path.name)
            data_bytes = self._stat.st_size - self.data_start
            self.metadata, self.entries = _parse_header(self.header, path.name, data_bytes)
        except BaseException:
            DESCRIPTORS.close(self)
            raise

    def reopen(self) -> int:
        """A descriptor of the file; raises where its name leads to another file than at first."""
        if self._closed:
            raise ValueError(f"{self.path.name}: read after it was closed")
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError("unreadable", f"{self.path.name}: cannot be opened: {error.strerror}") from None
        state = os.fstat(fd)
        if self._state is not None and _differs(state, self._state):
            os.close(fd)
            raise self._changed()
        self._state = state
        return fd

    @property
    def _stat(self) -> os.stat_result:
        assert self._state is not None
        return self._state

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        DESCRIPTORS.close(self)

    @property
    def version(self) -> list[int]:
        """Size and time of modification: they differ in a later file of the same name."""
        return [self._stat.st_size, self._stat.st_mtime_ns]

    def require_unchanged(self) -> None:
        """Raise when the file of this name was replaced or changed since it was opened."""
        try:
            now = os.stat(self.path)
        except OSError:
            now = None
        if now is None or _differs(now, self._stat):
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError(
            "changed",
            f"{self.path.name}: expected it to stay as it was when the run began, it changed while it was read; "
            f"let whatever writes it finish, then {RESUME}",
        )

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` of a tensor, or all of it."""
        entry = self.entries[name]
        rows = entry.shape[0] if entry.shape else 1
        last = rows if last is None else last
        raw = self.read_bytes(name, first * entry.row_bytes, (last - first) * entry.row_bytes)
        shape = (last - first, *entry.shape[1:]) if entry.shape else ()
        return raw.view(entry.dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=entry.dtype)

    def read_bytes(self, name: str, offset: int, count: int, into: Tensor | None = None) -> Tensor:
        """Bytes of a tensor, in `into` where that is large enough: fresh memory costs as much as a copy."""
        fits = into is not None and into.numel() >= count
        buffer = into[:count] if into is not None and fits else torch.empty(count, dtype=torch.uint8)
        view, position = _bytes(buffer), self.data_start + self.entries[name].start + offset
        with DESCRIPTORS.of(self) as fd:
            while view:
                try:
                    read = os.preadv(fd, [view], position)
                except OSError as error:
                    raise CheckpointError("unreadable", f"{self.path.name}: cannot be read: {error.strerror}") from None
                if read == 0:
                    raise CheckpointError("truncated", f"{self.path.name}: ends inside tensor {name}; {_FETCH}")
                view, position = view[read:], position + read
        return buffer


def layout(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with their places: widest elements first, so that every tensor is aligned, then by name."""
    placed, end = [], 0
    for entry in sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name)):
        start, end = end, end + entry.nbytes
        placed.append(Entry(entry.name, entry.dtype, entry.shape, start, end))
    return placed


def encode_header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """The header of a file of these entries, length included, padded to a multiple of eight bytes."""
    content: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for entry in entries:
        content[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFileWriter:
    """A file whose header is known before its data: tensors are written in any order, by any number of processes."""

    def __init__(self, path: Path, entries: list[Entry], metadata: dict[str, str], *, create: bool = True) -> None:
        self.entries = {entry.name: entry for entry in entries}
        header = encode_header(entries, metadata)
        self.size = len(header) + (entries[-1].end if entries else 0)
        self._data_start, self._dirty, self._path = len(header), 0, path
        self._fd = os.open(path, (os.O_CREAT | os.O_TRUNC if create else 0) | os.O_WRONLY, 0o644)
        if create:
            try:
                with self._path_in_errors():
                    os.truncate(self._fd, self.size)
                self._write(header, 0)
            except BaseException:
                self.abandon()
                raise

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Put a block of tensor `name` at byte `offset` of it."""
        if data.numel():
            self._write(
                _bytes(data.contiguous().view(-1).view(torch.uint8)),
                self._data_start + self.entries[name].start + offset,
            )

    def close(self) -> None:
        """Finish the file. Its bytes are on the disk when this returns."""
        try:
            with self._path_in_errors():
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def abandon(self) -> None:
        os.close(self._fd)

    def _write(self, data: bytes | memoryview, position: int) -> None:
        view = memoryview(data)
        self._dirty += len(view)
        with self._path_in_errors():
            while view:
                written = os.pwrite(self._fd, view, position)
                view, position = view[written:], position + written
        if _sync_file_range is not None and self._dirty >= WRITEBACK_BYTES:
            _sync_file_range(self._fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)  # to its end
            self._dirty = 0

    @contextmanager
    def _path_in_errors(self) -> Iterator[None]:
        """Add the path and the size to an OSError: one from a descriptor has neither."""
        try:
            yield
        except OSError as error:
            what = f"expected room for {self.size} bytes, got: {error.strerror}"
            raise OSError(error.errno, what, str(self._path)) from None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A whole file at once, for small ones."""
    entries = layout(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    writer = TensorFileWriter(path, entries, metadata or {})
    for name, tensor in tensors.items():
        writer.write(name, 0, tensor)
    writer.close()


def read_tensors(path: Path) -> dict[str, Tensor]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.entries}


def _bytes(data: Tensor) -> memoryview:
    """The memory of a dense uint8 tensor, which lives as long as the view; torch offers it through numpy only."""
    raw: Any = (ctypes.c_uint8 * data.numel()).from_address(data.data_ptr())
    raw.tensor = data
    return memoryview(raw).cast("B")


# -- the header --------------------------------------------------------------------------------------------------


def _read_header(fd: int, name: str) -> tuple[bytes, int]:
    size = os.fstat(fd).st_size
    if size < 8:
        raise CheckpointError("truncated", f"{name}: {size} bytes, too short for a header; {_FETCH}")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        claim = f"{name}: its header claims {length} bytes, the limit is 100 MB; {_FETCH}"
        raise CheckpointError("header-too-long", claim)
    if length > size - 8:
        raise CheckpointError("truncated", f"{name}: its header claims {length} bytes, {size - 8} follow; {_FETCH}")
    header = os.pread(fd, length, 8)
    if len(header) != length:
        raise CheckpointError("truncated", f"{name}: ends inside its header; {_FETCH}")
    return header, 8 + length


def _parse_header(header: bytes, name: str, data_bytes: int) -> tuple[dict[str, str], dict[str, Entry]]:
    content = parse_json(header, name)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("bad-header", f"{name}: its __metadata__ is not a table of strings")
    entries = {key: _parse_entry(name, key, value) for key, value in content.items()}
    position = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position:
            kind = "overlaps another tensor" if entry.start < position else "leaves a gap before it"
            raise CheckpointError("bad-offsets", f"{name}: tensor {entry.name} {kind} at byte {entry.start}")
        position = entry.end
    if position > data_bytes:
        found = f"its tensors need {position} bytes, {data_bytes} are there"
        raise CheckpointError("truncated", f"{name}: {found}; {_FETCH}")
    if position < data_bytes:
        raise CheckpointError("bad-offsets", f"{name}: {data_bytes - position} bytes belong to no tensor")
    return metadata, entries


def _parse_entry(file: str, name: str, value: Any) -> Entry:
    where = f"{file}: tensor {printable(name[:200])}"
    if printable(name) != name or not name or "\n" in name or "\t" in name:
        raise CheckpointError("bad-header", f"{where}: expected a name without control characters")
    if any(len(part) > MAX_NAME for part in name.rpartition(".")):  # quantizing makes the last part longer
        raise CheckpointError("bad-header", f"{where}...: expected a name of at most {MAX_NAME} characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError("bad-header", f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError("bad-dtype", f"{where}: unknown element type {str(dtype)[:40]!r}")
    if not _sizes(shape) or len(shape) > 64 or prod(max(n, 1) for n in shape) > 2**56:
        raise CheckpointError("bad-shape", f"{where}: its shape is not a list of possible sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError("bad-offsets", f"{where}: its data_offsets are not two ascending positions")
    entry = Entry(name, DTYPES[dtype], tuple(shape), *offsets)
    if entry.end - entry.start != entry.nbytes:
        raise CheckpointError(
            "bad-shape",
            f"{where}: shape {shape} of {dtype} needs {entry.nbytes} bytes, {entry.end - entry.start} given",
        )
    return entry


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
