"""A CUDA driver that launches nothing and keeps what it was given, built from fake_cuda.cpp."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch


class Record(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("early", ctypes.c_uint32),
        ("launches", ctypes.c_uint32),
        ("encodes", ctypes.c_uint32),
        ("values", ctypes.c_uint64 * 48),
        ("matrix", ctypes.c_uint64 * 10),
    ]


class Launch(ctypes.Structure):
    """A launch of a declared function; its parameters' bytes one after the other."""

    _fields_ = [
        ("function", ctypes.c_uint64),
        ("programs", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("bytes", ctypes.c_ubyte * 4096),
    ]


class Fake:
    """The driver, to be told what to answer, and what it was given last."""

    def __init__(self, path: Path) -> None:
        from baracuda import _host

        library = ctypes.CDLL(str(path))
        self.set = library.fake_set
        library.fake_record.restype = ctypes.POINTER(Record)
        self.record: Record = library.fake_record().contents
        self.driver = _host.Driver(str(path))
        self._library = library
        library.fake_launch.restype = ctypes.POINTER(Launch)

    def declare(self, function: int, sizes: list[int]) -> None:
        """The sizes of a function's parameters, so that its launches are kept."""
        self._library.fake_declare(ctypes.c_uint64(function), (ctypes.c_int * len(sizes))(*sizes), len(sizes))

    def forget(self) -> None:
        """No function is declared and no launch was made."""
        self._library.fake_forget()

    def launches(self) -> list[Launch]:
        """Of declared functions, in order."""
        return [self._library.fake_launch(i).contents for i in range(self._library.fake_launches())]


def build(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Compiled once a session."""
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("a CUDA build of torch has no current stream without a GPU; the CPU build has one that is null")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.getbasetemp() / "libfake_cuda.so"
    if not path.exists():
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return Fake(path)
