"""Norms and gated MLPs as one kernel: which are proved to feed integer linears alone, and what they compute."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import baracuda
from baracuda.models import fuse_producers, merge_siblings
from baracuda.nn.fused import FEW_ROWS, FusedMLP, FusedNorm

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


def quantized(
    name: str, scheme: str = "w8a8", dtype: torch.dtype = torch.float32, merge: bool = True, fuse: bool = False
) -> tuple[Any, Any]:
    """The model, and the report of what was fused."""
    model = models.build(name).to(dtype)
    if scheme == "w4a16":
        models.pack(model)
        if merge:
            merge_siblings(model)
        return model, fuse_producers(model) if fuse else None
    options: dict[str, Any] = {}
    if scheme == "w8a8-static":
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        options["input_scales"] = dict.fromkeys(linears, 0.05)
    return model, baracuda.quantize_model(model, scheme, ignore=["lm_head"], merge=merge, fuse=fuse, **options)


def fused(name: str, scheme: str = "w8a8", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    return quantized(name, scheme, dtype, fuse=True)


def few_tokens() -> Tensor:
    """Of no more rows than a float product has in one kernel on the CPU."""
    x = models.prompt()[:, :16]
    assert x.numel() == FEW_ROWS
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "quantizing", "norms", "mlps"),
    [
        ("llama", 4, 5, 2),
        ("qwen2", 4, 5, 2),
        ("qwen3", 4, 9, 2),
        ("gemma", 4, 5, 0),
        ("gemma2", 4, 9, 0),
        ("mixtral", 2, 5, 0),
        ("opt", 2, 2, 0),
    ],
)
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_the_model_zoo_is_fused_with_the_bits_of_the_same_formulas(
    scheme: str, name: str, quantizing: int, norms: int, mlps: int, dtype: torch.dtype
) -> None:
    model, report = fused(name, scheme, dtype)
    kinds = [(type(m), m.quantizer is None) for m in model.modules() if isinstance(m, FusedNorm | FusedMLP)]
    if scheme == "w4a16":  # the norms of OPT are torch's LayerNorm, which is one kernel already
        quantizing, norms = 0, 0 if name == "opt" else norms
    assert (kinds.count((FusedNorm, False)), kinds.count((FusedNorm, True))) == (quantizing, norms - quantizing)
    assert kinds.count((FusedMLP, scheme == "w4a16")) == mlps and len(report.fused) == len(kinds) == norms + mlps
    x = few_tokens()
    with torch.no_grad():
        assert torch.equal(model(x)[0], in_floats(model)(x)[0])
    alone, _ = quantized(name, scheme, dtype, merge=False)
    assert list(model.state_dict()) == list(alone.state_dict())
    with torch.no_grad():
        assert models.relative(alone(x)[0].double(), model(x)[0].double()) < (0.02 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a8-asymmetric", "w4a8", "w4a4"])
def test_other_schemes_are_fused_too(scheme: str) -> None:
    model, report = fused("llama", scheme)
    assert len(report.fused) == 7
    with torch.no_grad():
        x = few_tokens()
        assert torch.equal(model(x)[0], in_floats(model)(x)[0])


def test_the_report_says_what_was_fused_and_why_the_rest_was_not() -> None:
    _, report = fused("llama")
    wanted = "FusedNorm(LlamaRMSNorm, style=llama, eps=1e-06, quantized per token)"
    assert report.fused["model.layers.0.input_layernorm"] == wanted
    norm = "eps=1e-06, in floats, not torch's to the last bit: more than quantized linears read it"
    assert norm in report.fused["model.norm"] and wanted in str(report) and norm in str(report)
    _, report = fused("gemma")
    assert "GELUTanh" in report.unfused["model.layers.0.mlp"] and "not fused: its activation" in str(report)
    _, report = fused("llama", "w8a8-asymmetric")
    assert (
        "in floats, not torch's to the last bit: a linear that reads it has asymmetric"
        in report.fused["model.layers.0.input_layernorm"]
    )
    _, report = fused("llama", "w4a16")
    for name in ("input_layernorm", "mlp"):
        assert report.fused[f"model.layers.0.{name}"].endswith("a PackedLinear, which takes floats, reads it)")
    _, report = fused("opt", "w4a16")
    assert report.unfused["model.decoder.final_layer_norm"].endswith("LayerNorm of floats is one kernel already")
    assert fuse_producers(models.build("llama")).unfused["model.norm"] == "no linear of the model is quantized"


def test_nothing_is_fused_unless_asked_for_and_twice_is_once() -> None:
    model = models.build("llama")
    assert not baracuda.quantize_model(model, ignore=["lm_head"], merge=True).fused
    assert not any(isinstance(m, FusedNorm | FusedMLP) for m in model.modules())
    first = fuse_producers(model)
    assert fuse_producers(model).fused == first.fused and len(first.fused) == 7


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
    assert isinstance(block.norm, FusedNorm) and not report.unfused
    assert (block.norm.quantizer is None) == (reason is not None)
    assert "quantized per token" in report.fused["norm"] if reason is None else f": {reason}" in report.fused["norm"]
    torch.testing.assert_close(block(X), in_floats(block)(X), rtol=0, atol=0)


def test_linears_that_quantize_in_different_ways_read_floats() -> None:
    block = Block(lambda m, y, x: m.a(y) + m.b(y)).requires_grad_(False)
    block.b = baracuda.nn.QuantizedLinear.from_float(block.b, q_max=100)
    report = baracuda.quantize_model(block, fuse=True, inputs=(X,))
    assert "in floats, not torch's to the last bit: the linears that read it quantize it" in report.fused["norm"]
    assert torch.equal(block(X), in_floats(block)(X))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
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


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_where_gradients_or_autocast_ask_for_floats_the_model_computes_as_it_did(scheme: str) -> None:
    model, _ = fused("llama", scheme)
    plain, _ = quantized("llama", scheme)
    x = few_tokens()
    with torch.no_grad():
        assert not torch.equal(model(x)[0], plain(x)[0]), "or the next lines show nothing"
    assert torch.equal(model(x)[0], plain(x)[0])
    model(x)[0].sum().backward()
    assert model.model.layers[0].input_layernorm.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x)[0], plain(x)[0])


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_norm_whose_weight_has_another_type_is_the_original(scheme: str) -> None:
    """As adapters are trained: beside a model in bf16, the norms are made f32."""
    model, _ = fused("llama", scheme, torch.bfloat16)
    norm, x = model.model.layers[0].input_layernorm, torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        norm(x)
        norm.float()
        assert norm(x).dtype is torch.float32 and torch.equal(norm(x), norm.original(x))


def test_on_the_cpu_torch_computes_the_float_products_of_many_rows() -> None:
    mlp = fused("llama", "w4a16")[0].model.layers[0].mlp
    x = torch.randn(FEW_ROWS + 1, 64)
    with torch.no_grad():
        assert torch.equal(mlp(x), mlp.original(x)) and not torch.equal(mlp(x[1:]), mlp.original(x[1:]))


@pytest.mark.parametrize(("scheme", "scale"), [("w8a8-static", "input_scale"), ("w4a16", "weight_scale")])
def test_copies_pickles_casts_and_state_stay_fused_and_apart_from_the_first(scheme: str, scale: str) -> None:
    model, _ = fused("llama", scheme)
    x = few_tokens()
    with torch.no_grad():
        expected = model(x)[0]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x)[0], expected)
            norm = other.model.layers[0].input_layernorm
            assert norm._parameters is norm.original._parameters
            for name, buffer in other.named_buffers():
                if name.endswith(scale):
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


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
@pytest.mark.parametrize("child", ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_an_adapter_or_a_hook_gets_floats(child: str, scheme: str) -> None:
    model, _ = fused("llama", scheme)
    layer, x = model.model.layers[0], few_tokens()
    plain, _ = quantized("llama", scheme, merge=False)
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


def test_a_weight_only_linear_in_the_place_of_an_integer_one_gets_floats() -> None:
    mlp, x = fused("llama")[0].model.layers[0].mlp, torch.randn(3, 64)
    mlp.down_proj = quantized("llama", "w4a16", merge=False)[0].model.layers[0].mlp.down_proj
    with torch.no_grad():
        assert torch.equal(mlp(x), mlp.original(x))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_mode_of_torch_sees_the_operators_and_changes_no_bit(scheme: str) -> None:
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(function).partition(".default")[0])
            return function(*args, **(kwargs or {}))

    model, _ = fused("llama", scheme)
    with torch.no_grad():
        expected = model(few_tokens())[0]
        with Watch():
            assert torch.equal(model(few_tokens())[0], expected)
    suffix = "" if scheme == "w4a16" else "_dynamic_quantize"
    assert {"baracuda.norm", f"baracuda.norm{suffix}", f"baracuda.gated{suffix}"} <= seen


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_tangent_is_refused_by_the_linears_and_not_lost_in_a_norm(scheme: str) -> None:
    model, _ = quantized("llama", scheme, fuse=True)
    model.requires_grad_(False)  # with gradients the original computes anyway
    embedded = torch.randn(1, 5, model.config.hidden_size)
    with pytest.raises(baracuda.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda x: model(inputs_embeds=x).logits, (embedded,), (torch.ones_like(embedded),))
    norm, plain = model.model.norm, model.model.norm.original
    x = torch.randn(3, model.config.hidden_size)
    found, expected = (torch.func.jvp(each, (x,), (torch.ones_like(x),))[1] for each in (norm, plain))
    assert isinstance(norm, FusedNorm) and torch.equal(found, expected) and expected.any()
    assert torch.equal(torch.vmap(norm)(x[:, None]), torch.vmap(plain)(x[:, None]))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
@pytest.mark.parametrize("rows", [3, FEW_ROWS + 1])
def test_an_activation_that_is_replaced_or_hooked_is_the_one_that_computes(scheme: str, rows: int) -> None:
    model, _ = quantized("llama", scheme, fuse=True)
    mlp, x, calls = model.model.layers[0].mlp, torch.randn(1, rows, model.config.hidden_size), []
    handle = mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        before = mlp(x)
        handle.remove()
        mlp.act_fn = nn.GELU()
        after, expected = mlp(x), mlp.original(x)
    assert calls == [1] and torch.equal(after, expected) and not torch.allclose(after, before, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"scheme": "w4a16", "group_size": 32}], ids=["w8a8", "w4a16"])
def test_a_loaded_checkpoint_is_fused_and_saves_what_it_was(options: dict[str, Any], tmp_path: Path) -> None:
    from baracuda.flow import quantize_checkpoint, verify

    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", **options)
    model, alone = baracuda.load(tmp_path / "out"), baracuda.load(tmp_path / "out", fuse=False)
    assert len(fuse_producers(model).fused) == 7 and not any(isinstance(m, FusedNorm) for m in alone.modules())
    assert list(model.state_dict()) == list(alone.state_dict())
    baracuda.save(model, tmp_path / "again")
    assert not verify(tmp_path / "again", tmp_path / "model")
