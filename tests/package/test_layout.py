"""The sizes of files, and where the tests of a module are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
MOST_LINES = 400
#: Where the tests are of modules that no test imports by their path and that no test file is named after.
TESTED_IN = {
    "baracuda/backends/cpu/producers.py": "functional/test_fused.py",
    "baracuda/backends/reference.py": "contract/test_numpy_oracle.py",
    "baracuda/backends/triton/devices.py": "contract/test_honest.py",
    "baracuda/backends/triton/dynamic/extremes.py": "backends/triton/test_interpreter.py",
    "baracuda/backends/triton/pdl.py": "backends/triton/test_ptx.py",
    "baracuda/backends/triton/producers/kernels.py": "backends/triton/test_interpreter.py",
    "baracuda/backends/triton/producers/tune.py": "backends/triton/test_interpreter.py",
    "baracuda/backends/triton/sources.py": "backends/triton/test_launch.py",
    "baracuda/core/notebook.py": "functional/test_quantized.py",
    "baracuda/core/patterns.py": "models/test_replace.py",
    "baracuda/dispatch/eager.py": "functional/test_functions.py",
    "baracuda/flow/checkpoint/check.py": "flow/checkpoint/test_verify.py",
    "baracuda/flow/checkpoint/fusion.py": "flow/checkpoint/test_servers.py",
    "baracuda/flow/checkpoint/inventory.py": "flow/checkpoint/test_trust.py",
    "baracuda/flow/checkpoint/json_text.py": "flow/checkpoint/test_attacks.py",
    "baracuda/flow/hf/chat.py": "cli/test_daily.py",
    "baracuda/flow/hf/compare_config.py": "flow/checkpoint/test_trust.py",
    "baracuda/flow/hf/coverage.py": "flow/run/test_groups.py",
    "baracuda/flow/hf/expectations.py": "flow/checkpoint/test_verify.py",
    "baracuda/flow/hf/experts.py": "flow/hf/test_load.py",
    "baracuda/flow/hf/layers.py": "flow/hf/test_surroundings.py",
    "baracuda/flow/hf/live.py": "flow/hf/test_transformers.py",
    "baracuda/flow/hf/lora.py": "flow/hf/test_peft.py",
    "baracuda/flow/hf/rehearsal.py": "flow/run/test_hard_places.py",
    "baracuda/flow/hf/repack.py": "flow/hf/test_transformers.py",
    "baracuda/flow/hf/save.py": "flow/hf/test_transformers.py",
    "baracuda/flow/hf/small_llama.py": "cli/test_app.py",
    "baracuda/flow/hf/structure.py": "flow/hf/test_names.py",
    "baracuda/flow/hf/takeover.py": "flow/hf/test_transformers.py",
    "baracuda/flow/run/activations.py": "flow/run/test_sequential.py",
    "baracuda/flow/run/charts.py": "flow/run/test_report.py",
    "baracuda/flow/run/comparison.py": "cli/test_daily.py",
    "baracuda/flow/run/contents.py": "cli/test_daily.py",
    "baracuda/flow/run/options.py": "cli/test_app.py",
    "baracuda/flow/run/proof.py": "flow/checkpoint/test_attacks.py",
    "baracuda/flow/run/samples.py": "flow/run/test_report.py",
    "baracuda/flow/run/sensitivity.py": "flow/run/test_precision.py",
    "baracuda/functional/linears.py": "functional/test_functions.py",
    "baracuda/importing.py": "flow/hf/test_transformers.py",
    "baracuda/models/deterministic.py": "models/test_one_answer.py",
    "baracuda/nn/autocast.py": "nn/test_modules.py",
    "baracuda/nn/observers.py": "nn/test_fake_quantize.py",
    "baracuda/nn/requirements.py": "nn/test_modules.py",
    "baracuda/nn/rounding.py": "nn/test_fake_quantize.py",
    "baracuda/nn/stacking.py": "nn/test_siblings.py",
    "baracuda/nn/state.py": "nn/test_modules.py",
    "baracuda/plans/declarations.py": "plans/test_plan.py",
    "baracuda/plans/descriptors.py": "plans/test_plan.py",
    "baracuda/schemes/calibration.py": "schemes/test_method.py",
    "baracuda/schemes/formats.py": "schemes/test_registry.py",
    "baracuda/schemes/methods/rtn.py": "schemes/test_method.py",
    "baracuda/serve/vllm_kernels.py": "serve/test_vllm.py",
    "baracuda_cli/checkpoints.py": "cli/test_app.py",
    "baracuda_cli/demonstrate.py": "cli/test_app.py",
    "baracuda_cli/info.py": "cli/test_app.py",
    "baracuda_cli/measure.py": "cli/test_daily.py",
    "baracuda_cli/plans.py": "flow/run/test_preview.py",
    "baracuda_cli/scopes.py": "cli/test_app.py",
}

MODULES = [str(path.relative_to(ROOT / "src")) for path in sorted((ROOT / "src").rglob("[!_]*.py"))]
SOURCES = [f"src/{name}" for name in MODULES] + [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").iterdir())]
TEST_FILES = {path: path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}
TEST_NAMES = {path.stem for path in TEST_FILES}
TEST_TEXT = "\n".join(TEST_FILES.values())


def is_found(module: str) -> bool:
    """Whether a test file is named after the module or a folder it is in, or imports it."""
    package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    if any(f"test_{part}" in TEST_NAMES for part in (*package.split(".")[1:], name)):
        return True
    imported = rf"from {re.escape(package)} import [^\n]*\b{name}\b"
    return f"{package}.{name}" in TEST_TEXT or re.search(imported, TEST_TEXT) is not None


@pytest.mark.parametrize("source", SOURCES)
def test_no_source_file_is_longer_than_400_lines(source: str) -> None:
    assert len((ROOT / source).read_text().splitlines()) <= MOST_LINES, f"{source}: divide it"


@pytest.mark.parametrize("module", MODULES)
def test_the_tests_of_a_module_are_found_by_its_name(module: str) -> None:
    found = is_found(module) or module in TESTED_IN
    assert found, f"{module}: name its tests after it, or put where they are into TESTED_IN"


@pytest.mark.parametrize("module", TESTED_IN)
def test_what_the_table_names_exists(module: str) -> None:
    assert module in MODULES, f"{module} is gone; drop its line in TESTED_IN"
    assert (TESTS / TESTED_IN[module]).is_file(), f"{TESTED_IN[module]} is gone; say where {module} is tested now"
