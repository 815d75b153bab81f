"""One shard, block by block: worker threads read and quantize, the caller writes, so that disk and cores both work."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...schemes import Choice, Method, get_method
from ..checkpoint.storage import Storage
from ..checkpoint.tensorfile import Entry, TensorFile, TensorFileWriter
from ..errors import FlowError
from .changes import Changes

#: Small enough for a core's cache; a handful is all the memory a run needs, however large its tensors.
BLOCK_BYTES = 8 << 20
#: Rows whose error is measured in a block; all of a small weight, every n-th of a large one.
MEASURED_ROWS = 16
#: More workers than this would wait for the thread that writes, and each holds a few blocks.
MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes `start` to `end` of a tensor: whole rows of a weight that is quantized, anything of one that is copied."""

    entry: Entry
    start: int
    end: int


@dataclass
class WeightError:
    """The error of a quantized weight, summed over the rows that were measured."""

    signal: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    rows: int = 0
    #: What the method reports, added up over all rows.
    method: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, weight: Tensor, stored: Tensor, method: Mapping[str, float]) -> WeightError:
        error = weight.float() - stored
        signal, noise = (float(x.double().square().sum()) for x in (weight, error))
        return cls(signal, noise, float(error.abs().max()), weight.shape[0], dict(method))

    def add(self, other: WeightError) -> None:
        self.signal += other.signal
        self.noise += other.noise
        self.max_error = max(self.max_error, other.max_error)
        self.rows += other.rows
        for name, value in other.method.items():
            self.method[name] = self.method.get(name, 0.0) + value


@dataclass
class Converted:
    """What to write where, as (tensor, byte offset in it, data), and the error of what was quantized."""

    outputs: list[tuple[str, int, Tensor]]
    measured: WeightError | None = None
    #: The memory that `outputs` are views of, to be given back once they are written.
    buffer: Tensor | None = None


