"""Make norms and gated MLPs one kernel, which quantizes what it makes where one pass proves that linears alone read it.

The proof: a pass in which a norm hands on something that is no tensor, and only the quantized linears are told what is
inside. Whatever else would read it raises, and the norm goes on making floats, for which no proof is needed. What a
module computes is known by its result: it is called on numbers of ours and compared with the formula.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.types import NormStyle
from ..functional import rms_norm
from ..nn.attention import FASTER
from ..nn.fused import FusedMLP, FusedNorm, Reader, same_quantization, why_not_quantized_for
from ..nn.linear import IntegerLinear
from ..nn.siblings import Sibling, siblings_of
from .attention import switch_attention
from .merge import Inputs, PassError, Passes

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Name -> the norm, its style and eps.
Norms = dict[str, tuple[nn.Module, str, float]]
#: Name -> the MLP, and the names of its gate, up and down and of the activation.
MLPs = dict[str, tuple[nn.Module, tuple[str, str, str, str]]]
_ACTIVATIONS: dict[str, Any] = {"silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu}


@dataclass
class Fusion:
    """Which modules became one kernel, and why others did not, by qualified name."""

    fused: dict[str, str] = field(default_factory=dict)
    """Norm or MLP -> what it became: one that quantizes what it makes, or why that stays floats. Their last bits are
    not torch's."""
    unfused: dict[str, str] = field(default_factory=dict)
    """Norm or MLP -> why it is left as it is."""
    attention: dict[str, str] = field(default_factory=dict)
    """Module -> which kernel computes its attention from now on."""


def fuse_producers(model: nn.Module, inputs: Inputs | None = None) -> Fusion:
    """Make the norms and gated MLPs of a quantized model one kernel each, in place.

    Those that feed integer linears alone quantize what they make. The others, such as those before weight-only linears,
    the last norm, and norms of queries and keys, make floats of the type they had.

    `inputs` are those of `merge_siblings`, which is to be called first. State and names stay as they are. The sums of a
    fused norm, and a fused silu, have bits of their own, the same on every device: not torch's to the last bit. A
    product that leaves in floats stays torch's on the CPU for more than 32 rows, where torch is faster.

    Attention is a kernel of baracuda, too, in a transformers model that uses torch's ("sdpa"): on a CPU, and on a GPU
    that of single tokens inside torch.compile.
    """
    found = Fusion()
    if any(isinstance(module, Sibling) for module in model.modules()):
        found.attention = switch_attention(model, FASTER, inputs)
    norms = known_norms(model, found.unfused)
    mlps = _mlps(model, found)
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm | FusedMLP):
            found.fused[name] = _described(module)
    given = inputs if inputs is not None else getattr(model, "dummy_inputs", None)
    if given is None:
        why = "there are no inputs to make a pass with: give `inputs`"
        found.unfused |= dict.fromkeys((*norms, *mlps), why)
        return found
    if not any(isinstance(module, Sibling) for module in model.modules()):
        found.unfused |= dict.fromkeys(norms, "no linear of the model is quantized")
        return found
    try:
        with Passes(model, given) as passes:
            made = _made(passes, norms, mlps, found)
            for name, module in made.items():
                _place(model, name, module)
            try:
                passes.run(list)
            except PassError as error:
                for name, module in made.items():
                    _place(model, name, module.original)
                    found.unfused[name] = f"a pass of the fused model failed: {error}"
                return found
    except PassError as error:
        found.unfused |= dict.fromkeys((*norms, *mlps), f"a pass of the model failed: {error}; give other `inputs`")
        return found
    found.fused |= {name: _described(module) for name, module in made.items()}
    return found


def _made(passes: Passes, norms: Norms, mlps: MLPs, found: Fusion) -> dict[str, FusedNorm | FusedMLP]:
    """What takes the place of each norm and MLP; into `found`, why a norm is left."""
    floats: dict[str, str] = {}
    readers, places = _readers(passes, norms, floats), _places(passes.model)
    made: dict[str, FusedNorm | FusedMLP] = {}
    for name, (mlp, parts) in mlps.items():
        made[name] = FusedMLP(mlp, *parts, why_not_quantized_for(mlp._modules[parts[2]]))
    for name, (norm, style, eps) in norms.items():
        if name in readers:
            made[name] = FusedNorm(norm, style, eps, [places[id(linear)] for linear in readers[name]])
        elif isinstance(norm, nn.LayerNorm):
            found.unfused[name] = f"{floats[name]}; torch's LayerNorm of floats is one kernel already"
        else:
            made[name] = FusedNorm(norm, style, eps, floats=floats[name])
    return made


