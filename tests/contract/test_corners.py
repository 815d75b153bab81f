"""Every row of the contract's table of corners, by name, on the reference and on whatever `select` chooses here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compute import BACKENDS, compute
from torch import Tensor

import baracuda
from baracuda import (
    Arithmetic,
    BackendKind,
    DynamicRangeMode,
    ElementKind,
    InvalidProblem,
    PerChannel,
    PerGroup,
    PerToken,
    QuantizeKind,
)
from baracuda.backends.registry import choose
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.core.types import MAX_ZERO_POINT

F16, BF16, F32, F64 = FLOATS = [ElementKind[name] for name in ("F16", "BF16", "F32", "F64")]
S8, U8, S4, U4 = INTEGERS = [ElementKind[name] for name in ("S8", "U8", "S4", "U4")]
NAN, INF = float("nan"), float("inf")
ASYMMETRIC, SYMMETRIC = DynamicRangeMode.ASYMMETRIC, DynamicRangeMode.SYMMETRIC
QUIET_NAN = {F16: 0x7E00, BF16: 0x7FC0, F32: 0x7FC00000, F64: 0x7FF8000000000000}
FLOOR = {F16: 2.0**-24, BF16: 2.0**-126, F32: 2.0**-126, F64: 2.0**-1022}

both_backends = pytest.mark.parametrize("backend", BACKENDS, ids=str)
every_float = pytest.mark.parametrize("element", FLOATS, ids=str)
every_integer = pytest.mark.parametrize("kind", INTEGERS, ids=str)


def quantize(
    x: list[float], element: ElementKind, backend: BackendKind | None, kind: ElementKind = S8, **given: Any
) -> list[int]:
    operands = {"input": torch.tensor(x, dtype=torch.float64).to(element.dtype), "scale": given.pop("scale", 1.0)}
    operands["zero_point"] = given.pop("zero_point", None)
    q = compute(QuantizeKind.QUANTIZE, (len(x),), element, kind, backend=backend, operands=operands, **given)["output"]
    return (baracuda.unpack_int4(q, kind, len(x)) if kind.is_packed else q).tolist()


def fake(x: list[float], element: ElementKind, backend: BackendKind | None, scale: Any = 1.0, **given: Any) -> Tensor:
    operands = {"input": torch.tensor(x, dtype=torch.float64).to(element.dtype), "scale": scale}
    operands["zero_point"] = given.pop("zero_point", None)
    return compute(QuantizeKind.FAKE_QUANTIZE, (len(x),), element, backend=backend, operands=operands, **given)[
        "output"
    ]


def dynamic(x: Tensor, backend: BackendKind | None, kind: ElementKind = S8, **fields: Any) -> dict[str, Tensor]:
    fields.setdefault("scope", PerToken())
    element = ElementKind.of(x.dtype)
    fields.setdefault("scale_element", F64 if element is F64 else F32)
    return compute(
        QuantizeKind.DYNAMIC_QUANTIZE, tuple(x.shape), element, kind, backend=backend, operands={"input": x}, **fields
    )


@both_backends
@every_float
@every_integer
@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_nan_becomes_q_min(
    kind: ElementKind, element: ElementKind, arithmetic: Arithmetic, backend: BackendKind | None
) -> None:
    assert quantize([NAN, -NAN, NAN], element, backend, kind, arithmetic=arithmetic) == [kind.q_min] * 3
    assert quantize([NAN], element, backend, kind, zero_point=3, arithmetic=arithmetic) == [kind.q_min]
    assert quantize([NAN], element, backend, q_min=-5, q_max=4, arithmetic=arithmetic) == [-5]


@both_backends
@every_float
def test_zero_over_zero_and_infinity_over_infinity_become_q_min(
    element: ElementKind, backend: BackendKind | None
) -> None:
    zero, infinity = (torch.tensor(v, dtype=element.math.dtype) for v in (0.0, INF))
    assert quantize([0.0, -0.0], element, backend, scale=zero) == [-128, -128]
    assert quantize([INF, -INF], element, backend, scale=infinity, zero_point=9) == [-128, -128]


@both_backends
@every_float
@every_integer
def test_infinite_and_huge_values_saturate(
    kind: ElementKind, element: ElementKind, backend: BackendKind | None
) -> None:
    big = torch.finfo(element.dtype).max
    ends = [kind.q_max, kind.q_min] * 2
    assert quantize([INF, -INF, big, -big], element, backend, kind, scale=0.001) == ends
    assert quantize([INF, -INF, big, -big], element, backend, kind, scale=0.001, zero_point=kind.q_max) == ends


@both_backends
@every_float
def test_minus_zero_quantizes_to_the_zero_point_and_comes_back_positive(
    element: ElementKind, backend: BackendKind | None
) -> None:
    assert quantize([-0.0], element, backend, zero_point=7) == [7]
    assert not fake([-0.0, -0.3, 0.0], element, backend).signbit().any()
    assert not fake([-0.0, -0.3], element, backend, zero_point=7).signbit().any()


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, -INF, 1e-60, 1e60, True, "1"], ids=str)
@pytest.mark.parametrize("op", [QuantizeKind.QUANTIZE, QuantizeKind.FAKE_QUANTIZE], ids=str)
def test_a_number_as_scale_must_be_finite_and_positive(op: QuantizeKind, scale: object) -> None:
    with pytest.raises(InvalidProblem, match=r"scale: expected a number that is finite and > 0"):
        compute(op, (1,), F32, operands={"input": torch.ones(1), "scale": scale})


@both_backends
@every_float
def test_a_tensor_as_scale_follows_the_formula(element: ElementKind, backend: BackendKind | None) -> None:
    def q(x: list[float], scale: float) -> list[int]:
        return quantize(x, element, backend, scale=torch.tensor(scale, dtype=element.math.dtype), zero_point=1)

    assert q([2.0, -2.0, 0.0], 0.0) == [127, -128, -128]
    assert q([2.0, -2.0, 0.0], -0.5) == [-3, 5, 1]
    assert q([2.0, -2.0, INF], INF) == [1, 1, -128]
    assert q([2.0, -2.0, 0.0], NAN) == [-128] * 3


@both_backends
def test_a_number_as_zero_point_outside_its_limit_is_an_error_and_a_tensor_is_clamped(
    backend: BackendKind | None,
) -> None:
    assert MAX_ZERO_POINT == 2**24 - 256
    for wrong in (2**24 - 255, -(2**24) + 255, 2**31):
        with pytest.raises(InvalidProblem, match=r"zero_point: expected an integer in \[-16776960, 16776960\]"):
            quantize([1.0], F32, backend, zero_point=wrong)
    x = [float(-MAX_ZERO_POINT), float(MAX_ZERO_POINT)]
    for extreme in (2**31 - 1, -(2**31)):
        limit = math.copysign(MAX_ZERO_POINT, extreme)
        tensor = torch.tensor(extreme, dtype=torch.int32)
        assert quantize(x, F32, backend, zero_point=tensor) == quantize(x, F32, backend, zero_point=int(limit))
    assert quantize(x, F32, backend, zero_point=MAX_ZERO_POINT) == [0, 127]
    assert quantize(x, F32, backend, zero_point=-MAX_ZERO_POINT) == [-128, 0]


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [(S8, 5, 4), (S8, -129, 127), (U8, -1, 255), (U8, 0, 256), (S4, -9, 7), (U4, 0, 16)],
    ids=str,
)
def test_a_range_must_be_ordered_and_inside_the_storage_type(kind: ElementKind, low: int, high: int) -> None:
    with pytest.raises(InvalidProblem, match=rf"expected q_min .*{low}.*{high}"):
        quantize([1.0], F32, BackendKind.REFERENCE, kind, q_min=low, q_max=high)


@both_backends
@pytest.mark.parametrize("stored", [F16, BF16], ids=str)
def test_a_stored_scale_is_rounded_first_and_the_quantization_uses_what_is_stored(
    stored: ElementKind, backend: BackendKind | None
) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(stored.dtype)
    out = dynamic(x, backend, q_min=-127, scale_element=stored)
    exact = x.abs().amax(-1).float() / torch.tensor(127.0)
    assert out["scale_out"].dtype is stored.dtype
    assert torch.equal(out["scale_out"], exact.to(stored.dtype))
    with_stored = (x.float() / out["scale_out"].float()[:, None]).round().clamp(-127, 127)
    with_exact = (x.float() / exact[:, None]).round().clamp(-127, 127)
    assert torch.equal(out["output"].float(), with_stored)
    assert not torch.equal(with_stored, with_exact)


@both_backends
@pytest.mark.parametrize(
    ("element", "stored"), [(F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), (F32, F32), (F64, F64)]
)
def test_a_stored_scale_is_floored(element: ElementKind, stored: ElementKind, backend: BackendKind | None) -> None:
    smallest = {F16: 2.0**-24, BF16: 2.0**-133, F32: 2.0**-149, F64: 2.0**-1074}[element]
    x = torch.tensor([[smallest, -smallest]], dtype=torch.float64).to(element.dtype)
    out = dynamic(x, backend, q_min=-127, scale_element=stored)
    expected = max(smallest / 127, FLOOR[stored])
    if element is F16 and stored is F32:
        expected = float(torch.tensor(smallest) / torch.tensor(127.0))
    assert out["scale_out"].tolist() == [expected]


@every_float
def test_the_scales_storage_type_is_f32_or_the_inputs_own(element: ElementKind) -> None:
    x = torch.ones(2, 3, dtype=element.dtype)
    assert baracuda.dynamic_quantize(x).scale.dtype is (torch.float64 if element is F64 else torch.float32)
    assert baracuda.dynamic_quantize(x, scale_dtype=element).scale.dtype is element.dtype
    for accepted in {element.dtype, torch.float32}:
        assert baracuda.quantize(x, torch.tensor(1.0, dtype=accepted)).tolist() == [[1] * 3] * 2
    other = torch.float16 if element is not F16 else torch.bfloat16
    with pytest.raises(InvalidProblem, match=f"scale: expected .*got {other}"):
        baracuda.quantize(x, torch.tensor(1.0, dtype=other))


@both_backends
@every_float
@every_integer
def test_an_all_zero_segment_has_scale_one(
    kind: ElementKind, element: ElementKind, backend: BackendKind | None
) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0]], dtype=element.dtype)
    out = dynamic(x, backend, kind)
    assert out["scale_out"].tolist() == [1.0]
    assert integers(out["output"], kind, 3) == [[0, 0, 0]]
    out = dynamic(x, backend, kind, mode=ASYMMETRIC)
    assert (out["scale_out"].tolist(), out["zero_point_out"].tolist()) == ([1.0], [kind.q_min])
    assert integers(out["output"], kind, 3) == [[kind.q_min] * 3]


def integers(q: Tensor, kind: ElementKind, size: int) -> list[Any]:
    return (baracuda.unpack_int4(q, kind, size) if kind.is_packed else q).tolist()


@both_backends
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)], ids=str)
def test_an_empty_segment_has_scale_one(shape: tuple[int, int], backend: BackendKind | None) -> None:
    for mode, zero_point in ((SYMMETRIC, 0), (ASYMMETRIC, -128)):
        out = dynamic(torch.empty(shape), backend, mode=mode, scope=PerChannel(0))
        assert out["scale_out"].tolist() == [1.0] * shape[0]
        if mode is ASYMMETRIC:
            assert out["zero_point_out"].tolist() == [zero_point] * shape[0]


@both_backends
@every_float
@pytest.mark.parametrize("value", [-3.7, 3.7, 1e-4, -60000.0, 0.1])
def test_a_constant_segment_dequantizes_to_exactly_itself(
    value: float, element: ElementKind, backend: BackendKind | None
) -> None:
    x = torch.full((1, 5), value, dtype=element.dtype)
    out = dynamic(x, backend, mode=ASYMMETRIC)
    assert out["scale_out"].tolist() == x[:, 0].abs().tolist()
    back = (out["output"].double() - out["zero_point_out"].double()[:, None]) * out["scale_out"].double()[:, None]
    assert torch.equal(back, x.double())


@both_backends
@every_float
def test_include_zero_is_off_unless_asked_for(element: ElementKind, backend: BackendKind | None) -> None:
    x = torch.tensor([[5.0, 10.0]], dtype=element.dtype)
    off, on = (dynamic(x, backend, mode=ASYMMETRIC, include_zero=flag) for flag in (False, True))
    assert off["scale_out"].item() == pytest.approx(5 / 255)
    assert off["zero_point_out"].item() == -128 - 255
    assert on["scale_out"].item() == pytest.approx(10 / 255)
    assert on["zero_point_out"].item() == -128
    assert off["output"].tolist() == [[-128, 127]]


@both_backends
@pytest.mark.parametrize("element", [F16, BF16], ids=str)
def test_zero_stays_inside_whatever_its_scale_was_rounded_to(element: ElementKind, backend: BackendKind | None) -> None:
    x = -torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 0
    x = (x * (2.0**-16 if element is F16 else 200)).to(element.dtype)
    fields = {"mode": ASYMMETRIC, "include_zero": True, "scale_element": element, "q_min": -127, "q_max": 127}
    out = dynamic(x, backend, **fields)
    assert out["zero_point_out"].max() == 127
    assert torch.equal(out["output"][:, 1].to(torch.int32), out["zero_point_out"])  # zero comes back as zero


@both_backends
@pytest.mark.parametrize("element", [F32, F64], ids=str)
def test_include_zero_turns_itself_on_far_from_zero(element: ElementKind, backend: BackendKind | None) -> None:
    near = torch.tensor([[16384.0, 16385.0]], dtype=element.dtype)  # 16384 * 255 < 2**22
    far = torch.tensor([[16512.0, 16513.0]], dtype=element.dtype)  # 16512 * 255 > 2**22
    out = dynamic(torch.cat([near, far, -far.flip(1)]), backend, mode=ASYMMETRIC)
    assert out["scale_out"].tolist() == pytest.approx([1 / 255, 16513 / 255, 16513 / 255])
    assert out["zero_point_out"].tolist() == [-128 - 16384 * 255, -128, 127]
    assert out["output"].tolist() == [[-128, 127], [127, 127], [-128, -128]]


@both_backends
@every_float
@pytest.mark.parametrize("mode", DynamicRangeMode)
@pytest.mark.parametrize("position", [0, 3, 6])
def test_nan_in_a_dynamic_segment_poisons_that_segment_alone(
    position: int, mode: DynamicRangeMode, element: ElementKind, backend: BackendKind | None
) -> None:
    x = torch.tensor([[1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0]] * 2, dtype=element.dtype)
    x[0, position] = NAN
    out = dynamic(x, backend, mode=mode)
    assert out["scale_out"].isnan().tolist() == [True, False]
    assert out["output"][0].tolist() == [-128] * 7
    assert out["output"][1].max() == 127


@both_backends
@every_float
@pytest.mark.parametrize("mode", DynamicRangeMode)
@pytest.mark.parametrize("infinity", [INF, -INF])
def test_infinity_in_a_dynamic_segment_gives_an_infinite_scale(
    infinity: float, mode: DynamicRangeMode, element: ElementKind, backend: BackendKind | None
) -> None:
    out = dynamic(torch.tensor([[1.0, infinity, -2.0]], dtype=element.dtype), backend, mode=mode)
    assert out["scale_out"].tolist() == [INF]


@both_backends
@pytest.mark.parametrize("element", [BF16, F32, F64], ids=str)
def test_an_overflowing_range_is_halved(element: ElementKind, backend: BackendKind | None) -> None:
    big = torch.finfo(element.dtype).max
    out = dynamic(torch.tensor([[-big, big]], dtype=element.dtype), backend, mode=ASYMMETRIC)
    assert out["scale_out"].item() == pytest.approx(big / 127.5)
    # Both ends are half a step from an integer, so the last bit of the scale decides whether 127 or 126 is nearer.
    assert out["output"].tolist() in ([[-128, 127]], [[-128, 126]])


@both_backends
@every_float
@pytest.mark.parametrize("mode", DynamicRangeMode)
def test_a_linear_over_no_elements_writes_zeros_and_bias(
    mode: DynamicRangeMode, element: ElementKind, backend: BackendKind | None
) -> None:
    stored = F64 if element is F64 else F32
    operands = {"weight_q": torch.empty(2, 0, dtype=torch.int8), "weight_scale": torch.ones(2, dtype=stored.dtype)}
    operands["activation"] = torch.empty(3, 0, dtype=element.dtype)
    for bias, row in ((None, [0.0, 0.0]), (torch.tensor([1.5, -2.0], dtype=element.dtype), [1.5, -2.0])):
        given = {**operands, "bias": bias}
        fields = {"mode": mode, "scale_element": stored, "backend": backend, "operands": given}
        out = compute(QuantizeKind.QUANTIZED_LINEAR, (3, 2, 0), element, **fields)
        assert out["output"].tolist() == [row] * 3


@both_backends
@pytest.mark.parametrize(("kind", "mode"), [(S8, SYMMETRIC), (U8, SYMMETRIC), (U8, ASYMMETRIC)], ids=str)
def test_sums_beyond_int32_are_exact_or_declined(
    kind: ElementKind, mode: DynamicRangeMode, backend: BackendKind | None
) -> None:
    k = 140_000  # 255 * 128 * 140000 > 2**31
    value, zero_point = kind.q_min if kind is S8 else kind.q_max, int(mode is ASYMMETRIC)
    act, weight = torch.full((1, k), value, dtype=kind.dtype), torch.full((1, k), -128, dtype=torch.int8)
    # One odd product makes the sum odd, which no float of fewer bits holds.
    act[0, 0], weight[0, 0] = 2 * (value // 2) - 1 + zero_point if kind is U8 else -127, -127
    operands = {
        "act_q": act,
        "act_scale": 1.0,
        "act_zero_point": 1 if zero_point else None,
        "weight_q": weight,
        "weight_scale": 1.0,
    }
    out = compute(QuantizeKind.SMOOTHQUANT_LINEAR, (1, 1, k), F64, kind, mode=mode, backend=backend, operands=operands)
    total = (value - zero_point) * -128 * (k - 1) + (int(act[0, 0]) - zero_point) * -127
    assert total % 2 and out["output"].item() == total


@both_backends
@pytest.mark.parametrize(
    ("kind", "values", "stored"), [(S4, [-8, 7, -1], [0x78, 0x0F]), (U4, [0, 15, 9], [0xF0, 0x09])], ids=str
)
def test_4_bits_are_twos_complement_pairs_with_the_even_index_low_and_a_zero_tail(
    kind: ElementKind, values: list[int], stored: list[int], backend: BackendKind | None
) -> None:
    operands = {"input": torch.tensor([values, values], dtype=torch.float32), "scale": 1.0}
    out = compute(QuantizeKind.QUANTIZE, (2, 3), F32, kind, backend=backend, operands=operands)["output"]
    assert out.tolist() == [stored, stored]
    operands = {"input": torch.tensor([stored, stored], dtype=torch.uint8), "scale": 1.0}
    out = compute(QuantizeKind.DEQUANTIZE, (2, 3), F32, kind, backend=backend, operands=operands)["output"]
    assert out.tolist() == [values, values]


@both_backends
def test_a_group_must_divide_its_axis_and_may_be_of_size_one(backend: BackendKind | None) -> None:
    with pytest.raises(InvalidProblem, match=r"size=4.*axis 1 has 10 elements, not a multiple of 4"):
        dynamic(torch.ones(2, 10), backend, scope=PerGroup(4))
    out = dynamic(torch.tensor([[1.0, -127.0]]), backend, q_min=-127, scope=PerGroup(1))
    assert out["output"].tolist() == [[127, -127]]
    assert out["scale_out"].shape == (1, 2)


@both_backends
@pytest.mark.parametrize("op", [op for op, row in OPS.items() if row.elementwise], ids=str)
def test_empty_tensors_are_fine(op: QuantizeKind, backend: BackendKind | None) -> None:
    x = torch.empty(0, 4)
    operands = {"input": x, "grad_output": x, "scale": 1.0}
    if op in (QuantizeKind.DEQUANTIZE, QuantizeKind.DEQUANTIZE_BACKWARD):
        operands["input"] = torch.empty(0, 4, dtype=torch.int8)
    (out,) = compute(op, (0, 4), F32, backend=backend, operands=operands).values()
    assert out.shape == (0, 4)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements_work() -> None:
    n = 2**31 + 3
    problem = Problem(QuantizeKind.QUANTIZE, (n,), F16, S8, -128, 127)
    if choose(problem, torch.device("cpu")).backend is BackendKind.REFERENCE:
        pytest.skip("the reference holds ten copies of the tensor in f32 and int32")
    x = torch.zeros(n, dtype=torch.float16)
    x[-1], x[2**31] = 5.0, -7.0
    q = baracuda.quantize(x, 1.0)
    assert (q[-1].item(), q[2**31].item(), q[0].item()) == (5, -7, 0)


@both_backends
@every_float
def test_nan_in_an_output_is_the_canonical_quiet_nan(element: ElementKind, backend: BackendKind | None) -> None:
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[element.dtype.itemsize]
    quiet = torch.tensor(QUIET_NAN[element]).to(signed).item()
    odd = torch.tensor([-1, quiet + 1], dtype=signed).view(element.dtype)  # negative, and with a payload
    operands = {"input": torch.zeros(2, dtype=element.dtype), "grad_output": odd, "scale": 1.0}
    for op in (QuantizeKind.FAKE_QUANTIZE_BACKWARD, QuantizeKind.QUANTIZE_BACKWARD, QuantizeKind.DEQUANTIZE_BACKWARD):
        given = dict(operands, input=None) if op is QuantizeKind.DEQUANTIZE_BACKWARD else operands
        out = compute(op, (2,), element, backend=backend, operands=given)["grad_input"]
        assert out.view(signed).tolist() == [quiet] * 2
    poison = torch.tensor(-NAN, dtype=element.math.dtype)
    out = fake([1.0, 2.0], element, backend, poison)
    assert out.view(signed).tolist() == [quiet] * 2
    scale = dynamic(odd[None], backend, scale_element=element)["scale_out"]
    assert scale.view(signed).tolist() == [quiet]
