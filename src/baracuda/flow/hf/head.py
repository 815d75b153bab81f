"""The output head, quantized on request: which tensor it is made from, and its tie to the embedding resolved."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ...core.patterns import matches
from ...schemes import Choice, checkpoint_scheme
from ..checkpoint.directory import Checkpoint
from ..checkpoint.storage import Storage
from ..checkpoint.targets import HEAD, is_head
from ..errors import FlowError, shown, some
from .config import parse
from .layers import Head, Structure
from .names import RENAMED_ALONE, Names, match_names, renamed_alone
from .skeleton import skeleton, tied_weights
from .surroundings import casts, taken_apart

#: The setting that ties the head to the embedding.
TIE = "tie_word_embeddings"


def take_head(
    structure: Structure, model: torch.nn.Module | None, source: Checkpoint, ignore: tuple[str, ...] = ()
) -> None:
    """Add the head to what is quantized, as int8 rounded to nearest in every scheme; raise where that cannot be."""
    head = _of_rules(source) if model is None else _of_model(model, source, structure.names)
    name = structure.modules.get(head.module, head.module)
    for pattern in ignore:
        if matches(pattern, head.module) or matches(pattern, name):
            raise FlowError(f"--ignore {pattern} leaves the output head, which --quantize-head quantizes; drop one")
    choice = Choice(checkpoint_scheme("w8a8")[0])
    entry, storage = source.entry(head.tensor), Storage(choice.scheme)
    if (reason := storage.declines(entry)) is not None:
        raise FlowError(f"--quantize-head: {head.tensor}: {reason}; drop it")
    if model is not None:
        _require_replaceable(model, source.config, head, name)
    nbytes = sum(stored.nbytes for stored in storage.entries(head.module, entry))
    structure.head = Head(head.module, head.tensor, head.tied, nbytes)
    structure.choices[head.module] = choice
    structure.modules.setdefault(head.module, name)
    for left in {head.module, name}:
        structure.left.pop(left, None)


def untied(config: dict[str, Any]) -> dict[str, Any]:
    """A config of the model whose head has a weight of its own."""
    return {**_untied(config), TIE: False}


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """The same, for the configs in a config: those of language models, which may tie by default, and name what ties."""
    made = {key: _untied(value) if isinstance(value, dict) else value for key, value in config.items()}
    return made | ({TIE: False} if TIE in config or "vocab_size" in config else {})


def ties_quantized(config: dict[str, Any], quantized: Collection[str]) -> bool:
    """Whether a config ties a head that is stored quantized: it is that of a model that was quantized in memory."""
    if not any(map(is_head, quantized)):
        return False
    model, _ = skeleton(config)
    return model is not None and any(is_head(name.removesuffix(".weight")) for name in tied_weights(model))


def original_head(quantized: Collection[str], source: Checkpoint) -> Head | None:
    """What a quantized head was made from in the original; None where the original has no head of that name."""
    if not any(map(is_head, quantized)):
        return None
    try:
        model, _ = skeleton(source.config)
        head = _of_rules(source) if model is None else _of_model(model, source, match_names(model, source.where))
    except Exception:  # a config can be wrong in any way: what is not found is a finding of those who compare
        return None
    return head if head.module in quantized else None


def _of_rules(source: Checkpoint) -> Head:
    """The head by its name, of a model that transformers does not know: nobody can say what ties it there."""
    found = [tensor.removesuffix(".weight") for tensor in source.where if tensor.endswith(".weight")]
    found = [module for module in found if is_head(module)]
    if len(found) != 1 or source.config.get(TIE) is not False:
        raise FlowError(
            f"--quantize-head: transformers does not know this model, so its head must be stored as {HEAD}.weight and "
            f"config.json must say {TIE}: false; found {some(found) if found else 'no such tensor'} and "
            f"{shown(source.config.get(TIE))}; drop --quantize-head"
        )
    return Head(found[0], f"{found[0]}.weight", tied=False)


def _of_model(model: torch.nn.Module, source: Checkpoint, names: Names) -> Head:
    found = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and is_head(n)]
    if len(found) != 1:
        raise FlowError(
            f"--quantize-head: expected one output head called {HEAD}, {type(model).__name__} has "
            f"{some(found) if found else 'none'}; drop it"
        )
    (name,), tied = found, tied_weights(model)
    stored, embedding = names.module(name), tied.get(f"{name}.weight")
    if embedding is None:
        if stored is None:
            raise FlowError(f"--quantize-head: no file holds the weight of {name}; drop it")
        return Head(stored, f"{stored}.weight", tied=False)
    if embedding not in names.stored:
        raise FlowError(
            f"--quantize-head: {name} is tied to {embedding}, which no file holds under a name of its own; load and "
            "save the model with transformers first, or drop it"
        )
    # transformers reads a stored head although the config ties it, and ties where there is none.
    return Head(stored or name, f"{stored}.weight" if stored is not None else names.stored[embedding], tied=True)


def _require_replaceable(model: torch.nn.Module, config: dict[str, Any], head: Head, name: str) -> None:
    """Raise where its float weight is needed, its scale is not found, or untying changes more than the head."""
    why = "the code around it computes with its weight itself" if name in taken_apart(model) else casts(model, name)
    if why is None and renamed_alone(model, {head.module: name}):
        why = RENAMED_ALONE
    if why is None and head.tied:
        why = _why_tied(model, config, name)
    if why is not None:
        raise FlowError(f"--quantize-head: {name} of {type(model).__name__} must stay as it is: {why}; drop it")


def _why_tied(model: torch.nn.Module, config: dict[str, Any], name: str) -> str | None:
    """What else the config of the untied model would change, or None."""
    if getattr(model.config, "is_encoder_decoder", False):
        return f"models with an encoder and a decoder compute something else without {TIE}"
    other, _ = skeleton(untied(config))
    left = {key: value for key, value in tied_weights(model).items() if key != f"{name}.weight"}
    if other is None or tied_weights(other) != left:
        return f"without {TIE} other weights are tied, too"
    if _settings(parse(config).to_dict()) != _settings(parse(untied(config)).to_dict()):
        return f"other settings follow from {TIE}"
    return None


def _settings(value: Any) -> Any:
    """A parsed config without the tie, at any depth."""
    if isinstance(value, dict):
        return {key: _settings(inner) for key, inner in value.items() if key != TIE}
    return [_settings(inner) for inner in value] if isinstance(value, list) else value
