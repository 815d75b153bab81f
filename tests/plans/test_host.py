"""The host's part of a call: the quick check agrees with the thorough one, the driver is handed what was meant."""

from __future__ import annotations

import math
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import Fake, build

from baracuda import BackendKind, ElementKind, InvalidProblem, PerToken, PlanPreference, QuantizeKind, WorkspaceTooSmall
from baracuda.core.problem import Problem
from baracuda.core.strides import contiguous_strides
from baracuda.plans.checks import Checker
from baracuda.plans.plan import SelectedPlan
from cases import CASES, operands

_host = pytest.importorskip("baracuda._host", reason="the compiled module is missing")

CPU = torch.device("cpu")


# -- the quick check ---------------------------------------------------------------------------------------------


def checker(op: QuantizeKind = QuantizeKind.QUANTIZE, strides: str = "contiguous") -> Checker:
    return Checker(Problem(op, (4, 6), ElementKind.F32, ElementKind.S8, -128, 127, PerToken()), CPU, strides)  # type: ignore[arg-type]


def good() -> list[Any]:
    return [torch.randn(4, 6), torch.rand(4), None, torch.empty(4, 6, dtype=torch.int8)]


def test_operands_of_every_case_fit_at_once() -> None:
    for case in CASES[::41]:
        check = Checker(case.problem, CPU, "contiguous")
        values = tuple(v.contiguous() if isinstance(v, torch.Tensor) else v for v in operands(case))
        assert check.fits(values), case


WRONG: dict[str, tuple[int, Any]] = {
    "dtype": (0, torch.randn(4, 6, dtype=torch.float64)),
    "shape": (0, torch.randn(4, 7)),
    "rank": (0, torch.randn(24)),
    "device": (0, torch.empty(4, 6, device="meta")),
    "layout": (0, torch.randn(4, 6).to_sparse()),
    "none": (0, None),
    "not a tensor": (0, [1.0]),
    "number too small": (1, 0.0),
    "number not finite": (1, float("nan")),
    "bool": (1, True),
    "integer too large": (2, 2**24),
    "far too large": (2, 2**70),
    "float for an integer": (2, 1.5),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_left_to_the_thorough_check_which_says_why(name: str) -> None:
    values = good()
    values[WRONG[name][0]] = WRONG[name][1]
    assert not checker().fits(tuple(values))
    with pytest.raises(InvalidProblem, match="expected"):
        checker()(tuple(values))


def test_numbers_and_parameters_fit_at_once() -> None:
    for scale, zero_point in ((0.5, 3), (2, None), (torch.rand(4), torch.zeros(4, dtype=torch.int32))):
        x = torch.nn.Parameter(torch.randn(4, 6))
        assert checker().fits((x, scale, zero_point, torch.empty(4, 6, dtype=torch.int8)))


def test_what_fits_at_once_passes_the_thorough_check_and_is_contiguous() -> None:
    generator = random.Random(0)
    room = torch.zeros(200)
    numbers = [None, 0.5, 2, 0, -1, 1e300, float("inf"), True, 2**25, "1"]
    fitted = refused = 0
    for _ in range(12000):
        op = generator.choice([QuantizeKind.QUANTIZE, QuantizeKind.FAKE_QUANTIZE, QuantizeKind.DYNAMIC_QUANTIZE])
        values = []
        for rule in checker(op).expected:
            dtype = generator.choice([*rule.dtypes * 4, torch.float32, torch.int8])
            start = generator.choice([0, 0, 4, 25, 60, 120]) * 4
            memory = room.view(torch.uint8)[start : start + 24 * dtype.itemsize].view(dtype)
            shaped = memory[: math.prod(rule.shape)].view(rule.shape)
            values.append(generator.choice([shaped] * 8 + [shaped.mT if shaped.ndim > 1 else shaped[::2], *numbers]))
        check, given = checker(op), tuple(values)
        if check.fits(given):
            fitted += 1
            check(given)
            assert check.fit(given)
        else:
            refused += 1
    assert fitted > 100 and refused > 100


@pytest.mark.parametrize("backend", [BackendKind.CPU, BackendKind.REFERENCE])
@pytest.mark.parametrize("axes", [(6,), (2, 3), (3, 1, 2), (20, 2)], ids=str)
def test_a_plan_along_other_axes_takes_and_makes_what_has_them(backend: BackendKind, axes: tuple[int, ...]) -> None:
    rows = math.prod(axes)
    problem = Problem(QuantizeKind.QUANTIZED_LINEAR, (rows, 5, 24), ElementKind.F32, ElementKind.S8, -127, 127)
    plan = SelectedPlan(problem, torch.device("cpu"), PlanPreference(prefer_backend=backend))
    x, weight = torch.randn(*axes, 24), torch.randint(-127, 128, (5, 24), dtype=torch.int8)
    others = (weight, torch.rand(5), None, None, None, None)
    expected = plan.compute((x.reshape(rows, 24), *others))[-1]
    along = plan.along(axes)
    strided = torch.randn(*axes, 26)[..., :24].copy_(x)
    for given in (x, strided, x.reshape(rows, 24)):
        y = along.compute((given, *others))[-1]
        assert y.shape == (*axes, 5) and torch.equal(y.view(rows, 5), expected)
    with pytest.raises(InvalidProblem):
        along.compute((x, weight[:, :23].contiguous(), *others[1:]))
    if len(axes) > 1:
        with pytest.raises(InvalidProblem):
            plan.compute((x, *others))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 0, 5), (1, 1), (2, 3, 4)], ids=str)
