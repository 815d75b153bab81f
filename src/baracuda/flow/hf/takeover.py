"""Additions to transformers: its reader of compressed-tensors gives way to ours where ours computes the same file.

Its attention by torch's asks whether a module is marked for our kernel, as fusing marks it.

BARACUDA_TRANSFORMERS=0 leaves reading and decoding to transformers. Saving is never left: without a description in
config.json integer linears would be read back as something else.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.config import parse_config
from ..errors import FlowError
from . import attention
from .repack import repacked
from .save import describe_saved, require_savable, require_state, shared_input_scales

VARIABLE = "BARACUDA_TRANSFORMERS"
_FORMAT = "compressed-tensors"


def install() -> None:
    """Add ours, once."""
    from transformers.modeling_utils import PreTrainedModel
    from transformers.quantizers import auto

    attention.install()
    configs = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    if not isinstance(configs[_FORMAT], Reader):
        configs[_FORMAT] = Reader(configs[_FORMAT])
        PreTrainedModel.save_pretrained = describing(PreTrainedModel.save_pretrained)


class Reader:
    """Stands in transformers' table of configs for its own class, which it asks about everything that is not ours."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def from_dict(self, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if os.environ.get(VARIABLE, "1") != "0" and is_readable(config_dict):
            from .quantizer import BaracudaConfig

            return BaracudaConfig(compressed_tensors=config_dict)
        return self._theirs.from_dict(config_dict, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._theirs(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


def is_readable(config: dict[str, Any]) -> bool:
    """Whether our modules compute what this quantization_config describes."""
    try:
        parse_config(config)
    except FlowError:
        return False
    return True


def describing(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` that says in config.json what its integer linears are, and refuses what readers cannot read."""

    signature = inspect.signature(save_pretrained)

    @functools.wraps(save_pretrained)
    def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        linears = [] if getattr(self, "_hf_peft_config_loaded", False) else require_savable(self)
        if not linears:
            return save_pretrained(self, save_directory, *args, **kwargs)
        given = signature.bind(self, save_directory, *args, **kwargs).arguments
        if given.get("push_to_hub"):
            raise FlowError(
                "save_pretrained(push_to_hub=True): a model with integer linears is described when its files are "
                "written; save it first, then upload the directory with `hf upload`"
            )
        with shared_input_scales(self) as shared, repacked(self) as integer_inputs:
            require_state(given.get("state_dict"), linears, {*shared, *integer_inputs})
            result = save_pretrained(self, save_directory, *args, **kwargs)
        if given.get("is_main_process", True):
            try:
                describe_saved(save_directory, integer_inputs)
            except BaseException:
                # Integers that nothing describes would be read as floats; without a config nobody reads them.
                (Path(save_directory) / "config.json").unlink(missing_ok=True)
                raise
        return result

    return save
