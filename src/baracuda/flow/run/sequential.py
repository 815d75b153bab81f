"""Quantization block by block: each layer is calibrated on what the quantized layers before it make of the data.

The same few sequences always go through a block together, in one thread, and second moments are integer sums. So the
bytes do not depend on the number of threads or processes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...schemes import CalibrationData
from ...schemes.hessian import Moments, chunk_product, grid_of
from ..hf.blocks import Chain, Stop
from .distributed import Team
from .paused import PausedBatches

#: Linears of a block and what is known of the input they share -> the weights that stand for them from now on.
Quantize = Callable[[list[str], CalibrationData], Mapping[str, Tensor]]
#: Batch -> what computes the input of a group for it, or None where the batch does not reach the group.
Reads = Mapping[int, Callable[[], Tensor | None]]

#: Sequences of a batch, and their tokens.
BATCH, BATCH_TOKENS = 4, 1024
#: Tokens of the first sequence that show in which order the layers of a block are called.
PROBE = 32
#: Inputs of a layer that are kept for all batches, so that none is computed twice; with more, blocks run again.
HELD_BYTES = 1 << 28
#: A matrix in f64, of which solving takes several, that is worth giving memory back for.
LARGE_BYTES = 1 << 24
#: The option of glibc's mallopt that limits the number of arenas.
_ARENA_MAX = -8


class Workers:
    """Threads with one thread of torch each: what one of them computes does not depend on how many there are."""

    def __init__(self, device: torch.device) -> None:
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1

    @contextmanager
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Within, the calling thread has one thread of torch, too: others would wait for work by spinning."""
        before = torch.get_num_threads()
        _share_arenas(self.threads)
        try:
            torch.set_num_threads(1)
            with ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield pool
        finally:
            torch.set_num_threads(before)


class Sequential:
    """The calibration data on its way through the blocks of a model."""

    def __init__(
        self,
        chain: Chain,
        sequences: list[Tensor],
        arguments: dict[str, Any],
        team: Team,
        device: torch.device,
        pool: ThreadPoolExecutor,
        threads: int,
    ) -> None:
        self.chain, self.team, self.device, self.pool, self.threads = chain, team, device, pool, threads
        self.tokens = sum(map(len, sequences))

        def begin(tokens: Tensor) -> Tensor:
            return pool.submit(chain.begin, tokens.to(device), arguments).result()

        #: This rank's batches, by their index among all.
        self.hidden = {i: begin(x) for i, x in enumerate(batches(sequences)) if i % team.size == team.rank}
        #: What every rank sees: it tells in which order layers are called.
        self.probe = begin(sequences[0][None, :PROBE])

    def quantize_block(self, index: int, linears: list[str], inputs: Inputs, quantize: Quantize) -> None:
        """Quantize the linears of a block in the order they run, then move the data on to the next block."""
        block = self.chain.prepare(index)
        groups, run = self.groups(index, linears), partial(self.chain.run, index)

        def replace(group: list[str], measured: CalibrationData) -> None:
            for name, weight in quantize(group, measured).items():
                replace_weight(block, name, weight)

        widths = [block.get_parameter(f"{group[0]}.weight").shape[1] for group in groups]
        with inputs.quantized(block, linears):
            if self.chain.dtype.itemsize * self.tokens * max(widths, default=0) > HELD_BYTES:
                for group, columns in zip(groups, widths, strict=True):
                    with self._again(index, group) as reads:
                        measured = _data(self._moments(columns, reads))
                    replace(group, measured)
                self._advance(index)
                return
            with PausedBatches(block, groups, self.hidden, run, self.threads) as data:
                for number, (group, columns) in enumerate(zip(groups, widths, strict=True)):
                    read = data.inputs(number)
                    replace(group, _data(self._moments(columns, {i: partial(read.__getitem__, i) for i in read})))
                    del read
                    data.go_on(number)
                self.hidden = data.outputs()
            self._leave(index)

    def advance(self, index: int, linears: list[str], inputs: Inputs) -> None:
        """Replace the hidden states by what the block makes of them, and let go of its weights."""
        with inputs.quantized(self.chain.prepare(index), linears):
            self._advance(index)

    def _advance(self, index: int) -> None:
        moved = self.pool.map(partial(self.chain.run, index), self.hidden.values())
        self.hidden = dict(zip(self.hidden, moved, strict=True))
        self._leave(index)

    def _leave(self, index: int) -> None:
        self.probe = self.pool.submit(self.chain.run, index, self.probe).result()
        self.chain.block(index).to("meta")
        _release_memory()

    def groups(self, index: int, linears: list[str]) -> list[list[str]]:
        """The linears by the tensor they read, in the order they are called; those not called come last, alone."""
        block, seen = self.chain.block(index), []

        def watch(name: str) -> Any:
            return lambda module, args: seen.append((name, args[0]))

        handles = [block.get_submodule(name).register_forward_pre_hook(watch(name)) for name in linears]
        try:
            self.pool.submit(self.chain.run, index, self.probe).result()
        finally:
            for handle in handles:
                handle.remove()
        found: list[tuple[Tensor, list[str]]] = []
        for name, x in seen:
            same = next((group for known, group in found if known is x), None)
            if same is None:
                found.append((x, [name]))
            elif name not in same:
                same.append(name)
        called = {name for name, _ in seen}
        return [group for _, group in found] + [[name] for name in linears if name not in called]

    @contextmanager
    def _again(self, index: int, group: list[str]) -> Iterator[Reads]:
        """Run every batch up to the group: takes longer than stopping there, and less memory."""
        local = threading.local()

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            local.x = args[0].detach()
            raise Stop

        def read(hidden: Tensor) -> Tensor | None:
            local.x = None
            with suppress(Stop):
                self.chain.run(index, hidden)
            x: Tensor | None = local.x
            return x

        handle = self.chain.block(index).get_submodule(group[0]).register_forward_pre_hook(stop)
        try:
            yield {i: partial(read, hidden) for i, hidden in self.hidden.items()}
        finally:
            handle.remove()

    def _moments(self, columns: int, reads: Reads) -> Moments:
        """The second moments of what a group reads, batch by batch."""
        lock = threading.Lock()

        def product(batch: int) -> tuple[Tensor, int] | None:
            x = reads[batch]()
            if x is None:
                return None
            x = x.reshape(-1, columns)
            return chunk_product(x).cpu(), len(x)

        states = iter(sorted(reads))
        begun = self._first_product(states, product)
        grids = [g for g in self.team.gather(None if begun is None else begun[0]) if g is not None]
        moments = Moments(columns, min(grids)[1] if grids else 0)

        def add(batch: int) -> None:
            made = product(batch)
            if made is not None:
                with lock:  # in any order: integer sums do not mind
                    moments.add(*made)

        if begun is not None:
            moments.add(*begun[1])
        for _ in self.pool.map(add, states):
            pass
        moments.reduce(self.team.sum)
        if 8 * columns**2 > LARGE_BYTES:
            _release_memory()  # what forwards have freed is no use to the matrices of the solver
        return moments

    def _first_product(
        self, states: Iterator[int], product: Callable[[int], tuple[Tensor, int] | None]
    ) -> tuple[tuple[int, int], tuple[Tensor, int]] | None:
        """The first batch that reaches the group, as (index, grid), and its product."""
        for index in states:
            made = self.pool.submit(product, index).result()
            if made is not None:
                return (index, grid_of(made[0])), made
        return None


