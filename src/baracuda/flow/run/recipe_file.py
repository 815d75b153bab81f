"""Recipes in TOML: which layers of a model get which scheme, method and group size, and which stay float."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FlowError

#: What a recipe says of all layers, and of those that a pattern matches, with the types of the values.
DEFAULTS: dict[str, type] = {"scheme": str, "method": str, "group_size": int, "ignore": list, "layers": list}
RULE: dict[str, type] = {"match": str, "scheme": str, "method": str, "group_size": int}


@dataclass(frozen=True)
class Rule:
    """The choice for the layers that a pattern matches; None where it is that of all layers."""

    match: str
    scheme: str | None = None
    method: str | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe says; the first rule whose pattern matches a layer decides."""

    options: Mapping[str, Any]
    """scheme, method and group_size of all layers, as far as they are given."""
    ignore: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


def read_recipe(recipe: str | Path | Mapping[str, Any]) -> RecipeFile:
    """A recipe from a TOML file, or from the same as a dictionary; a FlowError says what is wrong with it."""
    where = "recipe" if isinstance(recipe, Mapping) else str(recipe)
    content = recipe if isinstance(recipe, Mapping) else _toml(Path(recipe))
    _require(content, DEFAULTS, where)
    rules = []
    for index, layer in enumerate(content.get("layers", [])):
        place = f"{where}: layers[{index}]"
        if not isinstance(layer, Mapping):
            raise FlowError(f"{place}: expected a table, got {layer!r}")
        _require(layer, RULE, place)
        if "match" not in layer:
            raise FlowError(f"{place}: expected a match: a name, shell pattern or re:REGEX of layers")
        rules.append(Rule(**layer))
    ignore = content.get("ignore", [])
    if not all(isinstance(pattern, str) for pattern in ignore):
        raise FlowError(f"{where}: ignore: expected a list of patterns, got {ignore!r}")
    options = {key: content[key] for key in ("scheme", "method", "group_size") if key in content}
    return RecipeFile(options, tuple(ignore), tuple(rules))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not TOML, not text, a huge number, or nested without end
        raise FlowError(f"{path}: expected TOML: {str(error)[:200]}") from None
    except FileNotFoundError:
        raise FlowError(f"{path}: no such file; expected a recipe in TOML") from None
    except OSError as error:
        raise FlowError(f"{path}: expected a recipe in TOML; it cannot be read: {error.strerror}") from None


def _require(table: Mapping[str, Any], known: dict[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise FlowError(f"{where}: expected only {', '.join(known)}, got {key}")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise FlowError(f"{where}: {key}: expected {known[key].__name__}, got {value!r}")
