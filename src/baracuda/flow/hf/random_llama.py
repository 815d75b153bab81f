"""A small Llama with random weights, for the demo."""

from __future__ import annotations

from pathlib import Path

import torch

from .skeleton import quiet


def save_random_llama(folder: Path, hidden: int, wide: int, vocabulary: int) -> bool:
    """Save one with outlier channels, as trained models have them. False where transformers is not installed."""
    try:
        import transformers
    except ImportError:
        return False
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    llama = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter[torch.randperm(hidden)[:4]] *= 30
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.02)  # as in trained models, a layer adds little to the residual stream
    with quiet():
        llama.save_pretrained(folder)
    return True
