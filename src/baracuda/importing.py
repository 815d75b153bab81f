"""What baracuda adds to transformers and PEFT, from the moment that a program has imported both; neither waits for it.

`from_pretrained` then computes a checkpoint of ours in integers, `save_pretrained` writes integer linears as what they
are, `generate` on a GPU does not wait for each token, and LoRA adapters go on them.
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

#: A module that is added to, one of its names (it is not there while the module is still being imported), and ours with
#: the additions.
WATCHED = {
    "transformers.modeling_utils": ("PreTrainedModel", "flow.hf.takeover"),
    "transformers.generation.utils": ("GenerationMixin", "flow.hf.decoding"),
    "peft.tuners.lora.model": ("LoraModel", "flow.hf.lora"),
}


def watch() -> None:
    """Install the additions to what is loaded now, and to the rest as soon as it is."""
    later = set()
    for name, (member, _) in WATCHED.items():
        if hasattr(sys.modules.get(name), member):
            _install(name)
        else:
            later.add(name)
    if later and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(later))


def _install(name: str) -> None:
    importlib.import_module(f"{__package__}.{WATCHED[name][1]}").install()


class _Finder(MetaPathFinder):
    """Finds each of these modules once, by asking the other finders."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.remove(name)
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
        _install(module.__name__)
