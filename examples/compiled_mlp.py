"""A quantized MLP under torch.compile: one graph, no breaks, the numbers of the eager model.

python examples/compiled_mlp.py
"""

from __future__ import annotations

import argparse
import copy
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

import baracuda


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """The best of a few runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    size, hidden = 512, options.hidden
    model = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size)).eval()
    quantized = copy.deepcopy(model)
    print(baracuda.quantize_model(quantized), "\n")

    compiler = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    x: Tensor = torch.randn(options.rows, size)
    with torch.no_grad():
        breaks = torch._dynamo.explain(quantized)(x).graph_break_count
        compiled = torch.compile(quantized, fullgraph=True, dynamic=True, backend=compiler)
        error = (quantized(x) - model(x)).norm() / model(x).norm()
        # To 0.1 %, not to the bit: GELU is the compiler's own, and its last bit can move a rounding of the next linear.
        agrees = bool((compiled(x) - quantized(x)).norm() <= 1e-3 * quantized(x).norm())
        table = {
            "float, eager": milliseconds(lambda: model(x), options.repeats),
            "int8, eager": milliseconds(lambda: quantized(x), options.repeats),
            f"int8, {compiler}": milliseconds(lambda: compiled(x), options.repeats),
        }
    for name, spent in table.items():
        print(f"{name:20} {spent:8.2f} ms   {table['float, eager'] / spent:5.2f}x")
    print(f"\n{breaks} graph breaks; int8 differs from float by {error:.2%}")
    return {"graph_breaks": breaks, "agrees": agrees, "error": float(error), "milliseconds": table}


if __name__ == "__main__":
    main()