def test_fresh_outputs_have_the_strides_torch_gives(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


class Loud(torch.Tensor):
    """A subclass may see its own shape differently."""


def test_subclasses_and_strides_are_left_to_the_thorough_check() -> None:
    values = good()
    for x in (torch.randn(4, 6).as_subclass(Loud), torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]):
        assert not checker().fits((x, *values[1:]))
        checker(strides="any")((x, *values[1:]))


def test_tensors_of_another_device_do_not_fit() -> None:
    """The same memory, for a plan on another device: no second one is here to have a tensor on."""
    p, values = checker().problem, tuple(good())
    for device in ("cuda:0", "cuda:1"):
        assert not Checker(p, torch.device(device), "contiguous").fits(values)


def test_more_operands_than_the_row_has_do_not_fit() -> None:
    assert not checker().fits((*good(), None))


def test_axes_of_length_one_and_empty_tensors_are_contiguous() -> None:
    p = Problem(QuantizeKind.QUANTIZE, (1, 6), ElementKind.F32, ElementKind.S8, -128, 127)
    x = torch.randn(6, 1).t()
    assert x.stride() == (1, 1) and Checker(p, CPU, "contiguous").fits(
        (x, 1.0, None, torch.empty(1, 6, dtype=torch.int8))
    )
    p = Problem(QuantizeKind.QUANTIZE, (0, 6), ElementKind.F32, ElementKind.S8, -128, 127)
    assert Checker(p, CPU, "contiguous").fits((torch.empty(6, 0).t(), 1.0, None, torch.empty(0, 6, dtype=torch.int8)))


