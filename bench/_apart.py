"""Decoders in processes of their own: they compile at the same time, and generate in turns, one process at a time.

Compiling 32 layers takes a minute for each model and batch size, one after the other in one process. The turns keep
what makes ratios fair: within a round every model generates once, while the others wait.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from torch import multiprocessing

from baracuda.flow.hf import measure

from ._decoder import Decoders


class Job(NamedTuple):
    """Decode steps of this many sequences, behind prompts of this many tokens, compiled or not."""

    batch: int
    compiled: bool
    length: int = 32

    @property
    def part(self) -> str:
        return "decode-compiled" if self.compiled else "decode"

    @property
    def is_long(self) -> bool:
        return self.length != Job._field_defaults["length"]

    @property
    def size(self) -> str:
        return f"batch {self.batch}" + (f", after {self.length} tokens" if self.is_long else "")

    @property
    def rounds(self) -> int:
        return 2 if self.is_long else 5 if self.compiled else 3


@dataclass(frozen=True)
class Order:
    """What every process does."""

    decoders: Decoders
    merge: bool
    jobs: tuple[Job, ...]
    tokens: int
    #: By the clock of all processes; nothing more begins behind it.
    deadline: float
    names: tuple[str, ...]


def decode(order: Order) -> Iterator[tuple[Job, dict[str, float]]]:
    """The seconds of a decode step of each model, job by job; jobs for which there was no time are left out."""
    context: Any = multiprocessing.get_context("spawn")
    barrier, results, goes_on = context.Barrier(len(order.names)), context.Queue(), context.Value("b", 1)
    processes = [
        context.Process(target=_generate, args=(order, name, barrier, goes_on, results), daemon=True)
        for name in order.names
    ]
    for process in processes:
        process.start()
    found: dict[Job, dict[str, float]] = {}
    ended = 0
    while ended < len(processes):
        try:
            got = results.get(timeout=5)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                for process in processes:
                    process.kill()
                raise SystemExit("a process that measures a model has died; its message is above") from None
            continue
        if got is None:
            ended += 1
            continue
        job, name, seconds = got
        row = found.setdefault(job, {})
        row[name] = seconds
        if len(row) == len(order.names):
            yield job, {each: row[each] for each in order.names}
    for process in processes:
        process.join()


def _generate(order: Order, name: str, barrier: Any, goes_on: Any, results: Any) -> None:
    turn, model = order.names.index(name), order.decoders.named(name, order.merge)
    for job in order.jobs:
        barrier.wait()
        if turn == 0:  # one decides for all: a process that went on alone would wait for ever
            goes_on.value = time.time() < order.deadline
        barrier.wait()
        if not goes_on.value:
            break
        batch, compiled, length = job
        if compiled:
            measure.forget_compiled(model)
        ids = measure.prompt(model, batch, length)
        for _ in range(2):
            measure.step_seconds(model, ids, order.tokens, compiled)
        times = []
        for current in range(job.rounds * len(order.names)):
            barrier.wait()
            if current % len(order.names) == turn:
                times.append(median(measure.step_seconds(model, ids, order.tokens, compiled)))
        barrier.wait()
        results.put((job, name, median(times)))
    results.put(None)
