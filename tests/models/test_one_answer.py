"""The example that trains what it serves, and the report of what in a model depends on the batch."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import baracuda
from baracuda.flow.hf.packed import PackedLinear
from baracuda.models import fuse_producers, merge_siblings
from baracuda.models.deterministic import _BY_ELEMENT
from baracuda.nn.fused import FusedMLP, FusedNorm
from baracuda.nn.ordered import Ordered, OrderedNorm

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_answer.py"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "one-answer.md"


def test_the_example_gives_the_numbers_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros to the last bit; rewards, and the gap of floats, as far as another CPU's float gradients let them."""
    found = runpy.run_path(str(EXAMPLE))["main"]()
    lines = [
        line.split("|") for line in PAGE.read_text().splitlines() if line.startswith(('| `"integer"', '| `"fake"'))
    ]
    for cells in lines:
        numbers, rewards = found[cells[1].strip(' `"')], cells[4].split("->")
        assert numbers["largest gap of a log-probability"] == pytest.approx(float(cells[2]), rel=2)
        assert numbers["divergence"] == pytest.approx(float(cells[3]), rel=4)
        assert numbers["first reward"] == pytest.approx(float(rewards[0]), abs=0.02)
        assert numbers["last reward"] == pytest.approx(float(rewards[1]), abs=0.15)
    assert len(lines) == 2
    assert found["integer"]["largest gap of a log-probability"] == found["integer"]["divergence"] == 0.0
    assert found["fake"]["largest gap of a log-probability"] > 1e-3
    assert "divergence: 0\n" in capsys.readouterr().out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU()
        self.attention, self.down = nn.MultiheadAttention(64, 2), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.up(self.norm(x)))
        return self.down(h)  # type: ignore[no-any-return]


def test_a_report_says_what_depends_on_the_batch_and_why() -> None:
    model = nn.Sequential(nn.Embedding(10, 32), Block())
    before = baracuda.deterministic(model, replace=False)
    assert set(before.invariant) == {"0"}
    assert {"1.norm", "1.up", "1.down", "1.act", "1.attention"} <= set(before.dependent)
    assert "number of rows" in before.dependent["1.up"] and not before.replaced
    after = baracuda.deterministic(model)
    replaced = {"1.up", "1.down", "1.norm", "1.act"}
    assert set(after.replaced) == replaced and replaced <= set(after.invariant)
    assert set(after.dependent) == {"1.attention"}
    assert "attention" in after.dependent["1.attention"]
    assert "1.attention" in str(after) and "depends on the batch" in str(after)
    tokens = torch.randint(10, (9,))
    assert isinstance(model[1].up, baracuda.nn.QuantizedLinear) and model(tokens).shape == (9, 32)


def test_a_model_of_quantized_linears_alone_is_invariant() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    report = baracuda.deterministic(model)
    assert not report.dependent and report.holds
    x = torch.randn(70, 32)
    assert all(torch.equal(model(x[:rows]), model(x)[:rows]) for rows in (1, 5, 33))


def test_a_head_stays_float_unless_asked() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 20)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    model = Language()
    assert "lm_head" in baracuda.deterministic(model).dependent
    assert not baracuda.deterministic(model, quantize_head=True).dependent


def test_what_is_not_known_counts_as_dependent() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    report = baracuda.deterministic(nn.Sequential(Odd()), replace=False)
    assert "not known" in report.dependent["0"] and not report.holds


def test_a_scheme_that_is_none_is_refused() -> None:
    with pytest.raises(baracuda.InvalidProblem, match="scheme"):
        baracuda.deterministic(nn.Sequential(nn.Linear(2, 2)), "w9a9")


def alone_and_in_a_batch(function: Any, x: torch.Tensor) -> bool:
    """Whether each row alone has the bits it has in the batch."""
    whole = function(x)
    return all(torch.equal(function(x[i : i + 1].clone()), whole[i : i + 1]) for i in range(len(x)))


@pytest.mark.parametrize("kind", [k for k in _BY_ELEMENT if k not in (nn.Embedding, nn.Flatten)])
def test_what_is_called_invariant_by_its_kind_alone_is(kind: type[nn.Module]) -> None:
    module = kind().eval()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for width in (1, 3, 7, 16, 37, 101, 1000):
            assert alone_and_in_a_batch(module, (torch.randn(33, width) * 3).to(dtype)), (dtype, width)


NORMS: list[tuple[nn.Module, torch.dtype]] = [
    (nn.LayerNorm(101), torch.float32),
    (nn.LayerNorm(101, eps=1e-3, bias=False), torch.bfloat16),
    (nn.RMSNorm(101, eps=1e-6), torch.float32),
    (nn.RMSNorm(101, eps=1e-6), torch.float64),
]


