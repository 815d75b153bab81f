"""Try early what a run needs at its end: that the installed transformers loads a quantized checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ...models.replace import quantize_model
from ..errors import FlowError
from .config import alone
from .load import load
from .save import save


def require_loadable(device: torch.device) -> None:
    """Raise unless a tiny model can be quantized, saved, loaded and run here."""
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
            with alone():
                model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
                quantize_model(model, "w8a8")
                save(model, Path(folder) / "model")
            loaded = load(Path(folder) / "model", device=device)
            with torch.no_grad():
                loaded(input_ids=torch.ones(1, 2, dtype=torch.long, device=device))
    except Exception as error:
        raise FlowError(
            f"evaluation: transformers {transformers.__version__} cannot load a quantized checkpoint here "
            f"({type(error).__name__}: {str(error)[:200]}); install another version of it, or drop --evaluate"
        ) from error
