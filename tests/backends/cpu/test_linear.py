"""The compiled linears: one call for few rows, every bit of the reference on every instruction set and thread count."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from compiled import _cpu, assert_like_reference, launch, plan_for
from torch import Tensor

import baracuda
from baracuda import Activation, BackendKind, DynamicRangeMode, ElementKind, QuantizeKind
from baracuda.core.problem import Problem, scale_elements
from baracuda.core.types import FLOATS
from cases import Case, assert_same_bits, operands

pytestmark = pytest.mark.usefixtures("restored")

S8, U8, S4 = ElementKind.S8, ElementKind.U8, ElementKind.S4
#: Both sides of a vector, of two, of a chunk, and of the longest sum that 32 bits hold.
WIDTHS = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 2047, 2049]


def linear(
    op: QuantizeKind, shape: tuple[int, int, int], element: ElementKind, kind: ElementKind, weight: ElementKind,
    mode: DynamicRangeMode, activation: Activation = Activation.NONE, group: int = 0,
) -> Problem:  # fmt: skip
    stored = scale_elements(element)[0]
    return Problem(
        op, shape, element, kind, kind.q_min, kind.q_max,
        mode=mode, scale_element=stored, weight=weight, nonlinearity=activation, weight_group=group,
    )  # fmt: skip


@pytest.mark.parametrize("rows", range(1, 19))
def test_few_rows_have_the_bits_of_the_reference(rows: int) -> None:
    pick = random.Random(rows).choice
    kinds = itertools.product((S8, U8), (S8, S4), DynamicRangeMode)
    for (kind, weight, mode), k in itertools.product(kinds, random.Random(rows).sample(WIDTHS, 3)):
        op = pick([QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR])
        shape = (rows, pick([1, 3, 4, 67, 130, 1031]), k)
        p = linear(op, shape, pick(FLOATS), kind, weight, mode, pick(list(Activation)))
        case = Case(p, pick(["ordinary", "poison"]), residual=pick([False, True]))
        torch.set_num_threads(pick([1, 2, 5]))
        assert_like_reference(p, operands(case), case, _cpu.isas())


@pytest.mark.parametrize("rows", [1023, 1025, 2050])
def test_more_rows_than_are_multiplied_at_once_have_the_bits_of_the_reference(rows: int) -> None:
    pick = random.Random(rows).choice
    both = (QuantizeKind.QUANTIZED_LINEAR, QuantizeKind.SMOOTHQUANT_LINEAR)
    for op, kind, weight, mode in itertools.product(both, (S8, U8), (S8, S4), DynamicRangeMode):
        p = linear(op, (rows, 37, 70), pick(FLOATS), kind, weight, mode)
        case = Case(p, "ordinary", residual=True)
        assert_like_reference(p, operands(case), case, _cpu.isas()[-1:])


@pytest.mark.parametrize("weight", [S8, S4], ids=lambda kind: kind.value)
@pytest.mark.parametrize("k", [65536, 65537, 140_001])
def test_sums_at_their_extremes_are_exact_for_any_k(k: int, weight: ElementKind) -> None:
    p = linear(QuantizeKind.SMOOTHQUANT_LINEAR, (2, 5, k), ElementKind.F64, U8, weight, DynamicRangeMode.ASYMMETRIC)
    stored = 0x88 if weight is S4 else 0x80  # the least of all weights
    w = torch.full((5, (k + 1) // 2 if weight is S4 else k), stored, dtype=torch.uint8).view(weight.dtype)
    for value, zero_point in [(255, 0), (0, 255), (255, 255)]:
        act = torch.full((2, k), value, dtype=torch.uint8)
        for isa in _cpu.isas():
            _cpu.use_isa(isa)
            (y,) = plan_for(p).compute((act, 1.0, zero_point, w, 1.0, None, None, None, None))
            assert (y == (value - zero_point) * weight.q_min * k).all(), isa


def test_given_weight_sums_are_used_and_change_no_bit() -> None:
    p = linear(QuantizeKind.QUANTIZED_LINEAR, (3, 70, 200), ElementKind.F32, U8, S8, DynamicRangeMode.ASYMMETRIC)
    values = list(operands(Case(p)))
    weight = values[1]
    assert isinstance(weight, Tensor)
    values[4] = weight.long().sum(1).int()
    assert_like_reference(p, tuple(values), p, _cpu.isas())


def test_the_scratch_of_the_activations_is_written_where_it_is_given() -> None:
    p = linear(QuantizeKind.QUANTIZED_LINEAR, (2, 9, 100), ElementKind.F32, S8, S8, DynamicRangeMode.SYMMETRIC)
    values = list(operands(Case(p)))
    x = values[0]
    values[7], values[8] = torch.full((2, 100), 77, dtype=torch.int8), torch.full((2,), 77.0)
    results = launch(plan_for(p), tuple(values))
    expected = baracuda.dynamic_quantize(x, scope=baracuda.PerToken(), q_min=-128, q_max=127)
    assert torch.equal(results["act_q_scratch"], expected.q) and torch.equal(
        results["act_scale_scratch"], expected.scale
    )


def test_calls_from_many_threads_at_once_do_not_disturb_each_other() -> None:
    p = linear(QuantizeKind.QUANTIZED_LINEAR, (2, 700, 300), ElementKind.F32, S8, S8, DynamicRangeMode.SYMMETRIC)
    plan, values = plan_for(p), operands(Case(p))
    expected, failures = launch(plan, values), []

    def work() -> None:
        torch.set_num_threads(3)
        for _ in range(100):
            try:
                assert_same_bits(launch(plan, values), expected, "a thread")
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this torch has no OpenMP threads")
def test_the_kernels_use_the_threads_of_torch_and_start_none() -> None:
    code = """
