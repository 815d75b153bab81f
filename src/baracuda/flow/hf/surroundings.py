"""How the code of transformers' models uses the weight of a Linear besides calling it: by its source, or by trying."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

#: Attributes that code may read of an integer weight; `casts_to_its_type` looks at `dtype`.
ASKED = ("device", "dtype", "ndim", "shape", "size")
#: Functions that code may call with an integer weight.
ASKING = ("hasattr", "isinstance")
#: The conditions around a place in code, and the value of each that leads there.
Conditions = tuple[tuple[ast.expr, bool], ...]


def casts_to_its_type(around: nn.Module, name: str) -> bool:
    """Whether the module that holds a Linear under `name` casts tensors to the type of its weight, by its source.

    `x.to(self.proj.weight.dtype)` would truncate activations to integers. Code that first checks for an integer type
    is safe.
    """
    kind: Any = type(around)
    asked = rf"\bself\.{re.escape(name)}\.weight\.dtype\b"
    careful = rf"{asked}\s*(!=\s*torch\.u?int8\b|\)\.is_floating_point\b)"
    return any(re.search(asked, code) and not re.search(careful, code) for code in _functions(kind))


def casts(model: nn.Module, name: str) -> str | None:
    """Why a Linear stays float although it is only called: its caller casts to `weight.dtype`. Or None."""
    parent, _, leaf = name.rpartition(".")
    found = casts_to_its_type(model.get_submodule(parent), leaf)
    return "the module around it casts to the type of its weight" if found else None


def taken_apart(model: nn.Module) -> set[str]:
    """The modules whose weight the code around them computes with, instead of calling them."""
    names = dict(model.named_modules())
    taken: set[str] = set()
    for around, module in names.items():
        kind: Any = type(module)
        for use in _uses(kind):
            path = re.compile(rf"{re.escape(around)}\.{use.path}" if around else use.path)
            found = {name for name in names if path.fullmatch(name)}
            if not found <= taken and use.happens(module):
                taken |= found
    return taken


@dataclass(frozen=True)
class _Use:
    """A place in the code of a module that computes with the weight of another module."""

    #: A pattern for the other module's name, relative to the module that has the code.
    path: str
    conditions: Conditions
    #: The arguments of the function that are None unless given.
    absent: tuple[str, ...]

    def happens(self, module: nn.Module) -> bool:
        """Whether inference can reach it: conditions on the module's own settings are evaluated."""
        names = {"self": _Inference(module), **dict.fromkeys(self.absent)}
        return all(_value(condition, names) is not (not expected) for condition, expected in self.conditions)


class _Inference:
    """A module as its code finds it when it is not trained."""

    training = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _value(condition: ast.expr, names: dict[str, Any]) -> bool | None:
    """Whether the condition is true; None where it reads more than `names`."""
    if isinstance(condition, ast.BoolOp):
        values = [_value(part, names) for part in condition.values]
        decides = isinstance(condition.op, ast.Or)
        return decides if decides in values else None if None in values else not decides
    nodes = list(ast.walk(condition))
    asked = {node.id for node in nodes if isinstance(node, ast.Name)}
    if not asked <= set(names) or any(isinstance(node, ast.Call) for node in nodes):
        return None
    try:
        return bool(eval(compile(ast.Expression(condition), "<condition>", "eval"), {"__builtins__": {}}, names))
    except Exception:  # an attribute that is not set, or a tensor without values
        return None


@cache
def _uses(kind: type) -> tuple[_Use, ...]:
    """The uses in all functions of a class, except those that initialize."""
    found = []
    for function in map(_parsed, _functions(kind)):
        if function is not None and "init" not in function.name:
            for module, conditions in _weights(function, ()):
                if path := _below(module):
                    found.append(_Use(path, conditions, _absent(function)))
    return tuple(found)


def _parsed(code: str) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(f"if True:\n{code}" if code[:1].isspace() else code)
    except SyntaxError:  # a part of a statement, where a function has no name
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


def _absent(function: ast.FunctionDef) -> tuple[str, ...]:
    given, plain = function.args, [*function.args.posonlyargs, *function.args.args]
    last = plain[len(plain) - len(given.defaults) :]
    defaults = [*zip(last, given.defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return tuple(name.arg for name, value in defaults if isinstance(value, ast.Constant) and value.value is None)


def _weights(node: ast.AST, conditions: Conditions) -> Iterator[tuple[ast.expr, Conditions]]:
    """The module of every `<module>.weight` below a node that code computes with, and the conditions around it."""
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load):
        yield node.value, conditions
    if isinstance(node, ast.Attribute) and node.attr in ASKED and isinstance(node.value, ast.Attribute):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
        return
    for field, value in ast.iter_fields(node):
        inner = conditions
        if isinstance(node, (ast.If, ast.IfExp)) and field in ("body", "orelse"):
            inner = (*conditions, (node.test, field == "body"))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _weights(child, inner)


def _below(node: ast.expr) -> str:
    """A pattern for the names of `self.a.b[0]`, or of `local.a.b` anywhere below; empty where it is unknown."""
    path: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            path.insert(0, re.escape(node.attr))
        else:
            path.insert(0, str(node.slice.value) if isinstance(node.slice, ast.Constant) else r"\d+")
        node = node.value
    if not path or not isinstance(node, ast.Name):
        return ""
    return r"\.".join(path) if node.id == "self" else r"(.*\.)?" + r"\.".join(path)


@cache
def _functions(kind: type) -> tuple[str, ...]:
    """The source of each function of a module of transformers' models; nothing for other classes."""
    found = []
    for owner in kind.__mro__:
        if owner.__module__.startswith("transformers.models."):
            for value in map(inspect.unwrap, filter(callable, vars(owner).values())):
                if inspect.isfunction(value):
                    found.append(_source(value))
    return tuple(found)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # installed without its source
        return ""


def needs_float_weights(model: nn.Module, packed: Iterable[str]) -> bool:
    """Whether transformers fails on `packed` Linears, which compressed-tensors leaves without a float weight.

    After loading, transformers initializes what no file holds, and the code of some models then reads the weight of
    every Linear. This runs that step with everything marked as loaded. `model`, on the meta device, is spoilt by it.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    for name in packed:
        del model.get_submodule(name).weight
    try:
        with torch.device("meta"):
            model.initialize_weights()  # type: ignore[operator]
    except AttributeError as error:
        return "attribute 'weight'" in str(error)
    except Exception:  # initialization of another kind fails on the meta device: nothing is known then
        return False
    return False