class Buffers:
    """Memory to read blocks into; the last one given back is taken first, since it is still in the cache."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"  # copied to a GPU several times faster
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        try:
            return self._free.pop()
        except IndexError:
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


@dataclass
class ShardJob:
    """What becomes of one shard: `linears` maps the tensors to quantize to module names, the rest is copied.

    Those that are `kept` are copied, too: the module that is made from one is stored beside it.
    """

    source: TensorFile
    writer: TensorFileWriter
    linears: dict[str, str]
    #: The scheme and the method of each module.
    choices: Mapping[str, Choice]
    changes: Changes
    device: torch.device
    progress: Callable[[str, int], None] = field(default=lambda tensor, count: None)
    kept: frozenset[str] = frozenset()
    _buffers: Buffers = field(init=False)
    #: A GPU is one queue, and its kernels are compiled once: workers take turns there.
    _turn: AbstractContextManager[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._buffers = Buffers(self.device)
        self._turn = threading.Lock() if self.device.type == "cuda" else nullcontext()

    def run(self, tensors: list[str]) -> dict[str, Any]:
        """Convert these tensors; returns the statistics of each quantized module."""
        errors = {name: WeightError() for name in tensors if name in self.linears}
        blocks = [block for name in tensors for block in self._blocks(self.source.entries[name])]
        threads = torch.get_num_threads()
        count = min(threads, MOST_WORKERS)
        try:
            with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as workers:
                for block, converted in self._in_order(workers, blocks, 2 * count):
                    self._write(converted)
                    if converted.measured is not None:
                        errors[block.entry.name].add(converted.measured)
                    self.progress(block.entry.name, block.end - block.start)
        finally:
            torch.set_num_threads(threads)
        return {self.linears[name]: self._statistics(name, measure) for name, measure in errors.items()}

    def _in_order(
        self, workers: ThreadPoolExecutor, blocks: list[Block], limit: int
    ) -> Iterator[tuple[Block, Converted]]:
        """Results in the order of blocks, so that sums do not depend on timing; a few blocks are in memory at most."""
        flying: list[tuple[Block, Future[Converted]]] = []
        try:
            for block in blocks:
                flying.append((block, workers.submit(self._work, block)))
                if len(flying) == limit:
                    done, future = flying.pop(0)
                    yield done, future.result()
            for done, future in flying:
                yield done, future.result()
        except BaseException:
            for _, future in flying:
                future.cancel()
            raise

    def _write(self, converted: Converted) -> None:
        """Called by one thread: file systems admit one writer to a file, and others would spin for their turn."""
        for name, offset, data in converted.outputs:
            self.writer.write(name, offset, data)
        if converted.buffer is not None:
            self._buffers.give_back(converted.buffer)

    def _work(self, block: Block) -> Converted:
        """Read and quantize one block in one thread, so that it stays in the cache of one core."""
        name = block.entry.name
        if name in self.changes.replaced:
            whole = self.changes.replaced[name].to(block.entry.dtype).view(-1).view(torch.uint8)
            return Converted([(name, block.start, whole[block.start : block.end])])
        buffer = self._buffers.take()
        raw = self.source.read_bytes(name, block.start, block.end - block.start, buffer)
        if not self._changes(name):
            return Converted([(name, block.start, raw)], buffer=buffer)
        with self._turn:
            converted = self._convert(block, raw)
        if name in self.kept:
            converted.outputs.append((name, block.start, raw))
            converted.buffer = buffer
        else:
            self._buffers.give_back(buffer)
        return converted

    def _changes(self, name: str) -> bool:
        return name in self.linears or self.changes.touches(name)

    def _blocks(self, entry: Entry) -> Iterator[Block]:
        whole = max(1, BLOCK_BYTES // max(1, entry.row_bytes)) * entry.row_bytes
        step = whole if self._changes(entry.name) else BLOCK_BYTES
        for start in range(0, max(entry.nbytes, 1), max(step, 1)):
            yield Block(entry, start, min(start + step, entry.nbytes))

    def _convert(self, block: Block, raw: Tensor) -> Converted:
        entry, name = block.entry, block.entry.name
        first = block.start // entry.row_bytes
        rows = raw.view(entry.dtype).view(-1, *entry.shape[1:]).to(self.device)
        smoothed = self.changes.apply(name, first, rows)
        if name not in self.linears:
            return Converted([(name, block.start, smoothed.to(entry.dtype).cpu())])
        module = self.linears[name]
        choice, storage = self.choices[module], self._storage(module)
        report: Mapping[str, float] = {}
        if module in self.changes.quantized:
            stored = self._ready(module, first, first + rows.shape[0], [storage.integers, "weight_scale"])
        else:
            made = self._method(module).quantize(
                storage.as_quantized_from(smoothed, entry.dtype), choice.scheme.weight, self.changes.data(module)
            )
            stored, report = {part: value.cpu() for part, value in storage.store(made).items()}, made.report
        if not math.isfinite(stored["weight_scale"].amax()):  # a NaN is the largest of all
            raise FlowError(f"{name}: holds NaN or infinite values; repair the checkpoint, or --ignore {module}")
        outputs = [(f"{module}.{part}", first * value[:1].nbytes, value) for part, value in stored.items()]
        if first == 0:
            constants = storage.constants(entry, self.changes.input_scales.get(module))
            outputs += [(f"{module}.{part}", 0, value) for part, value in constants.items()]
        return Converted(outputs, _measure(smoothed, stored, storage, report))

    def _ready(self, module: str, first: int, last: int, parts: list[str]) -> dict[str, Tensor]:
        """Rows of a linear that is quantized already."""
        with TensorFile(self.changes.quantized[module]) as file:
            return {part: file.read(f"{module}.{part}", first, last) for part in parts}

    def _method(self, module: str) -> Method:
        """The method of a module; round to nearest for one outside of all blocks, whose input nobody measured."""
        method = self.choices[module].method
        unmeasured = method.needs is not None and self.changes.data(module) is None
        return get_method("rtn") if unmeasured else method

    def _storage(self, module: str) -> Storage:
        return Storage(self.choices[module].scheme)

    def _statistics(self, name: str, measure: WeightError) -> dict[str, Any]:
        entry, module = self.source.entries[name], self.linears[name]
        return {
            "shape": list(entry.shape),
            "bytes_before": 0 if name in self.kept else entry.nbytes,
            "bytes_after": sum(e.nbytes for e in self._storage(module).entries(module, entry)),
            "signal": measure.signal,
            "noise": measure.noise,
            "max_error": measure.max_error,
            "measured_rows": measure.rows,
            **({"method": measure.method} if measure.method else {}),
        }


def _measure(weight: Tensor, stored: dict[str, Tensor], storage: Storage, method: Mapping[str, float]) -> WeightError:
    """The error of some of the rows."""
    step = max(1, weight.shape[0] // MEASURED_ROWS) if weight.numel() > 1 << 20 else 1
    rows = {part: value[::step].contiguous() for part, value in stored.items()}
    return WeightError.of(weight[::step].cpu(), storage.dequantize(rows), method)
