"""GPTQ block by block: better than rounding to nearest, and the same bytes however it is run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import baracuda
from baracuda.flow import quantize_checkpoint, verify
from baracuda.flow.errors import FlowError
from baracuda.flow.hf.blocks import Chain, find_chain
from baracuda.flow.run import sequential
from baracuda.flow.run.paused import PausedBatches
from baracuda.nn import QuantizedLinear

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

#: What each scheme takes besides its name; groups of 32 divide all layers of the small models.
SCHEMES: dict[str, dict[str, Any]] = {
    "w4a16": {"group_size": 32},
    "w4a8": {"group_size": 32},
    "w8a8": {},
    "w8a8-static": {},
}
LENGTH = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tokens(tmp_path_factory.mktemp("data") / "tokens.safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "model"
    models.save("llama", directory, torch.bfloat16)
    return directory


def quantize(source: Path, out: Path, data: Path, scheme: str = "w4a16", **options: Any) -> dict[str, Any]:
    chosen = {"method": "gptq", "calibration": data, "sequence_length": LENGTH, **SCHEMES[scheme], **options}
    return quantize_checkpoint(source, out, scheme=scheme, **chosen)


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "opt", "mixtral"])
def test_gptq_is_nearer_the_float_model_than_rounding_to_nearest(name: str, data: Path, tmp_path: Path) -> None:
    if name == "mixtral":
        models.needs_readable_experts()
    models.save(name, tmp_path / "model", torch.bfloat16)
    found = quantize(tmp_path / "model", tmp_path / "gptq", data, evaluation=data)
    nearest = quantize(tmp_path / "model", tmp_path / "rtn", data, method="rtn", calibration=None, evaluation=data)
    assert found["evaluation"]["kl"] < 0.5 * nearest["evaluation"]["kl"]
    assert verify(tmp_path / "gptq", tmp_path / "model") == []
    assert verify(tmp_path / "rtn", tmp_path / "model") == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threads_do_not_change_a_byte(scheme: str, llama: Path, data: Path, tmp_path: Path) -> None:
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            quantize(llama, tmp_path / str(threads), data, scheme)
            made.append(models.contents(tmp_path / str(threads)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert made[0] == made[1] == made[2]


def test_five_runs_have_one_hash(llama: Path, data: Path, tmp_path: Path) -> None:
    for run in range(5):
        quantize(llama, tmp_path / str(run), data)
    contents = [models.contents(tmp_path / str(run)) for run in range(5)]
    assert all(found == contents[0] for found in contents)


SCRIPT = """
import json, sys, torch
from baracuda.flow import quantize_checkpoint
source, out, data, length = sys.argv[1:5]
for scheme, options in json.loads(sys.argv[5]).items():
    quantize_checkpoint(source, f"{out}/{scheme}", scheme=scheme, method="gptq", calibration=data,
                        sequence_length=int(length), **options)
"""


def test_processes_do_not_change_a_byte(llama: Path, data: Path, tmp_path: Path) -> None:
    runs: dict[str, Any] = {"w4a16": SCHEMES["w4a16"], "w4a8": {**SCHEMES["w4a8"], "smooth": "auto"}, "w8a8": {}}
    for scheme, options in runs.items():
        quantize(llama, tmp_path / "one" / scheme, data, scheme, **options)
    (tmp_path / "script.py").write_text(SCRIPT)
    run = ["-m", "torch.distributed.run", "--nproc-per-node=3", "--master-port=29631", str(tmp_path / "script.py")]
    arguments = [str(llama), str(tmp_path / "three"), str(data), str(LENGTH), json.dumps(runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *run, *arguments], check=True, env=environment, capture_output=True, timeout=300)
    for scheme in runs:
        assert models.contents(tmp_path / "three" / scheme) == models.contents(tmp_path / "one" / scheme)


def test_a_killed_run_goes_on_to_the_same_bytes(llama: Path, data: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "whole", data)
    (tmp_path / "script.py").write_text(SCRIPT)
    out, runs = tmp_path / "killed" / "w4a16", json.dumps({"w4a16": SCHEMES["w4a16"]})
    script, folder = str(tmp_path / "script.py"), str(tmp_path / "killed")
    arguments = [sys.executable, script, str(llama), folder, str(data), str(LENGTH), runs]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((out / ".baracuda").glob("*block-0*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    quantize(llama, out, data, resume=True)
    assert models.contents(out) == models.contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("scheme", "options"), [("w4a16", {}), ("w4a8", {"smooth": "auto"}), ("w8a8", {})], ids=["w4a16", "w4a8", "w8a8"]
)
def test_a_block_that_is_done_is_not_done_again(
    scheme: str, options: dict[str, Any], llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baracuda.flow.run.blockwise import Blockwise

    quantize(llama, tmp_path / "whole", data, scheme, **options)
    done, original = [], Blockwise._quantize

    def interrupted(self: Blockwise, weights: Any, *rest: Any) -> Any:
        if any("layers.1.mlp" in name for name in weights) and not done.count("interrupted"):
            done.append("interrupted")
            raise KeyboardInterrupt
        done.extend(weights)
        return original(self, weights, *rest)

    monkeypatch.setattr(Blockwise, "_quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, tmp_path / "out", data, scheme, **options)
    assert any("layers.0" in name for name in done)
    done[:] = ["interrupted"]
    quantize(llama, tmp_path / "out", data, scheme, resume=True, **options)
    assert not any("layers.0" in name for name in done)
    assert models.contents(tmp_path / "out") == models.contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_block_that_runs_again_for_each_layer_gives_the_same_bytes(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.save(name, tmp_path / "model", torch.bfloat16)
    quantize(tmp_path / "model", tmp_path / "held", data)
    monkeypatch.setattr(sequential, "HELD_BYTES", 0)
    monkeypatch.setattr(sequential, "PausedBatches", None)
    quantize(tmp_path / "model", tmp_path / "again", data)
    assert models.contents(tmp_path / "again") == models.contents(tmp_path / "held")


class Block(torch.nn.Module):
    """Two linears; the second sees only what is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ArithmeticError("not a number")
        made = self.first(x)
        return self.second(made) if bool((x > 0).all()) else made


