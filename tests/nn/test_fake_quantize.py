"""FakeQuantize and its observers: the ranges they see, the scales they keep, and the gradients that pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import baracuda
from baracuda import PerChannel, PerGroup, PerTensor, PerToken, Scope
from baracuda.nn import FakeQuantize, MinMax, MovingAverage, Percentile

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS: list[tuple[Scope, tuple[int, ...]]] = [
    (PerTensor(), ()), (PerChannel(1), (8,)), (PerToken(), (6,)), (PerGroup(4), (6, 2)), (PerGroup(3, axis=0), (2, 8))
]  # fmt: skip


@pytest.mark.parametrize(("scope", "shape"), LAYOUTS, ids=str)
def test_min_max_is_the_range_of_everything_seen(scope: Scope, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(6, 8) for _ in range(3)]
    fake = FakeQuantize("static", scope, shape, observer=MinMax)
    for x in batches:
        fake(x)
    assert isinstance(fake.observer, MinMax)
    largest = torch.stack(batches).abs().amax(dim=0)
    expected, _ = baracuda.choose_qparams(largest, scope=scope)
    assert torch.equal(fake.scale, expected)
    fake.eval()(torch.full((6, 8), 1e6))
    assert torch.equal(fake.scale, expected), "eval() must not observe"


def test_a_moving_average_starts_at_the_first_batch_and_moves_by_its_momentum() -> None:
    observer = MovingAverage(momentum=0.25)
    observer(torch.tensor([-1.0, 2.0]))
    assert [end.item() for end in observer.range()] == [-1.0, 2.0]
    observer(torch.tensor([-5.0, 10.0]))
    assert [end.item() for end in observer.range()] == [-2.0, 4.0]


@pytest.mark.parametrize(("scope", "shape"), LAYOUTS, ids=str)
def test_a_percentile_leaves_outliers_out(scope: Scope, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    observer, seen = Percentile(scope, shape, percentile=98.0), []
    for i in range(60):
        x = torch.randn(6, 8) * (1 + i / 60)
        if i == 30:
            x[0, 0] = 500.0
        observer(x)
        seen.append(x)
    low, high = observer.range()
    assert int(observer.counts.sum()) == 60 * 48
    view = scope.view((6, 8)).shape
    values = torch.stack(seen).view(60, *view).permute(2, 4, 0, 1, 3).reshape(max(1, low.numel()), -1)
    width, spare = (2 * observer.limit / observer.bins).view(-1, 1), int(values.shape[1] * 0.01)
    for end, sign in ((low, 1), (high, -1)):
        limit = end.reshape(-1, 1)
        assert ((sign * values < sign * limit).sum(dim=1) <= spare).all()
        assert ((sign * values < sign * limit + width).sum(dim=1) > spare).all(), "a bin less would do"
    assert high.max() < 10


def test_a_histogram_of_everything_is_the_range() -> None:
    observer = Percentile(percentile=100.0)
    observer(torch.tensor([-3.0, 0.5]))
    observer(torch.tensor([7.0, float("nan"), 40.0]))
    assert int(observer.counts.sum()) == 4


@pytest.mark.parametrize("observer", [MinMax, MovingAverage, Percentile])
@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_a_static_scale_is_nan_until_something_was_seen_and_after_a_nan(mode: str, observer: type[Any]) -> None:
    x, poison = torch.tensor([0.2, 0.7, 1.6]), torch.tensor([0.2, float("nan")])
    fake = FakeQuantize("static", mode=mode, observer=observer)
    assert fake.eval()(x).isnan().all()
    fake.train()(x[:0])
    assert fake.eval()(x).isnan().all(), "an empty batch says nothing"
    assert fake.train()(x).isfinite().all() and fake.eval()(x).isfinite().all()
    restored = FakeQuantize("static", mode=mode, observer=observer).eval()
    restored.load_state_dict(fake.state_dict())
    assert torch.equal(restored(x), fake(x))
    assert fake.train()(poison).isnan().all() and fake.eval()(x).isnan().all()


def test_an_observer_names_the_shapes_it_did_not_expect() -> None:
    with pytest.raises(baracuda.InvalidProblem, match=r"scales of shape \[3\], got \[2, 4\] with \[4\]"):
        MinMax(PerChannel(1), (3,))(torch.randn(2, 4))


def test_fake_quantize_static_dynamic_and_learned_are_the_function() -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 8)
    for scope, shape in LAYOUTS:
        for mode in ("symmetric", "asymmetric"):
            scale, zero_point = baracuda.choose_qparams(x, scope=scope, mode=mode, include_zero=mode == "asymmetric")
            low = -127 if mode == "symmetric" else -128
            expected = baracuda.fake_quantize(x, scale, zero_point, scope=scope, q_min=low)
            for strategy in ("static", "dynamic", "learned"):
                fake = FakeQuantize(strategy, scope, shape, mode=mode)  # type: ignore[arg-type]
                assert torch.equal(fake(x), expected), (strategy, scope, mode)
                assert torch.equal(fake.eval()(x), expected), (strategy, scope, mode)
                fake.enabled = False
                assert fake(x) is x


def test_a_learned_fake_quantize_learns_to_lessen_its_error() -> None:
    torch.manual_seed(4)
    x = torch.randn(512)
    x[0] = 30.0
    fake = FakeQuantize("learned", element="s8", q_min=-8, q_max=7)
    before = (fake(x) - x).square().mean()
    optimizer = torch.optim.Adam(fake.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        (fake(x) - x).abs().mean().backward()
        optimizer.step()
    assert (fake(x)[1:] - x[1:]).square().mean() < 0.3 * before
    restored = FakeQuantize("learned", q_min=-8, q_max=7)
    restored.load_state_dict(fake.state_dict())
    assert restored.initialised and torch.equal(restored(x), fake(x))


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_a_backward_may_come_after_the_next_forward(mode: str) -> None:
    x, y = torch.randn(64, requires_grad=True), 3 * torch.randn(64)
    fake = FakeQuantize("static", mode=mode)
    first = fake(x)
    scale, zero_point = fake.scale.clone(), None if fake.zero_point is None else fake.zero_point.clone()
    (first.sum() + fake(y).sum()).backward()
    alone = x.detach().requires_grad_()
    baracuda.fake_quantize(alone, scale, zero_point).sum().backward()
    assert x.grad is not None and alone.grad is not None and torch.equal(x.grad, alone.grad)


def test_a_learned_scale_that_was_copied_in_is_kept() -> None:
    taught, student = FakeQuantize("learned"), FakeQuantize("learned")
    taught(torch.randn(64))
    with torch.no_grad():
        student.scale.copy_(taught.scale)
    student(100 * torch.randn(64))
    assert student.initialised and torch.equal(student.scale, taught.scale)


def test_an_empty_batch_teaches_a_learned_scale_nothing() -> None:
    fake = FakeQuantize("learned")
    assert fake(torch.empty(0)).shape == (0,) and not fake.initialised
    fake(torch.full((3,), 1.27))
    assert fake.scale.item() == pytest.approx(0.01)


def test_fake_quantize_keeps_its_types_when_the_model_changes_its_own() -> None:
    for strategy in ("static", "learned"):
        fake = FakeQuantize(strategy)  # type: ignore[arg-type]
        fake(torch.randn(100))
        before = fake.scale.detach().clone()
        fake.to(torch.bfloat16)
        assert fake.scale.dtype is torch.float32 and torch.equal(fake.scale, before)
        assert fake(torch.randn(5, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dynamic_symmetric_range_clips_nothing_so_its_gradient_passes_whole(dtype: torch.dtype) -> None:
    """What the shortcut through the backward relies on, for many ranges, tiny ones included."""
    torch.manual_seed(5)
    for exponent in range(-24, 14, 2):
        x = (torch.randn(64, 32, dtype=torch.float64) * 2.0**exponent).to(dtype).requires_grad_()
        scale, _ = baracuda.choose_qparams(x)
        dy = torch.ones_like(x)
        baracuda.fake_quantize(x, scale, scope=PerToken(), q_min=-127).backward(dy)
        assert x.grad is not None and torch.equal(x.grad, dy)
        x.grad = None
        FakeQuantize("dynamic", PerToken())(x).backward(dy)
        assert torch.equal(x.grad, dy)


def test_scales_and_ranges_are_f32_whatever_the_default_type_is() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        for observer in (MinMax, MovingAverage, Percentile):
            module = FakeQuantize("static", observer=observer).train()
            for _ in range(3):
                module(torch.rand(100) * 2.8 - 1.4)
            kept = {name: value.dtype for name, value in module.named_buffers() if value.is_floating_point()}
            assert set(kept.values()) == {torch.float32} and 0.9 < module.scale.item() * 127 <= 1.4, kept
    finally:
        torch.set_default_dtype(before)


def test_a_learned_scale_keeps_its_type_its_gradient_and_what_is_loaded_into_it() -> None:
    module = FakeQuantize("learned")
    module(torch.randn(8)).sum().backward()
    assert module.half().scale.dtype is torch.float32
    assert module.scale.grad is not None and module.scale.grad.dtype is torch.float32
    stored = {name: value.half() for name, value in module.state_dict().items()}
    module.load_state_dict(stored, assign=True)
    assert module.scale.dtype is torch.float32 and torch.equal(module.scale.half(), stored["scale"])
    module(torch.randn(8))
