"""Many processes, one result: ranks share the work, and every decision is made where all of them agree."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

#: How long ranks wait for one another. One may evaluate alone for hours; one that dies ends the wait at once.
LONGEST_WAIT = timedelta(days=7)


class Team:
    """The ranks of a run; alone, every method is what one process would do anyway."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for everybody. A rank that died makes this raise, so nobody waits for the dead."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def sum(self, integers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank, in place; of integers, so that their order does not matter."""
        if self.size > 1:
            dist.all_reduce(integers, group=self.group)
        return integers

    def share(self, sizes: dict[str, int]) -> list[str]:
        """The names that are this rank's, the largest dealt first to the rank with the least."""
        load = [0] * self.size
        mine = []
        for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
            rank = load.index(min(load))
            load[rank] += sizes[name]
            if rank == self.rank:
                mine.append(name)
        return mine


_TEAMS = itertools.count()


@cache
def _meeting_point(timeout: timedelta) -> Store:
    """The store that torchrun's variables name, opened once: a second server could not have its port."""
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


@contextmanager
def team(timeout_s: float = 1800) -> Iterator[Team]:
    """The team torchrun started, or a team of one. Only small host tensors travel, so gloo carries them everywhere.

    They travel in a group of their own. Functions of torch.distributed.nn hold on to the default group when they are
    imported while it exists (transformers imports them), and its threads, alive while Python shuts down, then abort the
    process if they still have a tensor to let go. This group ends where the team does.

    `timeout_s` is for the ranks to find each other; from there on they wait as long as the work takes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team()
        return
    started, timeout = not dist.is_initialized(), timedelta(seconds=timeout_s)
    if started:
        # Each under a name of its own: ranks that looked where an earlier team met would find what it left.
        store = PrefixStore(f"baracuda {next(_TEAMS)}", _meeting_point(timeout))
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size, timeout=timeout)
    ranks = Team(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=LONGEST_WAIT))
    try:
        yield ranks
        ranks.barrier()  # nobody leaves while another still talks
    finally:
        dist.destroy_process_group(None if started else ranks.group)
        ranks.group = None  # its threads end here, whoever still holds the team
