"""Decoders in processes of their own: they compile at the same time and are measured in turns, one at a time.

Making and compiling 32 layers takes a minute for each model and batch size, one after the other in one process. The
turns keep what makes ratios fair: within a round every model runs once, while the others wait.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from torch import multiprocessing

from baracuda.flow.hf import measure

from ._decoder import Decoders, compile_anywhere, weight_bytes

#: How often every model runs.
ROUNDS = {"linears": 20, "prefill": 5, "decode-compiled": 5, "decode": 3}
LONG_ROUNDS = 2


class Job(NamedTuple):
    """A part of the benchmark for so many sequences, behind or over prompts of so many tokens."""

    part: str
    batch: int = 1
    length: int = 32

    @property
    def is_long(self) -> bool:
        return self.part.startswith("decode") and self.length != Job._field_defaults["length"]

    @property
    def size(self) -> str:
        if self.part == "linears":
            return "1 token"
        if self.part == "prefill":
            return f"{self.batch} x {self.length}"
        return f"batch {self.batch}" + (f", after {self.length} tokens" if self.is_long else "")

    @property
    def rounds(self) -> int:
        return LONG_ROUNDS if self.is_long else ROUNDS[self.part]


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


@dataclass
class Facts:
    """Of each model: the bytes that it has, and those of its linears' weights."""

    memory: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)


def measured(order: Order, facts: Facts) -> Iterator[tuple[Job, dict[str, float]]]:
    """The seconds of each model, job by job; jobs for which there was no time are left out. Fills `facts`."""
    context: Any = multiprocessing.get_context("spawn")
    barrier, results, goes_on = context.Barrier(len(order.names)), context.Queue(), context.Value("b", 1)
    processes = [
        context.Process(target=_measure, args=(order, name, barrier, goes_on, results), daemon=True)
        for name in order.names
    ]
    for process in processes:
        process.start()
    found: dict[Job, dict[str, float]] = {}
    ended = 0
    while ended < len(processes):
        try:
            name, job, got = results.get(timeout=5)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                for process in processes:
                    process.kill()
                raise SystemExit("a process that measures a model has died; its message is above") from None
            continue
        if job is None:
            facts.memory[name], facts.read[name] = got
            ended += 1
            continue
        row = found.setdefault(job, {})
        row[name] = got
        if len(row) == len(order.names):
            yield job, {each: row[each] for each in order.names}
    for process in processes:
        process.join()


def _measure(order: Order, name: str, barrier: Any, goes_on: Any, results: Any) -> None:
    turn, model = order.names.index(name), order.decoders.named(name, order.merge)
    for job in order.jobs:
        barrier.wait()
        if turn == 0:  # one decides for all: a process that went on alone would wait for ever
            goes_on.value = time.time() < order.deadline
        barrier.wait()
        if not goes_on.value:
            break
        run = _prepared(order, job, name, model)
        times = []
        for current in range(job.rounds * len(order.names)):
            barrier.wait()
            if current % len(order.names) == turn:
                times.append(run())
        barrier.wait()
        results.put((name, job, median(times)))
    results.put((name, None, (measure.memory(model), weight_bytes(model))))


def _prepared(order: Order, job: Job, name: str, model: Any) -> Callable[[], float]:
    """What takes one turn and says its seconds; all that is made or compiled once is behind it."""
    if job.part in ("linears", "prefill"):
        linears = job.part == "linears"
        body = order.decoders.calls(name, model) if linears else measure.forward(model, job.batch, job.length)
        body()
        return lambda: measure.seconds_of(body, order.decoders.device)
    compiled = job.part == "decode-compiled"
    if compiled:
        measure.forget_compiled(model)
    ids = measure.prompt(model, job.batch, job.length)
    more = compile_anywhere(order.decoders.device) if compiled else {}

    def run() -> float:
        return median(measure.step_seconds(model, ids, order.tokens, compiled, more))

    for _ in range(2):
        run()
    return run
