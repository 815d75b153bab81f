"""Whole models: replace their linears in place, and say what was replaced, what was not, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BaracudaError, InvalidProblem, Unsupported
from ..core.notebook import html_table
from ..core.patterns import flaw, matches
from ..core.types import DynamicRangeMode
from ..nn import QATLinear, QuantizedLinear, SmoothQuantLinear
from ..nn.requirements import require_linear
from ..schemes import CalibrationData, Choice, LinearScheme, LiveScheme, Recipe, Scheme, get_method, live_scheme
from .fuse import fuse_producers
from .merge import Inputs, merge_siblings

#: A module's type, the name of its class, a pattern over its qualified name ("*.mlp.*", or "re:" and a regular
#: expression that matches from the start), or a function of the name and the module that says yes or no.
Pattern = str | type[nn.Module] | Callable[[str, nn.Module], bool]

_log = logging.getLogger(__name__)


@dataclass
class Report:
    """What happened to a model's modules, by qualified name."""

    replaced: dict[str, str] = field(default_factory=dict)
    """What became of each module."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a module was left as it is."""
    unmatched: list[str] = field(default_factory=list)
    """Patterns, and names of scales, no module answered to: most often a typing error."""
    merged: dict[str, str] = field(default_factory=dict)
    """First linear of those that read the same tensor -> which of them are computed as one."""
    apart: dict[str, str] = field(default_factory=dict)
    """Why a quantized linear is computed by itself, where merging was asked for."""
    fused: dict[str, str] = field(default_factory=dict)
    """Norms and MLPs that are one kernel, and whether it quantizes what it makes. Their last bits are not torch's: a
    norm's sum has an order of its own."""
    unfused: dict[str, str] = field(default_factory=dict)
    """Why a norm or an MLP is left as it is, where fusing was asked for."""
    attention: dict[str, str] = field(default_factory=dict)
    """Which kernel computes attention from now on, where fusing was asked for."""

    def __str__(self) -> str:
        width = max(map(len, (*self.replaced, *self.skipped)), default=0)
        lines = [f"{len(self.replaced)} replaced, {len(self.skipped)} left as they are"]
        lines += [f"  {name:{width}}  {what}" for name, what in self.replaced.items()]
        lines += [f"- {name:{width}}  {why}" for name, why in self.skipped.items()]
        lines += [f"+ {name:{width}}  {what}" for name, what in self.merged.items()]
        lines += [f"  {name:{width}}  not merged: {why}" for name, why in self.apart.items()]
        lines += [f"+ {name:{width}}  {what}" for name, what in self.fused.items()]
        lines += [f"  {name:{width}}  not fused: {why}" for name, why in self.unfused.items()]
        lines += [f"+ {name:{width}}  attention: {what}" for name, what in self.attention.items()]
        return "\n".join([*lines, *(f"? {pattern!r} matched no module" for pattern in self.unmatched)])

    def _repr_html_(self) -> str:
        rows = [(name, "replaced", what) for name, what in self.replaced.items()]
        rows += [(name, "left as it is", why) for name, why in self.skipped.items()]
        rows += [(name, "merged", what) for name, what in self.merged.items()]
        rows += [(name, "not merged", why) for name, why in self.apart.items()]
        rows += [(name, "fused", what) for name, what in self.fused.items()]
        rows += [(name, "not fused", why) for name, why in self.unfused.items()]
        rows += [(name, "attention", what) for name, what in self.attention.items()]
        rows += [(pattern, "no module", "matched nothing: most often a typing error") for pattern in self.unmatched]
        title = f"{len(self.replaced)} replaced, {len(self.skipped)} left as they are"
        return html_table(title, rows, ("module", "", "what and why"))


