"""Quantization block by block: each layer is calibrated on what the quantized layers before it make of the data.

Sequences go through a block one at a time, each by one thread, and second moments are integer sums. So the bytes do not
depend on the number of threads or processes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...schemes import CalibrationData
from ...schemes.hessian import Moments, chunk_product, grid_of
from ..hf.blocks import Chain, Stop
from .distributed import Team

#: Linears of a block and what is known of the input they share -> the weights that stand for them from now on.
Quantize = Callable[[list[str], CalibrationData], Mapping[str, Tensor]]


class Workers:
    """Threads with one thread of torch each: what one of them computes does not depend on how many there are."""

    def __init__(self, device: torch.device) -> None:
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1

    @contextmanager
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        before = torch.get_num_threads()
        try:
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
    ) -> None:
        self.chain, self.team, self.device, self.pool = chain, team, device, pool
        #: This rank's sequences, by their index among all.
        self.hidden: dict[int, Tensor] = {}
        for index, tokens in enumerate(sequences):
            mine = index % team.size == team.rank
            if mine or index == 0:  # every rank sees the first: it tells in which order layers are called
                start = pool.submit(chain.begin, tokens[None].to(device), arguments).result().float()
                if mine:
                    self.hidden[index] = start
                if index == 0:
                    self.first = start

    def quantize_block(self, index: int, linears: list[str], inputs: Inputs, quantize: Quantize) -> None:
        """Quantize the linears of a block in the order they run, then move the data on to the next block."""
        block = self.chain.block(index).float()
        groups = self.groups(index, linears)
        with inputs.quantized(block, linears):
            for group in groups:
                for name, weight in quantize(group, _data(self._moments(index, group))).items():
                    block.get_parameter(f"{name}.weight").data.copy_(weight)
        self.advance(index, linears, inputs)

    def advance(self, index: int, linears: list[str], inputs: Inputs) -> None:
        """Replace the hidden states by what the block makes of them, and let go of its weights."""
        block = self.chain.block(index).float()
        with inputs.quantized(block, linears):
            states = [*self.hidden.values(), self.first]
            *moved, self.first = self.pool.map(lambda x: self.chain.run(index, x), states)
        self.hidden = dict(zip(self.hidden, moved, strict=True))
        block.to("meta")
        _release_memory()

    def groups(self, index: int, linears: list[str]) -> list[list[str]]:
        """The linears by the tensor they read, in the order they are called; those not called come last, alone."""
        block, seen = self.chain.block(index), []

        def watch(name: str) -> Any:
            return lambda module, args: seen.append((name, args[0]))

        handles = [block.get_submodule(name).register_forward_pre_hook(watch(name)) for name in linears]
        try:
            self.pool.submit(self.chain.run, index, self.first).result()
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

    def _moments(self, index: int, group: list[str]) -> Moments:
        """Run every sequence up to the group, and add up the second moments of what it reads."""
        block = self.chain.block(index)
        columns = block.get_parameter(f"{group[0]}.weight").shape[1]
        local, lock = threading.local(), threading.Lock()

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            local.x = args[0].detach().reshape(-1, columns)
            raise Stop

        def product(state: Tensor) -> tuple[Tensor, int] | None:
            local.x = None
            with suppress(Stop):
                self.chain.run(index, state)
            return None if local.x is None else (chunk_product(local.x).cpu(), len(local.x))

        handle = block.get_submodule(group[0]).register_forward_pre_hook(stop)
        try:
            states = iter(sorted(self.hidden.items()))
            begun = self._first_product(states, product)
            grids = [g for g in self.team.gather(None if begun is None else begun[0]) if g is not None]
            moments = Moments(columns, min(grids)[1] if grids else 0)

            def add(state: Tensor) -> None:
                made = product(state)
                if made is not None:
                    with lock:  # in any order: integer sums do not mind
                        moments.add(*made)

            if begun is not None:
                moments.add(*begun[1])
            for _ in self.pool.map(lambda item: add(item[1]), states):
                pass
        finally:
            handle.remove()
        moments.reduce(self.team.sum)
        return moments

    def _first_product(
        self, states: Iterator[tuple[int, Tensor]], product: Callable[[Tensor], tuple[Tensor, int] | None]
    ) -> tuple[tuple[int, int], tuple[Tensor, int]] | None:
        """The first sequence that reaches the group, as (index, grid), and its product."""
        for index, state in states:
            made = self.pool.submit(product, state).result()
            if made is not None:
                return (index, grid_of(made[0])), made
        return None


def _data(moments: Moments) -> CalibrationData:
    mean = moments.mean().float()
    return CalibrationData(moments.count, mean.diagonal().clone(), mean)


def _release_memory() -> None:
    """Give freed memory back to the system: glibc keeps what a thread has freed for that thread."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Inputs:
    """What linears read in the quantized model: floats, or integers as the scheme makes them."""

    def __init__(self, rules: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        """`rules`: linear, by its name in the block, -> what becomes of its input; none for float activations."""
        self.rules = rules

    @contextmanager
    def quantized(self, block: nn.Module, linears: Iterable[str]) -> Iterator[None]:
        """Within, the linears of a block read what they will read in the quantized model."""

        def rule(name: str) -> Any:
            return lambda module, args: (self.rules[name](args[0]), *args[1:])

        handles = [block.get_submodule(n).register_forward_pre_hook(rule(n)) for n in linears if n in self.rules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
