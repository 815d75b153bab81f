"""Which stored tensor is which of the model: transformers renames many when it loads them, and is asked itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Names:
    """Where the tensors of a model come from."""

    #: Tensor of the model -> the stored one that is loaded into it as it is.
    stored: dict[str, str] = field(default_factory=dict)
    #: Tensor of the model -> a stored one that it is made from: cut out of it, joined with others, or turned.
    made: dict[str, str] = field(default_factory=dict)
    #: Stored tensors that nothing of the model is loaded from.
    unread: list[str] = field(default_factory=list)

    def module(self, name: str) -> str | None:
        """The name under which a module is stored, its weight as `*.weight`; None where it is not."""
        weight = self.stored.get(f"{name}.weight", "")
        return weight.removesuffix(".weight") if weight.endswith(".weight") else None

    def origin(self, name: str) -> str | None:
        """The tensor that the weight of a module comes from, where that is not the weight of a stored module."""
        weight = f"{name}.weight"
        return self.made.get(weight) or (self.stored.get(weight) if self.module(name) is None else None)


def match_names(model: nn.Module, tensors: Iterable[str]) -> Names:
    """What transformers would load each of the stored `tensors` into."""
    known, names = model.state_dict(), Names()
    rename = _renaming(model, known)
    for tensor in sorted(tensors):  # in order, as transformers does: some of its rules wait for the first of a family
        targets, converted = rename(tensor)
        found = [target for target in targets if target in known]
        for target in found:
            if converted:
                names.made.setdefault(target, tensor)
            elif target == tensor or target not in names.stored:
                names.stored[target] = tensor
        if not found:
            names.unread.append(tensor)
    return names


def _renaming(model: nn.Module, known: dict[str, Any]) -> Callable[[str], tuple[list[str], bool]]:
    """Stored name -> names in the model, and whether something is done to the tensor on the way there."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # a transformers that adds or removes the prefix of the base model, and renames nothing else
        return lambda tensor: ([tensor, f"{prefix}.{tensor}", tensor.removeprefix(f"{prefix}.")], False)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def rename(tensor: str) -> tuple[list[str], bool]:
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, known)
        if name not in known and tensor in known:
            return [tensor], False
        if pattern is None:
            return [name], False
        targets = next(rule.target_patterns for rule in converters if pattern in rule.source_patterns)
        return [name.replace(targets[0], target) for target in targets], True

    return rename
