"""What in a model gives a row the same bits in every batch, what does not, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ..nn.attention import ORDERED
from ..nn.fused import FusedNorm
from ..nn.ordered import Ordered, OrderedActivation, OrderedNorm
from ..nn.siblings import Sibling
from ..schemes import LinearScheme, LiveScheme
from .attention import has_one_order, switch_attention
from .fuse import activation_of, known_norms
from .replace import quantize_model

#: Modules that look up each row, or compute each element by itself without a routine of more than one rounding.
_BY_ELEMENT: tuple[type[nn.Module], ...] = (
    nn.Embedding, nn.Identity, nn.Dropout, nn.Flatten, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh,
)  # fmt: skip
_PRODUCT = "a matrix library chooses its order of summation by the number of rows"
_ATTENTION = "attention: the library splits its sums by the number of rows and of keys"
_NORM = "torch promises no order for a norm's sum"
_REASONS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.MultiheadAttention,), _ATTENTION),
    ((nn.Linear, nn.Bilinear), f"{_PRODUCT}; quantize it"),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), f"a convolution: {_PRODUCT}"),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "a batch norm reads the batch while it trains"),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), _NORM),
    ((nn.Softmax, nn.LogSoftmax), "torch promises no order for a softmax's sum"),
    (
        (nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.ELU, nn.Softplus, nn.Mish),
        "on a CPU torch computes whole vectors by another routine than the elements left over",
    ),
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

    With `replace`, in place: float linears become integer ones of this scheme, whose sums are exact, so that no split
    and no batch changes a bit; norms, silu and gelu are computed by baracuda's kernels, which have one order, with the
    gradients they had; weight-only linears multiply the packed weight whatever the number of rows, which takes longer
    for many rows on a CPU. The head stays in floating point unless `quantize_head` is set. Attention of a transformers
    model is computed by baracuda's kernel, too: on a CPU behind any padding, on a GPU behind padding on the left and in
    16-bit floats. For prompts on a GPU that takes longer, and memory that grows with the square of their length.
    Only modules are judged: a model's own code between them may add up rows as it likes.
    """
    found, unknown = Invariance(), dict[str, str]()
    if replace:
        found.replaced = quantize_model(model, scheme, quantize_head=quantize_head).replaced
        found.replaced |= _put_in_order(model, unknown)
        found.replaced |= {f"{name} (attention)": what for name, what in switch_attention(model, ORDERED).items()}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        attends = "attention" in type(module).__name__.lower() and not isinstance(module, nn.MultiheadAttention)
        # Its linears are judged by themselves. What holds a module with attention has none of its own.
        if attends and not any(has_one_order(each) for each in (module, *module.children())):
            found.dependent[f"{name} (attention)"] = _ATTENTION
        if (why := _why_not(module)) is not None:
            if name in unknown:
                why += f"; it was not replaced: {unknown[name]}"
            found.dependent[name or type(model).__name__] = why
            inside = (*inside, f"{name}.")
        elif _computes(module):
            found.invariant.append(name or type(model).__name__)
    return found


def _put_in_order(model: nn.Module, unknown: dict[str, str]) -> dict[str, str]:
    """Replace norms and activations by ones of one order, and fix that of weight-only linears.

    Says what became of each, and in `unknown` why a norm was left.
    """
    norms = known_norms(model, unknown).items()
    made: dict[str, nn.Module] = {name: OrderedNorm(norm, style, eps) for name, (norm, style, eps) in norms}
    fixed = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and _may_be_replaced(module) and type(module).__name__.lower().startswith(("silu", "gelu")):
            if (activation := activation_of(module)) is not None:
                made[name] = OrderedActivation(module, activation)
        elif isinstance(module, Sibling) and not module.fixed_order:
            module.fix_order()
            fixed[name] = "multiplies the packed weight, whatever the number of rows"
        elif isinstance(module, FusedNorm) and not isinstance(module.original, Ordered):
            module.__dict__["original"] = OrderedNorm(module.original, module.style, module.eps)
            fixed[name] = "computes in one order inside torch.compile, too"
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = module
    return {name: f"{type(module).__name__}({module.extra_repr()})" for name, module in made.items()} | fixed


def _may_be_replaced(module: nn.Module) -> bool:
    """Whether a module is its formula alone: no hooks, and nothing of its own."""
    own = (module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks)
    return not any(own)


def _computes(module: nn.Module) -> bool:
    """Whether a module is known to give a row the same bits in every batch."""
    if isinstance(module, FusedNorm):
        return isinstance(module.original, Ordered)
    if isinstance(module, Sibling):
        return module.fixed_order
    return isinstance(module, (Ordered, *_BY_ELEMENT))


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
        return _NORM
    if any(True for _ in module.children()) or isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return None  # its parts are judged one by one
    return f"{kind} is not known: see whether its forward adds up along the rows"