@pytest.mark.parametrize(("module", "dtype"), [*NORMS, (nn.SiLU(), torch.float32), (nn.GELU(), torch.float16)], ids=str)
def test_norms_and_activations_are_computed_in_one_order(module: nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    original = module.to(dtype)
    model = nn.Sequential(copy.deepcopy(original))
    names = set(model.state_dict())
    report = baracuda.deterministic(model)
    assert isinstance(model[0], Ordered) and report.holds and set(report.replaced) == {"0"}
    assert set(model.state_dict()) == names
    x = (torch.randn(33, 101) * 3).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))
        if isinstance(model[0], OrderedNorm):
            options = {"style": model[0].style, "bias": getattr(original, "bias", None)}
            assert torch.equal(model(x), baracuda.rms_norm(x, original.weight, original.eps, **options))
        assert alone_and_in_a_batch(model, x)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), model(x)) and torch.equal(compiled(x[:1]), model(x)[:1])
        assert torch.equal(copy.deepcopy(model)(x), model(x))
    found = []
    for each in (model, original):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y))
        found.append([y.detach(), leaf.grad, *(p.grad for p in each.parameters())])
    assert torch.equal(found[0][0], model(x).detach())
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


def test_a_norm_keeps_its_type_under_autocast_and_moves_with_the_model() -> None:
    model, x = nn.Sequential(nn.LayerNorm(64)), torch.randn(5, 64)
    baracuda.deterministic(model)
    for autocast, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            y = model(x.to(dtype))
            assert y.dtype is nn.functional.layer_norm(x.to(dtype), (64,)).dtype
    with torch.no_grad():
        model.to(torch.bfloat16)[0].weight.fill_(3.0)
        assert model(x.bfloat16()).dtype is torch.bfloat16
        torch.testing.assert_close(model(x.bfloat16()), nn.functional.layer_norm(x.bfloat16(), (64,)) * 3)


def test_a_norm_that_cannot_be_replaced_says_why() -> None:
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False))
    report = baracuda.deterministic(model)
    assert not report.replaced and "it was not replaced: has no weight" in report.dependent["0"]


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_fused_norms_and_mlps_have_one_answer_inside_a_trace_too(scheme: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = models.build("llama")
    if scheme == "w4a16":
        models.pack(model)
        merge_siblings(model)
        fuse_producers(model)
    else:
        baracuda.quantize_model(model, merge=True, fuse=True, quantize_head=True)
    layer = model.get_submodule("model.layers.0")
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    assert isinstance(norm, FusedNorm) and isinstance(mlp, FusedMLP)
    looked = baracuda.deterministic(model, replace=False)
    assert "inside torch.compile" in looked.dependent["model.layers.0.post_attention_layernorm"]
    x = torch.randn(40, norm.original.weight.shape[0])

    def half(x: torch.Tensor) -> torch.Tensor:
        return mlp(norm(x))  # type: ignore[no-any-return]

    with torch.no_grad():
        before = half(x[:32])  # more rows are torch's until now, where weights alone are quantized
        report = baracuda.deterministic(model, quantize_head=True)
        assert {"model.norm", "model.layers.0.mlp.act_fn"} <= set(report.replaced)
        assert "model.layers.0.post_attention_layernorm" in report.invariant
        assert torch.equal(half(x)[:32], before) and alone_and_in_a_batch(half, x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(half, backend="aot_eager")(x), half(x))
    assert all("attention" in why or "not known" in why for why in report.dependent.values()), str(report)


def test_a_weight_only_linear_is_put_in_one_order() -> None:
    torch.manual_seed(0)
    linear = packed_linear()
    report = baracuda.deterministic(nn.Sequential(linear), replace=False)
    assert "beyond 32 rows" in report.dependent["0"] and not report.holds
    x = torch.randn(100, 64)
    with torch.no_grad():
        few, many = linear(x[:32]), linear(x)
        assert not torch.equal(few, many[:32]), "or the next lines show nothing"
        assert baracuda.deterministic(nn.Sequential(linear)).holds
        assert torch.equal(linear(x[:32]), few) and alone_and_in_a_batch(linear, x)
        torch.testing.assert_close(linear(x), many)


def test_weight_only_siblings_are_put_in_one_order_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = packed_linear(), packed_linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q(x), self.k(x)], -1)

    torch.manual_seed(0)
    model = Two()
    merged = merge_siblings(model, (torch.randn(2, 64),))
    assert merged.merged
    baracuda.deterministic(model)
    x = torch.randn(70, 64)
    with torch.no_grad():
        assert alone_and_in_a_batch(model, x) and alone_and_in_a_batch(copy.deepcopy(model), x)
        member = model.q._member
        assert member is not None and member.whole is not None and member.whole.fixed_order


def packed_linear() -> PackedLinear:
    linear = PackedLinear(64, 24, bias=False, group_size=32)
    linear.weight_packed.random_(-(2**31), 2**31 - 1)
    linear.weight_scale.uniform_(0.01, 0.1)
    return linear
