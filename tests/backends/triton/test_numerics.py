"""One spelling of the GPU arithmetic: kernels call `backends/triton/numerics` and spell out none of it themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import baracuda

FOLDER = Path(baracuda.__file__).parent / "backends" / "triton"
NUMERICS = FOLDER / "numerics"
#: Functions of Triton that divide, round, fuse, take roots and exponentials, reinterpret or hold PTX.
ARITHMETIC = {
    "div_rn", "fdiv", "fma", "rcp", "rsqrt", "sqrt", "sqrt_rn", "clamp", "floor", "ceil", "rint", "round", "umulhi",
    "exp", "exp2", "log", "log2", "erf", "sin", "cos", "sigmoid", "softmax", "cast", "fp4_to_fp",
    "inline_asm_elementwise", "libdevice", "math",
}  # fmt: skip
#: What PTX outside of `numerics` may consist of: instructions that order kernels or fetch memory ahead, and a zero to
#: return.
SCHEDULING = ("griddepcontrol.", "prefetch", "cp.async.bulk.prefetch", "mov.u32 $0, 0")
#: Larger integers are bits of floats, or floats that round when they are added.
LARGEST_INDEX = 65535
#: Numbers that are no spelling of anything: neutral elements and signs.
NEUTRAL = {0.0, 1.0, -1.0}


def has_device_code(tree: ast.Module) -> bool:
    decorators = (d for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for d in node.decorator_list)
    return any("jit" in ast.unparse(decorator) for decorator in decorators)


def literal(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def is_extreme(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("minimum", "maximum")


def is_choice(node: ast.AST) -> bool:
    """A `where` that compares: two of them, one inside the other, are a clamp."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] != "where":
        return False
    return isinstance(node.args[0], ast.Compare)


def only_schedules(call: ast.Call) -> bool:
    """PTX of which every instruction only schedules, and computes nothing."""
    text = literal(call.args[0]) if call.args else None
    if not isinstance(text, str):
        return False
    return all(part.strip().startswith(SCHEDULING) for part in text.split(";") if part.strip())


def second_spellings(tree: ast.Module) -> Iterator[str]:
    """What a file with device code may not contain outside of `numerics`, each with its line."""
    schedules = {call.func for call in ast.walk(tree) if isinstance(call, ast.Call) and only_schedules(call)}
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in NEUTRAL:
            found = "a number of the arithmetic"
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > LARGEST_INDEX:
            found = "the bits of a float, or a float that rounds"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("triton"):
            found = next((f"`{alias.name}`" for alias in node.names if alias.name in ARITHMETIC), None)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name == "float":
                found = "an infinity or NaN"
            elif any(kind(node) and any(map(kind, node.args)) for kind in (is_extreme, is_choice)):
                found = "a clamp"
            elif any(keyword.arg == "bitcast" for keyword in node.keywords):
                found = "the bits of a float"
            elif name == "to" and any(".float" in ast.unparse(a) or ".bfloat" in ast.unparse(a) for a in node.args):
                found = "a conversion to float"
        elif isinstance(node, ast.Attribute) and node.attr in ARITHMETIC and node not in schedules:
            found = f"`{node.attr}`"
        elif isinstance(node, ast.BinOp | ast.AugAssign):
            right = node.right if isinstance(node, ast.BinOp) else node.value
            if isinstance(node.op, ast.Div):
                found = "a division"
            elif isinstance(node.op, ast.Pow):
                found = "a power"
            elif isinstance(node.op, ast.BitAnd | ast.BitXor) and literal(right) not in (None, 0, 1):
                found = "a mask of bits"
            elif isinstance(node.op, ast.LShift | ast.RShift) and any(
                isinstance(value := literal(part), int) and value > 1
                for part in ast.walk(right)
                if isinstance(part, ast.expr)
            ):
                found = "a shift of bits"
        if found is not None:
            yield f"line {node.lineno}: {found}: {ast.unparse(node)}"  # type: ignore[attr-defined]


KERNELS = {
    str(path.relative_to(FOLDER)): tree
    for path in sorted(FOLDER.rglob("*.py"))
    if NUMERICS not in path.parents and has_device_code(tree := ast.parse(path.read_text()))
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_leave_the_arithmetic_to_numerics(name: str) -> None:
    found = list(second_spellings(KERNELS[name]))
    assert not found, f"{name}: move this to backends/triton/numerics: {found}"


def test_device_code_is_where_the_convention_has_it() -> None:
    families = {name.split("/")[0] for name in KERNELS if "/" in name}
    assert families == {"attention", "dynamic", "elementwise", "learned", "linear", "producers"}
    for family in families:
        for module in ("kernels.py", "launch.py", "tune.py"):
            assert (FOLDER / family / module).is_file(), f"{family} has no {module}"
        assert f"{family}/kernels.py" in KERNELS
    assert not [name for name in KERNELS if name.endswith(("launch.py", "tune.py"))]


@pytest.mark.parametrize(
    "line",
    [
        "x + 12582912.0",
        "x + 1.5 * 2**23",
        "tl.where(s < 2.0**-126, 2.0**-126, s)",
        "tl.where(s < 1.1754943508222875e-38, s, s)",
        "x / scale",
        "tl.div_rn(x, scale)",
        "gl.div_rn(x, scale)",
        "gl.fma(x, scale, y)",
        'tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)',
        "byte & 15",
        "byte & 0xF0",
        "(n ^ 8) - 8",
        "byte >> 4",
        "byte >> (4 * odd)",
        'tl.where(y == y, y, float("nan"))',
        "tl.minimum(tl.maximum(q, low), high)",
        "gl.maximum(gl.minimum(q, high), low)",
        "x.to(tl.int32, bitcast=True)",
        "acc.to(gl.float32)",
        "tl.floor(x)",
        "tl.sqrt(x)",
        "1.0 / tl.sqrt_rn(x)",
        "gl.rsqrt(x)",
        "tl.exp2(x)",
        "tl.sigmoid(x)",
        "tl.cast(q, tl.float32)",
        "x + 12582912",
        "(q | 0x4B400000)",
        "tl.where(q < low, low, tl.where(q > high, high, q))",
        'gl.inline_asm_elementwise("prefetch.global.L2 [$1]; rcp.approx.f32 $0, $2;", "=f,l,f", [p, x])',
    ],
)
def test_a_second_spelling_is_found(line: str) -> None:
    assert list(second_spellings(ast.parse(f"@triton.jit\ndef kernel(x):\n    return {line}")))


def test_a_second_spelling_is_found_where_it_is_imported() -> None:
    assert list(second_spellings(ast.parse("from triton.language.extra.libdevice import rsqrt as inverse_root")))
    assert not list(second_spellings(ast.parse("from ..numerics.comparisons import clamp")))


@pytest.mark.parametrize("name", KERNELS)
def test_a_second_spelling_is_found_in_every_kernel(name: str) -> None:
    """Each kernel's own file, with a division and a rounding put at the end of its last function."""
    tree = ast.parse(ast.unparse(KERNELS[name]))
    last = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)][-1]
    last.body += ast.parse("y = x / scale\nz = y + 12582912.0 - 12582912.0").body
    assert len(list(second_spellings(tree))) == 3


@pytest.mark.parametrize(
    "line", ["tl.minimum(first + LINES, run)", "j // STAGES & 1", "LANES >> (i + 1)", "acc.to(tl.int64)", "x * 1.0"]
)
def test_indices_are_no_arithmetic(line: str) -> None:
    assert not list(second_spellings(ast.parse(f"@triton.jit\ndef kernel(x):\n    return {line}")))
