"""How fast a live decoder is: tokens a second of prefill and decode, in turns with other models, and its memory.

The models are transformers' (`generate`, `config`), or anything that is called and generates as they do. Contestants
take turns within a round, so that a noisy moment hits all of them; what to quote are ratios within one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidProblem

#: Steps at the start of a generation that do not count: the prefill, and what is set up on the way.
SKIPPED = 3


def memory(model: nn.Module) -> int:
    """The bytes of a model's parameters and buffers; memory that several of them share counts once."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def prefill(
    models: Mapping[str, nn.Module], batch: int, length: int, *, rounds: int = 5, seconds: float = 20.0
) -> dict[str, float]:
    """Seconds of one `forward` over the prompts."""
    bodies = {name: forward(model, batch, length) for name, model in models.items()}
    return in_turns(bodies, rounds, seconds, device_of(next(iter(models.values()))))


def decode(
    models: Mapping[str, nn.Module],
    batch: int,
    *,
    compiled: bool = False,
    length: int = 32,
    tokens: int = 32,
    rounds: int = 3,
    seconds: float = 20.0,
    options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Seconds of a decode step of `generate`: the median over the steps of a generation, then over the rounds.

    `compiled` is transformers' static cache, with which it compiles the decode step on accelerators. The first
    generation of each model, which compiles, does not count. `options` are further ones of `generate`.
    """
    if tokens <= SKIPPED + 1:
        raise InvalidProblem(f"tokens: expected more than {SKIPPED + 1}, of which {SKIPPED} do not count, got {tokens}")
    times: dict[str, list[float]] = {name: [] for name in models}
    prompts = {name: prompt(model, batch, length) for name, model in models.items()}
    for name, model in models.items():
        step_seconds(model, prompts[name], tokens, compiled, options)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn and time.perf_counter() - start > seconds:
            break
        for name, model in models.items():
            times[name].append(median(step_seconds(model, prompts[name], tokens, compiled, options)))
    return {name: median(each) for name, each in times.items()}


def step_seconds(
    model: nn.Module, ids: Tensor, tokens: int, compiled: bool, options: Mapping[str, Any] | None = None
) -> list[float]:
    """The time of each decode step of one generation, the first few left out; `options` are further ones of it."""
    clock = _Clock()
    given: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **(options or {})}
    if compiled:
        given["cache_implementation"] = "static"
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    with torch.no_grad():
        generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            logits_processor=[clock],
            **given,
        )
    ticks = clock.ticks
    return [after - before for before, after in zip(ticks[SKIPPED - 1 :], ticks[SKIPPED:], strict=False)]


class _Clock:
    """A logits processor that notes when each step's logits are there to be asked for, and changes nothing.

    `generate` waits for the device once a step, to see whether it is finished: the host's clock is the device's.
    """

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ticks.append(time.perf_counter())
        return scores


def forget_compiled(*models: nn.Module) -> None:
    """Start over: the next `generate` compiles for its own sizes, instead of making earlier ones dynamic."""
    for model in models:
        model.__dict__.pop("_compiled_call", None)
    torch._dynamo.reset()


def in_turns(
    bodies: Mapping[str, Callable[[], object]], rounds: int, seconds: float, device: torch.device
) -> dict[str, float]:
    """The median time of each body; at least two rounds, at most `rounds` or, behind `seconds`, no more."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for body in bodies.values():
        body()
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn > 1 and time.perf_counter() - begin > seconds:
            break
        for name, body in bodies.items():
            times[name].append(seconds_of(body, device))
    return {name: median(each) for name, each in times.items()}


def seconds_of(body: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    body()
    wait(device)
    return time.perf_counter() - start


def forward(model: nn.Module, batch: int, length: int) -> Callable[[], object]:
    """What fills the cache with `batch` prompts of `length` tokens and gives one logit row each."""
    ids = prompt(model, batch, length)

    def body() -> object:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return body


def prompt(model: nn.Module, batch: int, length: int) -> Tensor:
    """Random tokens, the same for every model of a vocabulary."""
    config: Any = model.config
    size = int(config.get_text_config().vocab_size)
    ids = torch.randint(0, size, (batch, length), generator=torch.Generator().manual_seed(length))
    return ids.to(device_of(model))


def device_of(model: nn.Module) -> torch.device:
    return next(t.device for t in (*model.parameters(), *model.buffers()))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