def _described(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _places(model: nn.Module) -> dict[int, Reader]:
    """Where each linear is held."""
    held: dict[int, Reader] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if isinstance(child, IntegerLinear):
                held[id(child)] = module._modules, name, child
    return held


def _place(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module


# -- norms ---------------------------------------------------------------------------------------------------------


def known_norms(model: nn.Module, unknown: dict[str, str]) -> Norms:
    """The norms of a model whose formula is one of ours, with its style and eps; into `unknown`, why others are not."""
    known: dict[Any, str | None] = {}
    norms = {}
    for name, module in _alone(model):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not name or not type(module).__name__.endswith(("RMSNorm", "LayerNorm")) or isinstance(module, FusedNorm):
            continue
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 1 or weight.is_meta or not isinstance(eps, float):
            unknown[name] = "has no weight of one row, or no eps"
        elif any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module):
            unknown[name] = "has hooks, or a forward of its own"
        elif module._modules or module._buffers or set(module._parameters) - {"weight", "bias"}:
            unknown[name] = "has more than a weight and a bias"
        else:
            key = type(module), weight.dtype, weight.device, eps, module._parameters.get("bias") is None
            if key not in known:
                known[key] = _style_of(module, eps)
            style = known[key]
            if style is None:
                unknown[name] = f"a {type(module).__name__} computes none of the formulas of baracuda.rms_norm"
            else:
                norms[name] = (module, style, eps)
    return norms


def _alone(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are held at one place only."""
    places: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        places[id(module)].append(name)
    return ((name, module) for name, module in model.named_modules() if len(places[id(module)]) == 1)


def _style_of(norm: nn.Module, eps: float) -> str | None:
    """The style whose formula the module computes on rows of ours, with a weight of ours; None if it is none."""
    tried = copy.deepcopy(norm)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in tried.parameters():
            values = torch.rand(parameter.shape, generator=generator) + 0.25
            parameter.copy_(values.to(parameter))
        weight, bias = tried._parameters["weight"], tried._parameters.get("bias")
        assert weight is not None
        x = (torch.randn(8, weight.numel(), generator=generator) * 3).to(weight)
        try:
            expected = tried(x)
        except Exception:  # what a model's code makes of two axes is its own business
            return None
        if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype != x.dtype:
            return None
        best, most = None, 0.99
        # Torch sums in f32, where differences near zero keep few digits.
        tolerance = (2 if x.dtype.itemsize == 2 else 16) * torch.finfo(x.dtype).eps
        for style in NormStyle:
            got = rms_norm(x, weight, eps, style=style, bias=bias)
            close = torch.isclose(got, expected, rtol=tolerance, atol=tolerance)
            equal = float((got == expected).float().mean()) if bool(close.all()) else 0.0
            if equal > most or (x.dtype in (torch.float32, torch.float64) and bool(close.all()) and best is None):
                best, most = style.value, max(equal, most)
        return best


class _Opaque:
    """What a norm hands on while its readers are looked for: no tensor, so that nobody else can read it."""

    def __init__(self, value: Tensor, norm: str) -> None:
        self.value, self.norm = value, norm
        self.shape, self.dtype, self.device = value.shape, value.dtype, value.device


def _readers(passes: Passes, norms: Norms, floats: dict[str, str]) -> dict[str, list[IntegerLinear]]:
    """The norms that integer linears alone read, with those; into `floats`, why another must make floats.

    Norms of one kind stand or fall together.
    """
    kinds: dict[Any, list[str]] = defaultdict(list)
    for name in norms:
        parent, _, child = name.rpartition(".")
        kinds[type(passes.model.get_submodule(parent)), child].append(name)
    readers: dict[str, list[IntegerLinear]] = {}
    for names in kinds.values():
        try:
            readers |= _pass_opaque(passes, names, norms, floats)
        except PassError as error:
            floats |= dict.fromkeys(names, f"more than quantized linears read it: {error}")
    return readers


def _pass_opaque(
    passes: Passes, names: list[str], norms: Norms, floats: dict[str, str]
) -> dict[str, list[IntegerLinear]]:
    read: dict[str, list[IntegerLinear]] = defaultdict(list)

    def hide(name: str) -> Any:
        return lambda module, args, y: _Opaque(y, name)

    def reveal(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if len(args) == 1 and isinstance(args[0], _Opaque):
            read[args[0].norm].append(module)  # type: ignore[arg-type]
            return (args[0].value,)
        return None

    def prepare() -> list[Any]:
        read.clear()
        handles = [norms[name][0].register_forward_hook(hide(name)) for name in names]
        linears = [m for m in passes.model.modules() if isinstance(m, Sibling)]
        return handles + [m.register_forward_pre_hook(reveal) for m in linears]

    passes.run(prepare)
    leaving = {value.norm for value in _opaque_in(passes.result)}
    kept = {}
    for name in names:
        linears = read.get(name, [])
        why = None
        if name in leaving:
            why = "it is an output of the model"
        elif not linears:
            why = "no quantized linear reads it"
        else:
            why = next((why for linear in linears if (why := why_not_quantized_for(linear)) is not None), None)
            if why is None and not all(same_quantization(linears[0], other) for other in linears[1:]):
                why = "the linears that read it quantize it in different ways"
        if why is None:
            kept[name] = linears
        else:
            floats[name] = why
    return kept


def _opaque_in(tree: Any) -> Iterator[_Opaque]:
    if isinstance(tree, _Opaque):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _opaque_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _opaque_in(value)


# -- gated MLPs ----------------------------------------------------------------------------------------------------


def _mlps(model: nn.Module, found: Fusion) -> MLPs:
    """The modules that compute down(act(gate(x)) * up(x)): with the names of those, and the activation's."""
    mlps = {}
    activations: dict[Any, str | None] = {}
    for name, module in _alone(model):
        linears = [child for child, m in module._modules.items() if isinstance(m, Sibling)]
        others = [child for child, m in module._modules.items() if m is not None and child not in linears]
        if not name or len(linears) != 3 or len(others) != 1 or isinstance(module, FusedMLP):
            continue
        act = module._modules[others[0]]
        assert act is not None
        if [*act.parameters(), *act.buffers()]:
            continue
        if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module) or module._parameters:
            found.unfused[name] = "has hooks, parameters or a forward of its own"
            continue
        parts = _parts_of(module, linears, act)
        if parts is None:
            continue  # it computes something else
        key = type(act), repr(act)
        if key not in activations:
            activations[key] = activation_of(act)
        activation = activations[key]
        if activation is None:
            found.unfused[name] = f"its activation, {act}, is not silu, relu or the exact gelu"
        else:
            mlps[name] = (module, (*parts, activation))
    return mlps


def activation_of(act: nn.Module) -> str | None:
    x = torch.linspace(-9, 9, 301)
    try:
        y = act(x)
    except Exception:  # a model's own code
        return None
    return next((name for name, function in _ACTIVATIONS.items() if torch.equal(function(x), y)), None)


def _parts_of(module: nn.Module, linears: list[str], act: nn.Module) -> tuple[str, str, str] | None:
    """The names of gate, up and down, found by computing the formula and comparing all bits; siblings come first."""
    merged = [list(siblings.names) for siblings in siblings_of(module) if len(siblings.names) == 2]
    pairs = merged or [[a, b] for a in linears for b in linears if a != b]
    for pair in pairs:
        for gate, up in (pair, pair[::-1]):
            down = next(child for child in linears if child not in (gate, up))
            parts = [module._modules[child] for child in (gate, up, down)]
            if _computes(module, act, *parts):
                return gate, up, down
    return None


def _computes(module: nn.Module, act: nn.Module, gate: Any, up: Any, down: Any) -> bool:
    if gate.in_features != up.in_features or gate.out_features != up.out_features:
        return False
    stored = next(gate.buffers(), None)
    if down.in_features != gate.out_features or stored is None or stored.is_meta:
        return False
    device, training = stored.device, module.training
    x = torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0)).to(device)
    try:
        with torch.no_grad():
            module.eval()
            return torch.equal(module(x), down(act(gate(x)) * up(x)))
    except Exception:  # a model's own code, on an input that may not suit it
        return False
    finally:
        module.train(training)
