"""The mutation check: break one line of the reference at a time and see the tests turn red.

    python tools/mutation.py [name ...]

Each mutant is a copy of the package with one piece of text replaced and with the reference as its only backend, put
first on the path; the tree itself is never edited. The tests that must notice compare with NumPy, ONNX Runtime, torch,
exact fractions, or one op with several others, never with the reference itself. Exits 1 when a mutant survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The reference is two files: its formulas, and what applies them to operands. A mutant's text is in one of them.
REFERENCE = "backends/formulas.py backends/reference.py"
ACTIVATION = "backends/nonlinearity.py"
PACKING = "core/packing.py"
WORKERS = 2
#: pytest over the copy, and over nothing else: an editable install redirects imports before the path is asked.
LAUNCH = """
import sys
directory = sys.argv[1]
sys.meta_path[:] = [f for f in sys.meta_path if "Editable" not in repr(f) and "ScikitBuild" not in repr(f)]
sys.path.insert(0, directory)
import baracuda, pytest
assert baracuda.__file__.startswith(directory), baracuda.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""

NUMPY, ONNX, TORCH, EXHAUSTIVE, CORNERS = (
    f"tests/contract/test_{name}.py" for name in ("numpy_oracle", "onnx", "torch_oracle", "exhaustive", "corners")
)
RECIPE = "tests/backends/test_nonlinearity.py"
FUSED, WEIGHT_ONLY = (f"tests/functional/test_{name}.py" for name in ("fused", "weight_only"))
GROUPS = "tests/nn/test_groups.py"


@dataclass(frozen=True)
class Mutant:
    name: str
    old: str
    new: str
    #: The files that should notice, quickest first.
    tests: tuple[str, ...]
    files: str = REFERENCE


#: Lines of the reference that more than one mutant breaks.
CLAMP = "torch.fmin(torch.fmax(steps(x, scale, p.arithmetic), low), high)"
FLOOR = "scale.to(kind.dtype).clamp(min=kind.smallest_scale)"
ADDED = "    y = y if bias is None else y + cast(Tensor, bias).to(torch.float64)\n"
ACTIVATED = "    y = activated(y, p.nonlinearity)\n"
NORM_ROOT = "root(row_sums(x * x) / size)"
EPILOGUE = "(acc.to(math) * scale_a.to(math)) * scale_w.to(math)"

