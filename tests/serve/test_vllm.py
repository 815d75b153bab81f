"""Our checkpoints in a real vLLM, through its own kernels and through ours: the tokens of baracuda.load.

`make vllm` runs this where vLLM is installed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import serving
import torch
import transformers

import baracuda
from baracuda.flow import quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors

pytest.importorskip("vllm", reason="make vllm runs these")
pytestmark = pytest.mark.filterwarnings("ignore")

INT8, INT4, W4A8 = OURS = ("BaracudaInt8LinearKernel", "BaracudaInt4LinearKernel", "BaracudaW4A8LinearKernel")
#: The kernels of ours that compute qkv, o, gate_up and down of schemes with 4-bit weights; all others are W8A8.
FOUR_BITS = {"w4a16": [INT4] * 4, "w4a8": [W4A8] * 4, "recipe": [INT8, INT4, INT4, W4A8]}
#: A mixture has none of the recipe's layers but those of attention.
SATURATES = "vLLM's own int8 product is wrong on a CPU without VNNI"
SERVED = [(n, s) for n in ("llama", "qwen3", "mixtral") for s in serving.SCHEMES if (n, s) != ("mixtral", "recipe")]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(autouse=True)
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in for all kinds of linears; registering again changes nothing."""
    from baracuda.serve import vllm_plugin

    monkeypatch.setenv(vllm_plugin.VARIABLE, ",".join(vllm_plugin.TABLES))
    vllm_plugin.register()


@pytest.fixture
def selected() -> Iterator[list[str]]:
    """The kernels that vLLM says it has chosen, and what ours say about themselves."""
    from vllm.logger import init_logger

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [init_logger("vllm.model_executor.kernels.linear"), init_logger("vllm.baracuda")]
    for logger in loggers:
        logger.addHandler(handler)
    forget_what_was_said()
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


def forget_what_was_said() -> None:
    """vLLM says some things once a process."""
    from vllm import logger

    for function in (logger._print_debug_once, logger._print_info_once, logger._print_warning_once):
        function.cache_clear()


