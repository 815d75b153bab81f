"""The compiled modules under the address and undefined-behaviour sanitizers, as Python loads them.

`make sanitize` fuzzes the kernels without Python. Here `_host` (lookup, check and launch of a call; a driver that
records stands in for CUDA's) and `_cpu` (what is between Python and the kernels) are built with sanitizers, and their
tests run. Leaks are not looked for: Python keeps memory until it ends. The interpreter needs torch and nanobind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import baracuda

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sanitized"
#: Of floats, dividing by zero is defined and what a scale of zero asks for; nanobind's types have no vptr to look at.
FLAGS = "-fsanitize=address,undefined -fno-sanitize=vptr,float-divide-by-zero -fno-sanitize-recover=all -g1"
TESTS = {
    "_host": ("plans/test_host.py", "nn/test_launches.py"),
    "_cpu": (
        "functional/test_fused.py",
        "functional/test_empty_shapes.py",
        "backends/cpu/test_empty.py",
        "backends/cpu/test_attention.py",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", choices=TESTS, action="append", help="this one; both unless given")
    modules = parser.parse_args().module or list(TESTS)
    for module in modules:
        build(module)
    overlay = BUILD / "lib" / "baracuda"
    shutil.rmtree(overlay, ignore_errors=True)
    shutil.copytree(Path(baracuda.__file__).parent, overlay)
    for module in modules:
        [made] = BUILD.glob(f"{module}.*.so")
        shutil.copy(made, overlay)
    environment = os.environ | {
        "PYTHONPATH": str(overlay.parent),
        "LD_PRELOAD": " ".join(library(name) for name in ("libasan.so", "libubsan.so")),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    loaded = f"import sys, baracuda._host as h, baracuda._cpu as c; sys.exit({str(overlay)!r} not in h.__file__)"
    subprocess.run([sys.executable, "-c", loaded], env=environment, check=True)
    tests = [f"tests/{test}" for module in modules for test in TESTS[module]]
    # Uncaptured: a sanitizer writes its report itself. Tests that measure time would measure the sanitizer.
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-m", "not alone and not gpu", *tests]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def build(module: str) -> None:
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, *options], check=True)
    subprocess.run(["cmake", "--build", BUILD, "--target", module], check=True)


def library(name: str) -> str:
    """The sanitizer's library, which must be loaded before Python's own."""
    asked = ["g++", f"-print-file-name={name}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