MUTANTS = [
    Mutant("reciprocal for division", "else x / scale", "else x * (1 / scale)", (ONNX, EXHAUSTIVE)),
    Mutant("division for reciprocal", "return x * (1 / scale) if", "return x / scale if", (TORCH,)),
    Mutant(
        "zero point before rounding",
        CLAMP,
        "torch.fmin(torch.fmax(torch.round(divide(x, scale, p.arithmetic) + zero_point) - zero_point, low), high)",
        (ONNX,),
    ),
    Mutant(
        "half away from zero",
        "return torch.round(divide(x, scale, arithmetic))",
        "t = divide(x, scale, arithmetic)\n    return torch.sign(t) * torch.floor(t.abs() + 0.5)",
        (ONNX, EXHAUSTIVE),
    ),
    Mutant("rounding down", "torch.round(divide(", "torch.floor(divide(", (ONNX,)),
    Mutant("open mask below", "(low <= t)", "(low < t)", (TORCH,)),
    Mutant("open mask above", "(t <= high)", "(t < high)", (TORCH,)),
    Mutant(
        "mask of the unrounded step",
        "t = steps(x, scale, p.arithmetic)\n",
        "t = divide(x, scale, p.arithmetic)\n",
        (TORCH,),
    ),
    Mutant("mask that multiplies", "torch.where(mask, see.float(dy), 0.0)", "mask * see.float(dy)", (TORCH,)),
    Mutant(
        "NaN to zero", CLAMP, CLAMP.replace("p.arithmetic)", "p.arithmetic).where(~x.isnan(), 0.0)"), (ONNX, CORNERS)
    ),
    Mutant("NaN to q_max", CLAMP, "torch.fmax(torch.fmin(steps(x, scale, p.arithmetic), high), low)", (ONNX, CORNERS)),
    Mutant("f32 in the f64 path", "self.math = p.element.math.dtype", "self.math = torch.float32", (NUMPY, EXHAUSTIVE)),
    Mutant("stored scale ignored", "floored = scale.to(kind.dtype).clamp", "floored = scale.clamp", (CORNERS, NUMPY)),
    Mutant("scale never floored", ".clamp(min=kind.smallest_scale)", "", (ONNX, CORNERS)),
    Mutant(
        "scale floored before it is rounded",
        FLOOR,
        "scale.clamp(min=kind.smallest_scale * 0.4).to(kind.dtype)",
        (CORNERS, NUMPY),
    ),
    Mutant("all-zero segment not special", "floored.masked_fill(all_zero, 1.0)", "floored", (ONNX, CORNERS)),
    Mutant("include_zero never", "if p.include_zero:", "if False:", (ONNX,)),
    Mutant("include_zero never on its own", "> 2.0**22", "> 2.0**99", (CORNERS, NUMPY)),
    Mutant("constant segment not special", "torch.where(low == high, low.abs(), scale)", "scale", (CORNERS, NUMPY)),
    Mutant(
        "halving missing",
        "torch.where(width.isinf(), halved, width /",
        "torch.where(width.isnan(), halved, width /",
        (CORNERS, NUMPY),
    ),
    Mutant("empty zero point", "else p.q_min\n", "else 0\n", (CORNERS, NUMPY)),
    Mutant("maximum without its sign", "torch.maximum(low.abs(), high.abs())", "high.abs()", (NUMPY,)),
    Mutant("canonical NaN missing", 'return y.masked_fill(y.isnan(), float("nan"))', "return y", (CORNERS,)),
    Mutant(
        "bias before scale",
        EPILOGUE,
        EPILOGUE.replace("(acc.to(math)", "((acc.to(math) + (0 if bias is None else bias.to(math)))"),
        (ONNX,),
    ),
    Mutant("scales multiplied first", EPILOGUE, "acc.to(math) * (scale_a.to(math) * scale_w.to(math))", (ONNX, NUMPY)),
    Mutant(
        "activation after the residual",
        "        y = y + cast(Tensor, residual).to(see.math)\n",
        "        y = activated(y + cast(Tensor, residual).to(see.math), see.p.nonlinearity)\n",
        (NUMPY,),
    ),
    Mutant(
        "relu that drops NaN", "torch.where(y < 0, 0.0, y)", "torch.where(y > 0, y, 0.0)", (RECIPE, NUMPY), ACTIVATION
    ),
    Mutant("the square of gelu rounded", "& terms.head)", "& -1)", (RECIPE, NUMPY), ACTIVATION),
    Mutant("2**n in one step", "half = exponent >> 1", "half = exponent * 0", (RECIPE, NUMPY), ACTIVATION),
    Mutant(
        "zero point of a linear ignored", "(act_q.to(torch.int32) - zero_point)", "(act_q.to(torch.int32))", (ONNX,)
    ),
    Mutant(
        "sums in f32",
        "acc = centred @ weight.to(torch.float64).T",
        "acc = centred.float() @ weight.to(torch.float32).T",
        (CORNERS, NUMPY),
    ),
    Mutant(
        "zero point not clamped",
        "torch.int32).clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT)",
        "torch.int32)",
        (CORNERS, NUMPY),
    ),
    Mutant(
        "wrong nibble order",
        "nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)",
        "nibbles[..., 1::2] | (nibbles[..., 0::2] << 4)",
        (CORNERS,),
        PACKING,
    ),
    Mutant(
        "unsigned nibbles",
        "return (nibbles ^ 8).to(torch.int8) - 8",
        "return nibbles.to(torch.int8)",
        (CORNERS,),
        PACKING,
    ),
    Mutant(
        "dequantize in the output's type",
        "(q - zero_point).to(scale.dtype) * scale",
        "((q - zero_point).to(torch.float16) * scale).to(scale.dtype)",
        (ONNX, EXHAUSTIVE),
    ),
    Mutant("factors of groups ignored", "(groups * factors[:, :, None])", "(groups * 1)", (GROUPS, NUMPY)),
    Mutant("all bits of a factor", ".view(torch.int8) & MAX_FACTOR", ".view(torch.int8)", (GROUPS, NUMPY)),
    Mutant("eps outside the root", "root(row_sums(x * x) / size + p.eps)", f"({NORM_ROOT} + p.eps)", (FUSED,)),
    Mutant("norm without eps", "/ size + p.eps)", "/ size)", (FUSED,)),
    Mutant("layer norm without its mean", "x = x - row_sums(x) / size", "x = x", (FUSED,)),
    Mutant(
        "sums of a norm in torch's order",
        "blocks = block_sums(x.T, SUM_LANES, SUM_STEPS, neighbours=True)",
        "blocks = x.T.sum(dim=0, keepdim=True)",
        (FUSED,),
    ),
    Mutant(
        "lanes of a norm halved",
        "blocks = block_sums(x.T, SUM_LANES, SUM_STEPS, neighbours=True)",
        "blocks = block_sums(x.T, SUM_LANES, SUM_STEPS)",
        (FUSED,),
    ),
    Mutant("sums of a norm in f32", "x = h.to(torch.float64)", "x = h.to(torch.float32)", (FUSED,)),
    Mutant("norm rounded once", "y = y.to(p.element.dtype).to(dtype)", "y = y", (FUSED,)),
    Mutant(
        "gain of Gemma without its one", "(1 + factor if p.norm is NormStyle.GEMMA else factor)", "factor", (FUSED,)
    ),
    Mutant(
        "norm of a sum that was not rounded",
        "x = canonical((x.to(math) + cast(Tensor, addend).to(math)).to(p.element.dtype))",
        "x = canonical(x.to(math) + cast(Tensor, addend).to(math))",
        (FUSED,),
    ),
    Mutant("gate not rounded", "p.nonlinearity).to(dtype).to(math)", "p.nonlinearity)", (FUSED,)),
    Mutant(
        "halves exchanged",
        "gate, up = gate.narrow(-1, 0, see.p.shape[-1]),",
        "up, gate = gate.narrow(-1, 0, see.p.shape[-1]),",
        (FUSED,),
    ),
    Mutant("zero points of a weight added", "groups = groups - cast(", "groups = groups + cast(", (WEIGHT_ONLY,)),
    Mutant("weight-only bias after the nonlinearity", ADDED + ACTIVATED, ACTIVATED + ADDED, (WEIGHT_ONLY,)),
    Mutant(
        "float weight rounded to the activations' type",
        "rows = [(weight * row)",
        "rows = [(weight.to(cast(Tensor, x).dtype).to(torch.float64) * row)",
        (WEIGHT_ONLY,),
    ),
]