import os, torch, baracuda
from baracuda.backends.cpu import threads_in_use
torch.set_num_threads(3)
x, w = torch.ones(2, 300), torch.ones(700, 300, dtype=torch.int8)
torch.ones(1 << 20).neg()
before = len(os.listdir("/proc/self/task"))
for rows in (1, 2, 8, 100):
    baracuda.quantized_linear(torch.ones(rows, 300), w, 1.0)
baracuda.quantize(torch.ones(1 << 20), 0.5)
torch.ones(1 << 20).neg()
assert threads_in_use() == "torch's OpenMP threads", threads_in_use()
assert len(os.listdir("/proc/self/task")) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_child_of_a_fork_computes_too() -> None:
    code = """
import os, torch, baracuda
from baracuda.backends.cpu import threads_in_use
torch.set_num_threads(2)
x, w = torch.ones(2, 300), torch.ones(700, 300, dtype=torch.int8)
expected = baracuda.quantized_linear(x, w, 1.0)
child = os.fork()
if child == 0:  # it has none of its parent's threads
    same = torch.equal(baracuda.quantized_linear(x, w, 1.0), expected)
    os._exit(0 if same and threads_in_use() == "threads started for each call" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(baracuda.quantized_linear(x, w, 1.0), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- 4-bit weights in groups with integer factors ----------------------------------------------------------------


def grouped(n: int, k: int, group: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed weights, their factors, and the s8 weight they stand for, expanded by NumPy."""
    generator = np.random.default_rng(seed)
    q = generator.integers(-8, 8, (n, k))
    factors = generator.integers(1, 16, (n, k // group))
    q[0], factors[0] = -8, 15  # the largest product
    even, odd = q[:, 0::2] & 15, np.zeros((n, (k + 1) // 2), dtype=np.int64)
    odd[:, : k // 2] = q[:, 1::2] & 15
    packed = torch.from_numpy((even | odd << 4).astype(np.uint8))
    expanded = torch.from_numpy((q * factors.repeat(group, axis=1)).astype(np.int8))
    return packed, torch.from_numpy(factors.astype(np.uint8)), expanded


@pytest.mark.parametrize(
    ("k", "group"),
    [(32, 32), (96, 32), (1024, 32), (192, 64), (576, 64), (640, 128), (1536, 512), (480, 96), (108, 36), (99, 33)],
)
@pytest.mark.parametrize("kind", [S8, U8], ids=lambda kind: kind.value)
def test_w4a8_in_groups_is_the_w8a8_linear_of_the_expanded_weight(k: int, group: int, kind: ElementKind) -> None:
    shapes = [(1, 70, ElementKind.F32), (3, 5, ElementKind.F16), (4, 64, ElementKind.BF16), (17, 9, ElementKind.F64)]
    for (m, n, element), mode in itertools.product(shapes, DynamicRangeMode):
        packed, factors, expanded = grouped(n, k, group, m)
        spaced = torch.full((n, factors.shape[1] + 3), 255, dtype=torch.uint8)
        spaced[:, :-3] = factors
        wide = linear(QuantizeKind.QUANTIZED_LINEAR, (m, n, k), element, kind, S8, mode)
        values = list(operands(Case(wide, residual=True)))
        values[1] = expanded
        expected = launch(plan_for(wide, BackendKind.REFERENCE), tuple(values))
        p = linear(QuantizeKind.QUANTIZED_LINEAR, (m, n, k), element, kind, S4, mode, group=group)
        for isa, given, threads in zip(_cpu.isas() * 2, [factors, spaced] * 4, [1, 3, 3, 1] * 2, strict=False):
            _cpu.use_isa(isa)
            torch.set_num_threads(threads)
            values[1], values[6] = packed, given[:, : factors.shape[1]]
            assert_same_bits(launch(plan_for(p), tuple(values)), expected, (isa, m, n, element, mode))


def test_grouped_weights_are_summed_and_unpacked_on_every_instruction_set() -> None:
    packed, factors, expanded = grouped(7, 198, 66, 0)
    native = _cpu.Linear(1, 7, 198, 2, 4, 6, 0, 66)
    for isa in _cpu.isas():
        _cpu.use_isa(isa)
        sums, unpacked = torch.empty(7, dtype=torch.int32), torch.empty(7, 198, dtype=torch.int8)
        weight = packed.data_ptr(), -1, factors.data_ptr(), -1
        native.weight_sums(*weight, sums.data_ptr(), 1)
        native.unpack(*weight, unpacked.data_ptr(), 1)
        assert torch.equal(sums.long(), expanded.long().sum(1)) and torch.equal(unpacked, expanded)


# -- arguments ---------------------------------------------------------------------------------------------------


def test_a_native_linear_with_nonsense_is_refused() -> None:
    quantization = _cpu.Plan(7, 2, 4, 2, -127, 127, False, True, False, 1, 2, 4, 1, 4, 2)
    for wrong in [
        (-1, 1, 1, 2, 4, 4, 0),
        (1, 1, 1, 4, 4, 4, 0),
        (1, 1, 1, 2, 6, 4, 0),
        (1, 1, 1, 2, 4, 5, 0),
        (1, 1, 1, 2, 4, 4, 4),
        (2**40, 2**40, 1, 2, 4, 4, 0),
        (1, 1, 4, 2, 4, 4, 0, 2),
        (1, 1, 4, 2, 4, 6, 0, 3),
        (1, 1, 4, 2, 4, 6, 0, -2),
        (3, 3, 4, 2, 4, 4, 0, 0, quantization),
        (2, 3, 4, 1, 4, 4, 0, 0, quantization),
    ]:
        with pytest.raises((ValueError, TypeError)):
            _cpu.Linear(*wrong)
    linear = _cpu.Linear(2, 3, 4, 2, 4, 4, 0)
    act, weight, out = torch.ones(2, 4, dtype=torch.int8), torch.ones(3, 4, dtype=torch.int8), torch.empty(2, 3)
    workspace = torch.empty(linear.workspace() + 8, dtype=torch.uint8)
    good = (act, 1.0, None, weight, 1.0, None, None, None, None, out)
    for room in (workspace, None):
        linear.launch(good, room)
        assert torch.equal(out, torch.full((2, 3), 4.0))
        out.zero_()
    for position, value in [
        (0, None), (0, act.to("meta")), (1, "one"), (3, None), (4, act.int()), (5, act), (8, act.view(torch.uint8)),
        (9, None),
    ]:  # fmt: skip
        with pytest.raises((ValueError, TypeError, BufferError, RuntimeError)):
            linear.launch((*good[:position], value, *good[position + 1 :]), workspace)
    for given, room in [(good[:9], workspace), (list(good), workspace), (good, workspace[8:]), (good, "room")]:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            linear.launch(given, room)
    scales = (0, 2, 1.0, 0, 0, 0, 2, 1.0, 0, 2, 0, -1)
    for wrong in (scales[:9], (0, 7, *scales[2:]), (*scales[:11], -2)):
        with pytest.raises((ValueError, TypeError)):
            linear.epilogue(out.data_ptr(), wrong, 0, 0, out.data_ptr(), 0, 2, 1)
    with pytest.raises(ValueError, match="address"):
        linear.epilogue(0, scales, 0, 0, out.data_ptr(), 0, 2, 1)
    with pytest.raises(ValueError, match="weight_sum"):
        linear.epilogue(out.data_ptr(), scales, 0, 128, out.data_ptr(), 0, 2, 1)
    for first, rows in ((-1, 1), (0, 3), (2, 1), (3, 0), (1, -1)):
        with pytest.raises(ValueError, match="rows of the output"):
            linear.epilogue(out.data_ptr(), scales, 0, 0, out.data_ptr(), first, rows, 1)
    with pytest.raises(ValueError, match="address"):
        linear.weight_sums(0, -1, 0, -1, out.data_ptr(), 1)
    with pytest.raises(ValueError, match="weight_factor"):
        _cpu.Linear(2, 3, 4, 2, 4, 6, 0, 2).weight_sums(weight.data_ptr(), -1, 0, -1, out.data_ptr(), 1)


def test_rows_that_begin_inside_each_other_are_multiplied_as_they_are() -> None:
    """Windows over a signal, one row for all, a lone row of any stride: the matrix library takes none of them."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randint(-128, 128, (400,), dtype=torch.int8, generator=generator)
    windows, dense = signal.unfold(0, 256, 1), torch.randint(-128, 128, (64, 256), dtype=torch.int8)
    for act, weight in [
        (windows[:20], dense),
        (dense[:20], windows[:64]),
        (dense[:1].expand(20, 256), dense),
        (dense[:20], dense[:1].expand(64, 256)),
        (signal[:256].view(256, 1).t(), dense),
        (dense, signal[:256].view(256, 1).t()),
        (dense[:, :1].contiguous(), dense[:7, :1].contiguous()),
    ]:
        y = baracuda.smoothquant_linear(act, weight, 1.0, 1.0, dtype=torch.float64)
        assert torch.equal(y, (act.long() @ weight.long().t()).double()), (act.stride(), weight.stride())


def test_a_zero_point_that_a_symmetric_problem_did_not_announce_is_summed_exactly() -> None:
    k = 100_000
    p = Problem(QuantizeKind.SMOOTHQUANT_LINEAR, (20, 16, k), ElementKind.F64, ElementKind.S8, -128, 127)
    act, weight = torch.full((20, k), -128, dtype=torch.int8), torch.full((16, k), -128, dtype=torch.int8)
    (y,) = plan_for(p).compute((act, 1.0, 127, weight, 1.0, None, None, None, None))
    assert (y == (-128 - 127) * -128 * k).all()


def test_a_zero_point_in_a_tensor_that_no_activation_can_have_is_the_nearest_that_one_can() -> None:
    act, weight = torch.randint(-128, 128, (2, 3, 5), dtype=torch.int8)
    far, near = (
        baracuda.smoothquant_linear(act, weight, 0.1, 0.1, act_zero_point=torch.tensor([z], dtype=torch.int32))
        for z in (300, 127)
    )
    assert torch.equal(far, near)
