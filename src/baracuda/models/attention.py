"""Which kernel computes attention in a model of transformers: its config names an entry of transformers' table.

`flow.hf.attention` adds the entries, as soon as transformers is imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn

#: One token at a time by our kernel on a CPU, more by torch's.
FEW = "baracuda"
#: All by our kernel, which has one order of summation.
ORDERED = "baracuda-ordered"
_TORCH = "sdpa"
_SAID = {
    FEW: "one token at a time is computed by baracuda's kernel, not torch's to the last bit",
    ORDERED: "has one order of summation, whatever the batch, the padding and the number of tokens",
}


def switch_attention(model: nn.Module, to: str) -> dict[str, str]:
    """Let a transformers model on a CPU compute attention by our kernel where torch's computes it now.

    Says where it does so now, by the name of the module that holds the config. A model that someone gave another
    implementation keeps it.
    """
    switched: dict[str, str] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen or not hasattr(module, "set_attn_implementation"):
            continue
        seen.add(id(config))
        if _may_switch(module, config, to):
            config._attn_implementation_internal = to
        if implementation(config) == to:
            switched[name or type(module).__name__] = _SAID[to]
    return switched


def implementation(config: Any) -> str | None:
    """What a config of transformers names; None where it is no such config."""
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def _may_switch(module: Any, config: Any, to: str) -> bool:
    if implementation(config) not in {_TORCH, FEW} - {to}:
        return False
    return all(parameter.device.type == "cpu" for parameter in module.parameters()) and bool(
        module._can_set_attn_implementation()
    )