def plant(mutant: Mutant, directory: Path) -> None:
    """A copy of the package with the mutation in it and no backend but the reference."""
    package = directory / "baracuda"
    shutil.copytree(ROOT / "src" / "baracuda", package, ignore=shutil.ignore_patterns("__pycache__"))
    texts = {package / file: (package / file).read_text() for file in mutant.files.split()}
    count = sum(text.count(mutant.old) for text in texts.values())
    if count != 1:
        raise SystemExit(f"{mutant.name}: expected its text once in {mutant.files}, found it {count} times")
    for target, text in texts.items():
        target.write_text(text.replace(mutant.old, mutant.new))
    with (package / "backends" / "registry.py").open("a") as registry:
        registry.write('\nBACKENDS = {BackendKind.REFERENCE: "baracuda.backends.reference"}\n')


def run(directory: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """`chosen` is left out: with one backend it is the reference again."""
    command = [sys.executable, "-c", LAUNCH, str(directory), "-x", "--no-header", "--tb=no", "-k", "not chosen", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_XDIST_WORKER": "mutant"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant) -> tuple[Mutant, str, str, float]:
    """killed, SURVIVED or BROKEN (pytest could not run), and the test that noticed."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        plant(mutant, Path(name))
        code, output = run(Path(name), mutant.tests)
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    noticed = failed[0].removeprefix("FAILED tests/").split("[")[0] if failed else ""
    verdict = {0: "SURVIVED", 1: "killed"}.get(code, "BROKEN")
    if verdict == "BROKEN" or (verdict == "killed" and not failed):
        verdict, noticed = "BROKEN", output[-300:]
    return mutant, verdict, noticed, time.perf_counter() - start


def main(names: list[str]) -> int:
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        raise SystemExit(f"expected names of mutants, got {', '.join(sorted(unknown))}; the names are in MUTANTS")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    start = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        verdicts = []
        for mutant, verdict, noticed, seconds in pool.map(judge, chosen):
            verdicts.append(verdict)
            print(f"{verdict:9} {mutant.name:36} {seconds:5.1f} s  {noticed}", flush=True)
    killed = verdicts.count("killed")
    print(f"{killed} of {len(chosen)} mutants killed in {time.perf_counter() - start:.0f} s")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
