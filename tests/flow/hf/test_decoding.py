"""A compiled `generate` that looks a step late whether a text has ended: whose models, and the tokens that come out.

On the CPU the device that may be late is the CPU, and its events are of ours; tests/gpu has the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch

import baracuda
from baracuda.flow.hf import decoding

transformers = pytest.importorskip("transformers")
utils = pytest.importorskip("transformers.generation.utils")
pytestmark = pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="transformers before 5.17 has no check that may be late"
)
TOKENS = 12


class Event:
    """What a CPU has none of: all that was asked for is there already."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checks that are made, by their names; those on a CPU may be late."""
    made: list[str] = []
    for name in ("StopCheck", "DeferredStopCheck"):
        real = getattr(utils, name)

        class Noted(real):  # type: ignore[misc]
            def __init__(self, *args: Any, _name: str = name, **options: Any) -> None:
                made.append(_name)
                super().__init__(*args, **options)

        monkeypatch.setattr(utils, name, Noted)
    monkeypatch.setattr(decoding, "_DEVICES", {"cpu"})
    monkeypatch.setattr(torch, "Event", Event)
    return made


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> Any:
    built = models.build("llama")
    baracuda.quantize_model(built, "w8a8", ignore=["lm_head"], merge=True, fuse=True)
    return built


class Streamer:
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = False

    def put(self, tokens: torch.Tensor) -> None:
        self.got.append(tokens.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


def compiled() -> dict[str, Any]:
    """What makes `generate` compile a step here; the compiler has no part in the tests."""
    config = transformers.CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def generated(model: Any, batch: int = 1, **options: Any) -> Any:
    ids = models.prompt()[:batch, :7]
    torch.manual_seed(0)
    given = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, **compiled(), **options}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **given)


def both(model: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """What comes out late, and as transformers does it."""
    checks.clear()
    late = generated(model, **options)
    assert checks == ["DeferredStopCheck"]
    with monkeypatch.context() as patch:
        patch.setenv("BARACUDA_TRANSFORMERS", "0")
        theirs = generated(model, **options)
    assert checks[1:] == ["StopCheck"]
    return late, theirs


@pytest.mark.parametrize("end", [0, 1, 5, TOKENS - 1, None])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_tokens_are_those_of_a_check_in_time(
    model: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch, batch: int, end: int | None
) -> None:
    """A text ends at its first token, in the middle, at the last that is asked for, or never."""
    free = generated(model, batch)
    eos = {} if end is None else {"eos_token_id": sorted({int(row[7 + end]) for row in free})}
    late, theirs = both(model, checks, monkeypatch, batch=batch, **eos)
    assert torch.equal(late, theirs)
    if batch == 1 and end is not None:
        first = next(i for i, token in enumerate(free[0, 7:].tolist()) if token in eos["eos_token_id"])
        assert late.shape[1] == 7 + first + 1


def test_sampled_tokens_are_those_of_a_check_in_time(
    model: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eos = int(generated(model, do_sample=True)[0, 7 + 4])
    late, theirs = both(model, checks, monkeypatch, do_sample=True, eos_token_id=eos)
    assert torch.equal(late, theirs) and late.shape[1] <= 7 + 5


def test_a_cache_that_is_handed_out_has_no_step_too_many(model: Any, checks: list[str]) -> None:
    """A static cache cannot undo a step, so the check is in time: transformers' own condition."""
    generated(model, return_dict_in_generate=True)
    assert checks == ["StopCheck"]


def test_a_streamer_gets_every_token_once(model: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    eos = int(generated(model)[0, 7 + 5])
    got = []
    for value in ("1", "0"):
        monkeypatch.setenv("BARACUDA_TRANSFORMERS", value)
        streamer = Streamer()
        generated(model, streamer=streamer, eos_token_id=eos)
        assert streamer.ended
        got.append(streamer.got)
    assert got[0] == got[1] and len(got[0]) >= 2
    assert checks[1:] == ["DeferredStopCheck", "StopCheck"]


def test_float_models_are_checked_as_ever_unless_they_are_marked(checks: list[str]) -> None:
    floats = models.build("llama")
    generated(floats)
    floats.__dict__[decoding.MARK] = True
    generated(floats)
    assert checks == ["StopCheck", "DeferredStopCheck"]


def test_weight_only_linears_count(checks: list[str]) -> None:
    packed = models.build("llama")
    models.pack(packed)
    generated(packed)
    assert checks == ["DeferredStopCheck"]


def test_other_devices_are_checked_as_ever(model: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_DEVICES", {"cuda"})
    generated(model)
    assert checks == ["StopCheck"]


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": None}, {"cache_implementation": None, "compile_config": None}, {"disable_compile": True}],
    ids=["dynamic", "plain", "disabled"],
)
def test_steps_that_are_not_compiled_are_checked_as_ever(
    model: Any, checks: list[str], options: dict[str, Any]
) -> None:
    generated(model, **options)
    assert checks == ["StopCheck"]


def test_processes_that_step_together_are_checked_as_ever(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = decoding._sampling(lambda self, *args, **kwargs: decoding._loop.late)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)
    assert asked(model, generation_config=model.generation_config) is True
    assert asked(model, generation_config=model.generation_config, synced_gpus=True) is False
    assert decoding._loop.late is False


def test_an_error_inside_leaves_the_thread_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, **options: Any) -> None:
        raise ValueError(f"late: {decoding._loop.late}")

    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)
    with pytest.raises(ValueError, match="late: True"):
        decoding._sampling(fails)(model, generation_config=model.generation_config)
    assert decoding._loop.late is False


def test_it_is_installed_once() -> None:
    before = utils.GenerationMixin._sample, utils.DeferredStopCheck.is_supported
    decoding.install()
    assert (utils.GenerationMixin._sample, utils.DeferredStopCheck.is_supported) == before
    assert hasattr(utils.GenerationMixin._sample, "theirs")
