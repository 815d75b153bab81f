"""`split_index` beside Python's own division, over divisors and indices at every edge, on any device."""

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl

from baracuda.backends.triton.numerics.indices import Split, split_by, split_index

LARGEST = 2**31 - 1


@triton.jit(do_not_specialize=["by", "factor", "shift"])
def _split(index_ptr, quotient_ptr, rest_ptr, by, factor, shift, WIDE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, SIZE)
    quotient, rest = split_index(tl.load(index_ptr + lane), Split(by=by, factor=factor, shift=shift), WIDE)
    tl.store(quotient_ptr + lane, quotient)
    tl.store(rest_ptr + lane, rest)


def assert_indices_are_split_as_python_divides(device: str) -> None:
    chance = random.Random(0)
    divisors = {*range(1, 65), *(2**k + d for k in range(6, 31) for d in (-1, 0, 1)), LARGEST}
    divisors |= {chance.randrange(1, LARGEST) for _ in range(64)}
    for i, by in enumerate(sorted(divisors)):
        last = LARGEST // by * by
        multiples = [0, by, last, last - by, *(by * chance.randrange(LARGEST // by) for _ in range(12))]
        indices = [min(max(n + d, 0), LARGEST) for n in multiples for d in (-1, 0, 1)] + [LARGEST] * 16
        n = torch.tensor(indices, dtype=torch.int32, device=device)
        wide = i % 2 == 1
        quotient, rest = (torch.empty_like(n, dtype=torch.int64 if wide else torch.int32) for _ in range(2))
        _split[(1,)](n, quotient, rest, *split_by(by), WIDE=wide, SIZE=n.numel())
        wanted = [divmod(value, by) for value in indices]
        assert list(zip(quotient.tolist(), rest.tolist(), strict=True)) == wanted, by
