"""Native sources with tests in C++: what `make sanitize` fuzzes compiles, and a caller's patience is as stated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


SOURCES = NATIVE.parents[1] / "csrc"


def compile_source(name: str, *options: str) -> None:
    command = [str(COMPILER), "-std=c++17", f"-I{SOURCES}", str(NATIVE / name), *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_the_fuzzer_of_the_native_kernels_compiles() -> None:
    compile_source("fuzz.cpp", "-fsyntax-only")


def test_a_caller_computes_alone_after_late_teams_and_no_longer_than_stated(tmp_path: Path) -> None:
    compile_source("patience.cpp", "-o", str(tmp_path / "patience"))
    found = subprocess.run([tmp_path / "patience"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_a_caller_computes_alone_where_teams_begin_late(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    subprocess.run(
        [str(COMPILER), "-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libtorch_cpu.so", "-o", library], check=True
    )
    threads = str(SOURCES / "threads.cpp")
    compile_source("late_team.cpp", threads, "-rdynamic", "-pthread", "-ldl", "-o", str(tmp_path / "late_team"))
    found = subprocess.run([tmp_path / "late_team", library], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
