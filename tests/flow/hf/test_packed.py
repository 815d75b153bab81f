"""The linear of 4-bit checkpoints: what it computes, in which batches a token keeps its bits, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from baracuda.flow import FlowError
from baracuda.flow.checkpoint.nibbles import in_order, order_of_groups, unpack_rows
from baracuda.flow.hf.packed import FEW_TOKENS, PackedLinear
from baracuda.models import merge_siblings
from baracuda.nn.siblings import siblings_of

K, GROUP = 96, 32


def linear(n: int = 20, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, **options: bool):
    """A linear with random tensors, as a file would fill it."""
    torch.manual_seed(seed)
    made = PackedLinear(K, n, bias, GROUP, dtype=dtype, **options)
    made.weight_packed.random_(-(2**31), 2**31)
    made.weight_scale.uniform_(0.01, 0.1)
    if made.weight_zero_point is not None:
        made.weight_zero_point.random_(-(2**31), 2**31)
    if made.weight_g_idx is not None:
        made.weight_g_idx.copy_(made.weight_g_idx[torch.randperm(K)])
    if bias:
        nn.init.normal_(made.bias)
    return made


def meant(state: dict[str, Tensor]) -> Tensor:
    """The f64 weight that stored tensors stand for, element by element."""
    words, scale = state["weight_packed"].long(), state["weight_scale"].double()
    n = len(words)
    q = torch.stack([(words >> 4 * i) & 15 for i in range(8)], -1).flatten(1)
    zero = torch.full_like(scale, 8)
    if "weight_zero_point" in state:
        packed = state["weight_zero_point"].long()
        zero = torch.stack([(packed >> 4 * i) & 15 for i in range(8)], 1).flatten(0, 1)[:n].double()
    groups = state.get("weight_g_idx", torch.arange(K) // GROUP).long()
    return (q - zero[:, groups]) * scale[:, groups]


KINDS = {
    "symmetric": {},
    "zero points": {"zero_points": True},
    "act-order": {"act_order": True},
    "both": {"zero_points": True, "act_order": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_with_the_weight_that_the_file_stands_for(kind: str, tokens: int, dtype: torch.dtype) -> None:
    made = linear(21, dtype=dtype, **KINDS[kind])
    weight = meant(made.state_dict())
    made.make_ready()
    assert torch.equal(made.dequantized_weight(torch.float64), weight)
    x = torch.randn(tokens, K).to(dtype)
    exact = x.double() @ weight.T + made.bias.double()
    unit = torch.finfo(dtype).eps
    assert ((made(x) - exact).abs() <= 4 * unit * (x.double().abs() @ weight.abs().T + exact.abs())).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_in_every_batch_of_few_tokens(kind: str) -> None:
    made = linear(70, dtype=torch.bfloat16, **KINDS[kind])
    made.make_ready()
    x = torch.randn(FEW_TOKENS, K).bfloat16()
    with torch.no_grad():
        whole = made(x)
        for rows in (slice(0, 1), slice(3, 5), slice(7, 20)):
            assert torch.equal(made(x[rows]), whole[rows])
            assert torch.equal(made(x[rows].unsqueeze(0)), whole[rows].unsqueeze(0))


def test_few_tokens_never_make_the_weight_float(monkeypatch: pytest.MonkeyPatch) -> None:
    made = linear()
    monkeypatch.setattr(PackedLinear, "_whole", lambda *_: pytest.fail("dequantized"))
    for x in (torch.randn(FEW_TOKENS, K), torch.randn(1, 1, K, requires_grad=True)):
        made(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert made(torch.randn(2, K)).dtype is torch.bfloat16
    with pytest.raises(pytest.fail.Exception, match="dequantized"):
        made(torch.randn(FEW_TOKENS + 1, K))


@pytest.mark.parametrize("slow", [True, False])
def test_many_tokens_are_multiplied_in_f32_where_bf16_would_take_longer(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baracuda.flow.hf.packed._SLOW", (torch.bfloat16,) if slow else ())
    made, x = linear(40, dtype=torch.bfloat16), torch.randn(FEW_TOKENS + 1, K).bfloat16()
    math = torch.float32 if slow else torch.bfloat16
    expected = nn.functional.linear(x.to(math), made.dequantized_weight(math), made.bias.to(math))
    y = made(x)
    assert y.dtype is torch.bfloat16 and torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_have_the_same_bits_in_every_column(kind: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = linear(24, seed=1, **KINDS[kind]), linear(13, bias=False, seed=1, **KINDS[kind])
            if self.q.weight_g_idx is not None:
                self.k.weight_g_idx = self.q.weight_g_idx.clone()
            self.q.make_ready()
            self.k.make_ready()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q(x), self.k(x)], -1)

    block, x = Block(), torch.randn(3, K)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with torch.no_grad():
        apart = block(x)
        merged = merge_siblings(block, [x]).merged
        assert list(merged) == ["q"] and "37 x 96" in merged["q"]
        for model in (block, copy.deepcopy(block)):
            assert siblings_of(model)[0].why_apart() is None
            assert torch.equal(model(x), apart)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


def test_gradients_reach_the_input_and_the_bias() -> None:
    made = linear(zero_points=True, act_order=True)
    weight = meant(made.state_dict())
    made.make_ready()
    x = torch.randn(4, K, requires_grad=True)
    upstream = torch.randn(4, 20)
    made(x).backward(upstream)
    torch.testing.assert_close(x.grad, (upstream.double() @ weight).float())
    torch.testing.assert_close(made.bias.grad, upstream.sum(0))


def test_loading_tensors_again_makes_other_zero_points() -> None:
    first, other = linear(zero_points=True), linear(zero_points=True, seed=9)
    first(torch.randn(1, K))
    assert "zero_point" not in first.state_dict()
    first.load_state_dict(other.state_dict())
    x = torch.randn(2, K)
    assert torch.equal(first(x), other(x))
    first.weight_zero_point = torch.full_like(first.weight_zero_point, -0x77777778)  # 8 for all
    assert torch.equal(first.dequantized_weight(torch.float64), meant(first.state_dict()))


def test_a_compiled_linear_is_one_graph_with_the_same_bits() -> None:
    for options in KINDS.values():
        made = linear(**options)
        made.make_ready()
        compiled = torch.compile(made, backend="eager", fullgraph=True)
        x = torch.randn(2, K)
        with torch.no_grad():
            assert torch.equal(compiled(x), made(x))
    torch._dynamo.reset()


def test_zero_points_are_unpacked_from_rows_of_eight() -> None:
    words = torch.tensor([[0x76543210], [-0x01234568]], dtype=torch.int32)
    assert unpack_rows(words, 16).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15][:8] + [
        (-0x01234568 >> 4 * i) & 15 for i in range(8)
    ]
    assert unpack_rows(words, 11).shape == (11, 1)


def test_groups_out_of_order_are_sorted_and_unequal_ones_refused() -> None:
    g_idx = torch.tensor([1, 0, 1, 0, 0, 0, 1, 1], dtype=torch.int32)
    order = order_of_groups(g_idx, 4, "weight_g_idx")
    assert order is not None and order.tolist() == [1, 3, 4, 5, 0, 2, 6, 7]
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert in_order(words, order).item() == 0x76205431
    assert order_of_groups(torch.arange(8) // 4, 4, "x") is None
    assert order_of_groups(torch.full((8,), -1), 4, "x") is None
    with pytest.raises(FlowError, match=r"layer: expected 2 groups of 4 columns.*got 2 groups of 3 to 5.*act-order"):
        order_of_groups(torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]), 4, "layer")
