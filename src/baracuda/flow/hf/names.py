"""Which stored tensor is loaded into which tensor of the model. transformers renames many; its own rules are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: Why a module of `renamed_alone` stays float.
RENAMED_ALONE = "transformers renames its weight by a rule that does not know its scale"


@dataclass
class Names:
    """Where the tensors of a model come from."""

    #: Tensor of the model -> the stored one that is loaded into it as it is.
    stored: dict[str, str] = field(default_factory=dict)
    #: Tensor of the model -> a stored one that it is made from: cut out of it, joined with others, or turned.
    made: dict[str, str] = field(default_factory=dict)
    #: Stored tensor that others are made from -> the patterns of all that are taken for them.
    collected: dict[str, list[str]] = field(default_factory=dict)
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
        targets, sources = rename(tensor)
        found = [target for target in targets if target in known]
        if sources and found:
            names.collected[tensor] = sources
        for target in found:
            if sources:
                names.made.setdefault(target, tensor)
            elif target == tensor or target not in names.stored:
                names.stored[target] = tensor
        if not found:
            names.unread.append(tensor)
    return names


def renamed_alone(model: nn.Module, modules: Mapping[str, str]) -> list[str]:
    """Of modules, stored name -> name in the model: those whose weight is renamed, but not a scale stored beside it."""
    weights = model.state_dict()
    scales = {f"{name}.weight_scale": weights[f"{name}.weight"] for name in modules.values()}
    rename = _renaming(model, weights | scales)
    return [s for s, name in modules.items() if f"{name}.weight_scale" not in rename(f"{s}.weight_scale")[0]]


def cuts_weights(model: nn.Module, packed: Iterable[str]) -> bool:
    """Whether transformers' reader of compressed-tensors fails on the rules of this model, whatever the files hold.

    Where a rule cuts one weight into several, it looks for the parts of a quantized one, and refuses to make several
    tensors of several; only where the first is a `packed` module does it cut each part by itself.
    """
    stored = "\n".join(f"{name}.weight_packed" for name in packed)
    return any(
        len(rule.target_patterns) > 1
        and all(source.endswith(".weight") for source in rule.source_patterns)
        and not re.search(f"{rule.target_patterns[0]}_packed$", stored, re.MULTILINE)
        for rule in _rules(model)[1]
    )


def _rules(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """What transformers renames when it loads this model, and what it converts."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:  # a transformers that does neither
        return [], []
    rules = get_model_conversion_mapping(model)
    kinds = (WeightRenaming, WeightConverter)
    renamings, converters = ([rule for rule in rules if isinstance(rule, kind)] for kind in kinds)
    return renamings, converters


def _renaming(model: nn.Module, known: dict[str, Any]) -> Callable[[str], tuple[list[str], list[str]]]:
    """Stored name -> names in the model, and the patterns of what is taken for them where that is not the tensor."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    try:
        from transformers.core_model_loading import rename_source_key
    except ImportError:  # a transformers that adds or removes the prefix of the base model, and renames nothing else
        return lambda tensor: ([tensor, f"{prefix}.{tensor}", tensor.removeprefix(f"{prefix}.")], [])
    renamings, converters = _rules(model)

    def rename(tensor: str) -> tuple[list[str], list[str]]:
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, known)
        if name not in known and tensor in known:
            return [tensor], []
        if pattern is None:
            return [name], []
        rule = next(rule for rule in converters if pattern in rule.source_patterns)
        first, *_ = targets = rule.target_patterns
        return [name.replace(first, target) for target in targets], rule.source_patterns

    return rename