def batches(sequences: list[Tensor]) -> list[Tensor]:
    """Neighbours of one length, a few at a time: fixed, since products of other batches have other bits."""
    made: list[list[Tensor]] = []
    for sequence in sequences:
        size = max(1, min(BATCH, BATCH_TOKENS // len(sequence)))
        if made and len(made[-1]) < size and len(made[-1][0]) == len(sequence):
            made[-1].append(sequence)
        else:
            made.append([sequence])
    return [torch.stack(batch) for batch in made]


def replace_weight(block: nn.Module, name: str, weight: Tensor) -> None:
    """Let a linear compute with another weight. The old one, which may lie in a mapped file, is not written to."""
    parameter = block.get_parameter(f"{name}.weight")
    parameter.data = weight.to(parameter)


def _data(moments: Moments) -> CalibrationData:
    mean = moments.mean(torch.float32)
    return CalibrationData(moments.count, mean.diagonal().clone(), mean)


def _release_memory() -> None:
    """Give freed memory back to the system: glibc keeps what a thread has freed for that thread."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def _share_arenas(threads: int) -> None:
    """Let waiting threads share the memory of those that compute: glibc gives each new one an arena of its own."""
    if (option := _glibc("mallopt")) is not None:
        option(_ARENA_MAX, threads + 1)


def _glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


class Inputs:
    """What linears read in the quantized model: floats, or integers as the scheme makes them."""

    def __init__(self, rules: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        """`rules`: linear, by its name in the block, -> what becomes of its input; none for float activations."""
        self.rules = rules

    @contextmanager
    def quantized(self, block: nn.Module, linears: Iterable[str]) -> Iterator[None]:
        """Within, the linears of a block read what they will read in the quantized model."""

        def rule(name: str) -> Any:
            return lambda module, args: (self.rules[name](args[0]).to(args[0].dtype), *args[1:])

        handles = [block.get_submodule(n).register_forward_pre_hook(rule(n)) for n in linears if n in self.rules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
