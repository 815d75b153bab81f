"""Which layers have which scheme, in patterns that every reader of the checkpoint resolves alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from ...schemes import Choice, Recipe, Scheme
from .fusion import fused_name, fused_with

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
DOT = re.escape(".")
_EXPERT = re.compile(r"\.experts\.\d+\.")
#: What most models call their output head.
HEAD = "lm_head"
#: GPT-NeoX has the second in its files, and in the models of old versions of transformers.
HEADS = (HEAD, "embed_out")


def is_head(module: str) -> bool:
    return module.rpartition(".")[2] in HEADS


def layer_recipe(schemes: Mapping[str, Scheme], names: Mapping[str, str] | None = None) -> Recipe:
    """A default and patterns for all layers that differ; no two patterns match the same layer.

    `names` has the names that transformers gives to layers of the checkpoint. Experts have the default scheme, since
    servers look for no other. vLLM compares the class of a fused layer before it looks at the layers that it is made
    of, so the patterns match the name of the fused layer, too. A quantized output head always has a pattern, since its
    class in vLLM is no Linear: without one, its integers would be read as floats.
    """
    experts = [scheme for module, scheme in schemes.items() if _EXPERT.search(module)]
    default, _ = Counter(experts or schemes.values()).most_common(1)[0]
    both: dict[str, Scheme] = {}
    for module, scheme in schemes.items():
        both[module] = both[(names or {}).get(module, module)] = scheme
    split = {
        _kind(name) for name, own in both.items() if any(both.get(other, own) != own for other in fused_with(name))
    }
    kinds = {name: _NUMBER.sub("#", name) if _kind(name) in split else _kind(name) for name in both}
    rules = []
    for scheme in dict.fromkeys(schemes.values()):
        mine = {name: kinds[name] for name, own in both.items() if own == scheme and (own != default or is_head(name))}
        if mine:
            taken = {kinds[name] for name in both.keys() - mine.keys()}
            rules += [(pattern, Choice(scheme)) for pattern in _patterns(mine, taken)]
    return Recipe(Choice(default), tuple(rules))


def _patterns(modules: Mapping[str, str], taken: set[str]) -> list[str]:
    """Patterns for modules, given with their kinds; a kind that is `taken` has layers of another scheme, too."""
    kinds: dict[str, set[str]] = {}
    for module, kind in modules.items():
        kinds.setdefault(kind, set()).add(module)
    made: dict[str, None] = {}
    for kind, members in sorted(kinds.items()):
        numbers = {tuple(_NUMBER.findall(member)) for member in members}
        if kind not in taken:
            made[_regex(kind, [r"\d+"] * kind.count("#"), members)] = None
        elif kind.count("#") == 1:
            choices = "|".join(str(n) for n in sorted(int(number) for (number,) in numbers))
            made[_regex(kind, [f"(?:{choices})"], members)] = None
        else:
            made |= {_regex(kind, list(one), members): None for one in sorted(numbers)}
    return list(made)


def _kind(module: str) -> str:
    """The name without its numbers, and with one name for all layers that servers fuse."""
    return _NUMBER.sub("#", fused_with(module)[0])


def _regex(kind: str, numbers: list[str], members: set[str]) -> str:
    parts = [re.escape(part) for part in kind.rpartition(".")[0].split("#")]
    parent = "".join(part + number for part, number in zip(parts, [*numbers[: len(parts) - 1], ""], strict=True))
    leaves = sorted({member.rpartition(".")[2] for member in members})
    leaf = kind.rpartition(".")[2]
    if "#" in leaf:  # a list of Linears: the number is the name
        return f"re:^{parent}{DOT}{numbers[-1]}$"
    whole = len(leaves) == len(fused_with(leaf))
    if whole and (fused := fused_name(leaf)) is not None:
        leaves.append(fused)
    end = re.escape(leaves[0]) if len(leaves) == 1 else f"(?:{'|'.join(map(re.escape, leaves))})"
    return f"re:^{parent}{DOT if parent else ''}{end}$"
