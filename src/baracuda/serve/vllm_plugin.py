"""The plug-in that vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

`BARACUDA_VLLM` says what baracuda computes: `w8a8,w4a8` unless told otherwise, any of the two and `w4a16`, or `0` for
nothing. vLLM's own variable VLLM_PLUGINS can leave the plug-in out altogether.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ..core.errors import InvalidProblem

VARIABLE = "BARACUDA_VLLM"
#: What can be asked for -> vLLM's table of kernels for it, and ours.
TABLES = {
    "w8a8": ("_POSSIBLE_INT8_KERNELS", "BaracudaInt8LinearKernel"),
    "w4a16": ("_POSSIBLE_KERNELS", "BaracudaInt4LinearKernel"),
    # Last, so that it comes first: it takes the layers with integer activations, and leaves the others.
    "w4a8": ("_POSSIBLE_KERNELS", "BaracudaW4A8LinearKernel"),
}
#: Where no kernel multiplies floats by 4-bit weights, w4a16 makes them float for each call: only on request.
DEFAULT = "w8a8,w4a8"
OFF = ("", "0", "off", "none")
#: Inside vLLM's own, whose handler prints it.
logger = logging.getLogger("vllm.baracuda")


def wanted(value: str | None = None) -> list[str]:
    """The schemes that baracuda computes, as the variable says."""
    value = os.environ.get(VARIABLE, DEFAULT) if value is None else value
    if value.strip().lower() in OFF:
        return []
    schemes = [name.strip().lower() for name in value.split(",")]
    for name in schemes:
        if name not in TABLES:
            raise InvalidProblem(f"{VARIABLE}: expected {', '.join(TABLES)} or 0, got {name!r}")
    return [name for name in TABLES if name in schemes]


def register() -> None:
    """Put our kernels before vLLM's own, whose first one accepts everything. Calling it again changes nothing."""
    schemes = wanted()
    if not schemes:
        logger.info("baracuda computes nothing: %s=%s", VARIABLE, os.environ.get(VARIABLE, ""))
        return
    try:
        from vllm.model_executor.kernels import linear
        from vllm.platforms import PlatformEnum

        from . import vllm_kernels

        tables = {name: getattr(linear, TABLES[name][0]) for name in schemes}
        if "w4a8" in tables:
            vllm_kernels.tell_integer_inputs()
    except (ImportError, AttributeError) as error:
        logger.warning(
            "baracuda computes nothing: this vLLM keeps its linear kernels elsewhere (%s); use vLLM 0.32, or set %s=0",
            error,
            VARIABLE,
        )
        return
    for name, table in tables.items():
        for platform in (PlatformEnum.CPU, PlatformEnum.CUDA):
            _put_first(table.setdefault(platform, []), getattr(vllm_kernels, TABLES[name][1]))
    logger.info("baracuda offers its kernels for %s; %s=0 leaves them to vLLM", ", ".join(schemes), VARIABLE)


def _put_first(kernels: list[Any], kernel: Any) -> None:
    if kernel not in kernels:
        kernels.insert(0, kernel)
