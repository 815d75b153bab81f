"""Generating with the model of a stranger: its settings choose no algorithm, and what fails is told in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.errors import BaracudaError
from ..errors import FlowError

#: What is kept of a generation_config.json. Others choose beams, caches and assistants, some of which load code.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """While this lasts, the model generates one sequence, by the tokens and numbers of its own settings alone."""
    before = model.generation_config
    model.generation_config = _plain(before)
    try:
        with failures_told(f"{type(model).__name__} cannot generate text"):
            yield
    finally:
        model.generation_config = before


@contextmanager
def failures_told(what: str) -> Iterator[None]:
    """Explain an error inside transformers: a model's files can be wrong in any way, and it then raises anything."""
    try:
        yield
    except (BaracudaError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["without a word"])[0][:200]
        raise FlowError(
            f"{what}: {type(error).__name__}: {reason}; download the model again, or correct its config.json, "
            "generation_config.json or tokenizer"
        ) from error


def _plain(settings: Any) -> Any:
    from transformers import GenerationConfig

    kept = {name: value for name in _TOKENS if _is_token(value := getattr(settings, name, None))}
    kept |= {name: value for name in _NUMBERS if _is_number(value := getattr(settings, name, None))}
    return GenerationConfig(**kept)


def _is_token(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and bool(value) and all(type(n) is int for n in value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