def test_an_output_shares_memory_only_with_the_very_input_of_an_elementwise_op() -> None:
    room = torch.randn(100)
    x, shifted = room[:24].view(4, 6), room[1:25].view(4, 6)
    fake = checker(QuantizeKind.FAKE_QUANTIZE)
    assert fake.fits((x, 1.0, None, x))
    line = Problem(QuantizeKind.FAKE_QUANTIZE, (1, 6), ElementKind.F32, ElementKind.S8, -128, 127)
    row, column = room[:6].view(1, 6), room[:6].view(6, 1).t()
    assert not Checker(line, CPU, "contiguous").fits((row, 1.0, None, column)), "only the very same view"
    assert fake.fits((x, 1.0, None, room[24:48].view(4, 6)))
    assert not fake.fits((x, 1.0, None, shifted))
    assert not fake.fits((x, room[2:6], None, x))
    assert not checker().fits((x, 1.0, None, room.view(torch.int8)[8:32].view(4, 6)))
    learned = checker(QuantizeKind.FAKE_QUANTIZE_LEARNED_BACKWARD)
    rest = (torch.randn(4, 6), 1.0, None)
    assert not learned.fits((x, *rest, x, torch.empty(4), torch.empty(4)))
    total = torch.empty(4)
    assert not learned.fits((x, *rest, torch.empty(4, 6), total, total))


def test_a_tensor_resized_in_place_is_noticed() -> None:
    check, values = checker(), tuple(good())
    assert check.fits(values)
    values[0].resize_(2, 6)
    assert not check.fits(values)


def test_a_workspace_is_held_to_its_device_size_density_and_alignment() -> None:
    holds = checker().holds
    room, values = torch.empty(256, dtype=torch.uint8), (*good(), None, 1.0, 3)
    assert holds(room, values, 256, 16) and holds(torch.empty(64), values, 256, 16)
    assert not holds(room, values, 257, 16)
    assert not holds(room[1:], values, 16, 16) and not holds(room[::2], values, 16, 16)
    assert not holds(None, values, 16, 16) and not holds(torch.empty(256, device="meta"), values, 16, 16)


def test_a_workspace_over_an_operand_is_noticed() -> None:
    holds, room = checker().holds, torch.empty(256, dtype=torch.uint8)
    assert holds(room[:128], (room[128:],), 128, 16)
    assert not holds(room[:144], (room[128:],), 128, 16) and not holds(room[128:], (room[:144],), 112, 16)
    assert not holds(torch.empty(64), (room[::2],), 16, 16)  # perhaps: Python knows how far it reaches


def test_a_small_workspace_is_still_refused_with_its_size() -> None:
    p = Problem(QuantizeKind.QUANTIZED_LINEAR, (64, 8, 16), ElementKind.F32, ElementKind.S8, -127, 127)
    plan = SelectedPlan(p, CPU)
    values = (torch.randn(64, 16), torch.ones(8, 16, dtype=torch.int8), 1.0, *[None] * 6, torch.empty(64, 8))
    with pytest.raises(WorkspaceTooSmall):
        plan.launch(values, torch.empty(plan.workspace_size() - 1, dtype=torch.uint8))


