"""A model from a stranger: its config loads nothing by name, its links lead nowhere, its sizes allocate nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from baracuda.flow import CheckpointError, FlowError, evaluate_checkpoint, load, quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import read_tensors, write_tensors
from baracuda.flow.hf.config import harmless, parse
from baracuda.flow.hf.forward import float_model, tokenizer
from baracuda.flow.hf.skeleton import skeleton

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.quantized(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def place(kept: Path, tmp_path: Path) -> Path:
    """A model, its quantized checkpoint and tokens, to be spoilt."""
    return Path(shutil.copytree(kept, tmp_path / "place"))


def change(directory: Path, **settings: Any) -> None:
    models.change_json(directory / "config.json", **settings)


# -- what a config names -----------------------------------------------------------------------------------------

KERNELS = """
import os
def get_kernel(*args, **options):
    with open(os.environ["ASKED"], "a") as file:
        print(args, file=file)
    raise RuntimeError("the stub holds no kernels")
def _unchanged(*args, **options):
    return lambda decorated: decorated
use_kernelized_func = use_kernel_forward_from_hub = use_kernel_func_from_hub = _unchanged
class _Named(type):
    def __getattr__(cls, name): return _Anything()
class _Anything(metaclass=_Named):
    def __init__(self, *args, **options): pass
    def __call__(self, *args, **options): return self
    def __or__(self, other): return self
    def __getattr__(self, name): return _Anything()
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return _Anything if name[0].isupper() else _Anything()
"""
COMMANDS = """
import sys
from pathlib import Path
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available(), "the stub is not what transformers takes for kernels"
from baracuda.flow import evaluate_checkpoint, load, quantize_checkpoint, verify
place = Path(sys.argv[1])
tokens = place / "tokens.safetensors"
quantize_checkpoint(place / "model", place / "new", scheme="w8a8-smoothquant", calibration=tokens, evaluation=tokens,
                    samples=4)
assert verify(place / "new", place / "model") == []
load(place / "new")
evaluate_checkpoint(place / "model", tokens, samples=4)
"""


def test_no_command_asks_for_the_kernel_that_a_config_names(place: Path, tmp_path: Path) -> None:
    """With a package in place of `kernels` that writes down what it is asked for."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    stub = tmp_path / "stub"
    (stub / "kernels" / "layer").mkdir(parents=True)
    (stub / "kernels" / "__init__.py").write_text(f"__version__ = {KERNELS_MIN_VERSION!r}\n{KERNELS}")
    for name in ("layer/__init__", "layer/mode"):
        (stub / "kernels" / f"{name}.py").write_text("class Mode: INFERENCE = TRAINING = 0\n")
    information = stub / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    change(place / "model", _attn_implementation="kernels-community/anything", attn_implementation="org/kernel")
    asked = tmp_path / "asked"
    places = (str(stub), os.environ.get("PYTHONPATH"), str(Path(sys.modules["baracuda"].__file__ or "").parents[1]))
    paths = os.pathsep.join(filter(None, places))
    environment = {**os.environ, "PYTHONPATH": paths, "ASKED": str(asked), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", COMMANDS, str(place)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert not asked.exists(), asked.read_text()


def test_settings_that_load_by_name_are_dropped_at_any_depth() -> None:
    inner = {"_attn_implementation": "a/b", "hidden_size": 3, "list": [{"auto_map": {}, "kept": 1}]}
    config = {"text_config": inner, "fusion_config": {}, "transformers_weights": "adapter_model.bin", "vocab_size": 7}
    assert harmless(config) == {"text_config": {"hidden_size": 3, "list": [{"kept": 1}]}, "vocab_size": 7}


def test_a_setting_that_is_switched_off_stays_so_that_no_default_switches_it_on() -> None:
    assert harmless({"use_pretrained_backbone": False}) == {"use_pretrained_backbone": False}
    assert harmless({"use_pretrained_backbone": True}) == {}


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
def test_a_config_has_the_implementations_that_transformers_chooses(key: str, place: Path) -> None:
    plain = parse(json.loads((place / "model" / "config.json").read_text()))
    change(place / "model", **{key: "eager"})
    again = parse(json.loads((place / "model" / "config.json").read_text()))
    assert again._attn_implementation == plain._attn_implementation
    assert again.name_or_path == ""


def test_code_beside_a_model_is_never_run(place: Path) -> None:
    ran = place / "ran"
    (place / "model" / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')")
    names = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M", "AutoModel": "modeling_own.M"}
    change(place / "model", auto_map=names, architectures=["OwnForCausalLM"])
    with pytest.raises(FlowError, match="never runs"):
        float_model(place / "model", torch.device("cpu"))
    assert skeleton(json.loads((place / "model" / "config.json").read_text()))[0] is None
    (place / "model" / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.T", None]}}))
    with pytest.raises(FlowError, match="no tokenizer"):
        tokenizer(place / "model")
    assert not ran.exists()


def test_an_adapter_beside_a_model_is_refused(place: Path) -> None:
    (place / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(FlowError, match="merge the adapter"):
        float_model(place / "model", torch.device("cpu"))


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "torchao", None, 3, ["compressed-tensors"]])
def test_quantization_of_others_is_refused_where_it_may_load_code(method: Any, place: Path) -> None:
    change(place / "model", quantization_config={"quant_method": method})
    with pytest.raises(FlowError, match="expected a quantization_config of"):
        evaluate_checkpoint(place / "model", place / "tokens.safetensors")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "load"}, "expected a floating-point type"),
        ({"torch_dtype": "nn"}, "expected a floating-point type"),
        ({"architectures": [1]}, "expected a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of names"),
        ({"backbone": "hf-hub:someone/else"}, "would be downloaded"),
        ({"num_hidden_layers": 10**9}, "more than any model has"),
        ({"text_config": {"num_experts": [10**9]}}, "more than any model has"),
    ],
)
def test_a_config_that_no_model_has_is_refused(settings: dict[str, Any], words: str, place: Path) -> None:
    for directory in ("model", "out"):
        change(place / directory, **settings)
    with pytest.raises(CheckpointError, match=words):
        quantize_checkpoint(place / "model", place / "new")
    with pytest.raises(CheckpointError, match=words):
        load(place / "out")
    assert any("bad-config" in found.code and words in found.message for found in verify(place / "out"))


