"""What attention by Triton kernels promises, on whatever device: near f64, and one answer for a row in any company."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baracuda.backends.triton.attention.launch import attend

#: batch, heads of keys, queries for each, tokens, keys, d, d of values: one part of the keys and several, widths that
#: are no power of two.
SHAPES = [
    (1, 1, 1, 1, 1, 16, 16),
    (2, 2, 4, 1, 64, 64, 64),
    (1, 3, 3, 1, 5, 64, 64),
    (2, 1, 4, 3, 130, 80, 40),
    (1, 2, 1, 5, 257, 20, 7),
    (1, 1, 17, 2, 600, 64, 96),
    (1, 1, 2, 2, 70, 256, 130),
]
TYPES = [torch.bfloat16, torch.float16]


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, group, tokens, keys, d, dv = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    return made(batch, heads * group, tokens, d), made(batch, heads, keys, d), made(batch, heads, keys, dv)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_near_f64(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Weights are rounded to 16 bits before they multiply values: half a unit of each, and one rounding at the end."""
    q, k, v = operands(shape, dtype, device)
    tokens, keys = q.shape[2], k.shape[2]
    mask = (torch.rand(q.shape[0], 1, tokens, keys, generator=torch.Generator().manual_seed(3)) > 0.3).to(device)
    mask[..., 0] = True
    lower = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril()[None, None]
    for scale, given, causal, seen in ((None, None, False, None), (0.3, mask, False, mask), (None, None, True, lower)):
        wide = scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=seen, scale=scale, enable_gqa=True
        )
        made = attend(q, k, v, given, scale, causal)
        distance = (made.double() - wide.transpose(1, 2)).abs().max()
        assert distance <= 1e-5 + 1.5 * torch.finfo(dtype).eps * v.abs().max()


def assert_one_answer(dtype: torch.dtype, device: torch.device, tokens: int = 300) -> None:
    """A row has the same bits alone, in a prompt, in a batch, in a longer cache and behind padding."""
    q, k, v = operands((1, 2, 3, tokens, tokens, 64, 64), dtype, device)
    prompt = attend(q, k, v, None, None, True)
    for t in (0, 1, 63, 64, 255, 256, tokens - 1):
        one, keys, values = q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]
        alone = attend(one, keys, values, None, None)
        assert torch.equal(bits(alone), bits(prompt[:, t : t + 1])), t
        for pad, behind in ((0, 70), (1, 0), (100, 3), (300, 0)):
            length = pad + t + 1 + behind
            cache = torch.full((2, 3, 2, length, 64), torch.nan, dtype=dtype, device=device)
            mask = torch.zeros(3, 1, 1, length, dtype=torch.bool, device=device)
            cache[0, 1, :, pad : pad + t + 1], cache[1, 1, :, pad : pad + t + 1] = keys[0], values[0]
            mask[1, ..., pad : pad + t + 1], mask[0] = True, True
            batch = attend(one.expand(3, -1, -1, -1), *cache, mask, None)
            assert torch.equal(bits(batch[1:2]), bits(alone)), (t, pad, behind)
            assert batch[0].isnan().all() and not batch[2].any()


def assert_strides_do_not_matter(device: torch.device) -> None:
    q, k, v = operands((2, 2, 2, 3, 40, 32, 32), torch.bfloat16, device)
    dense = attend(q, k, v, None, None)
    cache = torch.zeros(2, 2, 100, 32, dtype=torch.bfloat16, device=device)
    cache[:, :, 7:47] = k
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    every = torch.ones(1, 1, 1, 40, dtype=torch.bool, device=device)
    assert torch.equal(bits(attend(turned, cache[:, :, 7:47], columns, None, None)), bits(dense))
    for mask in (every, every.expand(2, 1, 3, 40), every.repeat(2, 1, 1, 2)[..., ::2]):
        assert torch.equal(bits(attend(q, k, v, mask, None)), bits(dense))


def assert_special_values(device: torch.device) -> None:
    q, k, v = operands((1, 1, 1, 1, 300, 16, 16), torch.bfloat16, device)
    for number in (torch.nan, torch.inf, -torch.inf):
        for place in (3, 280):
            keys = k.clone()
            keys[0, 0, place] = number
            theirs = scaled_dot_product_attention(q.double(), keys.double(), v.double()).transpose(1, 2)
            assert torch.equal(attend(q, keys, v, None, None).isnan(), theirs.isnan()), (number, place)
    assert attend(q[:, :, :0], k, v, None, None).shape == (1, 0, 1, 16)
    assert not attend(q, k[:, :, :0], v[:, :, :0], None, None).any()
