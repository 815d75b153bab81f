"""SmolLM2 as a model of Gemma's kind: the same function in an architecture that no method was tuned for.

Gemma's norms have a gain of 1 + weight, its embedding is multiplied by the root of the width and shared with the head.
The residual stream is widened from 576 to 640 channels: some are split in two at random angles, then all are shuffled.
Gains are multiplied by random factors. So every weight that reads or writes the stream is another one, groups hold
other columns, and the logits are SmolLM2's to rounding.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _real_model as real

WIDTH = 640


def model_directory() -> Path:
    """The model as a Hugging Face directory in bf16; made by the first call."""
    directory = real.cache() / "SmolLM2-135M-gemma"
    if not (directory / "config.json").exists():
        with tempfile.TemporaryDirectory(dir=real.model_directory().parent) as temporary:
            made = Path(temporary) / "model"
            _convert(real.model_directory(), made)
            shutil.rmtree(directory, ignore_errors=True)
            made.rename(directory)
    return directory


def _convert(source: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = converted(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))
    made.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def converted(model: Any) -> Any:
    """The Gemma with the logits of a Llama whose head is its embedding, in f32."""
    from transformers import AutoModelForCausalLM, GemmaConfig

    llama = model.config
    config = GemmaConfig(
        vocab_size=llama.vocab_size,
        hidden_size=WIDTH,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=llama.num_hidden_layers,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.hidden_size // llama.num_attention_heads,
        hidden_act=llama.hidden_act,
        hidden_activation=llama.hidden_act,
        max_position_embeddings=llama.max_position_embeddings,
        rms_norm_eps=llama.rms_norm_eps * llama.hidden_size / WIDTH,
        rope_parameters=llama.rope_parameters,
        bos_token_id=llama.bos_token_id,
        eos_token_id=llama.eos_token_id,
        pad_token_id=llama.pad_token_id,
        tie_word_embeddings=True,
    )
    made = AutoModelForCausalLM.from_config(config)
    made.load_state_dict(rewritten(model.state_dict(), llama.hidden_size, llama.num_hidden_layers), strict=False)
    made.tie_weights()
    return made.eval()


def rewritten(weights: dict[str, Tensor], width: int, layers: int) -> dict[str, Tensor]:
    """The tensors of the Gemma with the logits of this Llama."""
    generator = torch.Generator().manual_seed(0)
    spread = isometry(width, generator)
    # The mean square over more channels is smaller by width / WIDTH: the norm's output is larger by the root.
    shrink = math.sqrt(width / WIDTH)
    made: dict[str, Tensor] = {}
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        for norm, linears in (
            ("input_layernorm", [f"self_attn.{x}_proj" for x in "qkv"]),
            ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            old = weights[f"{stem}{norm}.weight"].double()
            wanted = (old @ (spread != 0).double()) * torch.exp(0.3 * torch.randn(WIDTH, generator=generator)).double()
            wanted = torch.where(wanted.abs() < 1 / 64, 1 / 64, wanted)  # which gain - 1 in bf16 still tells from zero
            made[f"{stem}{norm}.weight"] = (wanted - 1).bfloat16().double()
            gain = 1 + made[f"{stem}{norm}.weight"]
            for name in (f"{stem}{linear}.weight" for linear in linears):
                made[name] = (weights[name].double() * old) @ spread * shrink / gain
        for name in (f"{stem}{linear}.weight" for linear in ("self_attn.o_proj", "mlp.down_proj")):
            made[name] = spread.T @ weights[name].double()
    made["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].double() @ spread / math.sqrt(WIDTH)
    last = weights["model.norm.weight"].double() @ (spread != 0).double()
    made["model.norm.weight"] = last * shrink * math.sqrt(WIDTH) - 1
    return {name: tensor.float() for name, tensor in made.items()}


def isometry(width: int, generator: torch.Generator) -> Tensor:
    """`[width, WIDTH]` with orthonormal rows that share no column: gains of channels stay gains of channels."""
    spread = torch.zeros(width, WIDTH, dtype=torch.float64)
    order = torch.randperm(WIDTH, generator=generator)
    split = torch.randperm(width, generator=generator)[: WIDTH - width]
    spread[torch.arange(width), order[:width]] = 1.0
    angle = torch.rand(WIDTH - width, generator=generator, dtype=torch.float64) * 1.2 + 0.2
    spread[split, order[:width][split]] = angle.cos()
    spread[split, order[width:]] = angle.sin()
    return spread
