"""Norms and gated MLPs that quantize what they make: which are proved to feed linears alone, and what they compute."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import baracuda
from baracuda.models import fuse_producers
from baracuda.nn.fused import FusedMLP, FusedNorm

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class FloatNorm(nn.Module):
    """The same norm with floats as its result."""

    def __init__(self, fused: FusedNorm) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.fused._parameters.get("weight"), self.fused._parameters.get("bias")
        result: Tensor = baracuda.rms_norm(x, weight, self.fused.eps, style=self.fused.style, bias=bias)
        return result


class FloatMLP(nn.Module):
    def __init__(self, fused: FusedMLP) -> None:
        super().__init__()
        self.parts, self.activation = [fused._modules[name] for name in fused.names], fused.activation

    def forward(self, x: Tensor) -> Any:
        gate, up, down = self.parts
        return down(baracuda.gated(gate(x), up(x), activation=self.activation))  # type: ignore[misc]


def in_floats(model: nn.Module) -> nn.Module:
    """A copy whose norms and products leave as floats, by the same formulas, and are quantized by the linears."""
    copied = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        made = FloatNorm(module) if isinstance(module, FusedNorm) else None
        made = FloatMLP(module) if isinstance(module, FusedMLP) else made  # type: ignore[assignment]
        if made is not None:
            parent, _, child = name.rpartition(".")
            copied.get_submodule(parent)._modules[child] = made
    return copied


def fused(name: str, scheme: str = "w8a8", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = models.build(name).to(dtype)
    options: dict[str, Any] = {}
    if scheme == "w8a8-static":
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        options["input_scales"] = dict.fromkeys(linears, 0.05)
    report = baracuda.quantize_model(model, scheme, ignore=["lm_head"], merge=True, fuse=True, **options)
    return model, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "norms", "mlps"),
    [
        ("llama", 4, 2),
        ("qwen2", 4, 2),
        ("qwen3", 4, 2),
        ("gemma", 4, 0),
        ("gemma2", 4, 0),
        ("mixtral", 2, 0),
        ("opt", 2, 0),
    ],
)
def test_the_model_zoo_is_fused_with_the_bits_of_the_same_formulas(
    name: str, norms: int, mlps: int, dtype: torch.dtype
) -> None:
    model, report = fused(name, dtype=dtype)
    kinds = [type(m) for m in model.modules()]
    assert (kinds.count(FusedNorm), kinds.count(FusedMLP)) == (norms, mlps)
    assert len(report.fused) == norms + mlps
    x = models.prompt()
    with torch.no_grad():
        assert torch.equal(model(x)[0], in_floats(model)(x)[0])
    alone = models.build(name).to(dtype)
    baracuda.quantize_model(alone, ignore=["lm_head"])
    assert list(model.state_dict()) == list(alone.state_dict())
    with torch.no_grad():
        assert models.relative(alone(x)[0].double(), model(x)[0].double()) < (0.02 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("scheme", ["w8a8-static", "w4a8", "w4a4"])
def test_other_schemes_are_fused_too(scheme: str) -> None:
    model, report = fused("llama", scheme)
    assert len(report.fused) == 6
    with torch.no_grad():
        x = models.prompt()
        assert torch.equal(model(x)[0], in_floats(model)(x)[0])


def test_the_report_says_what_was_fused_and_why_the_rest_was_not() -> None:
    _, report = fused("llama")
    wanted = "FusedNorm(LlamaRMSNorm, style=llama, eps=1e-06, quantized per token)"
    assert report.fused["model.layers.0.input_layernorm"] == wanted
    assert report.unfused["model.norm"].startswith("more than quantized linears read it")
    assert wanted in str(report) and "not fused: more than" in str(report)
    _, report = fused("gemma")
    assert "GELUTanh" in report.unfused["model.layers.0.mlp"]
    _, report = fused("llama", "w8a8-asymmetric")
    assert not report.fused and "asymmetric" in report.unfused["model.layers.0.input_layernorm"]


def test_nothing_is_fused_unless_asked_for_and_twice_is_once() -> None:
    model = models.build("llama")
    assert not baracuda.quantize_model(model, ignore=["lm_head"], merge=True).fused
    assert not any(isinstance(m, FusedNorm | FusedMLP) for m in model.modules())
    first = fuse_producers(model)
    assert fuse_producers(model).fused == first.fused and len(first.fused) == 6


class Block(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(16, 1e-6), nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.how = forward

    def forward(self, x: Tensor) -> Any:
        return self.how(self, self.norm(x), x)


X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, y, x: m.a(y) + m.b(y), None),
        (lambda m, y, x: m.a(y) + m.b(x), None),
        (lambda m, y, x: m.a(y.reshape(y.shape)), "more than quantized linears read it: AttributeError"),
        (lambda m, y, x: m.a(y) + y[:, :8], "more than quantized linears read it"),
        (lambda m, y, x: (m.a(y), y), "it is an output of the model"),
        (lambda m, y, x: {"last": [m.a(y), y]}, "it is an output of the model"),
        (lambda m, y, x: m.a(x), "no quantized linear reads it"),
    ],
)
def test_what_reads_a_norm_decides(forward: Any, reason: str | None) -> None:
    block = Block(forward).requires_grad_(False)
    report = baracuda.quantize_model(block, fuse=True, inputs=(X,))
    if reason is None:
        assert isinstance(block.norm, FusedNorm) and not report.unfused
        assert torch.equal(block(X), in_floats(block)(X))
    else:
        assert report.unfused["norm"].startswith(reason) and isinstance(block.norm, nn.RMSNorm)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "b", baracuda.nn.QuantizedLinear.from_float(m.b, q_max=100)), "in different ways"),
        (lambda m: m.norm.register_forward_hook(lambda *_: None), "has hooks, or a forward of its own"),
        (lambda m: setattr(m.norm, "forward", m.norm.forward), "has hooks, or a forward of its own"),
        (lambda m: m.norm.register_buffer("more", torch.ones(1)), "has more than a weight and a bias"),
    ],
)
def test_a_norm_that_cannot_be_fused_is_named_with_the_reason(change: Any, reason: str) -> None:
    block = Block(lambda m, y, x: m.a(y) + m.b(y)).requires_grad_(False)
    change(block)
    assert reason in baracuda.quantize_model(block, fuse=True, inputs=(X,)).unfused["norm"]


def test_a_norm_of_another_formula_is_left_as_it_is() -> None:
    class OddRMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.01

    block = Block(lambda m, y, x: m.a(y)).requires_grad_(False)
    block.norm = OddRMSNorm(16, 1e-6).requires_grad_(False)
    assert "none of the formulas" in baracuda.quantize_model(block, fuse=True, inputs=(X,)).unfused["norm"]


def test_where_gradients_or_autocast_ask_for_floats_the_model_computes_as_it_did() -> None:
    model, _ = fused("llama", dtype=torch.bfloat16)
    plain = models.build("llama").to(torch.bfloat16)
    baracuda.quantize_model(plain, ignore=["lm_head"], merge=True)
    x = models.prompt()
    assert torch.equal(model(x)[0], plain(x)[0])
    model(x)[0].sum().backward()
    assert model.model.layers[0].input_layernorm.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x)[0], plain(x)[0])


def test_copies_pickles_casts_and_state_stay_fused_and_apart_from_the_first() -> None:
    model, _ = fused("llama", "w8a8-static")
    x = models.prompt()
    with torch.no_grad():
        expected = model(x)[0]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x)[0], expected)
            norm = other.model.layers[0].input_layernorm
            assert norm._parameters is norm.original._parameters
            for name, buffer in other.named_buffers():
                if name.endswith("input_scale"):
                    buffer.mul_(3)
            assert not torch.equal(other(x)[0], expected) and torch.equal(model(x)[0], expected)
            other.load_state_dict(model.state_dict())
            assert torch.equal(other(x)[0], expected)
        half = copy.deepcopy(model).to(torch.bfloat16)
        assert half.model.layers[0].input_layernorm.weight.dtype is torch.bfloat16
        assert torch.equal(half(x)[0], in_floats(half)(x)[0])


class Adapter(nn.Module):
    """As LoRA's: it stands in the place of a linear and reads its floats."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + 0 * x.sum()


