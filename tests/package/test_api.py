"""The public surface, pinned; what importing costs; and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import baracuda

SOURCE = Path(baracuda.__file__).parent
PLANS = [
    "DequantizePerChannelBackwardPlan",
    "DequantizePerChannelPlan",
    "DequantizePerGroupBackwardPlan",
    "DequantizePerGroupPlan",
    "DequantizePerTensorBackwardPlan",
    "DequantizePerTensorPlan",
    "DequantizePerTokenBackwardPlan",
    "DequantizePerTokenPlan",
    "DynamicRangeQuantizePlan",
    "FakeQuantizeBackwardPlan",
    "FakeQuantizePlan",
    "QuantizePerChannelBackwardPlan",
    "QuantizePerChannelPlan",
    "QuantizePerGroupBackwardPlan",
    "QuantizePerGroupPlan",
    "QuantizePerTensorBackwardPlan",
    "QuantizePerTensorPlan",
    "QuantizePerTokenBackwardPlan",
    "QuantizePerTokenPlan",
    "QuantizedLinearPlan",
    "SmoothQuantLinearPlan",
]
PUBLIC = [
    "Activation",
    "Arithmetic",
    "BackendKind",
    "BackwardArgs",
    "BaracudaError",
    "DynamicRangeMode",
    "DynamicRangeScope",
    "ElementKind",
    "InvalidProblem",
    "KernelSku",
    "LinearScheme",
    "MathPrecision",
    "OpCategory",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Plan",
    "PlanPreference",
    "PrecisionGuarantee",
    "QuantizeArgs",
    "QuantizeKind",
    "Quantized",
    "Report",
    "Scope",
    "Support",
    "Unsupported",
    "WorkspaceTooSmall",
    "__version__",
    "autograd",
    "choose_qparams",
    "convert",
    "dequantize",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "fake_quantize",
    "flow",
    "load",
    "nn",
    "pack_int4",
    "parallel",
    "prepare_qat",
    "quantize",
    "quantize_model",
    "quantized_linear",
    "smoothquant_linear",
    "unpack_int4",
]


def test_the_public_names_are_these_and_no_others() -> None:
    parts = [name.removesuffix("Plan") + part for name in PLANS for part in ("Args", "Descriptor", "Plan")]
    assert sorted(baracuda.__all__) == sorted(PUBLIC + parts)
    assert len(set(baracuda.__all__)) == len(baracuda.__all__)
    for name in baracuda.__all__:
        assert hasattr(baracuda, name)


def python(code: str) -> str:
    """The output of a fresh interpreter that imports this very package."""
    path = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); "
    run = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True, timeout=120)
    return run.stdout.strip()


def test_importing_costs_less_than_a_tenth_of_a_second_beyond_torch() -> None:
    """In CPU time, the best of several: a busy machine only ever adds to it."""
    code = "import torch, time; start = time.process_time(); import baracuda; print(time.process_time() - start)"
    seconds: list[float] = []
    while len(seconds) < 8 and min(seconds, default=1.0) >= 0.1:
        seconds.append(float(python(code)))
    assert min(seconds) < 0.1, seconds


def test_importing_loads_neither_triton_nor_the_command_line_nor_numpys_friends() -> None:
    code = "import torch; before = set(sys.modules); import baracuda; print(*sorted(set(sys.modules) - before))"
    loaded = {name.split(".")[0] for name in python(code).split()}
    assert not loaded & {"triton", "typer", "rich", "matplotlib", "transformers", "safetensors", "onnx"}


# -- layers ------------------------------------------------------------------------------------------------------

#: Lowest first; a module imports modules of lower lines only, or of its own folder.
LAYERS = [
    ["core.errors", "core.memory", "core.patterns"],
    ["core.types"],
    ["core.scope"],
    ["core.problem", "core.arrays"],
    ["core.packing", "backends.nonlinearity"],
    ["backends.registry"],
    ["plans.checks"],
    ["backends.reference", "backends.cpu", "backends.triton"],
    ["plans.plan"],
    ["plans.descriptors"],
    ["plans.declarations"],
    ["dispatch.eager"],
    ["dispatch.operators"],
    ["autograd"],
    ["functional"],
    ["nn"],
    ["models", "parallel"],
    ["flow"],
    ["backends.matrix"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
#: A package's own __init__ names what it gathers.
GATHERS = {"backends", "core", "plans", "dispatch"}


def layer_of(module: str) -> str | None:
    """`backends.triton.numerics` belongs to the layer `backends.triton`."""
    parts = module.split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in RANK:
            return ".".join(parts[:length])
    return None


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        if name not in GATHERS:
            found.append((name, path))
    return found


def imported(name: str, path: Path) -> set[str]:
    """The modules of baracuda that a file imports, anywhere in it, as dotted names below `baracuda`."""
    package = name.split(".") if path.name == "__init__.py" and name != "__init__" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif node.module and node.module.split(".")[0] == "baracuda":
                base = []
            else:
                continue
            module = (node.module or "").removeprefix("baracuda").lstrip(".") if not node.level else node.module or ""
            target = [*base, *(module.split(".") if module else [])]
            for alias in node.names:
                whole = ".".join([*target, alias.name])
                found.add(
                    whole if layer_of(whole) != layer_of(".".join(target)) and layer_of(whole) else ".".join(target)
                )
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("baracuda.") for alias in node.names if alias.name.startswith("baracuda.")
            }
    return found - {""}


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_one_way(name: str, path: Path) -> None:
    layer = layer_of(name)
    assert layer is not None, f"{name} has no place in LAYERS; give it one"
    for target in imported(name, path):
        below = layer_of(target)
        assert below is not None, f"{name} imports {target}, which has no place in LAYERS"
        assert RANK[below] < RANK[layer] or below == layer, f"{name} imports {target}, a layer above its own"


def test_the_layer_check_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "scope.py"
    file.write_text(
        "from ..plans.plan import Plan\nfrom .. import cli\n"
        "import baracuda.flow.run.convert\nfrom baracuda.nn import x\n"
    )
    assert {layer_of(name) for name in imported("core.scope", file)} == {"plans.plan", "cli", "flow", "nn"}
    file.write_text("from ...core.problem import OPS\nfrom .registry import Kernel\nfrom . import registry\n")
    assert imported("backends.cpu", file) == {"core.problem", "backends.registry"}
