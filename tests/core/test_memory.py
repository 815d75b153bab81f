"""Memory of large results: used again when nobody holds it, never while somebody does."""

from __future__ import annotations

import gc
import mmap
import sys
import threading

import pytest
import torch

import baracuda
from baracuda.core import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not know the requests")
SIZE = memory.LARGE  # elements of int8, so bytes of a result


@pytest.fixture(autouse=True)
def _nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_idle", [])


def test_a_result_that_is_gone_leaves_its_memory_to_the_next() -> None:
    x = torch.randn(SIZE)
    first = baracuda.quantize(x, 0.1)
    address = first.data_ptr()
    second = baracuda.quantize(x, 0.1)
    assert second.data_ptr() != address
    part = first[5:9]
    del first
    gc.collect()
    assert not memory._idle and torch.equal(part, second[5:9])
    del part
    assert [len(block) for block in memory._idle] == [SIZE]
    third = baracuda.quantize(x, 0.2)
    assert third.data_ptr() == address and not memory._idle
    assert torch.equal(third[:100], baracuda.quantize(x[:100], 0.2))


def test_only_so_much_memory_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE", 2 * SIZE)
    held = [baracuda.quantize(torch.zeros(SIZE), 0.1) for _ in range(4)]
    del held
    gc.collect()
    assert sum(map(len, memory._idle)) == 2 * SIZE


def test_threads_never_share_a_result() -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        x = torch.full((SIZE,), float(value))
        for _ in range(20):
            q = baracuda.quantize(x, 1.0)
            if not bool((q == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_result_is_an_ordinary_tensor_to_autograd() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    y = baracuda.fake_quantize(x, 0.1)
    assert not y._is_view()
    y.mul_(2.0).sum().backward()
    assert x.grad is not None and torch.equal(x.grad.unique(), torch.tensor([2.0]))


@pytest.mark.parametrize("advice", ["MADV_HUGEPAGE", "MADV_FREE"])
def test_a_kernel_that_refuses_the_advice_still_gives_memory(advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, advice, 9999)
    with pytest.raises(OSError):
        mmap.mmap(-1, memory.LARGE).madvise(9999)
    x = torch.zeros(memory.LARGE)
    assert not baracuda.quantize(x, 0.5).any()
