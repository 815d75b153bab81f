"""The tests at the ends of the version ranges that pyproject.toml states, each in a folder of packages of its own.

`python tools/compat.py [ROW ...]` runs the rows named, or all of them. A row puts the packages it names, with what they
depend on, into `.venv-compat/ROW`, and runs its tests with that folder first on the path: torch, pytest and the rest
come from this environment. Where PyPI cannot be reached, it prints the reason and ends with 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_env import pypi_answers

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-compat"
FLOW = ("tests/flow", "-m", "not slow and not gpu")
#: What changed between two versions was how models are loaded and saved.
LOAD = ("tests/flow/hf/test_load.py", "tests/flow/hf/test_transformers.py", "tests/flow/hf/test_saving.py")
#: About models, or rules for them, that the oldest transformers has not: the names of tests.
NEWER = (
    "test_names.py::test_every_linear_is_quantized_or_left_with_a_reason_and_the_model_runs[vit]",
    "test_names.py::test_every_linear_is_quantized_or_left_with_a_reason_and_the_model_runs[gpt_neox]",
    "test_names.py::test_every_linear_is_quantized_or_left_with_a_reason_and_the_model_runs[nomic_bert]",
    "test_names.py::test_every_linear_is_quantized_or_left_with_a_reason_and_the_model_runs[mamba]",
    "test_names.py::test_linears_that_share_their_weights_with_linears_stay_float",
    "test_names.py::test_heads_and_routers_stay_float_wherever_they_are[jetmoe]",
    "test_surroundings.py::test_the_report_says_so_exactly_where_transformers_cannot_open_the_checkpoint[falcon]",
    "test_surroundings.py::test_the_report_says_what_transformers_does_not_read_of_a_checkpoint_that_we_load[dinov2-w8a8]",
    "test_surroundings.py::test_the_report_says_what_transformers_does_not_read_of_a_checkpoint_that_we_load[dinov2-w4a16]",
    "test_surroundings.py::test_linears_that_are_left_float_are_in_nobodys_way",
    "test_surroundings.py::test_linears_that_are_computed_with_stay_float_and_the_model_runs[longcat-w4a16]",
)
OLD_FLOW = (*FLOW, *(part for name in NEWER for part in ("--deselect", f"tests/flow/hf/{name}")))
KERNELS = ("tests/backends/triton", "-m", "not slow and not gpu")


@dataclass(frozen=True)
class Row:
    """Packages at given versions, and the tests that look at them."""

    #: Installed with what they depend on.
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    #: Installed alone: what they depend on is torch, which this environment has.
    alone: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


ROWS = {
    "transformers-oldest": Row(
        ("transformers==5.0.0", "safetensors==0.5.0"), OLD_FLOW, ("compressed-tensors==0.15.0",)
    ),
    "transformers-5.7": Row(("transformers==5.7.0",), LOAD, ("compressed-tensors==0.16.0",)),
    "transformers-5.8": Row(("transformers==5.8.0",), LOAD, ("compressed-tensors==0.16.0",)),
    "transformers-5.17": Row(("transformers==5.17.0",), FLOW, ("compressed-tensors==0.17.0",)),
    "transformers-newest": Row(("transformers", "safetensors"), FLOW, ("compressed-tensors",)),
    "triton-oldest": Row((), KERNELS, ("triton==3.6.0",), {"TRITON_INTERPRET": "1"}),
    "triton-newest": Row((), KERNELS, ("triton",), {"TRITON_INTERPRET": "1"}),
}
#: What every change is tested with (.ci/run), in two minutes; the newest versions are those of `make test`.
ENDS = {"transformers-oldest": LOAD}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--ends", action="store_true", help=f"what loads and saves with {' and '.join(ENDS)}")
    parser.add_argument("--tests", nargs="+", default=[], help="other tests than the row's")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"expected rows among {', '.join(ROWS)}, got {', '.join(unknown)}")
    found: list[tuple[str, str, str]] = []
    for name in options.rows or (ENDS if options.ends else ROWS):
        started = time.monotonic()
        if not install(name):
            if pypi_answers():
                print(f"{name}: its packages could not be installed although PyPI answers", file=sys.stderr)
                return 1
            print(f"{name}: skipped, since PyPI cannot be reached")
            continue
        passed = run(name, options.tests or (ENDS.get(name) if options.ends else None) or ROWS[name].tests)
        found.append((versions(name), "passed" if passed else "FAILED", f"{time.monotonic() - started:.0f} s"))
    for line in found:
        print(" | ".join(line))
    return int(any(result != "passed" for _, result, _ in found))


def install(name: str) -> bool:
    row, folder = ROWS[name], FOLDER / name
    stamp = folder / "installed"
    wanted = "\n".join((*row.packages, *row.alone))
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--upgrade", "--target", str(folder)]
    for packages in (row.packages, ("--no-deps", *row.alone)):
        if packages and subprocess.run([*pip, *packages], check=False).returncode:
            return False
    stamp.write_text(wanted)
    return True


def run(name: str, tests: Sequence[str]) -> bool:
    path = os.pathsep.join(filter(None, (str(FOLDER / name), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": path} | ROWS[name].environment
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-n", "2", *tests]
    print(f"-- {name}: {versions(name)}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def versions(name: str) -> str:
    """What the row has installed of the packages it names."""
    row = ROWS[name]
    names = [package.partition("==")[0] for package in (*row.packages, *row.alone)]
    found = [path.name for path in (FOLDER / name).glob("*.dist-info")]
    stems = {item.partition("-")[0].replace("_", "-"): item.split("-")[1].removesuffix(".dist") for item in found}
    return ", ".join(f"{package} {stems.get(package, '?')}" for package in names)


if __name__ == "__main__":
    sys.exit(main())