@pytest.mark.parametrize("child", ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_an_adapter_or_a_hook_gets_floats(child: str) -> None:
    model, _ = fused("llama")
    layer, x = model.model.layers[0], models.prompt()
    plain = models.build("llama")
    baracuda.quantize_model(plain, ignore=["lm_head"])
    parent, _, name = child.rpartition(".")
    linear = layer.get_submodule(child)
    with torch.no_grad():
        seen: list[Any] = []
        handle = linear.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        model(x)
        handle.remove()
        assert all(isinstance(value, Tensor) for value in seen) and seen
        layer.get_submodule(parent)._modules[name] = Adapter(linear)
        assert models.relative(plain(x)[0].double(), model(x)[0].double()) < 0.02


def test_a_loaded_checkpoint_is_fused_and_saves_what_it_was(tmp_path: Path) -> None:
    from baracuda.flow import quantize_checkpoint, verify

    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    model, alone = baracuda.load(tmp_path / "out"), baracuda.load(tmp_path / "out", fuse=False)
    assert len(fuse_producers(model).fused) == 6 and not any(isinstance(m, FusedNorm) for m in alone.modules())
    assert list(model.state_dict()) == list(alone.state_dict())
    baracuda.save(model, tmp_path / "again")
    assert not verify(tmp_path / "again", tmp_path / "model")