def test_batches_wait_for_the_new_weights_of_the_layers_they_are_about_to_call() -> None:
    block, before = Block(), threading.active_count()
    given = {0: torch.ones(1, 4), 1: -torch.ones(1, 4), 5: torch.ones(2, 4)}
    with torch.no_grad(), PausedBatches(block, [["first"], ["second"]], given, block, 1) as data:
        assert {i: x.shape[0] for i, x in data.inputs(0).items()} == {0: 1, 1: 1, 5: 2}
        block.first.weight.copy_(2 * torch.eye(4))
        data.go_on(0)
        read = data.inputs(1)
        assert list(read) == [0, 5] and torch.equal(read[5], torch.full((2, 4), 2.0))
        block.second.weight.copy_(3 * torch.eye(4))
        data.go_on(1)
        assert [float(y.flatten()[0]) for y in data.outputs().values()] == [6, -2, 6]
    assert threading.active_count() == before and not block.first._forward_pre_hooks


def test_no_thread_is_left_where_a_batch_or_the_caller_fails() -> None:
    block, before = Block(), threading.active_count()
    given = {0: torch.ones(1, 4), 1: torch.full((1, 4), float("nan"))}
    with (
        pytest.raises(ArithmeticError, match="not a number"),
        PausedBatches(block, [["first"]], given, block, 2) as data,
    ):
        data.inputs(0)
    with pytest.raises(KeyboardInterrupt), PausedBatches(block, [["first"]], {0: given[0]}, block, 2) as data:
        data.inputs(0)
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_the_report_says_what_blocks_computed_in_and_that_there_was_too_little_text(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = torch.cpu.get_capabilities()
    fast = has.get("avx512_bf16") or has.get("amx_bf16")
    made = quantize(llama, tmp_path / "out", data)
    assert made["smoothing"]["blocks"]["dtype"] == ("bfloat16" if fast else "float32") and not made["notes"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    plain = quantize(llama, tmp_path / "plain", data, samples=1, sequence_length=8)
    assert plain["smoothing"]["blocks"]["dtype"] == "float32"
    assert "Calibration read only 8 tokens" in plain["notes"][0]


def test_one_shot_calibrates_on_the_float_model(llama: Path, data: Path, tmp_path: Path) -> None:
    once = quantize(llama, tmp_path / "once", data, one_shot=True, evaluation=data)
    blocks = quantize(llama, tmp_path / "blocks", data, evaluation=data)
    assert "blocks" not in (once["smoothing"] or {}) and blocks["smoothing"]["blocks"]["count"] == 2
    assert blocks["evaluation"]["kl"] < 1.2 * once["evaluation"]["kl"]
    with pytest.raises(FlowError, match="drop --one-shot"):
        quantize(llama, tmp_path / "rtn", data, method="rtn", calibration=None, one_shot=True)


def test_a_model_without_a_chain_of_blocks_is_told() -> None:
    model = models.build("llama")
    tokens = torch.tensor([[3, 4, 5]])
    linears = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    chain = find_chain(model, linears, tokens, {"use_cache": False})
    assert isinstance(chain, Chain) and chain.names == ["model.layers.0", "model.layers.1"]
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[0]])
    told = find_chain(model, linears, tokens, {"use_cache": False})
    assert isinstance(told, str) and "once each and in order" in told
    assert "no list of blocks" in str(find_chain(torch.nn.Linear(2, 2), [], tokens, {}))


@pytest.mark.parametrize("hands_on", ["unpacked", "kept"])
def test_blocks_that_hand_on_more_than_hidden_states_are_told(hands_on: str) -> None:
    """What a block gets from another one would be missing where blocks run one by one."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor, more: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            return self.up(hidden) + (0 if more is None else more), hidden.mean()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = torch.nn.Embedding(9, 8), torch.nn.ModuleList([Block(), Block()])

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden, more = self.embed(input_ids), None
            for layer in self.layers:
                made = layer(hidden, more)
                if hands_on == "unpacked":
                    hidden, more = made
                else:
                    hidden, more = made[0], made[-1] if len(made) > 1 else None
            return hidden

    told = find_chain(Model(), ["layers.0.up", "layers.1.up"], torch.tensor([[3, 4, 5]]), {})
    assert told == "the blocks of layers hand on more than hidden states, or keep some of what they see"


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_w4a8_is_loaded_as_integer_linears_with_group_factors(
    method: str, llama: Path, data: Path, tmp_path: Path
) -> None:
    calibration = data if method == "gptq" else None
    report = quantize(llama, tmp_path / "out", data, "w4a8", method=method, calibration=calibration, evaluation=data)
    loaded = baracuda.load(tmp_path / "out", fuse=False)
    linear = loaded.model.layers[0].mlp.up_proj
    assert isinstance(linear, QuantizedLinear) and linear.weight_group == 32
    assert int(linear.weight_factor.max()) > 1
    apart, prompt = baracuda.load(tmp_path / "out", merge=False, fuse=False), models.prompt()
    with torch.no_grad():
        assert torch.equal(loaded(prompt)[0], apart(prompt)[0])
    assert report["evaluation"]["kl"] < 0.01
    assert verify(tmp_path / "out", llama) == []