@pytest.mark.parametrize(("name", "scheme"), SERVED)
def test_vllms_own_kernels_give_what_baracuda_load_gives(
    name: str, scheme: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scheme not in FOUR_BITS and serving.int8_sums_saturate():
        pytest.skip(SATURATES)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", ",".join(OURS))
    out = serving.checkpoint(name, scheme, checkpoints, experts=name != "mixtral")
    dtype = torch.bfloat16 if scheme in FOUR_BITS else torch.float32  # vLLM's 4-bit kernel for CPUs has no float32
    with serving.served(out, dtype=dtype) as llm:
        assert not {kernel_of(layer) for layer in linears(llm)} & set(OURS)
        given = serving.answers(llm)
    # vLLM's own kernels for 4-bit weights leave the activations of w4a8 in floating point.
    same = serving.with_float_activations(out) if scheme in ("w4a8", "recipe") else out
    serving.assert_near(same, given, dtype)


@pytest.mark.parametrize("scheme", serving.SCHEMES)
def test_the_plug_in_serves_the_same_tokens_through_our_kernels(
    scheme: str, checkpoints: Path, selected: list[str]
) -> None:
    out = serving.checkpoint("llama", scheme, checkpoints)
    with serving.served(out) as llm:
        kernels = [kernel_of(layer) for layer in linears(llm)]
        given = serving.answers(llm)
    assert kernels == FOUR_BITS.get(scheme, [INT8] * 4) * 2
    assert any("run in baracuda on cpu" in line for line in selected), selected
    serving.assert_near(out, given)


def test_the_plug_in_serves_a_compiled_model(checkpoints: Path) -> None:
    """vLLM traces the model once for any number of tokens: our linear is one opaque operator in it."""
    out = serving.checkpoint("llama", "w8a8", checkpoints)
    with serving.served(out, enforce_eager=False, compilation_config={"mode": 3, "backend": "eager"}) as llm:
        assert {kernel_of(layer) for layer in linears(llm)} == {INT8}
        given = serving.answers(llm)
    serving.assert_near(out, given)


@pytest.mark.parametrize(("value", "first"), [(None, (INT8, W4A8)), ("w4a16", (None, INT4)), ("0", (None, None))])
def test_vllm_finds_the_plug_in_by_its_entry_point_and_the_variable_switches_it_off(
    value: str | None, first: tuple[str | None, ...]
) -> None:
    """In a process of its own, which starts as those of a server do: its log first, then the plug-ins."""
    from baracuda.serve.vllm_plugin import VARIABLE

    code = (
        "from vllm.config.logging import LoggingConfig\nfrom vllm.logger import configure_logging\n"
        "configure_logging(LoggingConfig())\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.model_executor.kernels import linear\nfrom vllm.platforms import PlatformEnum\n"
        "for table in (linear._POSSIBLE_INT8_KERNELS, linear._POSSIBLE_KERNELS):\n"
        "    for platform in (PlatformEnum.CPU, PlatformEnum.CUDA):\n"
        "        print('first:', table[platform][0].__name__)\n"
    )
    environment = {name: given for name, given in os.environ.items() if name != VARIABLE}
    environment |= {} if value is None else {VARIABLE: value}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    found = [line.partition(": ")[2] for line in run.stdout.splitlines() if line.startswith("first: ")]
    ours = [name if name in OURS else None for name in found]
    assert ours == [kernel for kernel in first for _ in range(2)], found
    said = "computes nothing: BARACUDA_VLLM=0" if value == "0" else "baracuda offers its kernels for"
    assert said in run.stdout + run.stderr


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_vllm_computes_a_head_that_was_untied_and_quantized(
    scheme: str, ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        if scheme not in FOUR_BITS and serving.int8_sums_saturate():
            pytest.skip(SATURATES)
        monkeypatch.setenv("VLLM_DISABLED_KERNELS", ",".join(OURS))
    models.save("llama", tmp_path / "model", tie_word_embeddings=True, **serving.SIZES)
    serving.tokenizer().save_pretrained(tmp_path / "model")
    out, options = tmp_path / "out", serving.SCHEMES[scheme][0]
    quantize_checkpoint(tmp_path / "model", out, quantize_head=True, **options)
    dtype = torch.bfloat16 if scheme in FOUR_BITS and not ours else torch.float32
    with serving.served(out, dtype=dtype) as llm:
        *_, head = linears(llm)
        assert type(head).__name__ == "ParallelLMHead" and (kernel_of(head) == INT8) is ours
        given = serving.answers(llm)
    serving.assert_near(out, given, dtype)


@pytest.mark.parametrize("made", ["loaded", "quantized", "trained"])
def test_vllm_serves_what_save_pretrained_wrote_of_a_live_model(made: str, checkpoints: Path, tmp_path: Path) -> None:
    loaded, out = serving.checkpoint("llama", "w8a8", checkpoints), tmp_path / "saved"
    if made == "loaded":
        model = baracuda.load(loaded)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "llama")
        change = baracuda.quantize_model if made == "quantized" else baracuda.prepare_qat
        change(model, "w8a8", ignore=["lm_head"])
        if made == "trained":
            baracuda.convert(model)
    model.save_pretrained(out)
    serving.tokenizer().save_pretrained(out)
    assert verify(out, checkpoints / "llama") == []
    with serving.served(out) as llm:
        given = serving.answers(llm)
    serving.assert_near(out, given)


def linears(llm: Any) -> list[Any]:
    """The modules of vLLM's model that a scheme computes."""
    executor = llm.llm_engine.model_executor
    model = executor.driver_worker.worker.model_runner.model
    return [module for module in model.modules() if hasattr(getattr(module, "scheme", None), "kernel")]


def kernel_of(layer: Any) -> str:
    return type(layer.scheme.kernel).__name__


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8"])
def test_vllm_serves_four_bit_experts(scheme: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's 4-bit experts on x86 CPUs need AMX")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", ",".join(OURS))
    out = serving.checkpoint("mixtral", scheme, checkpoints)
    with serving.served(out, dtype=torch.bfloat16) as llm:
        given = serving.answers(llm)
    serving.assert_near(serving.with_float_activations(out), given, torch.bfloat16)


class Loaded(Exception):
    """Ends the start of an engine: what was to be seen has been seen."""


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static", "w4a16", "w4a8"])
def test_vllms_loader_puts_packed_experts_where_they_belong(
    scheme: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels for them need a GPU, or a CPU with AMX; its loader does not."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as moe,
    )

    taken: dict[str, torch.Tensor] = {}

    def take(self: Any, layer: Any) -> None:
        taken.update({name: parameter.data.clone() for name, parameter in layer.named_parameters()})
        raise Loaded

    # The choice of a GPU, which takes scales of groups and of channels; nothing is computed here.
    monkeypatch.setattr(moe, "select_wna16_moe_backend", lambda **_: (WNA16MoEBackend.MARLIN, None))
    monkeypatch.setattr(moe, "check_moe_marlin_supports_config", lambda *_, **__: True)
    monkeypatch.setattr(moe.CompressedTensorsWNA16MoEMethod, "process_weights_after_loading", take)
    out = serving.checkpoint("mixtral", scheme, checkpoints)
    with pytest.raises(Loaded), serving.served(out, dtype=torch.bfloat16):
        pass
    cleanup_dist_env_and_memory()
    stored = read_tensors(out / "model.safetensors")
    for expert in range(4):
        names = {leaf: f"model.layers.0.block_sparse_moe.experts.{expert}.{leaf}" for leaf in ("w1", "w2", "w3")}
        for part in ("weight_packed", "weight_scale"):
            w1, w2, w3 = (stored[f"{names[leaf]}.{part}"].to(taken[f"w2_{part}"].dtype) for leaf in ("w1", "w2", "w3"))
            assert torch.equal(taken[f"w13_{part}"][expert], torch.cat([w1, w3]))
            assert torch.equal(taken[f"w2_{part}"][expert], w2)
