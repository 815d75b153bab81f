"""What baracuda adds to transformers, from the moment that a program has imported both; importing neither waits for it.

`from_pretrained` then computes a checkpoint of ours in integers, and `save_pretrained` writes integer linears as what
they are. `flow.hf.takeover` has the additions.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The module that loads and saves models: nothing can be done before a program has it.
WATCHED = "transformers.modeling_utils"


def watch() -> None:
    """Install the additions now, where transformers is loaded, or else as soon as it is."""
    module = sys.modules.get(WATCHED)
    if module is not None and hasattr(module, "PreTrainedModel"):
        _install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _install() -> None:
    importlib.import_module(f"{__package__}.flow.hf.takeover").install()


class _Finder(MetaPathFinder):
    """Finds the one module, by asking the other finders, and steps aside."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The module's own loader, and the additions after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _install()
