"""Compiled decoding on a GPU: the host looks a step late whether a text has ended, and waits for no token.

`generate` asks the device after each token, and prepares the next step only when it has the answer. Preparing a step,
checking compiled code and sending its graph take a millisecond or more; a step of integer linears takes the device two.
transformers can look a step late, which costs one step that it then undoes, but does so on Apple's devices alone. Here
it does so for models with linears of ours on CUDA devices, where it compiles the step. The tokens are the same; a
streamer has each a step later. A step that is not compiled takes the host longer than the device, so it is left alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn

from ...nn.siblings import Sibling
from .takeover import VARIABLE

#: Marks a float model that is to look late, too, so that it can be measured beside a quantized one.
MARK = "_baracuda_looks_late"
_DEVICES = frozenset({"cuda"})
#: Where transformers looks late by itself.
_APPLE = torch.device("mps")


class _Loop(local):
    """Whether the thread is in a decoding loop that looks late."""

    late = False


_loop = _Loop()


def install() -> None:
    """Once. Before 5.17, transformers has no check that may be late, and nothing changes."""
    from transformers.generation import utils

    check, mixin = getattr(utils, "DeferredStopCheck", None), utils.GenerationMixin
    if check is None or not hasattr(mixin, "_valid_auto_compile_criteria"):
        return
    if not hasattr(mixin._sample, "theirs"):
        mixin._sample = _sampling(mixin._sample)
        check.is_supported = staticmethod(_supporting(check.is_supported))


def looks_late(model: nn.Module) -> bool:
    """Whether the model has linears of ours, or is marked; and nobody has asked to leave transformers alone."""
    if os.environ.get(VARIABLE, "1") == "0":
        return False
    return bool(model.__dict__.get(MARK)) or any(isinstance(module, Sibling) for module in model.modules())


def _sampling(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = kwargs.get("generation_config")
        # Where several processes step together, all of them must see the end in the same step.
        late = settings is not None and not kwargs.get("synced_gpus") and looks_late(self)
        with _looking(late and self._valid_auto_compile_criteria(kwargs, settings)):
            return theirs(self, *args, **kwargs)

    sample.__dict__["theirs"] = theirs
    return sample


def _supporting(theirs: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(theirs)
    def is_supported(device: torch.device, *args: Any, **kwargs: Any) -> bool:
        """What transformers says of Apple's devices, where the loop looks late: the cache must allow it, for one."""
        late = _loop.late and device.type in _DEVICES
        return theirs(_APPLE if late else device, *args, **kwargs)

    return is_supported


@contextmanager
def _looking(late: bool) -> Iterator[None]:
    before, _loop.late = _loop.late, late
    try:
        yield
    finally:
        _loop.late = before
