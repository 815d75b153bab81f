"""The config.json of a model as transformers parses it, without what would make transformers load anything by name."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.directory import read_json
from ..errors import CheckpointError, FlowError, shown

#: Settings of a config with which transformers loads code, weights or other settings by a name that the config gives.
#: Their defaults are what transformers has built in.
LOADS_BY_NAME = frozenset(
    (
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("kernel_config", "use_kernels", "allow_all_kernels", "fusion_config"),
        *("auto_map", "custom_pipelines", "custom_generate", "trust_remote_code", "code_revision"),
        *("transformers_weights", "configuration_files", "gguf_file", "subfolder", "revision", "token"),
        *("name_or_path", "_name_or_path", "_commit_hash", "use_pretrained_backbone", "backbone_kwargs"),
        *("distributed_config", "adapter_kwargs", "_adapter_model_path", "adapters"),
    )
)
#: Names that timm downloads, whatever the setting that holds them is called.
_FETCHED = re.compile(r"\s*(hf[-_]hub|local[-_]dir)\s*:", re.IGNORECASE)
#: Methods of other libraries' quantization_config that run what is installed and load nothing by name.
KNOWN_METHODS = ("compressed-tensors", "awq", "bitsandbytes", "gptq")
_DTYPES = ("auto", "float32", "float16", "bfloat16", "float64", "float", "half", "double")
#: Settings that say how many parts are built, and limits that no real model reaches: more would never be built.
_COUNT = re.compile(r"(^|_)(layers?|blocks?|depths?|experts?)$")
_NO_COUNT = re.compile(r"vocab|size|dim")
MAX_REPEATS, MAX_EXPERTS = 10_000, 100_000


def harmless(config: dict[str, Any]) -> dict[str, Any]:
    """The config without the settings that load something by name, at any depth.

    One that is switched off stays: without it, a default may switch it on.
    """
    return {key: _harmless(value) for key, value in config.items() if key not in LOADS_BY_NAME or value is False}


def _harmless(value: Any) -> Any:
    if isinstance(value, dict):
        return harmless(value)
    return [_harmless(item) for item in value] if isinstance(value, list) else value


def require_sane(config: dict[str, Any], path: str = "") -> None:
    """Raise for values with which transformers would build forever, or fetch, or take a function for a type."""
    for key, value in config.items():
        where = f"config.json: {path}{shown(key)[1:-1]}"
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                require_sane(item, f"{path}{shown(key)[1:-1]}.")
            elif isinstance(item, str) and _FETCHED.match(item):
                raise CheckpointError("bad-config", f"{where} is {shown(item)}: a name that would be downloaded")
            elif type(item) is int and item > _limit(key):
                raise CheckpointError("bad-config", f"{where} is {shown(item)}, more than any model has")
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and value.removeprefix("torch.") not in _DTYPES:
            raise CheckpointError("bad-config", f"{where}: expected a floating-point type, got {shown(value)}")
    architectures = config.get("architectures")
    if architectures is not None and not _names(architectures):
        text = f"config.json: {path}architectures: expected a list of names, got {shown(architectures)}"
        raise CheckpointError("bad-config", text)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _limit(key: str) -> int:
    if not _COUNT.search(key) or _NO_COUNT.search(key):
        return 2**63 - 1
    return MAX_EXPERTS if "expert" in key else MAX_REPEATS


def parse(config: dict[str, Any]) -> Any:
    """The config as transformers' AutoConfig reads it from a directory that holds nothing else.

    Raises whatever transformers raises: a config can be wrong in any way.
    """
    import transformers

    require_sane(config)
    clean = harmless(config)
    clean.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as folder, alone():
        (Path(folder) / "config.json").write_text(json.dumps(clean))
        parsed = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    parsed.name_or_path = ""
    return parsed


def has_own_code(config: dict[str, Any]) -> bool:
    """Whether the model's class is in code that comes with it, of which nothing is known."""
    import transformers

    name = next(iter(config.get("architectures") or []), None)
    return bool(config.get("auto_map")) and not (isinstance(name, str) and hasattr(transformers, name))


def model_config(directory: Path) -> Any:
    """The config of a model directory as transformers parses it. Code that comes with a model is never run."""
    import transformers

    raw = read_json(directory / "config.json")
    if "model_type" not in raw:
        raise FlowError(
            f"{directory}: expected a config.json of transformers, got one without model_type; download the model again"
        )
    try:
        parsed = None if has_own_code(raw) else parse(raw)
        problem = "its class is in code that comes with it"
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises anything
        parsed, problem = None, f"{type(error).__name__}: {str(error)[:200]}"
    if parsed is None:
        raise FlowError(
            f"{directory}: expected a model that transformers {transformers.__version__} knows without code of its "
            f"own, which baracuda never runs; quantize it without calibration ({problem})"
        )
    if (quantization := raw.get("quantization_config")) is not None:
        parsed.quantization_config = _known(quantization, directory)
    return parsed


def _known(quantization: Any, directory: Path) -> Any:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in KNOWN_METHODS:
        raise FlowError(
            f"{directory}: expected a quantization_config of {', '.join(KNOWN_METHODS)}, got {shown(method)}, which "
            "may load code of its own; load the model with transformers instead"
        )
    return harmless(quantization)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notices of transformers: baracuda draws its own.

    Its errors, too: they quote the config, and the exception that follows says what is wrong.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def alone() -> Iterator[None]:
    """Run transformers quietly, without the Hugging Face Hub and without kernels from there."""
    from huggingface_hub import constants

    try:
        from transformers.integrations import hub_kernels
    except ImportError:  # a transformers without them
        hub_kernels = None
    kernels = getattr(hub_kernels, "_kernels_enabled", None)
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    if kernels is not None:
        hub_kernels._kernels_enabled = False
    try:
        with quiet():
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        if kernels is not None:
            hub_kernels._kernels_enabled = kernels