def test_without_the_compiled_module_checks_still_run_and_triton_says_why_it_does_not() -> None:
    code = """
import sys; sys.modules["baracuda._host"] = None
import torch, baracuda
from baracuda.backends.triton import declines
from baracuda.core.problem import Problem
x = torch.tensor([1.0, 2.0])
assert baracuda.quantize(x, 0.5).tolist() == [2, 4]
try:
    baracuda.quantize(x, -1.0)
except baracuda.InvalidProblem:
    pass
else:
    raise AssertionError("a negative scale went through")
p = Problem(baracuda.QuantizeKind.QUANTIZE, (2,), baracuda.ElementKind.F32, baracuda.ElementKind.S8, -128, 127)
why = declines(p, torch.device("cuda", 0))
assert why and ("_host is missing" in why or "triton is not installed" in why), why
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# -- launches, on a driver that only writes down -----------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return build(tmp_path_factory)


@pytest.fixture
def fake(library: Fake) -> Iterator[Fake]:
    library.set(0, 0, 0)
    yield library
    library.set(0, 0, 0)


F32, S8 = (2, 32), (0, 8)


def test_parameters_arrive_in_their_order_and_bits(fake: Fake) -> None:
    launcher = _host.Launcher(fake.driver, 0, [(0, -1, 0, 0), (1, -1, 0, 0), (2, -1, 0, 0), (-1, 32, *F32)], 15, 16)
    x, room = torch.randn(8), torch.empty(64)
    kernel = _host.Kernel("kernel", 0xABC, 7, 128, 4096, False)
    kernel.address(0)
    kernel.number(1, "f64")
    kernel.number(1, "f32")
    kernel.number(2, "i32")
    kernel.constant(2**64 - 5)
    kernel.address(3)
    kernel.address(1)  # a number has no address
    kernel.number(0, "f32")  # and a tensor is no number
    launcher.add((x, 0.1, -3), room, kernel)
    fake.set(8, 0, 0)
    assert launcher.launch((x, 0.1, -3), room)
    record = fake.record
    assert (record.function, list(record.grid), list(record.block), record.shared) == (
        0xABC,
        [7, 1, 1],
        [128, 1, 1],
        4096,
    )
    bits64, bits32 = struct.unpack("<Q", struct.pack("<d", 0.1))[0], struct.unpack("<I", struct.pack("<f", 0.1))[0]
    values = list(record.values[:8])
    assert values == [x.data_ptr(), bits64, bits32, 2**32 - 3, 2**64 - 5, room.data_ptr() + 32, 0, 0]
    assert launcher.launch((x, 2, -3), room), "an integer is a number too"
    assert record.values[1] == struct.unpack("<Q", struct.pack("<d", 2.0))[0]


@pytest.mark.parametrize("early", [False, True])
def test_a_kernel_comes_early_where_it_is_said_to(fake: Fake, early: bool) -> None:
    launcher, x = launcher_of(fake), torch.zeros(8)
    launcher.add((x,), None, _host.Kernel("kernel", 1, 1, 32, 0, early))
    assert launcher.launch((x,), None)
    assert fake.record.early == early


def launcher_of(fake: Fake, sources: int = 1, vectors: int = -1) -> Any:
    mask = vectors if vectors >= 0 else (1 << sources) - 1
    return _host.Launcher(fake.driver, 0, [(i, -1, 0, 0) for i in range(sources)], mask, 16)


def test_the_kernel_is_the_one_for_these_dtypes_numbers_and_alignment(fake: Fake) -> None:
    launcher = launcher_of(fake, 2)
    base = torch.zeros(64)
    forms = [(base, None), (base, 1.0), (base, base), (base.to(torch.float64), None), (base[1:], None)]
    for i, form in enumerate(forms):
        assert not launcher.launch(form, None)
        launcher.add(form, None, _host.Kernel(str(i), i + 1, 1, 32, 0, False))
    for i, form in enumerate(forms):
        assert launcher.launch(form, None) and fake.record.function == i + 1
    assert launcher.launch((base[4:], 7), None) and fake.record.function == 2, "another address, another number"


def test_alignment_matters_only_where_it_was_asked_for(fake: Fake) -> None:
    launcher = launcher_of(fake, 2, vectors=0b01)
    base = torch.zeros(64)
    launcher.add((base, base), None, _host.Kernel("kernel", 1, 1, 32, 0, False))
    assert launcher.launch((base, base[1:]), None) and not launcher.launch((base[1:], base), None)


def test_an_operand_that_is_none_gives_way_to_its_place_in_the_workspace(fake: Fake) -> None:
    launcher = _host.Launcher(fake.driver, 0, [(0, 64, *S8)], 1, 16)
    kernel, given, room = _host.Kernel("kernel", 1, 1, 32, 0, False), torch.zeros(4, dtype=torch.int8), torch.empty(32)
    kernel.address(0)
    launcher.add((given,), room, kernel)
    fake.set(1, 0, 0)
    assert launcher.launch((given,), room) and fake.record.values[0] == given.data_ptr()
    assert launcher.launch((None,), room) and fake.record.values[0] == room.data_ptr() + 64
    assert launcher.launch((), room) and fake.record.values[0] == room.data_ptr() + 64


def test_nothing_is_launched_on_another_device_or_without_a_context(fake: Fake) -> None:
    launcher, x = launcher_of(fake), torch.zeros(4)
    launcher.add((x,), None, _host.Kernel("kernel", 1, 1, 32, 0, False))
    before = fake.record.launches
    for current in (1, -1):
        fake.set(0, current, 0)
        assert not launcher.launch((x,), None)
    assert fake.record.launches == before
    launcher.use_context()
    assert launcher.launch((x,), None) and fake.record.launches == before + 1


def test_an_error_of_the_driver_is_raised_in_its_words(fake: Fake) -> None:
    launcher, x = launcher_of(fake), torch.zeros(4)
    launcher.add((x,), None, _host.Kernel("the_kernel", 1, 3, 32, 99, False))
    fake.set(0, 0, 700)
    with pytest.raises(RuntimeError, match=r"the_kernel \(3 x 32 threads, 99 bytes.*an illegal fake access .*700"):
        launcher.launch((x,), None)


def test_a_matrix_is_encoded_once_for_an_address(fake: Fake) -> None:
    launcher, x, y = launcher_of(fake), torch.zeros(6, 32, dtype=torch.int8), torch.zeros(6, 32, dtype=torch.int8)
    kernel = _host.Kernel("kernel", 1, 1, 32, 0, False)
    kernel.matrix(0, 5, 3, 1, 6, 32, 2, 16)
    launcher.add((x,), None, kernel)
    fake.set(1, 0, 0)
    before = fake.record.encodes
    for value, encodes in ((x, 1), (x, 1), (y, 2), (x, 3)):
        assert launcher.launch((value,), None)
        assert fake.record.values[0] == value.data_ptr() ^ 0xFEED
        assert fake.record.encodes == before + encodes
    assert list(fake.record.matrix[:9]) == [5, 2, x.data_ptr(), 32, 6, 32, 16, 2, 3]


def test_wrong_arguments_are_refused(fake: Fake) -> None:
    launcher, kernel = launcher_of(fake), _host.Kernel("kernel", 1, 1, 32, 0, False)
    with pytest.raises(TypeError, match="tuple"):
        launcher.launch([torch.zeros(4)], None)
    with pytest.raises(ValueError, match="i32, f32 or f64"):
        kernel.number(0, "i8")
    kernel.address(1)
    with pytest.raises(ValueError, match="name one of the arguments"):
        launcher.add((torch.zeros(4),), None, kernel)
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        _host.Driver("libnowhere.so.1")
    sparse = torch.zeros(4).to_sparse()
    with pytest.raises(RuntimeError):
        launcher.launch((sparse,), None)


def test_threads_launch_beside_each_other(fake: Fake) -> None:
    launcher, x = launcher_of(fake), torch.zeros(4)
    launcher.add((x,), None, _host.Kernel("kernel", 1, 1, 32, 0, False))
    done: list[bool] = []
    threads = [
        threading.Thread(target=lambda: done.append(all(launcher.launch((x,), None) for _ in range(500))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4


def test_inputs_in_spaced_rows_fit_kernels_that_take_them_and_only_without_outputs() -> None:
    p = Problem(QuantizeKind.QUANTIZE, (4, 6), ElementKind.F32, ElementKind.S8, -128, 127, PerToken())
    x, scale, out = torch.randn(4, 9)[:, :6], torch.ones(4), torch.empty(4, 6, dtype=torch.int8)
    rows, dense = Checker(p, CPU, "rows"), Checker(p, CPU, "contiguous")
    assert rows.fits((x, scale, None)) and not dense.fits((x, scale, None))
    assert rows.fits((x[:1].expand(4, 6), scale, None)), "one row for all"
    assert not rows.fits((x, scale, None, out)), "what they share is for Python to find out"
    assert not rows.fits((torch.randn(6, 4).t(), scale, None)), "columns are not rows"
    assert not rows.fits((x.contiguous(), scale, None, torch.empty(4, 9, dtype=torch.int8)[:, :6]))
