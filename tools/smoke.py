"""A first use of an installed baracuda, with nothing but what it declares: python smoke.py, from anywhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

import baracuda
from baracuda import BackendKind, PerChannel, PerGroup, PerToken


def main() -> None:
    home = Path(baracuda.__file__).resolve().parent
    assert home == Path(sysconfig.get_path("platlib")).resolve() / "baracuda", f"this is the package in {home}"
    assert (home / "py.typed").exists()

    x, w = torch.randn(32, 64), torch.randn(48, 64)
    q = baracuda.dynamic_quantize(x, scope=PerToken())
    assert (baracuda.dequantize(q.q, q.scale, scope=PerToken()) - x).abs().max() < 0.05
    assert baracuda.dynamic_quantize(w, scope=PerGroup(32), dtype="s4").q.shape == (48, 32)
    weight = baracuda.dynamic_quantize(w, scope=PerChannel(0))
    exact = x @ w.T
    assert (baracuda.quantized_linear(x, weight.q, weight.scale) - exact).norm() < 0.03 * exact.norm()

    desc = baracuda.QuantizePerTensorDescriptor(32, -128, 127, input_element="f32", output_element="s8")
    plan = baracuda.QuantizePerTensorPlan.select(desc, device="cpu")
    assert plan.sku().backend is BackendKind.CPU, "the compiled kernels are missing"

    command = str(Path(sysconfig.get_path("scripts")) / "baracuda")
    subprocess.run([command, "info"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([command, "demo", "--output", folder], check=True, stdout=subprocess.DEVNULL)
    optional = [name for name in ("numpy", "transformers", "triton") if importlib.util.find_spec(name)]
    print(f"baracuda {baracuda.__version__}, torch {torch.__version__}, python {sys.version.split()[0]}: works, "
          f"{plan.sku().arch}; optional packages: {', '.join(optional) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
