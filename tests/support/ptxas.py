"""What NVIDIA's assembler says of a kernel: registers, spills, and products that it serialized."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Assembled:
    registers: int
    #: Bytes that are spilled, and loaded again.
    stored: int
    loaded: int
    #: Products of warpgroups wait for each other.
    serialized: bool

    @property
    def spills(self) -> bool:
        return bool(self.stored or self.loaded)


def assembled(compiled: Any, arch: int = 90) -> Assembled:
    """A compiled kernel by the assembler that this Triton takes for the architecture."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"-arch=sm_{arch}{'a' * (arch >= 90)}", str(source), "-o", str(binary)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    used = re.search(r"Used (\d+) registers", report)
    assert spilled and used, report
    return Assembled(int(used.group(1)), int(spilled.group(1)), int(spilled.group(2)), "serialized" in report)
