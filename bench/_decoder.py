"""Decoders to measure: random weights of given shapes made on the device, or a model directory, float and quantized."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import baracuda
from baracuda.flow.hf import decoding
from baracuda.flow.hf.measure import wait
from baracuda.flow.hf.modules import quantized_linear
from baracuda.flow.hf.packed import make_ready
from baracuda.schemes import checkpoint_scheme

from .common import captured


@dataclass(frozen=True)
class Shapes:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int


LLAMA_8B = Shapes(32, 4096, 14336, 32, 8, 32000)
#: The types of float decoders, by name.
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16}
#: The bf16 decoder, in the decoding loop that quantized ones have on a GPU: nobody waits for a token.
LATE = "bf16-late"
SMOLLM2_135M = Shapes(30, 576, 1536, 9, 3, 49152)


class Decoders:
    """Builds the same decoder as often as asked, so that no two contestants share anything, compiled code least."""

    def __init__(self, shapes: Shapes, directory: Path | None, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes, self.directory, self.device, self.dtype = shapes, directory, device, dtype

    def floats(self, dtype: torch.dtype | None = None) -> Any:
        import transformers

        dtype = dtype or self.dtype
        if self.directory is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=dtype)
            return model.to(self.device).eval()
        s = self.shapes
        config = transformers.LlamaConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        with torch.device(self.device):  # weights are made where they are used: no copy of billions of numbers
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def named(self, name: str, merge: bool = True) -> Any:
        """The float decoder of a type, or the one of a scheme."""
        if name == LATE:
            model = self.floats(FLOATS["bf16"])
            model.__dict__[decoding.MARK] = True
            return model
        dtype = FLOATS.get(name)
        return self.quantized(name, merge) if dtype is None else self.floats(dtype)

    def quantized(self, scheme: str, merge: bool = True) -> Any:
        if scheme in ("w4a16", "w4a8"):
            return self._in_groups(scheme, merge)
        model = self.floats()
        options: dict[str, Any] = {"merge": merge, "fuse": merge}  # as `baracuda.load` does it
        if "static" in scheme or "smoothquant" in scheme:
            options["input_scales"] = {n: 0.05 for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        report = baracuda.quantize_model(model, scheme, ignore=["lm_head"], **options)
        if not report.replaced:
            raise SystemExit(f"{scheme}: nothing was replaced: {report}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return model

    def _in_groups(self, scheme: str, merge: bool) -> Any:
        """4-bit weights in groups, as checkpoints hold them; random integers, as a search for scales takes minutes."""
        model, (stored, _) = self.floats(), checkpoint_scheme(scheme)
        widths = {module.in_features for modules, _ in linears(model) for module in modules}
        stored = stored.with_groups(next(size for size in (128, 64, 32, 16) if not any(k % size for k in widths)))
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                made = quantized_linear(module, stored, module.weight.dtype)
                made.weight_packed.random_(-(2**31), 2**31)
                made.weight_scale.random_(1, 16).mul_(2.0**-10)
                model.set_submodule(name, made)
        make_ready(model)
        if merge:  # as `baracuda.load` does it
            baracuda.models.merge_siblings(model)
            baracuda.models.fuse_producers(model)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return model

    def calls(self, name: str, model: nn.Module) -> Callable[[], object]:
        """What calls every linear of a `named` decoder's layers once, with one token; on a GPU as one CUDA graph."""
        dtype = FLOATS.get(name, self.dtype)
        plan = [
            (modules, torch.randn(1, 1, width, device=self.device, dtype=dtype)) for modules, width in linears(model)
        ]

        def run() -> None:
            with torch.no_grad():
                for modules, x in plan:
                    for module in modules:
                        module(x)

        return captured(run) if self.device.type == "cuda" else run

    def describe(self) -> dict[str, Any]:
        shown = {"directory": self.directory.name} if self.directory is not None else asdict(self.shapes)
        return {**shown, "dtype": str(self.dtype).removeprefix("torch.")}


def compile_anywhere(device: torch.device) -> dict[str, Any]:
    """What `generate` is told to compile a step; transformers does so by itself on accelerators only."""
    from transformers import CompileConfig

    if device.type != "cpu":
        return {}
    config = CompileConfig()
    config._compile_all_devices = True
    return {"compile_config": config}


def linears(model: nn.Module) -> Iterator[tuple[list[nn.Module], int]]:
    """For each layer and each tensor that its linears read: those linears, in the order of the model, and its width."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp
        yield [attention.q_proj, attention.k_proj, attention.v_proj], attention.q_proj.in_features
        yield [attention.o_proj], attention.o_proj.in_features
        yield [mlp.gate_proj, mlp.up_proj], mlp.gate_proj.in_features
        yield [mlp.down_proj], mlp.down_proj.in_features


def weight_bytes(model: nn.Module) -> int:
    """The bytes of the weights of a model's linears, the head left out: what a decode step must read of them."""
    total = 0
    for modules, _ in linears(model):
        for module in modules:
            names = ("weight", "weight_packed")
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            total += sum(t.nbytes for name, t in tensors.items() if name in names)
    return total


@contextmanager
def timed_parts(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds spent in the head, the other linears and the norms, while in use; for devices that do not run behind.

    Forwards are wrapped, since a hook would part siblings and fused modules. What a fused norm quantizes counts as the
    norm's; a gated product that is quantized counts as neither.
    """
    spent: dict[str, float] = defaultdict(float)
    inside = False
    wrapped = []
    head = model.get_output_embeddings()  # type: ignore[operator]

    def wrap(module: nn.Module, part: str) -> None:
        forward = module.forward

        def timed(*args: Any, **options: Any) -> Any:
            nonlocal inside
            if inside:  # a sibling that computes all of them, a fused norm that asks the original
                return forward(*args, **options)
            inside = True
            wait(device)
            start = time.perf_counter()
            try:
                return forward(*args, **options)
            finally:
                wait(device)
                spent[part] += time.perf_counter() - start
                inside = False

        wrapped.append((module, vars(module).get("forward")))
        module.forward = timed  # type: ignore[method-assign]

    for module in model.modules():
        if hasattr(module, "in_features") and hasattr(module, "out_features"):
            wrap(module, "head" if module is head else "linears")
            member = getattr(module, "_member", None)
            if member is not None and member.index == 0 and member.whole is not None:
                wrap(member.whole, "linears")
        elif type(module).__name__.endswith("Norm"):
            wrap(module, "norms")
    try:
        yield spent
    finally:
        for module, before in wrapped:
            del module.forward
            if before is not None:
                module.forward = before  # type: ignore[method-assign]
