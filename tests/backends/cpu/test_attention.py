"""The compiled attention: its stated order to the bit, one answer for a row in any company, and f64 beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baracuda import _cpu
from baracuda.backends.attention import attend, declines
from baracuda.backends.nonlinearity import F32, _exponential

CHUNK, LANES = 128, 16
#: batch, heads of keys, queries for each, tokens, keys, d, d of values
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 3, 3, 1, 5, 64, 64),
    (2, 3, 3, 1, 300, 64, 64),
    (2, 1, 4, 7, 130, 80, 40),
    (1, 2, 1, 9, 129, 20, 7),
    (1, 1, 71, 2, 257, 64, 72),
    (3, 2, 2, 3, 1025, 33, 128),
    (1, 1, 3, 40, 150, 64, 48),  # tokens in two tiles
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, group, tokens, keys, d, dv = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    return made(batch, heads * group, tokens, d), made(batch, heads, keys, d), made(batch, heads, keys, dv)


def masks(shape: tuple[int, ...]) -> Tensor:
    batch, _, _, tokens, keys, _, _ = shape
    return torch.rand(batch, 1, tokens, keys, generator=torch.Generator().manual_seed(3)) > 0.3


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# -- the order that csrc/attention.hpp states, in torch's operations on single elements --------------------------------


def exponential(a: Tensor) -> Tensor:
    e, first, second = _exponential(torch.where(a < -112, -112.0, a), torch.zeros_like(a), F32)
    return (e * first) * second


def in_lanes(terms: Tensor) -> Tensor:
    """The sum along the last axis: lanes first, then the upper half is added to the lower until one is left."""
    terms = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % LANES))
    lanes = torch.zeros(*terms.shape[:-1], LANES)
    for first in range(0, terms.shape[-1], LANES):
        lanes = lanes + terms[..., first : first + LANES]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def one_query(q: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    if not len(keys):
        return torch.zeros(values.shape[-1])
    state = None
    for k, v in zip(keys.split(CHUNK), values.split(CHUNK), strict=True):
        scores = in_lanes(q * k) * scale
        greatest = scores.max()
        weights = exponential(scores - torch.where(greatest == -torch.inf, 0.0, greatest))
        total, sums = in_lanes(weights), torch.zeros(v.shape[-1])
        for weight, row in zip(weights, v, strict=True):
            sums = sums + weight * row
        if state is not None:
            m = torch.maximum(state[0], greatest)
            own, its = exponential(state[0] - m), exponential(greatest - m)
            greatest, total, sums = m, state[1] * own + total * its, state[2] * own + sums * its
        state = greatest, total, sums
    assert state is not None
    return state[2] / state[1]


def oracle(query: Tensor, key: Tensor, value: Tensor, attended: Tensor, scale: float) -> Tensor:
    batch, heads, tokens, _ = query.shape
    group, out = heads // key.shape[1], torch.empty(batch, tokens, heads, value.shape[-1])
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (batch, heads, tokens))).tolist():
        seen = attended[b % len(attended), 0, t]
        k, v = key[b, h // group, seen].float(), value[b, h // group, seen].float()
        out[b, t, h] = one_query(query[b, h, t].float(), k, v, torch.tensor(scale, dtype=torch.float32))
    return out.to(query.dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_the_stated_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = operands(shape, dtype)
    every = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    for mask in (None, masks(shape)):
        made = attend(q, k, v, mask, 0.3)
        assert torch.equal(bits(made), bits(oracle(q, k, v, every if mask is None else mask, 0.3)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_causal_tokens_attend_to_the_keys_up_to_their_own(shape: tuple[int, ...]) -> None:
    q, k, v = operands(shape, torch.float32)
    lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    assert torch.equal(bits(attend(q, k, v, None, None, True)), bits(attend(q, k, v, lower, None)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_near_torch_in_f64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = operands(shape, dtype)
    for mask in (None, masks(shape)):
        wide = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True)
        distance = (attend(q, k, v, mask, None).double() - wide.transpose(1, 2)).abs().max()
        assert distance <= 4e-6 + torch.finfo(dtype).eps * v.abs().max()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_instruction_set_and_number_of_threads_has_the_same_bits(dtype: torch.dtype, restored: None) -> None:
    for shape in SHAPES:
        q, k, v = operands(shape, dtype)
        mask, found = masks(shape), []
        for isa in _cpu.isas():
            _cpu.use_isa(isa)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(torch.cat([bits(attend(q, k, v, m, None)) for m in (None, mask)]))
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_alone_padded_and_after_a_prompt(dtype: torch.dtype) -> None:
    tokens = 150
    q, k, v = operands((1, 2, 3, tokens, tokens, 64, 64), dtype)
    prompt = attend(q, k, v, None, None, True)
    for t in (0, 1, 15, 127, 128, 149):
        alone = attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], None, None)
        assert torch.equal(bits(alone), bits(prompt[:, t : t + 1])), t
        # Padding of any kind around the keys, and rows of any kind in the batch, change nothing.
        for pad in (1, 5, 128):
            rows = torch.full((3, 2, pad + t + 1, 64), torch.nan, dtype=dtype)
            keys, values, mask = rows.clone(), rows.clone(), torch.zeros(3, 1, 1, pad + t + 1, dtype=torch.bool)
            keys[1, :, pad:], values[1, :, pad:], mask[1, ..., pad:] = k[0, :, : t + 1], v[0, :, : t + 1], True
            mask[0] = True
            batch = attend(q[:, :, t : t + 1].expand(3, -1, -1, -1), keys, values, mask, None)
            assert torch.equal(bits(batch[1:2]), bits(alone)), (t, pad)
            assert batch[0].isnan().all() and not batch[2].any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tokens_of_a_prompt_have_the_bits_of_each_alone_under_any_mask(dtype: torch.dtype) -> None:
    """Tokens whose keys are the first of one list are computed together, the others one by one."""
    tokens, keys = 70, 200
    q, k, v = operands((2, 2, 3, tokens, keys, 40, 64), dtype)
    causal = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    window = causal & ~causal.tril(-50)
    behind = causal.clone()
    behind[:, :9] = False
    nothing = causal.clone()
    nothing[:40] = False
    falling = causal.flip(0)
    for each in (causal, window, behind, nothing, falling, torch.rand(tokens, keys) > 0.5):
        mask = torch.stack([each, causal])[:, None]
        made = attend(q, k, v, mask, None)
        for t in (0, 1, 30, 31, 32, 33, 39, 40, 69):
            alone = attend(q[:, :, t : t + 1], k, v, mask[:, :, t : t + 1], None)
            assert torch.equal(bits(alone), bits(made[:, t : t + 1])), t


def test_what_comes_later_in_a_prompt_changes_nothing() -> None:
    q, k, v = operands((1, 2, 3, 100, 100, 64, 64), torch.float32)
    expected = attend(q, k, v, None, None, True)
    for t in (1, 17, 50, 99):
        keys, values = k.clone(), v.clone()
        keys[:, :, t:], values[:, :, t:] = torch.nan, torch.inf
        assert torch.equal(bits(attend(q, keys, values, None, None, True)[:, :t]), bits(expected[:, :t])), t


def test_lots_of_tiles_have_the_bits_of_each_alone() -> None:
    """Lists of 4,000 keys for 96 tokens take 1.5 MB of the room for a lot, which is 4 MB."""
    tokens, keys = 500, 4000
    q, k, v = operands((2, 1, 1, tokens, keys, 16, 16), torch.float32)
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens).expand(2, 1, -1, -1)
    made = attend(q, k, v, mask, None)
    for t in (0, 95, 96, 191, 192, 300, 499):
        alone = attend(q[:, :, t : t + 1], k, v, mask[:, :, t : t + 1], None)
        assert torch.equal(bits(alone), bits(made[:, t : t + 1])), t


def test_strided_operands_give_the_bits_of_dense_ones() -> None:
    q, k, v = operands((2, 2, 2, 3, 40, 32, 32), torch.bfloat16)
    dense = attend(q, k, v, None, None)
    cache = torch.zeros(2, 2, 100, 32, dtype=torch.bfloat16)
    cache[:, :, 7:47] = k
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(bits(attend(turned, cache[:, :, 7:47], columns, None, None)), bits(dense))


def test_special_values_end_as_in_torch() -> None:
    q, k, v = operands((1, 1, 1, 1, 20, 16, 16), torch.float32)
    assert torch.equal(attend(q, k, v, torch.zeros(1, 1, 1, 20, dtype=torch.bool), None), torch.zeros(1, 1, 1, 16))
    for number in (torch.nan, torch.inf, -torch.inf):
        keys = k.clone()
        keys[0, 0, 3] = number
        theirs = scaled_dot_product_attention(q, keys, v).transpose(1, 2)
        assert torch.equal(attend(q, keys, v, None, None).isnan(), theirs.isnan()), number
    one = torch.ones(1, 1, 1, 16)
    for place in (0, 140):  # scores that overflow, a whole lot of 128 keys of them, before and behind others
        keys, values = -one.expand(1, 1, 300, 16) * 1e38, torch.ones(1, 1, 300, 16)
        keys = keys.clone()
        keys[:, :, place : place + 130] = 0
        assert torch.equal(attend(one * 1e38, keys, values, None, None), torch.ones(1, 1, 1, 16)), place
    assert attend(one * 1e38, -one.expand(1, 1, 300, 16) * 1e38, torch.ones(1, 1, 300, 16), None, None).isnan().all()
    far = k * 1e4  # all weights but one vanish
    wide = scaled_dot_product_attention(q.double(), far.double(), v.double()).transpose(1, 2)
    assert (attend(q, far, v, None, None).double() - wide).abs().max() < 1e-6


@pytest.mark.parametrize("empty", [{"batch": 0}, {"tokens": 0}, {"keys": 0}], ids=str)
def test_empty_sizes_give_zeros_or_nothing(empty: dict[str, int]) -> None:
    sizes = {"batch": 2, "heads": 2, "group": 2, "tokens": 3, "keys": 5, "d": 16, "dv": 16} | empty
    made = attend(*operands(tuple(sizes.values()), torch.float32), None, None)
    assert made.shape == (sizes["batch"], sizes["tokens"], 4, 16) and not made.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, m: (q[:, :3], k, v, m), "whole number of queries"),
        (lambda q, k, v, m: (q, k[..., :8], v, m), "keys and values that fit"),
        (lambda q, k, v, m: (q, k, v[:, :, :3], m), "keys and values that fit"),
        (lambda q, k, v, m: (q, k.half(), v, m), "one float type"),
        (lambda q, k, v, m: (q, k, v, m[..., :3]), "a mask of bools"),
        (lambda q, k, v, m: (q, k, v, m.float()), "a mask of bools"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    given = (*operands((2, 2, 2, 3, 5, 16, 16), torch.float32), torch.ones(2, 1, 3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=message):
        attend(*change(*given), None)


def test_what_the_kernel_declines_it_declines_in_words() -> None:
    q, k, v = operands((1, 1, 1, 1, 4, 16, 16), torch.float32)
    mask = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    assert declines(q, k, v, mask) is None
    assert "not on meta" in str(declines(q.to("meta"), k, v, None))
    assert "torch.float64" in str(declines(q.double(), k.double(), v.double(), None))
    assert "torch.bfloat16" in str(declines(q, k.bfloat16(), v, None))
    assert "a mask of bools" in str(declines(q, k, v, mask.float()))
    assert "a mask of bools" in str(declines(q, k, v, mask.expand(1, 2, 1, 4)))