def quantize_model(
    model: nn.Module,
    scheme: LiveScheme | LinearScheme = "w8a8",
    *,
    targets: Pattern | Iterable[Pattern] = (nn.Linear,),
    ignore: Pattern | Iterable[Pattern] = (),
    quantize_head: bool = False,
    input_scales: Mapping[str, Tensor | float] | None = None,
    method: str = "rtn",
    calibration: Mapping[str, CalibrationData] | None = None,
    merge: bool = False,
    fuse: bool = False,
    inputs: Inputs | None = None,
) -> Report:
    """Replace float linears by integer ones, in place.

    The scheme is `w8a8`, `w8a8-asymmetric`, `w8a8-static`, `w4a8`, `w4a4` or a `LinearScheme`. `w8a8-smoothquant` is
    an older name of `w8a8-static`: a model in memory is not smoothed; `baracuda quantize` smooths a checkpoint.

    `targets` are the linears to replace: types, names, patterns, or functions of the name and the module. The output
    head, and a linear that shares its weight with an embedding, stay in floating point as `baracuda quantize` leaves
    them, unless `quantize_head` is set or a target names them.

    A static scheme needs `input_scales`, the calibrated scale of each linear's inputs by qualified name. `method` turns
    weights into integers: `rtn` rounds them to nearest. One that needs data takes it from `calibration`, by qualified
    name.

    `merge` computes linears that read the same tensor, such as q, k and v, as one, with the same bits; the report names
    them. One pass of the model proves it, on `inputs` (keyword arguments or arguments), or on transformers' own.

    `fuse` makes norms, and MLPs with a gate, one kernel, which quantizes what the linears behind it read where a pass
    proves that nothing else reads it, and makes floats elsewhere. The kernels' bits are the same on every device, and
    not those of torch to the last one. They count where no gradients are recorded: elsewhere the modules compute as
    they did. A transformers model also computes attention by baracuda's kernel, on a GPU inside torch.compile.
    """
    recipe = Recipe(Choice(live_scheme(scheme), get_method(method)))
    scales, data = input_scales or {}, calibration or {}
    for choice in recipe.choices:
        _require_computable(choice.scheme)
    if recipe.static and not scales:
        raise InvalidProblem("input_scales: expected a calibrated scale for each linear of a static scheme, got none")

    def replace(name: str, module: nn.Module) -> nn.Module:
        linear = _require_replaceable(module)
        _require_finite(linear.weight)
        scheme, method = recipe.of(name).scheme, recipe.of(name).method
        static = scheme.activation.kind == "static"
        if static and name not in scales:
            raise InvalidProblem("no calibrated scale: give one in input_scales")
        quantized = method.quantize(linear.weight.detach(), scheme.weight, data.get(name))
        if not static:
            return QuantizedLinear.from_float(linear, quantized=quantized, **scheme.linear_options)
        return SmoothQuantLinear.from_float(linear, scales[name], quantized=quantized, **scheme.linear_options)

    report = _replace(model, targets, ignore, replace, {} if quantize_head else _heads(model))
    known = {*report.replaced, *report.skipped}
    report.unmatched += [name for name in dict.fromkeys((*scales, *data)) if name not in known]
    if merge:
        found = merge_siblings(model, inputs)
        report.merged, report.apart = found.merged, found.apart
    if fuse:
        fusion = fuse_producers(model, inputs)
        report.fused, report.unfused, report.attention = fusion.fused, fusion.unfused, fusion.attention
    return report


def prepare_qat(
    model: nn.Module,
    scheme: LiveScheme | LinearScheme = "w8a8",
    *,
    targets: Pattern | Iterable[Pattern] = (nn.Linear,),
    ignore: Pattern | Iterable[Pattern] = (),
    quantize_head: bool = False,
    **options: Any,
) -> Report:
    """Replace float linears by QATLinears over the same parameters, in place; further options are QATLinear's.

    The schemes, and what stays in floating point, are those of `quantize_model`; a static scheme needs no scales, since
    training finds them.
    """
    chosen = live_scheme(scheme)
    options = {**chosen.linear_options, "activation_strategy": chosen.activation.kind, **options}
    QATLinear(1, 1, device="meta", **options)  # raises what is wrong with them

    def replace(name: str, module: nn.Module) -> nn.Module:
        return QATLinear.from_float(_require_replaceable(module), **options)

    return _replace(model, targets, ignore, replace, {} if quantize_head else _heads(model))


def convert(
    model: nn.Module,
    *,
    targets: Pattern | Iterable[Pattern] = (QATLinear,),
    ignore: Pattern | Iterable[Pattern] = (),
) -> Report:
    """Replace the QATLinears of a trained model by the integer linears they trained for, in place.

    One whose observed or learned scale has no value yet is left, and the report says so.
    """

    def replace(name: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, QATLinear):
            raise Unsupported(f"is a {type(module).__name__}, not a QATLinear: call prepare_qat first")
        _require_no_hooks(module)
        _require_finite(module.weight)
        return module.convert()

    return _replace(model, targets, ignore, replace)


# -- choosing and replacing --------------------------------------------------------------------------------------