# -- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["env.txt", "sub/env.txt", "tokenizer.json", "generation_config.json", "linked"])
def test_no_command_reads_or_copies_what_a_link_leads_to(name: str, place: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("{}")
    for directory in (place / "model", place / "out"):
        link = directory / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(secret if name == "linked" else secret / "file")
    with pytest.raises(CheckpointError, match=rf"{name}: a link that leads out of .*; replace it"):
        quantize_checkpoint(place / "model", place / "new")
    assert not (place / "new").exists()
    with pytest.raises(CheckpointError, match="leads out"):
        load(place / "out")
    with pytest.raises(CheckpointError, match="leads out"):
        evaluate_checkpoint(place / "model", place / "tokens.safetensors")
    with pytest.raises(CheckpointError, match="leads out"):
        tokenizer(place / "model")
    assert ("path-escape", name) in {(found.code, found.where) for found in verify(place / "out")}
    assert "path-escape" in {found.code for found in verify(place / "out", place / "model")}


@pytest.mark.parametrize("name", ["config.json", "baracuda_report.json", "model.safetensors"])
def test_what_every_command_reads_is_no_link_either(name: str, place: Path, tmp_path: Path) -> None:
    from baracuda.flow import report

    (place / "out" / name).rename(tmp_path / "elsewhere")
    (place / "out" / name).symlink_to(tmp_path / "elsewhere")
    assert ("path-escape", name) in {(found.code, found.where) for found in verify(place / "out")}
    with pytest.raises(CheckpointError, match="leads out"):
        report(place / "out") if "report" in name else load(place / "out")


def test_links_inside_a_model_are_followed(place: Path) -> None:
    (place / "model" / "sub").mkdir()
    (place / "model" / "vocab.txt").write_text("words")
    (place / "model" / "sub" / "vocab.txt").symlink_to("../vocab.txt")
    quantize_checkpoint(place / "model", place / "new")
    assert (place / "new" / "sub" / "vocab.txt").read_text() == "words"
    assert not (place / "new" / "sub" / "vocab.txt").is_symlink()


# -- sizes and types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"head_dim": 2**33}, {"intermediate_size": 2**34}, {"vocab_size": 2**36}, {"hidden_size": 2**40}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_config_of_other_sizes_than_the_files_allocates_nothing(settings: dict[str, int], place: Path) -> None:
    import resource

    for directory in ("model", "out"):
        change(place / directory, **settings)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), limits[1]))
    try:
        for call in (lambda: load(place / "out"), lambda: float_model(place / "model", torch.device("cpu"))):
            with pytest.raises((CheckpointError, FlowError), match=r"can hold; correct|transformers cannot build"):
                call()
        assert verify(place / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def retype(place: Path, tensor: str, dtype: torch.dtype) -> None:
    path = place / "model" / "model.safetensors"
    tensors = read_tensors(path)
    write_tensors(path, tensors | {tensor: tensors[tensor].to(dtype)}, {"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_linears_of_eight_bit_floats_are_carried_over_and_named(dtype: torch.dtype, known: bool, place: Path) -> None:
    retype(place, f"{DOWN}.weight", dtype)
    if not known:
        change(place / "model", model_type="nobody-knows")
    content = quantize_checkpoint(place / "model", place / "new")
    reasons = {entry["name"]: entry["reason"] for entry in content["left"]}
    assert "carried over as it is" in reasons[DOWN]
    assert verify(place / "new") == [] and verify(place / "new", place / "model") == []
    if known:
        loaded = load(place / "new")
        assert loaded(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_linears_of_integers_are_refused_before_the_run(dtype: torch.dtype, known: bool, place: Path) -> None:
    retype(place, f"{DOWN}.weight", dtype)
    if not known:
        change(place / "model", model_type="nobody-knows")
    with pytest.raises(FlowError, match=rf"{DOWN} \({dtype}\): a part of this model is quantized already"):
        quantize_checkpoint(place / "model", place / "new")
    assert not (place / "new").exists()


# -- text that no program can go on with -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ['{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ["\\ud800"]}', '{"a":' * 5000, '{"a":' + "[" * 90 + "]" * 90 + "}"],
)
def test_halves_of_characters_and_deep_nesting_are_told_in_a_sentence(text: str, place: Path) -> None:
    (place / "model" / "config.json").write_text(text)
    (place / "out" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (it holds half|nested more|not readable)"):
        quantize_checkpoint(place / "model", place / "new")
    assert "bad-json" in {found.code for found in verify(place / "out")}


@pytest.mark.parametrize("name", ["a\x1bb", "a\nb", "\u202ea"])
def test_names_with_control_characters_are_refused(name: str, place: Path) -> None:
    path = place / "model" / "model.safetensors"
    tensors = read_tensors(path)
    write_tensors(path, tensors | {name: torch.ones(1)}, {"format": "pt"})
    with pytest.raises(CheckpointError, match="without control characters") as error:
        quantize_checkpoint(place / "model", place / "new")
    assert "\x1b" not in str(error.value)
    write_tensors(path, tensors, {"format": "pt"})
    (place / "model" / name).write_text("x")
    with pytest.raises(CheckpointError, match="rename it"):
        quantize_checkpoint(place / "model", place / "new")


@pytest.mark.parametrize("line", ['{"text": "a\\ud800"}', "[" * 100000, "3", '{"a": 1}', "\x1b[2J"])
def test_lines_that_hold_no_text_are_told_in_a_sentence(line: str, place: Path) -> None:
    data = place / "texts.jsonl"
    data.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(FlowError, match=r"line 2: .*; correct the line, or remove it") as error:
        evaluate_checkpoint(place / "model", data)
    assert "\x1b" not in str(error.value)


def test_no_request_is_made_while_a_model_is_built(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says about being offline: every connection is refused here, and none is asked for."""
    import socket

    from huggingface_hub import constants

    asked: list[Any] = []

    def connect(self: socket.socket, address: Any) -> None:
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: connect(None, args))  # type: ignore[arg-type]
    change(place / "model", _name_or_path="someone/else", transformers_weights="other.safetensors")
    tokens = place / "tokens.safetensors"
    quantize_checkpoint(place / "model", place / "new", activations="static", calibration=tokens, samples=2)
    assert verify(place / "new", place / "model") == []
    load(place / "new")
    with pytest.raises(FlowError, match="no tokenizer"):
        tokenizer(place / "model")
    assert asked == [] and constants.HF_HUB_OFFLINE is False
