"""What both models say next to a few prompts from the evaluation data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlowError
from ..hf.forward import generates, tokenizer
from ..hf.generation import failures_told, plain_generation
from .options import Progress

#: A few words are enough to see nonsense, and cost seconds where a model is slow.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 24, 20


def sample_texts(
    directory: Path,
    original: nn.Module,
    quantized: nn.Module,
    sequences: list[Tensor],
    device: torch.device,
    progress: Progress,
) -> list[dict[str, str]]:
    """The beginnings of some sequences, and how each model goes on; none for a model without text or tokenizer."""
    if not generates(original) or not any(len(sequence) > 1 for sequence in sequences):
        return []
    try:
        words = tokenizer(directory)
    except FlowError:
        return []
    chosen = sequences[:: max(1, len(sequences) // PROMPTS)][:PROMPTS]
    said = []
    for index, sequence in enumerate(chosen):
        said.append(_sample(words, original, quantized, sequence[:PROMPT_TOKENS][None].to(device)))
        progress("samples", 1, len(chosen), f"text {index + 1}")
    return said


def _sample(words: Any, original: Any, quantized: Any, prompt: Tensor) -> dict[str, str]:
    with failures_told("the tokenizer fails"):
        said = {"prompt": words.decode(prompt[0], skip_special_tokens=True)}
    for name, model in (("float", original), ("quantized", quantized)):
        with plain_generation(model), torch.no_grad():
            made = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=words.pad_token_id or words.eos_token_id or 0,
            )
        with failures_told("the tokenizer fails"):
            said[name] = words.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
    return said