def _replace(
    model: nn.Module,
    targets: Pattern | Iterable[Pattern],
    ignore: Pattern | Iterable[Pattern],
    replace: Callable[[str, nn.Module], nn.Module],
    kept: Mapping[nn.Module, str] | None = None,
) -> Report:
    """Replace what `targets` match; of these, what is `kept` only where a target names it."""
    wanted, unwanted = _Patterns(targets), _Patterns(ignore)
    report, made = Report(), {}
    for name, parent, child, module in list(_places(model)):
        target = wanted.match(name, module)
        if target is None:
            continue
        if (pattern := unwanted.match(name, module)) is not None:
            report.skipped[name] = f"ignored by {_spelled(pattern)!r}"
            continue
        if kept and module in kept and isinstance(target, type):
            report.skipped[name] = f"{kept[module]}: pass quantize_head=True to quantize it too"
            continue
        try:
            if parent is None:
                raise Unsupported("is the model itself, which cannot be replaced in place: use from_float")
            if module not in made:
                made[module] = replace(name, module)
        except BaracudaError as error:
            report.skipped[name] = str(error).split("\n", maxsplit=1)[0]
        else:
            setattr(parent, child, made[module])
            report.replaced[name] = f"{type(module).__name__} -> {made[module]}".replace("\n", " ")[:160]
            if isinstance(made[module], QATLinear):
                report.replaced[name] = f"{type(module).__name__} -> QATLinear"
    if made:
        _leave_fast_paths(model)
    report.unmatched = [*wanted.unmatched(), *unwanted.unmatched()]
    _log.info("%s: %d modules replaced, %d left", type(model).__name__, len(report.replaced), len(report.skipped))
    for pattern in report.unmatched:
        _log.warning("%r matched no module of %s", pattern, type(model).__name__)
    return report


def _heads(model: nn.Module) -> dict[nn.Module, str]:
    """The linears that turn hidden states into logits, and those that share a weight with an embedding."""
    found: dict[nn.Module, str] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in embeddings:
            found[module] = "shares its weight with an embedding"
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # not a transformers model, or one that has no head and says so in its own way
        head = None
    if isinstance(head, nn.Module):
        found.setdefault(head, "the output head")
    return found


def _leave_fast_paths(model: nn.Module) -> None:
    """Turn off the fast path of torch's encoder layers: it multiplies by weights without calling the linears."""
    layers = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    replaced = [m for m in layers if not type(m.linear1) is type(m.linear2) is nn.Linear]
    for layer in replaced:
        layer.activation_relu_or_gelu = 0  # what a layer with another activation has: its linears are called
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(layer in replaced for layer in encoder.layers):
            encoder.use_nested_tensor = False  # only the fast path takes nested tensors


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, str, nn.Module]]:
    """Every place a module is held at: name, parent, attribute, module. A shared module has several."""
    parents = dict(model.named_modules(remove_duplicate=False))
    for name, module in parents.items():
        head, _, child = name.rpartition(".")
        yield (name or type(model).__name__), (parents[head] if name else None), child, module


class _Patterns:
    """Patterns, and which of them have matched something."""

    def __init__(self, patterns: Iterable[Pattern] | Pattern) -> None:
        listed = (patterns,) if isinstance(patterns, str) or callable(patterns) else patterns
        self.found: dict[Pattern, bool] = dict.fromkeys(listed, False)
        for pattern in self.found:
            if isinstance(pattern, str) and (error := flaw(pattern)) is not None:
                raise InvalidProblem(
                    f"{pattern!r}: expected a regular expression behind re:, got one with an error: {error}; "
                    "correct it, or drop re: for a shell pattern"
                )

    def match(self, name: str, module: nn.Module) -> Pattern | None:
        for pattern in self.found:
            if _matches(pattern, name, module):
                self.found[pattern] = True
                return pattern
        return None

    def unmatched(self) -> list[str]:
        return [_spelled(pattern) for pattern, found in self.found.items() if not found]


def _spelled(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    if not isinstance(pattern, str):
        return bool(pattern(name, module))
    return matches(pattern, name) or type(module).__name__ == pattern


def _require_computable(scheme: Scheme) -> None:
    """Raise unless there is an integer linear of this scheme whose scales `quantize_model` can be given."""
    static = scheme.activation.kind == "static"
    (SmoothQuantLinear if static else QuantizedLinear)(1, 1, device="meta", **scheme.linear_options)
    if static and scheme.activation.mode is DynamicRangeMode.ASYMMETRIC:
        raise Unsupported(
            "a static asymmetric scheme needs zero points, which input_scales does not carry; "
            "use prepare_qat, or mode='symmetric'"
        )


def _require_replaceable(module: nn.Module) -> nn.Linear:
    require_linear(module)
    if type(module) is not nn.Linear:
        raise Unsupported(f"is a {type(module).__name__}, which may do more than an nn.Linear")
    _require_no_hooks(module)
    return module


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _require_no_hooks(module: nn.Module) -> None:
    """Raise where a module has hooks. Pruning and torch's older weight norm are hooks that compute the weight."""
    if any(getattr(module, name) for name in _HOOKS):
        raise Unsupported("has hooks, which would be lost: remove them, as prune.remove does, or add them afterwards")


def _require_finite(weight: Tensor) -> None:
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise InvalidProblem("weight has NaN or infinite values; repair it, or pass the module in ignore")
