"""What in a model gives a row the same bits in every batch, what does not, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ..nn.fused import FusedNorm
from ..nn.linear import IntegerLinear
from ..nn.siblings import Sibling
from ..schemes import LinearScheme, LiveScheme
from .replace import quantize_model

#: Modules that compute each element, or look up each row, by itself.
_BY_ELEMENT: tuple[type[nn.Module], ...] = (
    nn.Embedding, nn.Identity, nn.Dropout, nn.Flatten, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid,
    nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.ELU, nn.Softplus, nn.Mish,
)  # fmt: skip
_PRODUCT = "a matrix library chooses its order of summation by the number of rows"
_ATTENTION = "attention: the library splits its sums by the number of rows and of keys"
_REASONS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.MultiheadAttention,), _ATTENTION),
    ((nn.Linear, nn.Bilinear), f"{_PRODUCT}; quantize it"),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), f"a convolution: {_PRODUCT}"),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "a batch norm reads the batch while it trains"),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), "torch promises no order for a norm's sum"),
    ((nn.Softmax, nn.LogSoftmax), "torch promises no order for a softmax's sum"),
)


@dataclass
class Invariance:
    """Which modules of a model give a row the same bits whatever is in the batch, by qualified name."""

    invariant: list[str] = field(default_factory=list)
    dependent: dict[str, str] = field(default_factory=dict)
    """Why the bits of a row may depend on the batch."""
    replaced: dict[str, str] = field(default_factory=dict)
    """What was replaced to make them independent of it."""

    @property
    def holds(self) -> bool:
        """Whether nothing that is known to compute depends on the batch. Code outside of modules is not seen."""
        return not self.dependent

    def __str__(self) -> str:
        known, count = len(self.invariant), len(self.dependent)
        lines = [f"same bits in every batch: {known} modules; depends on the batch: {count}"]
        lines += [f"  {name}: {what}" for name, what in self.replaced.items()]
        return "\n".join([*lines, *(f"- {name}: {why}" for name, why in self.dependent.items())])


def deterministic(
    model: nn.Module, scheme: LiveScheme | LinearScheme = "w8a8", *, replace: bool = True, quantize_head: bool = False
) -> Invariance:
    """Say which modules of a model give a row the same bits in every batch, and why the others do not.

    With `replace`, float linears first become integer ones of this scheme, in place: their sums are exact, so no split
    and no batch changes a bit. The head stays in floating point unless `quantize_head` is set. Attention stays what it
    is. Only modules are judged: a model's own code between them may add up rows as it likes.
    """
    found = Invariance()
    if replace:
        found.replaced = quantize_model(model, scheme, quantize_head=quantize_head).replaced
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if "attention" in type(module).__name__.lower() and not isinstance(module, nn.MultiheadAttention):
            found.dependent[f"{name} (attention)"] = _ATTENTION  # its linears are judged by themselves
        if (why := _why_not(module)) is not None:
            found.dependent[name or type(model).__name__] = why
            inside = (*inside, f"{name}.")
        elif _computes(module):
            found.invariant.append(name or type(model).__name__)
    return found


def _computes(module: nn.Module) -> bool:
    return isinstance(module, (IntegerLinear, *_BY_ELEMENT))


def _why_not(module: nn.Module) -> str | None:
    if _computes(module):
        return None
    for kinds, why in _REASONS:
        if isinstance(module, kinds):
            return why
    kind = type(module).__name__
    if isinstance(module, Sibling):
        return "weight-only: on a CPU, beyond 32 rows, torch multiplies in an order of its own"
    if isinstance(module, FusedNorm):
        return "a fused norm has one order, but inside torch.compile torch's own norm takes its place"
    if "norm" in kind.lower():
        return "torch promises no order for a norm's sum"
    if any(True for _ in module.children()) or isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return None  # its parts are judged one by one
    return f"{kind} is not known: see whether its forward adds up along the rows"
