"""A block that is quantized while the data is inside it: each layer's input is computed once.

Every batch goes through the block in a thread of its own, which stops where it is about to call layers that are not
quantized yet, and goes on with their new weights. A few of the threads compute at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.blocks import Stop


class PausedBatches:
    """Batches on their way through a block. Its `with` statement ends all threads, whatever happens inside."""

    def __init__(
        self,
        block: nn.Module,
        groups: list[list[str]],
        batches: Mapping[int, Tensor],
        run: Callable[[Tensor], Tensor],
        threads: int,
    ) -> None:
        """`groups`: linears of the block that read the same tensor, in the order in which they will be quantized."""
        self._slots = threading.Semaphore(threads)
        self._changed, self._local = threading.Condition(), threading.local()
        #: Groups before this one are quantized: who calls them goes on.
        self._open, self._given_up = 0, False
        #: Where each batch waits, by the number of the group; one more than all where it has left the block.
        self._at = dict.fromkeys(batches, -1)
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._failures: list[BaseException] = []
        self._count, self._run = len(groups), run
        self._handles = [
            block.get_submodule(group[0]).register_forward_pre_hook(self._stop(number))
            for number, group in enumerate(groups)
        ]
        self._threads = [threading.Thread(target=self._go, args=item, daemon=True) for item in batches.items()]

    def __enter__(self) -> PausedBatches:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for handle in self._handles:
            handle.remove()

    def inputs(self, number: int) -> dict[int, Tensor]:
        """What the layers of a group read, by batch, once every batch is there; some may never come."""
        self._wait(number)
        return {batch: self._inputs[batch] for batch, at in sorted(self._at.items()) if at == number}

    def go_on(self, number: int) -> None:
        """The layers of this group have their new weights."""
        with self._changed:
            self._open = number + 1
            self._changed.notify_all()

    def outputs(self) -> dict[int, Tensor]:
        """What the block makes of each batch."""
        self._wait(self._count)
        return dict(sorted(self._outputs.items()))

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failures or all(at >= number for at in self._at.values()))
            if self._failures:
                raise self._failures[0]

    # -- in the threads ---------------------------------------------------------------------------------------------

    def _go(self, batch: int, hidden: Tensor) -> None:
        torch.set_num_threads(1)
        self._local.batch = batch
        failure: BaseException | None = None
        with self._slots, suppress(Stop):
            try:
                self._outputs[batch] = self._run(hidden)
            except Stop:
                raise
            except BaseException as error:
                failure = error
        with self._changed:
            self._at[batch] = self._count
            if failure is not None:
                self._failures.append(failure)
            self._changed.notify_all()

    def _stop(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            batch = self._local.batch
            with self._changed:
                if number < self._open:
                    return
                x = args[0].detach()
                self._inputs[batch], self._at[batch] = x.reshape(-1, x.shape[-1]), number
                self._changed.notify_all()
                self._slots.release()
                self._changed.wait_for(lambda: self._given_up or self._open > number)
                del self._inputs[batch]
            self._slots.acquire()
            if self._given_up:
                raise Stop

        return hook
